//! The functions of NVML that are called, as prototypes: names, parameters and their order come from NVIDIA's nvml.h.
//!
//! A type `Name` stands for `nvmlName_t`, and `&mut T` for `T *`. `debian::the_table_of_nvml_is_that_of_nvml_h` compares the table with
//! the header.
#![allow(non_snake_case, reason = "the names in nvml.h")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong};

use super::NvmlLibrary;
use super::structs::{
    AddressingMode, DeviceAttributes, EventData, FieldValue, GpuInstanceInfo, Memory, MemoryV2,
    PciInfo, ProcessList, Return, Utilization,
};
use crate::api::{DeviceHandle, GpuInstance, MOST};
use crate::monitoring::{BorrowedSet, EventSet, FIELDS};
use nvidia_host::nvml::Failed;

// C gives an enumeration without negative values the type `unsigned int`.
type BrandType = c_uint;
type ClockType = c_uint;
type ComputeMode = c_uint;
type EnableState = c_uint;
type GpuTopologyLevel = c_uint;
type TemperatureSensors = c_uint;

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE` and `NVML_DEVICE_NAME_V2_BUFFER_SIZE`; the driver version needs 80.
const TEXT: c_uint = 96;

/// A buffer for text.
#[repr(transparent)]
pub(super) struct Text([c_char; TEXT as usize]);

impl Text {
    /// Returns the text that a function stored: up to the first NUL, or the whole buffer if the library did not terminate it.
    pub(super) fn stored(
        call: impl FnOnce(&mut Self) -> Result<(), Failed>,
    ) -> Result<String, Failed> {
        let text = super::stored(Self([0; TEXT as usize]), call)?;
        let bytes: Vec<u8> = text
            .0
            .iter()
            .take_while(|c| **c != 0)
            .map(|c| c.to_ne_bytes()[0])
            .collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// The length of a [`Text`]: a type, so that no other length can be passed with one.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Length(c_uint);

impl Length {
    pub(super) const OF_TEXT: Self = Self(TEXT);
}

/// The number of elements of an array of [`FIELDS`] fields.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Count(c_int);

impl Count {
    pub(super) const OF_FIELDS: Self = Self(3);
}

const _: () = assert!(FIELDS == 3, "Count::OF_FIELDS");

/// The number of elements of a [`ProcessList`], which the library replaces with the number of those that it stored.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Room(c_uint);

impl Room {
    pub(super) const OF_PROCESSES: Self = Self(1024);

    pub(super) fn count(self) -> usize {
        usize::try_from(self.0).unwrap_or_default()
    }
}

const _: () = assert!(MOST == 1024, "Room::OF_PROCESSES");

/// Declares a method of [`NvmlLibrary`] for each prototype. All functions return an `nvmlReturn_t`.
macro_rules! prototypes {
    ($($name:ident($($parameter:ident: $type:ty),*);)*) => {
        impl NvmlLibrary {$(
            pub(super) fn $name(&self, $($parameter: $type),*) -> Result<(), Failed> {
                const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                };
                // SAFETY: the row is the prototype in nvml.h, and the symbol is used only below, while `self` holds the library.
                let function = unsafe { self.symbol::<unsafe extern "C" fn($($type),*) -> Return>(NAME) }?;
                // SAFETY: the types permit only valid arguments. A reference points to a value with the layout in nvml.h, which
                // the library fills or leaves as it is, and does not keep. A `Length`, `Count` or `Room` belongs to its buffer. A `DeviceHandle`
                // or `EventSet` is NULL or comes from this library, which is initialized then and never shut down; a freed set does not
                // exist any more. A `GpuInstance` too comes from this library, which this program never has destroy one. The library
                // checks NULL and all numbers.
                let code = unsafe { function($($parameter),*) };
                self.check(NAME, code)
            }
        )*}
    };
}

prototypes! {
    nvmlInit_v2();
    nvmlSystemGetDriverVersion(version: &mut Text, length: Length);
    nvmlSystemGetCudaDriverVersion(cudaDriverVersion: &mut c_int);
    nvmlDeviceGetCount_v2(deviceCount: &mut c_uint);
    nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: &mut DeviceHandle);
    // The symbol without a version is the oldest one, and all drivers have it. nvml.h declares v3, which has a longer text for the bus id.
    nvmlDeviceGetPciInfo(device: DeviceHandle, pci: &mut PciInfo);
    nvmlDeviceGetUUID(device: DeviceHandle, uuid: &mut Text, length: Length);
    nvmlDeviceGetMinorNumber(device: DeviceHandle, minorNumber: &mut c_uint);
    nvmlDeviceGetName(device: DeviceHandle, name: &mut Text, length: Length);
    nvmlDeviceGetCudaComputeCapability(device: DeviceHandle, major: &mut c_int, minor: &mut c_int);
    nvmlDeviceGetBrand(device: DeviceHandle, kind: &mut BrandType);
    nvmlDeviceGetMigMode(device: DeviceHandle, currentMode: &mut c_uint, pendingMode: &mut c_uint);
    nvmlDeviceGetMaxMigDeviceCount(device: DeviceHandle, count: &mut c_uint);
    nvmlDeviceGetMigDeviceHandleByIndex(device: DeviceHandle, index: c_uint, migDevice: &mut DeviceHandle);
    nvmlDeviceGetGpuInstanceId(device: DeviceHandle, id: &mut c_uint);
    nvmlDeviceGetComputeInstanceId(device: DeviceHandle, id: &mut c_uint);

    nvmlEventSetCreate(set: &mut EventSet);
    nvmlEventSetFree(set: EventSet);
    nvmlEventSetWait_v2(set: BorrowedSet<'_>, data: &mut EventData, timeoutms: c_uint);
    nvmlDeviceGetSupportedEventTypes(device: DeviceHandle, eventTypes: &mut c_ulonglong);
    nvmlDeviceRegisterEvents(device: DeviceHandle, eventTypes: c_ulonglong, set: BorrowedSet<'_>);
    nvmlDeviceGetFieldValues(device: DeviceHandle, valuesCount: Count, values: &mut [FieldValue; FIELDS]);
    nvmlDeviceGetMemoryInfo(device: DeviceHandle, memory: &mut Memory);
    nvmlDeviceGetMemoryInfo_v2(device: DeviceHandle, memory: &mut MemoryV2);
    nvmlDeviceGetCurrentClocksEventReasons(device: DeviceHandle, clocksEventReasons: &mut c_ulonglong);
    nvmlDeviceGetCurrentClocksThrottleReasons(device: DeviceHandle, clocksThrottleReasons: &mut c_ulonglong);
    nvmlDeviceGetUtilizationRates(device: DeviceHandle, utilization: &mut Utilization);
    nvmlDeviceGetTemperature(device: DeviceHandle, sensorType: TemperatureSensors, temp: &mut c_uint);
    nvmlDeviceGetPowerUsage(device: DeviceHandle, power: &mut c_uint);
    nvmlDeviceGetClockInfo(device: DeviceHandle, r#type: ClockType, clock: &mut c_uint);
    nvmlDeviceGetEncoderUtilization(device: DeviceHandle, utilization: &mut c_uint, samplingPeriodUs: &mut c_uint);
    nvmlDeviceGetDecoderUtilization(device: DeviceHandle, utilization: &mut c_uint, samplingPeriodUs: &mut c_uint);
    nvmlDeviceGetAttributes_v2(device: DeviceHandle, attributes: &mut DeviceAttributes);
    nvmlDeviceGetAddressingMode(device: DeviceHandle, mode: &mut AddressingMode);
    nvmlDeviceGetGpuInstanceById(device: DeviceHandle, id: c_uint, gpuInstance: &mut GpuInstance);
    nvmlGpuInstanceGetInfo(gpuInstance: GpuInstance, info: &mut GpuInstanceInfo);
    nvmlDeviceGetTopologyCommonAncestor(device1: DeviceHandle, device2: DeviceHandle, pathInfo: &mut GpuTopologyLevel);
    nvmlDeviceGetNvLinkState(device: DeviceHandle, link: c_uint, isActive: &mut EnableState);
    nvmlDeviceGetNvLinkRemotePciInfo_v2(device: DeviceHandle, link: c_uint, pci: &mut PciInfo);

    nvmlDeviceGetComputeMode(device: DeviceHandle, mode: &mut ComputeMode);
    nvmlDeviceSetComputeMode(device: DeviceHandle, mode: ComputeMode);

    nvmlDeviceGetComputeRunningProcesses_v3(device: DeviceHandle, infoCount: &mut Room, infos: &mut ProcessList);
    nvmlDeviceGetGraphicsRunningProcesses_v3(device: DeviceHandle, infoCount: &mut Room, infos: &mut ProcessList);
    nvmlDeviceGetMPSComputeRunningProcesses_v3(device: DeviceHandle, infoCount: &mut Room, infos: &mut ProcessList);
    nvmlDeviceGetComputeRunningProcesses_v2(device: DeviceHandle, infoCount: &mut Room, infos: &mut ProcessList);
    nvmlDeviceGetGraphicsRunningProcesses_v2(device: DeviceHandle, infoCount: &mut Room, infos: &mut ProcessList);
    nvmlDeviceGetMPSComputeRunningProcesses_v2(device: DeviceHandle, infoCount: &mut Room, infos: &mut ProcessList);
}
