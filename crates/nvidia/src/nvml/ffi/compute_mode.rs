//! Reads and sets the compute mode of a GPU.

use super::{NvmlLibrary, stored};
use crate::nvml::api::{DeviceHandle, Failed};
use crate::nvml::compute_mode::{ComputeMode, ComputeModes};

impl ComputeModes for NvmlLibrary {
    fn compute_mode(&self, device: DeviceHandle) -> Result<u32, Failed> {
        stored(0, |mode| self.nvmlDeviceGetComputeMode(device, mode))
    }

    fn set_compute_mode(&self, device: DeviceHandle, mode: ComputeMode) -> Result<(), Failed> {
        self.nvmlDeviceSetComputeMode(device, mode.number())
    }
}
