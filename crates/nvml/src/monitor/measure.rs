//! Asks NVML for what labels and metrics contain.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nvidia_host::inventory::MigDevice;
use nvidia_host::nvml::message::{Measured, More, Properties};
use nvidia_host::nvml::monitoring::{Memory, MemorySlices, MigAttributes};
use nvidia_host::nvml::protocol::Measures;

use super::ask::Handle;
use crate::api::DeviceHandle;
use crate::monitoring::{Clock, Monitoring, Utilization, field, is_unsupported};

/// What does not change while a GPU or a MIG device exists, by UUID. Each device is asked once.
#[derive(Debug, Default)]
pub(super) struct DeviceConstants {
    pub(super) properties: BTreeMap<String, Properties>,
    pub(super) mig_attributes: BTreeMap<String, MigAttributes>,
    pub(super) memory_slices: BTreeMap<String, MemorySlices>,
}

impl DeviceConstants {
    /// Asks about a GPU and its MIG devices, unless they are known. A call that fails is made again the next time.
    pub(super) fn add(&mut self, api: &impl Monitoring, handle: &Handle) {
        if !self.properties.contains_key(&handle.gpu.uuid) {
            self.properties
                .extend(properties(api, handle).map(|found| (handle.gpu.uuid.clone(), found)));
        }
        for mig in &handle.gpu.mig_devices {
            if self.mig_attributes.contains_key(&mig.uuid) {
                continue;
            }
            let Ok(device) = api.mig_device(handle.device, mig.index) else {
                continue;
            };
            self.mig_attributes.extend(
                api.mig_attributes(device)
                    .map(|found| (mig.uuid.clone(), found)),
            );
            let slices = api.memory_slices(handle.device, mig.gpu_instance);
            self.memory_slices
                .extend(slices.map(|found| (mig.uuid.clone(), found)));
        }
    }

    /// Forgets the devices that are not part of these GPUs.
    pub(super) fn retain(&mut self, handles: &[Handle]) {
        self.properties
            .retain(|uuid, _| handles.iter().any(|handle| handle.gpu.uuid == *uuid));
        self.mig_attributes
            .retain(|uuid, _| handles.iter().any(|handle| handle.has_mig(uuid)));
        self.memory_slices
            .retain(|uuid, _| handles.iter().any(|handle| handle.has_mig(uuid)));
    }
}

fn properties(api: &impl Monitoring, handle: &Handle) -> Option<Properties> {
    let memory_mib = match api.memory(handle.device) {
        Ok(memory) => Some(memory.total >> 20),
        Err(failed) if is_unsupported(&failed) => None,
        Err(_) => return None,
    };
    let addressing_mode = api.addressing_mode(handle.device).ok().flatten();
    Some(Properties {
        memory_mib,
        mig_capable: api.mig_mode(handle.device).is_ok(),
        addressing_mode,
    })
}

/// Reads the values of a GPU for metrics.
pub(super) fn measure(
    api: &impl Monitoring,
    handle: &Handle,
    measures: Measures,
    mig_memory: &mut MigMemory,
) -> Option<Measured> {
    if measures == Measures::Nothing {
        return None;
    }
    let rates = api.utilization(handle.device).ok();
    Some(Measured {
        utilization: rates.map(|rates| rates.gpu),
        temperature: api.temperature(handle.device).ok(),
        power: api.power(handle.device).ok(),
        mig_memory: mig_memory.of(api, handle),
        more: (measures == Measures::All).then(|| Box::new(more(api, handle, rates))),
    })
}

/// How old the memory of MIG devices may be. It takes two calls for each device, and a node can have 56.
const MIG_MEMORY_AGE: Duration = Duration::from_secs(30);

/// The memory of the MIG devices of GPUs by UUID, and when it was read.
#[derive(Debug, Default)]
pub(super) struct MigMemory {
    of_gpus: BTreeMap<String, BTreeMap<String, Memory>>,
    since: Option<Instant>,
    /// The MIG devices by UUID
    devices: BTreeMap<String, DeviceHandle>,
}

