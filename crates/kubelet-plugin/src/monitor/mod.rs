//! Watches the GPUs with NVML, in a child process.
//!
//! The library of the driver can hang or crash, keeps the device nodes open, and cannot be replaced in a running process. Therefore
//! only a child loads it: the program executes itself as `monitor`. The child prints a [`message::Message`] on each line, and the
//! [`supervisor`] turns the lines and the end of the child into [`update::Update`]s for the agent.

pub mod child;
mod lines;
pub mod measure;
pub mod message;
mod nvml;
pub mod supervisor;
pub mod update;
