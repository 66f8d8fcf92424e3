//! Takes the place of NVML in a program that never asks it, and that must not contain a dynamic loader (`crates/compat`).

use std::ffi::OsStr;
use std::io;

use super::api::{Api, DeviceHandle, Failed};
use super::compute_mode::{ComputeMode, ComputeModes};
use super::processes::{NvmlProcess, Processes, Use};

/// The library, which no value of this type can be.
#[derive(Debug)]
pub enum NvmlLibrary {}

impl NvmlLibrary {
    /// Reports that this program cannot load a library.
    ///
    /// # Errors
    /// Always.
    pub fn load(name: &OsStr) -> io::Result<Self> {
        Err(io::Error::other(format!(
            "{name:?} is not loaded: this program does without NVML"
        )))
    }
}

impl Api for NvmlLibrary {
    fn init(&self) -> Result<(), Failed> {
        match *self {}
    }
    fn driver_version(&self) -> Result<String, Failed> {
        match *self {}
    }
    fn cuda_driver_version(&self) -> Result<u32, Failed> {
        match *self {}
    }
    fn device_count(&self) -> Result<u32, Failed> {
        match *self {}
    }
    fn device(&self, _index: u32) -> Result<DeviceHandle, Failed> {
        match *self {}
    }
    fn pci(&self, _device: DeviceHandle) -> Result<(u32, u32, u32), Failed> {
        match *self {}
    }
    fn uuid(&self, _device: DeviceHandle) -> Result<String, Failed> {
        match *self {}
    }
    fn minor(&self, _device: DeviceHandle) -> Result<u32, Failed> {
        match *self {}
    }
    fn name(&self, _device: DeviceHandle) -> Result<String, Failed> {
        match *self {}
    }
    fn compute_capability(&self, _device: DeviceHandle) -> Result<(u32, u32), Failed> {
        match *self {}
    }
    fn brand(&self, _device: DeviceHandle) -> Result<u32, Failed> {
        match *self {}
    }
    fn mig_mode(&self, _device: DeviceHandle) -> Result<u32, Failed> {
        match *self {}
    }
    fn max_mig_device_count(&self, _device: DeviceHandle) -> Result<u32, Failed> {
        match *self {}
    }
    fn mig_device(&self, _device: DeviceHandle, _index: u32) -> Result<DeviceHandle, Failed> {
        match *self {}
    }
    fn gpu_instance(&self, _device: DeviceHandle) -> Result<u32, Failed> {
        match *self {}
    }
    fn compute_instance(&self, _device: DeviceHandle) -> Result<u32, Failed> {
        match *self {}
    }
}

impl Processes for NvmlLibrary {
    fn processes(&self, _device: DeviceHandle, _how: Use) -> Result<Vec<NvmlProcess>, Failed> {
        match *self {}
    }
}

impl ComputeModes for NvmlLibrary {
    fn compute_mode(&self, _device: DeviceHandle) -> Result<u32, Failed> {
        match *self {}
    }
    fn set_compute_mode(&self, _device: DeviceHandle, _mode: ComputeMode) -> Result<(), Failed> {
        match *self {}
    }
}
