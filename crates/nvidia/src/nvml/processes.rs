//! The functions of NVML that list the processes on a GPU, as a trait, so that the callers can be tested without the library.

use super::api::{Api, DeviceHandle, Failed};

/// The way in which a process uses a GPU. NVML has a list for each, and a process can be in several of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Computes, with CUDA for example
    Compute,
    /// Draws
    Graphics,
    /// Computes as a client of the Multi-Process Service
    Mps,
}

/// A process on a GPU, from `nvmlProcessInfo_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmlProcess {
    /// Its id, in the PID namespace of the process that asks
    pub pid: u32,
    /// The memory of the GPU that it uses, in bytes; `None` if the driver does not know it
    pub memory: Option<u64>,
}

/// The part of NVML that lists processes.
pub trait Processes: Api {
    /// `nvmlDeviceGetComputeRunningProcesses_v3`, or the function for another [`Use`]; with drivers before 510, its version 2
    ///
    /// # Errors
    /// If the GPU is lost, or has more processes than [`MOST`].
    fn processes(&self, device: DeviceHandle, how: Use) -> Result<Vec<NvmlProcess>, Failed>;
}

/// The processes of a GPU that can be listed.
pub const MOST: usize = 1024;
