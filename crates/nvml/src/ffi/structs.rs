//! The structures of nvml.h, with the layout that a C compiler gives them. A structure `Name` is `nvmlName_t`.

use std::ffi::{c_char, c_longlong, c_uint, c_ulonglong};

use crate::api::{DeviceHandle, MOST, NvmlProcess};
use crate::monitoring::field;
use nvidia_host::nvml::Code;

/// `nvmlReturn_t`, an enumeration without negative values.
pub(super) type Return = c_uint;

/// The start of `nvmlPciInfo_t`, which is the same in all versions, and enough space for the longest version (68 bytes in v3).
#[repr(C)]
pub(super) struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    rest: [u8; 100],
}

impl PciInfo {
    pub(super) const EMPTY: Self = Self {
        bus_id_legacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        rest: [0; 100],
    };

    /// Returns the domain, bus and device.
    pub(super) const fn address(&self) -> (u32, u32, u32) {
        (self.domain, self.bus, self.device)
    }
}

#[repr(C)]
pub(super) struct EventData {
    pub(super) device: DeviceHandle,
    pub(super) kind: c_ulonglong,
    pub(super) data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

impl EventData {
    pub(super) const EMPTY: Self = Self {
        device: DeviceHandle::NULL,
        kind: 0,
        data: 0,
        gpu_instance: 0,
        compute_instance: 0,
    };
}

/// The value is a union of numbers, the widest of which has 8 bytes.
#[repr(C)]
pub(super) struct FieldValue {
    id: c_uint,
    scope: c_uint,
    timestamp: c_longlong,
    latency: c_longlong,
    kind: c_uint,
    code: Return,
    value: [u8; 8],
}

impl FieldValue {
    /// Returns a field to be requested, without a value.
    pub(super) fn request(id: u32) -> Self {
        Self {
            id,
            scope: field::scope(id),
            timestamp: 0,
            latency: 0,
            kind: 0,
            code: Code::NOT_SUPPORTED.0,
            value: [0; 8],
        }
    }

    /// Returns the number, if the library stored one.
    pub(super) fn number(&self) -> Option<u64> {
        let [a, b, c, d, ..] = self.value;
        match (self.code, self.kind) {
            // NVML_VALUE_TYPE_UNSIGNED_INT
            (0, 1) => Some(u32::from_ne_bytes([a, b, c, d]).into()),
            // NVML_VALUE_TYPE_UNSIGNED_LONG and NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, both of 8 bytes on all platforms of the driver
            (0, 2 | 3) => Some(u64::from_ne_bytes(self.value)),
            // NVML_VALUE_TYPE_SIGNED_LONG_LONG
            (0, 4) => u64::try_from(i64::from_ne_bytes(self.value)).ok(),
            // NVML_VALUE_TYPE_SIGNED_INT
            (0, 5) => u64::try_from(i32::from_ne_bytes([a, b, c, d])).ok(),
            _ => None,
        }
    }
}

#[derive(Default)]
#[repr(C)]
pub(super) struct Memory {
    pub(super) total: c_ulonglong,
    free: c_ulonglong,
    pub(super) used: c_ulonglong,
}

/// `nvmlMemory_v2_t`
#[repr(C)]
pub(super) struct MemoryV2 {
    version: c_uint,
    total: c_ulonglong,
    pub(super) reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

impl MemoryV2 {
    /// Version 2 of the structure, with its size in bytes
    pub(super) const EMPTY: Self = Self {
        version: 2 << 24 | 40,
        total: 0,
        reserved: 0,
        free: 0,
        used: 0,
    };
}

const _: () = assert!(size_of::<MemoryV2>() == 40);

#[derive(Default)]
#[repr(C)]
pub(super) struct Utilization {
    pub(super) gpu: c_uint,
    pub(super) memory: c_uint,
}

#[derive(Default)]
#[repr(C)]
pub(super) struct DeviceAttributes {
    pub(super) multiprocessors: c_uint,
    pub(super) copy_engines: c_uint,
    pub(super) decoders: c_uint,
    pub(super) encoders: c_uint,
    pub(super) jpegs: c_uint,
    pub(super) ofas: c_uint,
    pub(super) gpu_slices: c_uint,
    pub(super) compute_slices: c_uint,
    pub(super) memory_mib: c_ulonglong,
}

/// `nvmlDeviceAddressingMode_t`
#[repr(C)]
pub(super) struct AddressingMode {
    version: c_uint,
    pub(super) value: c_uint,
}

impl AddressingMode {
    /// Version 1 of the structure, with its size in bytes
    pub(super) const EMPTY: Self = Self {
        version: 1 << 24 | 8,
        value: 0,
    };
}

const _: () = assert!(size_of::<AddressingMode>() == 8);

/// `nvmlGpuInstanceInfo_t`
#[repr(C)]
pub(super) struct GpuInstanceInfo {
    device: DeviceHandle,
    id: c_uint,
    profile: c_uint,
    pub(super) start: c_uint,
    pub(super) size: c_uint,
}

impl GpuInstanceInfo {
    pub(super) const EMPTY: Self = Self {
        device: DeviceHandle::NULL,
        id: 0,
        profile: 0,
        start: 0,
        size: 0,
    };
}

/// The versions 2 and 3 of the functions that store it use one layout. Version 1 lacks the last two fields.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ProcessInfo {
    pid: c_uint,
    used_memory: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// The processes that a function stores.
pub(super) type ProcessList = [ProcessInfo; MOST];

impl ProcessInfo {
    /// A place for the library to store processes, on the heap because of its size
    pub(super) fn empty_list() -> Box<ProcessList> {
        Box::new(
            [Self {
                pid: 0,
                used_memory: 0,
                gpu_instance: 0,
                compute_instance: 0,
            }; MOST],
        )
    }

    pub(super) fn process(&self) -> NvmlProcess {
        // NVML_VALUE_NOT_AVAILABLE: on Windows, and for a MIG device of another user.
        let memory = (self.used_memory != c_ulonglong::MAX).then_some(self.used_memory);
        NvmlProcess {
            pid: self.pid,
            memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes that a C compiler computes for nvml.h.
    const _: () = assert!(
        size_of::<ProcessInfo>() == 24 && std::mem::offset_of!(ProcessInfo, gpu_instance) == 16
    );
    const _: () = assert!(size_of::<EventData>() == 32 && size_of::<FieldValue>() == 40);
    const _: () = assert!(size_of::<Memory>() == 24 && size_of::<DeviceAttributes>() == 40);
    const _: () = assert!(size_of::<Utilization>() == 8 && size_of::<PciInfo>() >= 68);

    #[test]
    fn a_value_is_read_by_its_type() {
        let field = |kind, code, value: [u8; 8]| FieldValue {
            kind,
            code,
            value,
            ..FieldValue::request(0)
        };
        let all = (-1_i64).to_ne_bytes();
        for (kind, code, expected) in [
            (1, 0, Some(0xffff_ffff)),
            (2, 0, Some(u64::MAX)),
            (3, 0, Some(u64::MAX)),
            (4, 0, None),
            (5, 0, None),
            (1, 3, None),
        ] {
            assert_eq!(field(kind, code, all).number(), expected, "{kind} {code}");
        }
        assert_eq!(
            field(
                5,
                0,
                [7_i32.to_ne_bytes(), [0; 4]].concat().try_into().unwrap()
            )
            .number(),
            Some(7)
        );
        assert_eq!(
            FieldValue::request(0).number(),
            None,
            "the library has not answered"
        );
    }
}
