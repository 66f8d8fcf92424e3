//! The functions of NVML that a program calls to watch GPUs, as a trait, so that it can be tested without the library.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;
use std::time::Duration;

use nvidia_host::nvml::monitoring::{AddressingMode, Memory, MemorySlices, MigAttributes};
use nvidia_host::nvml::{Code, Failed};

use crate::api::{Api, DeviceHandle};

/// The number of fields that one call requests.
pub(crate) const FIELDS: usize = 3;

/// A set of GPUs whose events are waited for, `nvmlEventSet_t`: an opaque pointer.
///
/// Only the library creates one that is not NULL, because the library dereferences it. There is one copy of it until it is freed.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct EventSet(*mut c_void);

impl EventSet {
    /// A place for the library to store a set
    pub(super) const NULL: Self = Self(ptr::null_mut());

    pub(super) const fn borrow(&self) -> BorrowedSet<'_> {
        BorrowedSet(self.0, PhantomData)
    }
}

/// The same pointer, for a call that does not free the set.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct BorrowedSet<'a>(*mut c_void, PhantomData<&'a EventSet>);

/// Types of events, the bits `nvmlEventType…`.
pub(crate) mod event {
    /// A double-bit error of the memory
    pub(crate) const DOUBLE_BIT_ECC: u64 = 0x2;
    /// An XID, which is the data of the event
    pub(crate) const XID: u64 = 0x8;
    /// MIG devices were created or removed.
    pub(crate) const MIG_CONFIG: u64 = 0x100;
    /// The GPU cannot be used.
    pub(crate) const UNAVAILABLE: u64 = 0x4000;
    /// The recommended recovery action changed.
    pub(crate) const RECOVERY_ACTION: u64 = 0x8000;
}

/// Ids of fields, `NVML_FI_DEV_…`.
pub(crate) mod field {
    /// The number of single-bit errors since the driver was loaded
    pub(crate) const SINGLE_BIT_ECC: u32 = 3;
    /// The number of double-bit errors since the driver was loaded
    pub(crate) const DOUBLE_BIT_ECC: u32 = 4;
    /// The temperature of the memory in degrees Celsius
    pub(crate) const MEMORY_TEMPERATURE: u32 = 82;
    /// The energy in millijoules that the GPU used since the driver was loaded
    pub(crate) const ENERGY: u32 = 83;
    /// The number of PCIe packets that were sent again
    pub(crate) const PCIE_REPLAYS: u32 = 94;
    /// The data in KiB that the GPU has sent through its NVLinks
    pub(crate) const NVLINK_SENT: u32 = 138;
    /// The data in KiB that the GPU has received through its NVLinks
    pub(crate) const NVLINK_RECEIVED: u32 = 139;
    /// The number of rows that were remapped because of correctable errors
    pub(crate) const REMAPPED_CORRECTABLE: u32 = 142;
    /// The number of rows that were remapped because of uncorrectable errors
    pub(crate) const REMAPPED_UNCORRECTABLE: u32 = 143;
    /// Whether a row will be remapped at the next reset of the GPU
    pub(crate) const REMAP_PENDING: u32 = 144;
    /// Whether the remapping of a row has failed
    pub(crate) const REMAP_FAILURE: u32 = 145;
    /// The power in milliwatts that the board may use, with drivers from 530
    pub(crate) const POWER_LIMIT: u32 = 190;
    /// The recommended recovery action
    pub(crate) const RECOVERY_ACTION: u32 = 230;

    /// Returns the scope of the value: `UINT_MAX` is the sum over all NVLinks, which otherwise are counted one by one.
    pub(crate) const fn scope(id: u32) -> u32 {
        match id {
            NVLINK_SENT | NVLINK_RECEIVED => u32::MAX,
            _ => 0,
        }
    }
}

/// An event, `nvmlEventData_t`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventData {
    /// The GPU
    pub device: DeviceHandle,
    /// One of the bits in [`event`]
    pub kind: u64,
    /// The XID
    pub data: u64,
}

/// Percentages of the last sample period, which is at most a second, from `nvmlUtilization_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Utilization {
    /// In which a kernel ran
    pub gpu: u32,
    /// In which memory was read or written
    pub memory: u32,
}

/// A clock of a GPU, from `nvmlClockType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    /// The clock of the multiprocessors
    Multiprocessors,
    /// The clock of the memory
    Memory,
}

