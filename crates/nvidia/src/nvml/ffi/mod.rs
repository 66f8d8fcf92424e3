//! Loads libnvidia-ml.so.1 at run time and calls it. All `unsafe` code for NVML is here.
//!
//! The C types are those of NVIDIA's nvml.h. Each symbol is looked up when it is called: an older driver lacks newer functions, and
//! then only the call of such a function fails.
#![allow(unsafe_code, reason = "dlopen and calls into a C library")]

mod monitoring;

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW, Symbol};

use super::api::{Api, Code, Device, Failed};

type Return = c_uint;
type RawDevice = *mut c_void;

/// NVML_DEVICE_UUID_V2_BUFFER_SIZE and NVML_DEVICE_NAME_V2_BUFFER_SIZE; the driver version needs 80.
const TEXT: c_uint = 96;

/// The start of `nvmlPciInfo_t`, which is the same in all versions, and enough space for the longest version (68 bytes in v3).
#[repr(C)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    rest: [u8; 100],
}

impl PciInfo {
    const EMPTY: Self = Self { bus_id_legacy: [0; 16], domain: 0, bus: 0, device: 0, rest: [0; 100] };
}

/// The loaded library.
#[derive(Debug)]
pub struct Library {
    handle: Handle,
}

impl Library {
    /// Loads the library. This runs its constructors with the privileges of this process, so only a confined child calls it.
    pub fn load(name: &OsStr) -> Result<Self, libloading::Error> {
        // SAFETY: the callers load libraries of the host only, NVIDIA's and those of the C library, which run their
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
        Err(Failed { call: text_of(call), code: Code(code), text: self.error_string(code) })
    }

    fn error_string(&self, code: Return) -> String {
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(Return) -> *const c_char>(c"nvmlErrorString") };
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

    /// Calls a function that fills a text buffer: `f(device, buffer, length)`.
    ///
    /// # Safety
    ///
    /// nvml.h gives the function of this name these parameters.
    unsafe fn device_text(&self, name: &'static CStr, device: Device) -> Result<String, Failed> {
        // SAFETY: the type is the caller's promise, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, *mut c_char, c_uint) -> Return>(name) }?;
        let mut buffer = [0 as c_char; TEXT as usize];
        // SAFETY: the library writes at most TEXT bytes, NUL included, to `buffer`, which has as many; `device` is a
        // handle that it gave us (Device is made in `device()` only).
        let code = unsafe { function(device.get() as RawDevice, buffer.as_mut_ptr(), TEXT) };
        self.check(name, code)?;
        Ok(until_nul(&buffer))
    }

    /// Calls a function that stores a number: `f(device, &value)`.
    ///
    /// # Safety
    ///
    /// nvml.h gives the function of this name these parameters.
    unsafe fn device_number(&self, name: &'static CStr, device: Device) -> Result<u32, Failed> {
        // SAFETY: the type is the caller's promise, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, *mut c_uint) -> Return>(name) }?;
        let mut value = 0;
        // SAFETY: the library writes one unsigned int to `value`; `device` is a handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, &raw mut value) };
        self.check(name, code)?;
        Ok(value)
    }
}

fn text_of(text: &CStr) -> String {
    text.to_string_lossy().into_owned()
}

