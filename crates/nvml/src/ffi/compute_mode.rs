//! Reads and sets the compute mode of a GPU.

use super::{NvmlLibrary, stored};
use crate::api::{ComputeModes, DeviceHandle};
use nvidia_host::nvml::Failed;
use nvidia_host::nvml::compute_mode::ComputeMode;

impl ComputeModes for NvmlLibrary {
    fn compute_mode(&self, device: DeviceHandle) -> Result<u32, Failed> {
        stored(0, |mode| self.nvmlDeviceGetComputeMode(device, mode))
    }

    fn set_compute_mode(&self, device: DeviceHandle, mode: ComputeMode) -> Result<(), Failed> {
        self.nvmlDeviceSetComputeMode(device, mode.number())
    }
}
