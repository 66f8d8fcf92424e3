//! What the agent learns from the monitor and from its end.

use super::message::{Event, Sample, Snapshot};

/// A change that the agent must know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// The GPUs and MIG devices of the host
    Snapshot(Box<Snapshot>),
    /// The state of one GPU
    Sample(Sample),
    /// An event of one GPU
    Event(Event),
    /// The driver hangs or crashes. It was asked about the GPU with this UUID, or about no single GPU.
    Silent {
        /// The UUID
        gpu: Option<String>,
        /// What happened
        why: String,
    },
    /// The driver is missing, or NVML fails, with this error.
    Absent(String),
    /// The administrator replaces the driver, and no process of the plugin uses it.
    LetGo,
}
