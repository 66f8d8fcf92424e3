//! Loads libnvidia-ml.so.1 at run time and calls it. All `unsafe` code for NVML is here.
//!
//! Each symbol is looked up when it is called: an older driver lacks newer functions, and then only the call of such a function fails.
#![allow(unsafe_code, reason = "dlopen and calls into a C library")]

mod compute_mode;
mod monitoring;
mod processes;
mod structs;
mod table;

use std::ffi::{CStr, OsStr, c_char, c_int};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW, Symbol};

use self::structs::{PciInfo, Return};
use self::table::{Length, Text};
use nvidia_host::nvml::{Code, Failed};

use crate::api::{Api, DeviceHandle};

/// The loaded library.
#[derive(Debug)]
pub(crate) struct NvmlLibrary {
    handle: Handle,
}

impl NvmlLibrary {
    /// Loads the library. This runs its constructors with the privileges of this process, so only a confined child calls it.
    pub(crate) fn load(name: &OsStr) -> Result<Self, libloading::Error> {
        // SAFETY: the callers load libraries of the host only, NVIDIA's and the C library's, which run their
        // constructors correctly in a process with one thread; none comes from a container.
        let handle = unsafe { Handle::open(Some(name), RTLD_NOW | RTLD_LOCAL) }?;
        Ok(Self { handle })
    }

    /// A function of type `F`.
    ///
    /// # Safety
    ///
    /// `F` is the type that nvml.h gives the function of this name (NVIDIA keeps it for a given name: a new type gets a new
    /// `_vN` name), and the symbol is not used after `self` is dropped.
    unsafe fn symbol<F>(&self, name: &'static CStr) -> Result<Symbol<F>, Failed> {
        // SAFETY: both are the caller's promise.
        let found = unsafe { self.handle.get::<F>(name.to_bytes_with_nul()) };
        found.map_err(|_| Failed {
            call: text_of(name),
            code: Code::FUNCTION_NOT_FOUND,
            text: "the driver's library does not have this function".into(),
        })
    }

    fn check(&self, call: &'static CStr, code: Return) -> Result<(), Failed> {
        if code == 0 {
            return Ok(());
        }
        Err(Failed {
            call: text_of(call),
            code: Code(code),
            text: self.error_string(code),
        })
    }

    fn error_string(&self, code: Return) -> String {
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe {
            self.symbol::<unsafe extern "C" fn(Return) -> *const c_char>(c"nvmlErrorString")
        };
        let Ok(function) = function else {
            return "unknown error".into();
        };
        // SAFETY: nvmlErrorString takes any code, needs no init, and returns a static string or NULL.
        let text = unsafe { function(code) };
        if text.is_null() {
            return "unknown error".into();
        }
        // SAFETY: not NULL, so a NUL-terminated string that lives as long as the library, which `self` holds.
        let text = unsafe { CStr::from_ptr(text) };
        text_of(text).to_ascii_lowercase()
    }
}

fn text_of(text: &CStr) -> String {
    text.to_string_lossy().into_owned()
}

fn number(number: c_int) -> u32 {
    u32::try_from(number).unwrap_or_default()
}

/// Returns the value that a function stored.
fn stored<T>(mut value: T, call: impl FnOnce(&mut T) -> Result<(), Failed>) -> Result<T, Failed> {
    call(&mut value)?;
    Ok(value)
}

impl Api for NvmlLibrary {
    fn init(&self) -> Result<(), Failed> {
        self.nvmlInit_v2()
    }

    fn driver_version(&self) -> Result<String, Failed> {
        Text::stored(|text| self.nvmlSystemGetDriverVersion(text, Length::OF_TEXT))
    }

    fn cuda_driver_version(&self) -> Result<u32, Failed> {
        stored(0, |version| self.nvmlSystemGetCudaDriverVersion(version)).map(number)
    }

    fn device_count(&self) -> Result<u32, Failed> {
        stored(0, |count| self.nvmlDeviceGetCount_v2(count))
    }

    fn device(&self, index: u32) -> Result<DeviceHandle, Failed> {
        stored(DeviceHandle::NULL, |device| {
            self.nvmlDeviceGetHandleByIndex_v2(index, device)
        })
    }

    fn pci(&self, device: DeviceHandle) -> Result<(u32, u32, u32), Failed> {
        stored(PciInfo::EMPTY, |info| {
            self.nvmlDeviceGetPciInfo(device, info)
        })
        .map(|info| info.address())
    }

    fn uuid(&self, device: DeviceHandle) -> Result<String, Failed> {
        Text::stored(|text| self.nvmlDeviceGetUUID(device, text, Length::OF_TEXT))
    }

    fn minor(&self, device: DeviceHandle) -> Result<u32, Failed> {
        stored(0, |minor| self.nvmlDeviceGetMinorNumber(device, minor))
    }

    fn name(&self, device: DeviceHandle) -> Result<String, Failed> {
        Text::stored(|text| self.nvmlDeviceGetName(device, text, Length::OF_TEXT))
    }

    fn compute_capability(&self, device: DeviceHandle) -> Result<(u32, u32), Failed> {
        let call = |(major, minor): &mut (_, _)| {
            self.nvmlDeviceGetCudaComputeCapability(device, major, minor)
        };
        stored((0, 0), call).map(|(major, minor)| (number(major), number(minor)))
    }

    fn brand(&self, device: DeviceHandle) -> Result<u32, Failed> {
        stored(0, |brand| self.nvmlDeviceGetBrand(device, brand))
    }

    fn mig_mode(&self, device: DeviceHandle) -> Result<u32, Failed> {
        let call =
            |(current, pending): &mut (_, _)| self.nvmlDeviceGetMigMode(device, current, pending);
        stored((0, 0), call).map(|(current, _)| current)
    }

    fn max_mig_device_count(&self, device: DeviceHandle) -> Result<u32, Failed> {
        stored(0, |count| {
            self.nvmlDeviceGetMaxMigDeviceCount(device, count)
        })
    }

    fn mig_device(&self, device: DeviceHandle, index: u32) -> Result<DeviceHandle, Failed> {
        stored(DeviceHandle::NULL, |mig| {
            self.nvmlDeviceGetMigDeviceHandleByIndex(device, index, mig)
        })
    }

    fn gpu_instance(&self, device: DeviceHandle) -> Result<u32, Failed> {
        stored(0, |id| self.nvmlDeviceGetGpuInstanceId(device, id))
    }

    fn compute_instance(&self, device: DeviceHandle) -> Result<u32, Failed> {
        stored(0, |id| self.nvmlDeviceGetComputeInstanceId(device, id))
    }
}
