//! The functions of NVML that this crate calls, as a trait, so that the inventory can be tested without the library.

use std::ffi::c_void;
use std::ptr;

use nvidia_host::nvml::Failed;
use nvidia_host::nvml::compute_mode::ComputeMode;

/// A device handle, `nvmlDevice_t`: an opaque pointer that is valid until NVML is shut down.
///
/// Only the library and tests create one that is not NULL, because the library dereferences it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct DeviceHandle(*mut c_void);

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
pub(crate) trait Api {
    /// `nvmlInit_v2`
    ///
    /// # Errors
    /// [`nvidia_host::nvml::Code::DRIVER_NOT_LOADED`], [`nvidia_host::nvml::Code::NO_PERMISSION`],
    /// [`nvidia_host::nvml::Code::LIB_RM_VERSION_MISMATCH`], …
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
    /// [`nvidia_host::nvml::Code::NOT_SUPPORTED`] without MIG; [`nvidia_host::nvml::Code::FUNCTION_NOT_FOUND`] before driver 450.
    fn mig_mode(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetMaxMigDeviceCount`
    ///
    /// # Errors
    /// If the GPU is lost.
    fn max_mig_device_count(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetMigDeviceHandleByIndex`
    ///
    /// # Errors
    /// [`nvidia_host::nvml::Code::NOT_FOUND`] if there is none of this number.
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

/// The way in which a process uses a GPU. NVML has a list for each, and a process can be in several of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Computes, with CUDA for example
    Compute,
    /// Draws
    Graphics,
    /// Computes as a client of the Multi-Process Service
    Mps,
}

/// A process on a GPU, from `nvmlProcessInfo_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NvmlProcess {
    /// Its id, in the PID namespace of the process that asks
    pub pid: u32,
    /// The memory of the GPU that it uses, in bytes; `None` if the driver does not know it
    pub memory: Option<u64>,
}

/// The part of NVML that lists processes.
pub(crate) trait Processes: Api {
    /// `nvmlDeviceGetComputeRunningProcesses_v3`, or the function for another [`Use`]; with drivers before 510, its version 2
    ///
    /// # Errors
    /// If the GPU is lost, or has more processes than [`MOST`].
    fn processes(&self, device: DeviceHandle, how: Use) -> Result<Vec<NvmlProcess>, Failed>;
}

/// The processes of a GPU that can be listed.
pub(crate) const MOST: usize = 1024;

/// The part of NVML for the compute mode.
pub(crate) trait ComputeModes: Api {
    /// `nvmlDeviceGetComputeMode`
    ///
    /// # Errors
    /// [`nvidia_host::nvml::Code::NOT_SUPPORTED`] if the GPU does not have modes.
    fn compute_mode(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceSetComputeMode`
    ///
    /// # Errors
    /// [`nvidia_host::nvml::Code::NO_PERMISSION`] without root's capability `CAP_SYS_ADMIN`, and
    /// [`nvidia_host::nvml::Code::NOT_SUPPORTED`] in MIG mode.
    fn set_compute_mode(&self, device: DeviceHandle, mode: ComputeMode) -> Result<(), Failed>;
}
