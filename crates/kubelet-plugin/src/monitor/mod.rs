//! Watches the GPUs with NVML, in a child process.
//!
//! The library of the driver can hang or crash, keeps the device nodes open, and cannot be replaced in a running process. Therefore
//! another program loads it ([`nvidia_host::nvml::program`]). It prints a [`message::Message`] on each line, and the [`supervisor`] turns
//! the lines and the end of the child into [`update::Update`]s for the agent.

mod lines;
pub mod supervisor;
pub mod update;

pub use nvidia_host::nvml::message;