/// NVML, as far as a program needs it that watches GPUs.
pub(crate) trait Monitoring: Api {
    /// `nvmlEventSetCreate`
    ///
    /// # Errors
    /// Before [`Api::init`].
    fn create_event_set(&self) -> Result<EventSet, Failed>;
    /// `nvmlEventSetFree`
    ///
    /// # Errors
    /// Before [`Api::init`].
    fn free_event_set(&self, set: EventSet) -> Result<(), Failed>;
    /// `nvmlDeviceGetSupportedEventTypes`: bits of [`event`] and others
    ///
    /// # Errors
    /// If the GPU is lost.
    fn supported_events(&self, device: DeviceHandle) -> Result<u64, Failed>;
    /// `nvmlDeviceRegisterEvents`
    ///
    /// # Errors
    /// [`Code::NOT_SUPPORTED`] if the GPU does not have one of these types.
    fn register_events(
        &self,
        device: DeviceHandle,
        kinds: u64,
        set: &EventSet,
    ) -> Result<(), Failed>;
    /// `nvmlEventSetWait_v2`: `None` if there was no event within `limit`
    ///
    /// # Errors
    /// If one of the GPUs is lost.
    fn wait(&self, set: &EventSet, limit: Duration) -> Result<Option<EventData>, Failed>;
    /// `nvmlDeviceGetFieldValues`: the values in the order of the ids; `None` if the GPU or the driver does not have the field
    ///
    /// # Errors
    /// If the GPU is lost.
    fn fields(
        &self,
        device: DeviceHandle,
        ids: [u32; FIELDS],
    ) -> Result<[Option<u64>; FIELDS], Failed>;
    /// `nvmlDeviceGetMemoryInfo`, also of a MIG device. The call reaches the GPU, unlike those for its name or UUID.
    ///
    /// # Errors
    /// If the GPU is lost.
    fn memory(&self, device: DeviceHandle) -> Result<Memory, Failed>;
    /// `nvmlDeviceGetMemoryInfo_v2`, also of a MIG device: the bytes that the driver reserves
    ///
    /// # Errors
    /// [`Code::FUNCTION_NOT_FOUND`] with drivers before 510.
    fn reserved_memory(&self, device: DeviceHandle) -> Result<u64, Failed>;
    /// `nvmlDeviceGetCurrentClocksEventReasons`, whose name was `nvmlDeviceGetCurrentClocksThrottleReasons` before driver 535: bits
    /// `nvmlClocksEventReason…`
    ///
    /// # Errors
    /// [`Code::NOT_SUPPORTED`] for MIG devices, and for some models.
    fn clock_reasons(&self, device: DeviceHandle) -> Result<u64, Failed>;
    /// `nvmlDeviceGetUtilizationRates`
    ///
    /// # Errors
    /// [`Code::NOT_SUPPORTED`] in MIG mode, and for MIG devices.
    fn utilization(&self, device: DeviceHandle) -> Result<Utilization, Failed>;
    /// `nvmlDeviceGetTemperature` of the GPU's chip, in degrees Celsius
    ///
    /// # Errors
    /// [`Code::NOT_SUPPORTED`] without a sensor.
    fn temperature(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetPowerUsage` of the GPU's board, in milliwatts
    ///
    /// # Errors
    /// [`Code::NOT_SUPPORTED`] without a sensor.
    fn power(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetClockInfo`, in megahertz
    ///
    /// # Errors
    /// [`Code::NOT_SUPPORTED`] if the GPU does not report this clock.
    fn clock(&self, device: DeviceHandle, clock: Clock) -> Result<u32, Failed>;
    /// `nvmlDeviceGetEncoderUtilization`, in percent
    ///
    /// # Errors
    /// [`Code::NOT_SUPPORTED`] in MIG mode, and without an encoder.
    fn encoder(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetDecoderUtilization`, in percent
    ///
    /// # Errors
    /// [`Code::NOT_SUPPORTED`] in MIG mode, and without a decoder.
    fn decoder(&self, device: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetAttributes_v2`, of a MIG device
    ///
    /// # Errors
    /// If it is not a MIG device, or does not exist any more.
    fn mig_attributes(&self, device: DeviceHandle) -> Result<MigAttributes, Failed>;
    /// `nvmlDeviceGetAddressingMode`; `None` if the value is unknown
    ///
    /// # Errors
    /// [`Code::NOT_SUPPORTED`] on platforms without it, and with drivers before 570.
    fn addressing_mode(&self, device: DeviceHandle) -> Result<Option<AddressingMode>, Failed>;
    /// `nvmlDeviceGetGpuInstanceById` and `nvmlGpuInstanceGetInfo`, of the GPU instance with this id of a GPU
    ///
    /// # Errors
    /// If the instance does not exist, or the process may not monitor it.
    fn memory_slices(&self, device: DeviceHandle, instance: u32) -> Result<MemorySlices, Failed>;
    /// `nvmlDeviceGetTopologyCommonAncestor`: an `nvmlGpuTopologyLevel_t`
    ///
    /// # Errors
    /// If the driver cannot determine it.
    fn common_ancestor(&self, a: DeviceHandle, b: DeviceHandle) -> Result<u32, Failed>;
    /// `nvmlDeviceGetNvLinkState`: whether the link is active
    ///
    /// # Errors
    /// If the GPU does not have this link.
    fn is_nvlink_active(&self, device: DeviceHandle, link: u32) -> Result<bool, Failed>;
    /// `nvmlDeviceGetNvLinkRemotePciInfo_v2`: domain, bus and device of the GPU or switch at the other end
    ///
    /// # Errors
    /// If the link is not active.
    fn nvlink_remote(&self, device: DeviceHandle, link: u32) -> Result<(u32, u32, u32), Failed>;
}

/// Whether the GPU, the driver or the privileges of this process lack a feature: an answer, not an error of the GPU.
#[must_use]
pub(crate) fn is_unsupported(failed: &Failed) -> bool {
    matches!(
        failed.code,
        Code::NOT_SUPPORTED | Code::FUNCTION_NOT_FOUND | Code::NO_PERMISSION
    )
}
