//! The processes that use each GPU.

use serde::{Deserialize, Serialize};

/// The processes of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcesses {
    /// NVML's index
    pub index: u32,
    /// The N of `/dev/nvidiaN`
    pub minor: Option<u32>,
    /// `GPU-…`; empty if NVML does not report it
    pub uuid: String,
    /// The processes, or why NVML does not list them
    pub processes: Result<Vec<GpuProcess>, String>,
}

/// A process that uses a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Its id in this PID namespace
    pub pid: u32,
    /// The memory of the GPU that it uses, in bytes; `None` if the driver does not know it
    pub memory: Option<u64>,
    /// Whether it computes as a client of MPS
    pub is_mps_client: bool,
}