/// Returns the text before the first NUL, or the whole buffer if the library did not terminate the text.
fn until_nul(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().take_while(|c| **c != 0).map(|c| c.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Api for Library {
    fn init(&self) -> Result<(), Failed> {
        const NAME: &CStr = c"nvmlInit_v2";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn() -> Return>(NAME) }?;
        // SAFETY: nvmlInit_v2 takes nothing and may be called at any time, any number of times.
        let code = unsafe { function() };
        self.check(NAME, code)
    }

    fn driver_version(&self) -> Result<String, Failed> {
        const NAME: &CStr = c"nvmlSystemGetDriverVersion";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(*mut c_char, c_uint) -> Return>(NAME) }?;
        let mut buffer = [0 as c_char; TEXT as usize];
        // SAFETY: the library writes at most TEXT bytes, NUL included, to `buffer`, which has as many.
        let code = unsafe { function(buffer.as_mut_ptr(), TEXT) };
        self.check(NAME, code)?;
        Ok(until_nul(&buffer))
    }

    fn cuda_driver_version(&self) -> Result<u32, Failed> {
        const NAME: &CStr = c"nvmlSystemGetCudaDriverVersion";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(*mut c_int) -> Return>(NAME) }?;
        let mut version: c_int = 0;
        // SAFETY: the library writes one int to `version`.
        let code = unsafe { function(&raw mut version) };
        self.check(NAME, code)?;
        Ok(u32::try_from(version).unwrap_or_default())
    }

    fn device_count(&self) -> Result<u32, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetCount_v2";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(*mut c_uint) -> Return>(NAME) }?;
        let mut count = 0;
        // SAFETY: the library writes one unsigned int to `count`.
        let code = unsafe { function(&raw mut count) };
        self.check(NAME, code)?;
        Ok(count)
    }

    fn device(&self, index: u32) -> Result<Device, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetHandleByIndex_v2";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(c_uint, *mut RawDevice) -> Return>(NAME) }?;
        let mut device: RawDevice = std::ptr::null_mut();
        // SAFETY: the library writes one pointer to `device`; any index is allowed and checked by it.
        let code = unsafe { function(index, &raw mut device) };
        self.check(NAME, code)?;
        Ok(Device::from_raw(device as usize))
    }

    fn pci(&self, device: Device) -> Result<(u32, u32, u32), Failed> {
        // The unversioned symbol is the oldest one, and all drivers have it. v3 only has a longer text for the bus id.
        const NAME: &CStr = c"nvmlDeviceGetPciInfo";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, *mut PciInfo) -> Return>(NAME) }?;
        let mut info = PciInfo::EMPTY;
        // SAFETY: the library writes an nvmlPciInfo_t of its version to `info`; every version has the same first four
        // fields and is shorter than PciInfo. `device` is a handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, &raw mut info) };
        self.check(NAME, code)?;
        Ok((info.domain, info.bus, info.device))
    }

    fn uuid(&self, device: Device) -> Result<String, Failed> {
        // SAFETY: it takes a device, and a pointer to what it fills.
        unsafe { self.device_text(c"nvmlDeviceGetUUID", device) }
    }

    fn minor(&self, device: Device) -> Result<u32, Failed> {
        // SAFETY: it takes a device, and a pointer to what it fills.
        unsafe { self.device_number(c"nvmlDeviceGetMinorNumber", device) }
    }

    fn name(&self, device: Device) -> Result<String, Failed> {
        // SAFETY: it takes a device, and a pointer to what it fills.
        unsafe { self.device_text(c"nvmlDeviceGetName", device) }
    }

    fn compute_capability(&self, device: Device) -> Result<(u32, u32), Failed> {
        const NAME: &CStr = c"nvmlDeviceGetCudaComputeCapability";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function =
            unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, *mut c_int, *mut c_int) -> Return>(NAME) }?;
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: the library writes one int to each of `major` and `minor`; `device` is a handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, &raw mut major, &raw mut minor) };
        self.check(NAME, code)?;
        Ok((u32::try_from(major).unwrap_or_default(), u32::try_from(minor).unwrap_or_default()))
    }

    fn mig_mode(&self, device: Device) -> Result<u32, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetMigMode";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function =
            unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, *mut c_uint, *mut c_uint) -> Return>(NAME) }?;
        let (mut current, mut pending) = (0, 0);
        // SAFETY: the library writes one unsigned int to each of `current` and `pending`; `device` is its own handle.
        let code = unsafe { function(device.get() as RawDevice, &raw mut current, &raw mut pending) };
        self.check(NAME, code)?;
        Ok(current)
    }

    fn brand(&self, device: Device) -> Result<u32, Failed> {
        // SAFETY: it takes a device, and a pointer to what it fills.
        unsafe { self.device_number(c"nvmlDeviceGetBrand", device) }
    }

    fn max_mig_device_count(&self, device: Device) -> Result<u32, Failed> {
        // SAFETY: it takes a device, and a pointer to what it fills.
        unsafe { self.device_number(c"nvmlDeviceGetMaxMigDeviceCount", device) }
    }

    fn mig_device(&self, device: Device, index: u32) -> Result<Device, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetMigDeviceHandleByIndex";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function =
            unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, c_uint, *mut RawDevice) -> Return>(NAME) }?;
        let mut mig: RawDevice = std::ptr::null_mut();
        // SAFETY: the library writes one pointer to `mig`; any index is allowed and checked by it, and `device` is a
        // handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, index, &raw mut mig) };
        self.check(NAME, code)?;
        Ok(Device::from_raw(mig as usize))
    }

    fn gpu_instance(&self, device: Device) -> Result<u32, Failed> {
        // SAFETY: it takes a device, and a pointer to what it fills.
        unsafe { self.device_number(c"nvmlDeviceGetGpuInstanceId", device) }
    }

    fn compute_instance(&self, device: Device) -> Result<u32, Failed> {
        // SAFETY: it takes a device, and a pointer to what it fills.
        unsafe { self.device_number(c"nvmlDeviceGetComputeInstanceId", device) }
    }
}
