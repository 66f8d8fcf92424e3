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

/// Implements functions of the library, which cannot be called.
macro_rules! never_called {
    ($($name:ident($($type:ty),*) -> $value:ty;)*) => {$(
        fn $name(&self, $(_: $type),*) -> Result<$value, Failed> {
            match *self {}
        }
    )*};
}

impl Api for NvmlLibrary {
    never_called! {
        init() -> ();
        driver_version() -> String;
        cuda_driver_version() -> u32;
        device_count() -> u32;
        device(u32) -> DeviceHandle;
        pci(DeviceHandle) -> (u32, u32, u32);
        uuid(DeviceHandle) -> String;
        minor(DeviceHandle) -> u32;
        name(DeviceHandle) -> String;
        compute_capability(DeviceHandle) -> (u32, u32);
        brand(DeviceHandle) -> u32;
        mig_mode(DeviceHandle) -> u32;
        max_mig_device_count(DeviceHandle) -> u32;
        mig_device(DeviceHandle, u32) -> DeviceHandle;
        gpu_instance(DeviceHandle) -> u32;
        compute_instance(DeviceHandle) -> u32;
    }
}

impl Processes for NvmlLibrary {
    never_called! {
        processes(DeviceHandle, Use) -> Vec<NvmlProcess>;
    }
}

impl ComputeModes for NvmlLibrary {
    never_called! {
        compute_mode(DeviceHandle) -> u32;
        set_compute_mode(DeviceHandle, ComputeMode) -> ();
    }
}
