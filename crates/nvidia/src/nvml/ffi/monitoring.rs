//! The calls of a program that watches GPUs.

use std::ffi::{CStr, c_int, c_uint, c_ulonglong, c_void};
use std::time::Duration;

use super::{Library, PciInfo, RawDevice, Return};
use crate::nvml::api::{Code, Device, Failed};
use crate::nvml::monitoring::{Engines, EventData, EventSet, Memory, MigAttributes, Monitoring};

type RawEventSet = *mut c_void;

/// `nvmlEventData_t`
#[derive(Clone, Copy)]
#[repr(C)]
struct RawEvent {
    device: RawDevice,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlFieldValue_t`. The value is a union of numbers, the widest of which has 8 bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawField {
    id: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency: i64,
    kind: c_uint,
    code: Return,
    value: [u8; 8],
}

/// `nvmlMemory_t`
#[repr(C)]
struct RawMemory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlUtilization_t`
#[repr(C)]
struct RawUtilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlDeviceAttributes_t`
#[repr(C)]
#[derive(Default)]
struct RawAttributes {
    multiprocessors: c_uint,
    copy_engines: c_uint,
    decoders: c_uint,
    encoders: c_uint,
    jpegs: c_uint,
    ofas: c_uint,
    gpu_slices: c_uint,
    compute_slices: c_uint,
    memory_mib: c_ulonglong,
}

impl RawField {
    /// Returns the number, if the library stored one.
    fn number(&self) -> Option<u64> {
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

impl Monitoring for Library {
    fn create_event_set(&self) -> Result<EventSet, Failed> {
        const NAME: &CStr = c"nvmlEventSetCreate";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(*mut RawEventSet) -> Return>(NAME) }?;
        let mut set: RawEventSet = std::ptr::null_mut();
        // SAFETY: the library writes one pointer to `set`.
        let code = unsafe { function(&raw mut set) };
        self.check(NAME, code)?;
        Ok(EventSet::of(set as usize))
    }

    fn free_event_set(&self, set: EventSet) -> Result<(), Failed> {
        const NAME: &CStr = c"nvmlEventSetFree";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawEventSet) -> Return>(NAME) }?;
        // SAFETY: `set` is an event set that the library gave us. This function takes the only copy of it, so it is freed once, and
        // not used again.
        let code = unsafe { function(set.get() as RawEventSet) };
        self.check(NAME, code)
    }

    fn supported_events(&self, device: Device) -> Result<u64, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetSupportedEventTypes";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, *mut c_ulonglong) -> Return>(NAME) }?;
        let mut kinds = 0;
        // SAFETY: the library writes one unsigned long long to `kinds`; `device` is a handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, &raw mut kinds) };
        self.check(NAME, code)?;
        Ok(kinds)
    }

    fn register_events(&self, device: Device, kinds: u64, set: &EventSet) -> Result<(), Failed> {
        const NAME: &CStr = c"nvmlDeviceRegisterEvents";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function =
            unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, c_ulonglong, RawEventSet) -> Return>(NAME) }?;
        // SAFETY: `device` is a handle and `set` an event set that the library gave us and that is not freed,
        // because `free_event_set` takes it away. The library checks the types.
        let code = unsafe { function(device.get() as RawDevice, kinds, set.get() as RawEventSet) };
        self.check(NAME, code)
    }

    fn wait(&self, set: &EventSet, limit: Duration) -> Result<Option<EventData>, Failed> {
        const NAME: &CStr = c"nvmlEventSetWait_v2";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function =
            unsafe { self.symbol::<unsafe extern "C" fn(RawEventSet, *mut RawEvent, c_uint) -> Return>(NAME) }?;
        let mut event =
            RawEvent { device: std::ptr::null_mut(), kind: 0, data: 0, gpu_instance: 0, compute_instance: 0 };
        let limit = c_uint::try_from(limit.as_millis()).unwrap_or(c_uint::MAX);
        // SAFETY: `set` is an event set that the library gave us, not freed as above. The library writes one
        // nvmlEventData_t to `event`, which has its layout.
        let code = unsafe { function(set.get() as RawEventSet, &raw mut event, limit) };
        if Code(code) == Code::TIMEOUT {
            return Ok(None);
        }
        self.check(NAME, code)?;
        Ok(Some(EventData { device: Device::from_raw(event.device as usize), kind: event.kind, data: event.data }))
    }

    fn fields<const N: usize>(&self, device: Device, ids: [u32; N]) -> Result<[Option<u64>; N], Failed> {
        const NAME: &CStr = c"nvmlDeviceGetFieldValues";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, c_int, *mut RawField) -> Return>(NAME) }?;
        let of = |id| RawField {
            id,
            scope: 0,
            timestamp: 0,
            latency: 0,
            kind: 0,
            code: Code::NOT_SUPPORTED.0,
            value: [0; 8],
        };
        let mut fields = ids.map(of);
        let count = c_int::try_from(N).unwrap_or(0);
        // SAFETY: the library reads the ids of `count` values of type nvmlFieldValue_t, and writes the rest of them. `fields` has
        // as many, of its layout, and any id is permitted; `device` is a handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, count, fields.as_mut_ptr()) };
        self.check(NAME, code)?;
        Ok(fields.map(|field| field.number()))
    }

    fn memory(&self, device: Device) -> Result<Memory, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetMemoryInfo";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, *mut RawMemory) -> Return>(NAME) }?;
        let mut memory = RawMemory { total: 0, free: 0, used: 0 };
        // SAFETY: the library writes one nvmlMemory_t to `memory`, which has its layout; `device` is a handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, &raw mut memory) };
        self.check(NAME, code)?;
        Ok(Memory { total: memory.total, used: memory.used })
    }

    fn utilization(&self, device: Device) -> Result<u32, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetUtilizationRates";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, *mut RawUtilization) -> Return>(NAME) }?;
        let mut rates = RawUtilization { gpu: 0, memory: 0 };
        // SAFETY: the library writes one nvmlUtilization_t to `rates`, which has its layout; `device` is a handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, &raw mut rates) };
        self.check(NAME, code)?;
        Ok(rates.gpu)
    }

    fn temperature(&self, device: Device) -> Result<u32, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetTemperature";
        /// NVML_TEMPERATURE_GPU
        const SENSOR: c_uint = 0;
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, c_uint, *mut c_uint) -> Return>(NAME) }?;
        let mut celsius = 0;
        // SAFETY: the library writes one unsigned int to `celsius`; `device` is a handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, SENSOR, &raw mut celsius) };
        self.check(NAME, code)?;
        Ok(celsius)
    }

    fn power(&self, device: Device) -> Result<u32, Failed> {
        // SAFETY: it takes a device, and a pointer to what it fills.
        unsafe { self.device_number(c"nvmlDeviceGetPowerUsage", device) }
    }

    fn mig_attributes(&self, device: Device) -> Result<MigAttributes, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetAttributes_v2";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, *mut RawAttributes) -> Return>(NAME) }?;
        let mut found = RawAttributes::default();
        // SAFETY: the library writes one nvmlDeviceAttributes_t to `found`, which has its layout; `device` is a handle that it
        // gave us.
        let code = unsafe { function(device.get() as RawDevice, &raw mut found) };
        self.check(NAME, code)?;
        let RawAttributes { multiprocessors, gpu_slices, compute_slices, memory_mib, .. } = found;
        let engines = Engines {
            copy: found.copy_engines,
            decoder: found.decoders,
            encoder: found.encoders,
            jpeg: found.jpegs,
            ofa: found.ofas,
        };
        Ok(MigAttributes { gpu_slices, compute_slices, memory_mib, multiprocessors, engines })
    }

    fn common_ancestor(&self, a: Device, b: Device) -> Result<u32, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetTopologyCommonAncestor";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function =
            unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, RawDevice, *mut c_uint) -> Return>(NAME) }?;
        let mut level = 0;
        // SAFETY: the library writes one enum, an unsigned int, to `level`; both devices are handles that it gave us.
        let code = unsafe { function(a.get() as RawDevice, b.get() as RawDevice, &raw mut level) };
        self.check(NAME, code)?;
        Ok(level)
    }

    fn is_nvlink_active(&self, device: Device, link: u32) -> Result<bool, Failed> {
        const NAME: &CStr = c"nvmlDeviceGetNvLinkState";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, c_uint, *mut c_uint) -> Return>(NAME) }?;
        let mut is_active = 0;
        // SAFETY: the library writes one enum, an unsigned int, to `is_active`, and checks the number of the link; `device` is a
        // handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, link, &raw mut is_active) };
        self.check(NAME, code)?;
        Ok(is_active == 1)
    }

    fn nvlink_remote(&self, device: Device, link: u32) -> Result<(u32, u32, u32), Failed> {
        const NAME: &CStr = c"nvmlDeviceGetNvLinkRemotePciInfo_v2";
        // SAFETY: nvml.h gives it this type, and it is called here only.
        let function = unsafe { self.symbol::<unsafe extern "C" fn(RawDevice, c_uint, *mut PciInfo) -> Return>(NAME) }?;
        let mut info = PciInfo::EMPTY;
        // SAFETY: the library writes an nvmlPciInfo_t to `info`, which is longer, and checks the number of the link; `device` is
        // a handle that it gave us.
        let code = unsafe { function(device.get() as RawDevice, link, &raw mut info) };
        self.check(NAME, code)?;
        Ok((info.domain, info.bus, info.device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes that a C compiler computes for nvml.h.
    const _: () = assert!(size_of::<RawEvent>() == 32 && size_of::<RawField>() == 40);
    const _: () = assert!(size_of::<RawMemory>() == 24 && size_of::<RawAttributes>() == 40);
    const _: () = assert!(size_of::<RawUtilization>() == 8);

    #[test]
    fn a_value_is_read_by_its_type() {
        let field =
            |kind, code, value: [u8; 8]| RawField { id: 0, scope: 0, timestamp: 0, latency: 0, kind, code, value };
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
        assert_eq!(field(5, 0, [7_i32.to_ne_bytes(), [0; 4]].concat().try_into().unwrap()).number(), Some(7));
    }
}
