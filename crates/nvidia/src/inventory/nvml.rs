//! What NVML reports for an inventory.

use serde::{Deserialize, Serialize};

use super::{FailedGpu, Gpu};

/// What NVML reports before its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Driver {
    /// `535.183.01`
    pub version: String,
    /// `12.2`; empty if unknown
    pub cuda: String,
    /// The number of GPUs
    pub count: u32,
}

/// A report. It is passed on before the next call of NVML, which may never return.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NvmlProgress {
    /// NVML has been initialized
    Driver(Driver),
    /// The GPU with this index is queried next
    Next(u32),
    /// The GPU works
    Gpu(Gpu),
    /// The GPU does not work
    Failed(FailedGpu),
}