impl MigMemory {
    /// Forgets values that are too old.
    pub(super) fn expire(&mut self) {
        if self
            .since
            .is_none_or(|since| since.elapsed() >= MIG_MEMORY_AGE)
        {
            self.of_gpus.clear();
            self.since = Some(Instant::now());
        }
    }

    fn of(&mut self, api: &impl Monitoring, handle: &Handle) -> BTreeMap<String, Memory> {
        if let Some(known) = self.of_gpus.get(&handle.gpu.uuid) {
            return known.clone();
        }
        let mut found = BTreeMap::new();
        for mig in &handle.gpu.mig_devices {
            if let Some(memory) = self.read(api, handle, mig) {
                found.insert(mig.uuid.clone(), memory);
            }
        }
        self.of_gpus.insert(handle.gpu.uuid.clone(), found.clone());
        found
    }

    fn read(&mut self, api: &impl Monitoring, handle: &Handle, mig: &MigDevice) -> Option<Memory> {
        let device = match self.devices.get(&mig.uuid) {
            Some(device) => *device,
            None => api.mig_device(handle.device, mig.index).ok()?,
        };
        // A device that was created again can have the same UUID.
        self.devices.remove(&mig.uuid);
        let memory = api.memory(device).ok()?;
        self.devices.insert(mig.uuid.clone(), device);
        Some(memory)
    }
}

fn more(api: &impl Monitoring, handle: &Handle, rates: Option<Utilization>) -> More {
    let device = handle.device;
    let fields = |ids| api.fields(device, ids).unwrap_or_default();
    let [memory_temperature, energy, pcie_replays] = fields([
        field::MEMORY_TEMPERATURE,
        field::ENERGY,
        field::PCIE_REPLAYS,
    ]);
    let [remapped_correctable, remapped_uncorrectable, remap_failure] = fields([
        field::REMAPPED_CORRECTABLE,
        field::REMAPPED_UNCORRECTABLE,
        field::REMAP_FAILURE,
    ]);
    let [power_limit, ecc_corrected, ecc_uncorrected] = fields([
        field::POWER_LIMIT,
        field::SINGLE_BIT_ECC,
        field::DOUBLE_BIT_ECC,
    ]);
    let [nvlink_sent, nvlink_received, remap_pending] = fields([
        field::NVLINK_SENT,
        field::NVLINK_RECEIVED,
        field::REMAP_PENDING,
    ]);
    More {
        reserved: reserved(api, handle),
        clock_reasons: api.clock_reasons(device).ok(),
        nvlink_data: nvlink_data(nvlink_sent, nvlink_received),
        remap_pending,
        power_limit,
        ecc_corrected,
        ecc_uncorrected,
        memory_utilization: rates.map(|rates| rates.memory),
        encoder: api.encoder(device).ok(),
        decoder: api.decoder(device).ok(),
        memory_temperature,
        sm_clock: api.clock(device, Clock::Multiprocessors).ok(),
        memory_clock: api.clock(device, Clock::Memory).ok(),
        energy,
        pcie_replays,
        remapped_correctable,
        remapped_uncorrectable,
        remap_failure,
    }
}

/// Returns the sum, as DCGM has it. A GPU without NVLinks has neither.
fn nvlink_data(sent: Option<u64>, received: Option<u64>) -> Option<u64> {
    sent?.checked_add(received?)
}

/// Returns the reserved memory of a GPU, or of its MIG devices, to which the memory belongs then.
fn reserved(api: &impl Monitoring, handle: &Handle) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    let gpu = &handle.gpu;
    if gpu.mig_devices.is_empty()
        && let Ok(bytes) = api.reserved_memory(handle.device)
    {
        found.insert(gpu.uuid.clone(), bytes);
    }
    for mig in &gpu.mig_devices {
        let Ok(device) = api.mig_device(handle.device, mig.index) else {
            continue;
        };
        if let Ok(bytes) = api.reserved_memory(device) {
            found.insert(mig.uuid.clone(), bytes);
        }
    }
    found
}
