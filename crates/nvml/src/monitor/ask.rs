//! Asks NVML for what the messages contain.

use std::collections::BTreeMap;

use nvidia_host::inventory::{BusId, Gpu, MigDevice};
use nvidia_host::nvml::Failed;
use nvidia_host::nvml::message::{EventKind, Level, Link, Recovery, Sample};
use nvidia_host::nvml::monitoring::MigAttributes;

use crate::api::DeviceHandle;
use crate::monitoring::{EventSet, Monitoring, event, field, is_unsupported};

/// The events that the monitor waits for, if the GPU has them.
const EVENTS: u64 = event::XID
    | event::DOUBLE_BIT_ECC
    | event::UNAVAILABLE
    | event::RECOVERY_ACTION
    | event::MIG_CONFIG;

/// The limit for the NVLinks of a GPU, `NVML_NVLINK_MAX_LINKS` of the newest driver.
const MAX_NVLINKS: u32 = 36;

/// A GPU that works, with its handle.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    /// NVML's index
    pub(super) index: u32,
    pub(super) gpu: Gpu,
    pub(super) device: DeviceHandle,
    /// It has no device node
    pub(super) node_missing: bool,
}

impl Handle {
    /// Whether this is the UUID of a MIG device of the GPU.
    pub(super) fn has_mig(&self, uuid: &str) -> bool {
        self.gpu.mig_devices.iter().any(|mig| mig.uuid == uuid)
    }
}

/// Polls a GPU.
pub(super) fn sample(api: &impl Monitoring, handle: &Handle) -> Sample {
    let mut sample = Sample {
        gpu: handle.gpu.uuid.clone(),
        ..Sample::default()
    };
    let ids = [
        field::RECOVERY_ACTION,
        field::REMAP_FAILURE,
        field::DOUBLE_BIT_ECC,
    ];
    match api.fields(handle.device, ids) {
        Ok([recovery, remap, ecc]) => {
            if let Some(action) = recovery {
                sample.recovery = Some(Recovery::of(u32::try_from(action).unwrap_or(u32::MAX)));
            }
            sample.remap_failed = remap.map(|failed| failed != 0);
            sample.uncorrectable_ecc = ecc;
        }
        Err(failed) => sample.error = error(&failed),
    }
    // Fields may come from a cache of the library.
    match api.memory(handle.device) {
        Ok(memory) => sample.memory = Some(memory),
        Err(failed) => sample.error = sample.error.or_else(|| error(&failed)),
    }
    sample
}

fn error(failed: &Failed) -> Option<String> {
    if is_unsupported(failed) {
        return None;
    }
    Some(failed.to_string())
}

/// Returns the profiles of the MIG devices of a GPU by UUID. One that disappears in the meantime is left out.
pub(super) fn mig_profiles(api: &impl Monitoring, handle: &Handle) -> BTreeMap<String, String> {
    let mut profiles = BTreeMap::new();
    for mig in &handle.gpu.mig_devices {
        if let Some(profile) = mig_profile(api, handle, mig) {
            profiles.insert(mig.uuid.clone(), profile);
        }
    }
    profiles
}

/// Returns the profile in the inventory, or what follows from the attributes if the name of the device has none.
fn mig_profile(api: &impl Monitoring, handle: &Handle, mig: &MigDevice) -> Option<String> {
    if mig.profile.is_some() {
        return mig.profile.clone();
    }
    let device = api.mig_device(handle.device, mig.index).ok()?;
    api.mig_attributes(device).ok().map(profile_of)
}

/// Returns the profile that NVIDIA gives to these parts. The name contains the memory in GiB, rounded up, because a part of it is
/// reserved.
fn profile_of(parts: MigAttributes) -> String {
    let MigAttributes {
        gpu_slices,
        compute_slices,
        memory_mib,
        ..
    } = parts;
    let memory = memory_mib.div_ceil(1024);
    if compute_slices == gpu_slices {
        return format!("{gpu_slices}g.{memory}gb");
    }
    format!("{compute_slices}c.{gpu_slices}g.{memory}gb")
}

/// The other ends of the NVLinks of a GPU.
type Ends = BTreeMap<BusId, u32>;

/// Returns how close each pair of GPUs is.
pub(super) fn links(api: &impl Monitoring, handles: &[Handle]) -> Vec<Link> {
    let mut ends = Vec::new();
    let mut addresses = Vec::new();
    for handle in handles {
        ends.push(nvlink_ends(api, handle.device));
        addresses.push(handle.gpu.bus_id);
    }
    let mut links = Vec::new();
    for (at, (a, a_ends)) in handles.iter().zip(&ends).enumerate() {
        for (b, b_ends) in handles.iter().zip(&ends).skip(at + 1) {
            let Some(level) = api.common_ancestor(a.device, b.device).ok().and_then(level) else {
                continue;
            };
            links.push(Link {
                gpus: (a.gpu.uuid.clone(), b.gpu.uuid.clone()),
                level,
                nvlinks: between((a.gpu.bus_id, a_ends), (b.gpu.bus_id, b_ends), &addresses),
            });
        }
    }
    links
}

