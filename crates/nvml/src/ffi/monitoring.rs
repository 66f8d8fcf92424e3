//! The calls of a program that watches GPUs.

use std::ffi::c_uint;
use std::time::Duration;

use super::structs::{self, DeviceAttributes, FieldValue, GpuInstanceInfo, PciInfo};
use super::table::Count;
use super::{NvmlLibrary, stored};
use crate::api::{DeviceHandle, GpuInstance};
use crate::monitoring::{Clock, EventData, EventSet, FIELDS, Monitoring, Utilization};
use nvidia_host::nvml::monitoring::{AddressingMode, Engines, Memory, MemorySlices, MigAttributes};
use nvidia_host::nvml::{Code, Failed};

impl Monitoring for NvmlLibrary {
    fn create_event_set(&self) -> Result<EventSet, Failed> {
        stored(EventSet::NULL, |set| self.nvmlEventSetCreate(set))
    }

    fn free_event_set(&self, set: EventSet) -> Result<(), Failed> {
        self.nvmlEventSetFree(set)
    }

    fn supported_events(&self, device: DeviceHandle) -> Result<u64, Failed> {
        stored(0, |kinds| {
            self.nvmlDeviceGetSupportedEventTypes(device, kinds)
        })
    }

    fn register_events(
        &self,
        device: DeviceHandle,
        kinds: u64,
        set: &EventSet,
    ) -> Result<(), Failed> {
        self.nvmlDeviceRegisterEvents(device, kinds, set.borrow())
    }

    fn wait(&self, set: &EventSet, limit: Duration) -> Result<Option<EventData>, Failed> {
        let limit = c_uint::try_from(limit.as_millis()).unwrap_or(c_uint::MAX);
        match stored(structs::EventData::EMPTY, |event| {
            self.nvmlEventSetWait_v2(set.borrow(), event, limit)
        }) {
            Ok(event) => Ok(Some(EventData {
                device: event.device,
                kind: event.kind,
                data: event.data,
            })),
            Err(Failed {
                code: Code::TIMEOUT,
                ..
            }) => Ok(None),
            Err(failed) => Err(failed),
        }
    }

    fn fields(
        &self,
        device: DeviceHandle,
        ids: [u32; FIELDS],
    ) -> Result<[Option<u64>; FIELDS], Failed> {
        let fields = ids.map(FieldValue::request);
        let fields = stored(fields, |fields| {
            self.nvmlDeviceGetFieldValues(device, Count::OF_FIELDS, fields)
        })?;
        Ok(fields.map(|field| field.number()))
    }

    fn memory(&self, device: DeviceHandle) -> Result<Memory, Failed> {
        let memory = stored(structs::Memory::default(), |memory| {
            self.nvmlDeviceGetMemoryInfo(device, memory)
        })?;
        Ok(Memory {
            total: memory.total,
            used: memory.used,
        })
    }

    fn reserved_memory(&self, device: DeviceHandle) -> Result<u64, Failed> {
        let memory = stored(structs::MemoryV2::EMPTY, |memory| {
            self.nvmlDeviceGetMemoryInfo_v2(device, memory)
        })?;
        Ok(memory.reserved)
    }

    fn clock_reasons(&self, device: DeviceHandle) -> Result<u64, Failed> {
        let reasons = stored(0, |reasons| {
            self.nvmlDeviceGetCurrentClocksEventReasons(device, reasons)
        });
        match reasons {
            Err(failed) if failed.code == Code::FUNCTION_NOT_FOUND => stored(0, |reasons| {
                self.nvmlDeviceGetCurrentClocksThrottleReasons(device, reasons)
            }),
            other => other,
        }
    }

    fn utilization(&self, device: DeviceHandle) -> Result<Utilization, Failed> {
        let rates = stored(structs::Utilization::default(), |rates| {
            self.nvmlDeviceGetUtilizationRates(device, rates)
        });
        rates.map(|rates| Utilization {
            gpu: rates.gpu,
            memory: rates.memory,
        })
    }

