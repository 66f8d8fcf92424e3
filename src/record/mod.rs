//! Prints, logs and records what a call of the hook does.

pub(crate) mod call;
mod deadline;
pub(crate) mod journal;
pub(crate) mod log_file;
pub(crate) mod name;
mod stderr;
pub(crate) mod storage;