fn nvlink_ends(api: &impl Monitoring, device: DeviceHandle) -> Ends {
    let mut ends = Ends::new();
    for link in 0..MAX_NVLINKS {
        match api.is_nvlink_active(device, link) {
            Ok(true) => {}
            Ok(false) => continue,
            // The GPU has no link with this or a higher number.
            Err(_) => break,
        }
        if let Ok((domain, bus, device)) = api.nvlink_remote(device, link) {
            let end = BusId {
                domain,
                bus,
                device,
            };
            *ends.entry(end).or_default() += 1;
        }
    }
    ends
}

/// Returns the number of links between two GPUs: the links that connect them, or the links to
/// switches of the GPU with fewer.
fn between(a: (BusId, &Ends), b: (BusId, &Ends), gpus: &[BusId]) -> u32 {
    match a.1.get(&b.0).or_else(|| b.1.get(&a.0)) {
        Some(direct) if *direct > 0 => return *direct,
        _ => {}
    }
    u32::min(to_switches(a.1, gpus), to_switches(b.1, gpus))
}

/// Returns the number of links that end at none of the GPUs.
fn to_switches(ends: &Ends, gpus: &[BusId]) -> u32 {
    let others = ends.iter().filter(|(end, _)| !gpus.contains(end));
    others.map(|(_, count)| count).sum()
}

/// Translates `nvmlGpuTopologyLevel_t`. nvml.h leaves room between its numbers for more levels.
const fn level(number: u32) -> Option<Level> {
    Some(match number {
        0 => Level::Board,
        10 => Level::Switch,
        20 => Level::Switches,
        30 => Level::HostBridge,
        40 => Level::Node,
        50 => Level::System,
        _ => return None,
    })
}

/// Returns the events that the GPU can report, of those that the monitor waits for.
pub(super) fn supported_events(api: &impl Monitoring, device: DeviceHandle) -> u64 {
    api.supported_events(device).unwrap_or_default() & EVENTS
}

/// Creates a set for the events of these GPUs, and calls `next` before each GPU. Returns `None` if no GPU reports events.
pub(super) fn register(
    api: &impl Monitoring,
    handles: &[Handle],
    next: &mut dyn FnMut(&Handle),
) -> Option<EventSet> {
    let set = api.create_event_set().ok()?;
    let mut registered = 0;
    for handle in handles {
        next(handle);
        let kinds = supported_events(api, handle.device);
        if kinds != 0 && api.register_events(handle.device, kinds, &set).is_ok() {
            registered += 1;
        }
    }
    if registered == 0 {
        api.free_event_set(set).ok();
        return None;
    }
    Some(set)
}

/// What follows from an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// It is reported.
    Report(EventKind),
    /// The MIG devices changed.
    MigChanged,
}

/// Returns what an event means, `None` for an event that the monitor did not ask for.
pub(super) const fn meaning(kind: u64, data: u64) -> Option<Meaning> {
    Some(Meaning::Report(match kind {
        event::XID => EventKind::Xid(data),
        event::DOUBLE_BIT_ECC => EventKind::UncorrectableEcc,
        event::UNAVAILABLE => EventKind::Unavailable,
        event::RECOVERY_ACTION => EventKind::RecoveryAction,
        event::MIG_CONFIG => return Some(Meaning::MigChanged),
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_of_a_mig_device() {
        for (gpu_slices, compute_slices, memory_mib, profile) in [
            (1, 1, 9856, "1g.10gb"),
            (3, 1, 19968, "1c.3g.20gb"),
            (7, 7, 80896, "7g.79gb"),
        ] {
            let parts = MigAttributes {
                gpu_slices,
                compute_slices,
                memory_mib,
                ..MigAttributes::default()
            };
            assert_eq!(profile_of(parts), profile);
        }
    }

    #[test]
    fn nvlinks_between_two_gpus() {
        let at = |bus| BusId {
            domain: 0,
            bus,
            device: 0,
        };
        let gpus = [at(1), at(2), at(3)];
        let ends = |list: &[(u32, u32)]| {
            list.iter()
                .map(|(bus, count)| (at(*bus), *count))
                .collect::<Ends>()
        };
        for (a, b, count) in [
            (ends(&[(2, 4)]), ends(&[(1, 4)]), 4),
            (ends(&[(2, 4)]), ends(&[]), 4),
            (ends(&[(3, 4)]), ends(&[(3, 2)]), 0),
            (ends(&[(9, 12), (10, 6)]), ends(&[(9, 12)]), 12),
            (ends(&[]), ends(&[(9, 12)]), 0),
        ] {
            assert_eq!(
                between((at(1), &a), (at(2), &b), &gpus),
                count,
                "{a:?} {b:?}"
            );
        }
    }

    #[test]
    fn the_numbers_of_nvml() {
        for (number, expected) in [
            (0, Some(Level::Board)),
            (20, Some(Level::Switches)),
            (50, Some(Level::System)),
            (1, None),
        ] {
            assert_eq!(level(number), expected);
        }
        assert_eq!(meaning(8, 79), Some(Meaning::Report(EventKind::Xid(79))));
        assert_eq!(
            meaning(0x4000, 0),
            Some(Meaning::Report(EventKind::Unavailable))
        );
        assert_eq!(meaning(0x100, 0), Some(Meaning::MigChanged));
        assert_eq!(meaning(4, 0), None);
    }
}
