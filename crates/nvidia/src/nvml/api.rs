//! The functions of NVML that this crate calls, as a trait, so that the inventory can be tested without the library.

use std::ffi::c_void;
use std::{fmt, ptr};

use serde::{Deserialize, Serialize};

/// A return code of NVML, `nvmlReturn_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code(pub u32);

impl Code {
    /// The GPU or the driver does not have the feature.
    pub(crate) const NOT_SUPPORTED: Self = Self(3);
    /// This user cannot open the device nodes.
    pub(crate) const NO_PERMISSION: Self = Self(4);
    /// There is no device with this index.
    pub(crate) const NOT_FOUND: Self = Self(6);
    /// The kernel module is not loaded, or `/dev/nvidiactl` is missing.
    pub(crate) const DRIVER_NOT_LOADED: Self = Self(9);
    /// Nothing happened within the time limit.
    pub(crate) const TIMEOUT: Self = Self(10);
    /// The library is older than the function.
    pub(crate) const FUNCTION_NOT_FOUND: Self = Self(13);
    /// The library has another version than the kernel module.
    pub(crate) const LIB_RM_VERSION_MISMATCH: Self = Self(18);
}

/// A call of NVML that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The function, such as `nvmlInit_v2`
    pub call: String,
    /// The return code
    pub code: Code,
    /// The library's description of the code
    pub text: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} reports {:?} ({})", self.call, self.text, self.code.0)
    }
}

/// A device handle, `nvmlDevice_t`: an opaque pointer that is valid until NVML is shut down.
///
/// Only the library and tests create one that is not NULL, because the library dereferences it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct DeviceHandle(*mut c_void);

impl DeviceHandle {
    /// A place for the library to store a handle
    pub(super) const NULL: Self = Self(ptr::null_mut());
}

/// A handle of a GPU instance, `nvmlGpuInstance_t`: an opaque pointer, as [`DeviceHandle`].
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct GpuInstance(*mut c_void);

impl GpuInstance {
    /// A place for the library to store a handle
    pub(super) const NULL: Self = Self(ptr::null_mut());
}

#[cfg(test)]
impl DeviceHandle {
    pub(crate) const fn new(number: usize) -> Self {
        Self(ptr::without_provenance_mut(number))
    }

    pub(crate) fn raw(self) -> usize {
        self.0.addr()
    }
}

/// NVML, as far as we need it.
pub trait Api {
    /// `nvmlInit_v2`
    ///
    /// # Errors
    /// [`Code::DRIVER_NOT_LOADED`], [`Code::NO_PERMISSION`], [`Code::LIB_RM_VERSION_MISMATCH`], …
    fn init(&self) -> Result<(), Failed>;
    /// `nvmlSystemGetDriverVersion`: `535.183.01`
    ///
    /// # Errors
    /// Before [`Api::init`].
    fn driver_version(&self) -> Result<String, Failed>;
    /// `nvmlSystemGetCudaDriverVersion`: 12020 for 12.2
    ///
    /// # Errors
    /// If libcuda cannot be loaded by the library.
    fn cuda_driver_version(&self) -> Result<u32, Failed>;
    /// `nvmlDeviceGetCount_v2`
    ///
    /// # Errors
    /// Before [`Api::init`].
    fn device_count(&self) -> Result<u32, Failed>;
    /// `nvmlDeviceGetHandleByIndex_v2`: attaches to the GPU, which can take seconds.
    ///
    /// # Errors
    /// If the GPU is lost, in an interrupt storm, without power, …
    fn device(&self, index: u32) -> Result<DeviceHandle, Failed>;
    /// `nvmlDeviceGetPciInfo`: domain, bus, device
    ///
    /// # Errors
    /// If the GPU is lost.
    fn pci(&self, device: DeviceHandle) -> Result<(u32, u32, u32), Failed>;
    /// `nvmlDeviceGetUUID`
    ///
    /// # Errors
    /// If the GPU is lost.
    fn uuid(&self, device: DeviceHandle) -> Result<String, Failed>;
    /// `nvmlDeviceGetMinorNumber`
    ///
    /// # Errors
    /// If the GPU is lost.
    fn minor(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetName`
    ///
    /// # Errors
    /// If the GPU is lost.
    fn name(&self, device: DeviceHandle) -> Result<String, Failed>;
    /// `nvmlDeviceGetCudaComputeCapability`
    ///
    /// # Errors
    /// If the GPU is lost.
    fn compute_capability(&self, device: DeviceHandle) -> Result<(u32, u32), Failed>;
    /// `nvmlDeviceGetBrand`: an `nvmlBrandType_t`
    ///
    /// # Errors
    /// If the GPU is lost.
    fn brand(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetMigMode`: the current mode, 1 is enabled
    ///
    /// # Errors
    /// [`Code::NOT_SUPPORTED`] without MIG; [`Code::FUNCTION_NOT_FOUND`] before driver 450.
    fn mig_mode(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetMaxMigDeviceCount`
    ///
    /// # Errors
    /// If the GPU is lost.
    fn max_mig_device_count(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetMigDeviceHandleByIndex`
    ///
    /// # Errors
    /// [`Code::NOT_FOUND`] if there is none of this number.
    fn mig_device(&self, device: DeviceHandle, index: u32) -> Result<DeviceHandle, Failed>;
    /// `nvmlDeviceGetGpuInstanceId`, of a MIG device
    ///
    /// # Errors
    /// If it is no MIG device, or gone.
    fn gpu_instance(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetComputeInstanceId`, of a MIG device
    ///
    /// # Errors
    /// If it is no MIG device, or gone.
    fn compute_instance(&self, device: DeviceHandle) -> Result<u32, Failed>;
}
