//! Asks NVML for what labels and metrics contain.

use std::collections::BTreeMap;

use nvidia_host::nvml::monitoring::{Memory, MigAttributes, Monitoring, is_unsupported};

use super::message::{Measured, Properties};
use super::nvml::Handle;

/// What does not change while a GPU or a MIG device exists, by UUID. Each device is asked once.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) properties: BTreeMap<String, Properties>,
    pub(super) mig_attributes: BTreeMap<String, MigAttributes>,
}

impl Known {
    /// Asks about a GPU and its MIG devices, unless they are known. A call that fails is made again the next time.
    pub(super) fn add(&mut self, api: &impl Monitoring, handle: &Handle) {
        if !self.properties.contains_key(&handle.gpu.uuid) {
            self.properties.extend(properties(api, handle).map(|found| (handle.gpu.uuid.clone(), found)));
        }
        for mig in &handle.gpu.mig_devices {
            if self.mig_attributes.contains_key(&mig.uuid) {
                continue;
            }
            let Ok(device) = api.mig_device(handle.device, mig.index) else { continue };
            self.mig_attributes.extend(api.mig_attributes(device).map(|found| (mig.uuid.clone(), found)));
        }
    }

    /// Forgets the devices that are not part of these GPUs.
    pub(super) fn retain(&mut self, handles: &[Handle]) {
        self.properties.retain(|uuid, _| handles.iter().any(|handle| handle.gpu.uuid == *uuid));
        self.mig_attributes.retain(|uuid, _| handles.iter().any(|handle| handle.has_mig(uuid)));
    }
}

fn properties(api: &impl Monitoring, handle: &Handle) -> Option<Properties> {
    let memory_mib = match api.memory(handle.device) {
        Ok(memory) => Some(memory.total >> 20),
        Err(failed) if is_unsupported(&failed) => None,
        Err(_) => return None,
    };
    Some(Properties { memory_mib, mig_capable: api.mig_mode(handle.device).is_ok() })
}

/// Reads the values of a GPU for metrics.
pub(super) fn measure(api: &impl Monitoring, handle: &Handle) -> Measured {
    let migs = handle.gpu.mig_devices.iter();
    Measured {
        utilization: api.utilization(handle.device).ok(),
        temperature: api.temperature(handle.device).ok(),
        power: api.power(handle.device).ok(),
        mig_memory: migs.filter_map(|mig| Some((mig.uuid.clone(), memory(api, handle, mig.index)?))).collect(),
    }
}

fn memory(api: &impl Monitoring, handle: &Handle, mig: u32) -> Option<Memory> {
    api.memory(api.mig_device(handle.device, mig).ok()?).ok()
}