    fn temperature(&self, device: DeviceHandle) -> Result<u32, Failed> {
        /// NVML_TEMPERATURE_GPU
        const SENSOR: c_uint = 0;
        stored(0, |celsius| {
            self.nvmlDeviceGetTemperature(device, SENSOR, celsius)
        })
    }

    fn power(&self, device: DeviceHandle) -> Result<u32, Failed> {
        stored(0, |milliwatts| {
            self.nvmlDeviceGetPowerUsage(device, milliwatts)
        })
    }

    fn clock(&self, device: DeviceHandle, clock: Clock) -> Result<u32, Failed> {
        let kind = match clock {
            // NVML_CLOCK_SM and NVML_CLOCK_MEM
            Clock::Multiprocessors => 1,
            Clock::Memory => 2,
        };
        stored(0, |megahertz| {
            self.nvmlDeviceGetClockInfo(device, kind, megahertz)
        })
    }

    fn encoder(&self, device: DeviceHandle) -> Result<u32, Failed> {
        let call = |(percent, period): &mut (_, _)| {
            self.nvmlDeviceGetEncoderUtilization(device, percent, period)
        };
        stored((0, 0), call).map(|(percent, _)| percent)
    }

    fn decoder(&self, device: DeviceHandle) -> Result<u32, Failed> {
        let call = |(percent, period): &mut (_, _)| {
            self.nvmlDeviceGetDecoderUtilization(device, percent, period)
        };
        stored((0, 0), call).map(|(percent, _)| percent)
    }

    fn mig_attributes(&self, device: DeviceHandle) -> Result<MigAttributes, Failed> {
        let found = stored(DeviceAttributes::default(), |found| {
            self.nvmlDeviceGetAttributes_v2(device, found)
        })?;
        let DeviceAttributes {
            multiprocessors,
            gpu_slices,
            compute_slices,
            memory_mib,
            ..
        } = found;
        let engines = Engines {
            copy: found.copy_engines,
            decoder: found.decoders,
            encoder: found.encoders,
            jpeg: found.jpegs,
            ofa: found.ofas,
        };
        Ok(MigAttributes {
            gpu_slices,
            compute_slices,
            memory_mib,
            multiprocessors,
            engines,
        })
    }

    fn addressing_mode(&self, device: DeviceHandle) -> Result<Option<AddressingMode>, Failed> {
        let mode = stored(structs::AddressingMode::EMPTY, |mode| {
            self.nvmlDeviceGetAddressingMode(device, mode)
        })?;
        Ok(match mode.value {
            0 => Some(AddressingMode::None),
            1 => Some(AddressingMode::Hmm),
            2 => Some(AddressingMode::Ats),
            _ => None,
        })
    }

    fn memory_slices(&self, device: DeviceHandle, instance: u32) -> Result<MemorySlices, Failed> {
        let instance = stored(GpuInstance::NULL, |found| {
            self.nvmlDeviceGetGpuInstanceById(device, instance, found)
        })?;
        let info = stored(GpuInstanceInfo::EMPTY, |info| {
            self.nvmlGpuInstanceGetInfo(instance, info)
        })?;
        Ok(MemorySlices {
            start: info.start,
            size: info.size,
        })
    }

    fn common_ancestor(&self, a: DeviceHandle, b: DeviceHandle) -> Result<u32, Failed> {
        stored(0, |level| {
            self.nvmlDeviceGetTopologyCommonAncestor(a, b, level)
        })
    }

    fn is_nvlink_active(&self, device: DeviceHandle, link: u32) -> Result<bool, Failed> {
        stored(0, |is_active| {
            self.nvmlDeviceGetNvLinkState(device, link, is_active)
        })
        .map(|is_active| is_active == 1)
    }

    fn nvlink_remote(&self, device: DeviceHandle, link: u32) -> Result<(u32, u32, u32), Failed> {
        let info = stored(PciInfo::EMPTY, |info| {
            self.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, info)
        });
        info.map(|info| info.address())
    }
}
