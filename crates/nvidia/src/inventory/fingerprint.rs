//! The fingerprint of a host: the state on which NVML's answer depends. The cached inventory is valid while the fingerprint stays the
//! same and the kernel confirms the inventory. [`super::cache`] stores both.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::cap_files::Instance;
use super::caps::MigCap;
use super::procfs::KernelGpu;
use super::scope::Scope;
use super::{Gpu, Inventory};

/// The fingerprint of a host, or of some of its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// What each device depends on, as text: the boot, the driver, and which GPUs there are in which order
    pub host: String,
    /// The rest of the state of each examined GPU, by its device minor: whether it responds, and its MIG devices
    pub gpus: BTreeMap<u32, String>,
    /// Whether each GPU has a known UUID and its node, and each examined one responds on the bus
    pub is_whole: bool,
}

impl Fingerprint {
    /// Whether this fingerprint of all GPUs shows the same state as a later one, which can be of fewer GPUs.
    #[must_use]
    pub(crate) fn agrees_with(&self, later: &Self) -> bool {
        let is_same = |(minor, text)| self.gpus.get(minor) == Some(text);
        self.host == later.host && later.gpus.iter().all(is_same)
    }
}

/// Whether the kernel confirms an inventory: it has the same GPUs with the same bus ids, UUIDs and minors, and the same MIG devices. All
/// GPUs work, and each in MIG mode has a MIG device. `instances` are those of the GPUs in `scope`.
#[must_use]
pub fn is_confirmed(
    inventory: &Inventory,
    version: &str,
    kernel: &[KernelGpu],
    instances: &[Instance],
    scope: &Scope,
) -> bool {
    inventory.failed.is_empty()
        && is_confirmed_in_part(inventory, version, kernel, instances, scope)
}

/// Like [`is_confirmed`] for the GPUs that have answered. Each of the other GPUs must have an index.
#[must_use]
pub(crate) fn is_confirmed_in_part(
    inventory: &Inventory,
    version: &str,
    kernel: &[KernelGpu],
    instances: &[Instance],
    scope: &Scope,
) -> bool {
    let kernel: Vec<_> = kernel.iter().filter(|gpu| !gpu.excluded).collect();
    let Inventory { gpus, failed, .. } = inventory;
    let mut indices: Vec<u32> = gpus.iter().map(|gpu| gpu.index).collect();
    indices.extend(failed.iter().filter_map(|failed| failed.index));
    indices.sort();
    inventory.driver_version == version
        && gpus.len() + failed.len() == kernel.len()
        && !kernel.is_empty()
        && gpus.iter().all(|gpu| is_listed_once(gpu, &kernel))
        && gpus
            .iter()
            .all(|gpu| !scope.has(gpu.minor) || has_mig_devices(gpu, instances))
        && gpus.is_sorted_by_key(|gpu| gpu.index)
        && (0..).zip(&indices).all(|(index, known)| index == *known)
        && indices.len() == kernel.len()
}

/// Whether NVML listed exactly the compute instances of the GPU that the kernel lists. MIG mode without an instance is not confirmed,
/// because the kernel does not show it.
fn has_mig_devices(gpu: &Gpu, instances: &[Instance]) -> bool {
    let (mut listed, mut existing) = (BTreeSet::new(), BTreeSet::new());
    for mig in &gpu.mig_devices {
        listed.insert((mig.gpu_instance, mig.compute_instance));
    }
    let mut has_instance = false;
    for Instance { cap, .. } in instances {
        has_instance |= cap.gpu() == Some(gpu.minor);
        if let MigCap::ComputeInstance(minor, instance, compute) = *cap
            && minor == gpu.minor
        {
            existing.insert((instance, compute));
        }
    }
    gpu.mig_enabled == has_instance
        && gpu.mig_enabled != listed.is_empty()
        && listed == existing
        && listed.len() == gpu.mig_devices.len()
}

fn is_listed_once(gpu: &Gpu, kernel: &[&KernelGpu]) -> bool {
    let same = kernel.iter().filter(|kernel| {
        kernel.bus_id == gpu.bus_id
            && kernel.uuid.as_deref() == Some(&gpu.uuid)
            && kernel.minor == Some(gpu.minor)
    });
    same.count() == 1
}

/// Returns the seconds since the host was booted, including suspend. Unlike the wall clock, this clock is never set.
#[must_use]
pub fn uptime() -> u64 {
    // rustix reads the vDSO, which does not work under valgrind. The tests that count instructions use valgrind.
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
    now.map_or(0, |now| u64::try_from(now.tv_sec()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::BusId;
    use crate::inventory::select::tests::inventory;

    fn kernel() -> Vec<KernelGpu> {
        let gpu = |gpu: &super::super::Gpu| KernelGpu {
            dir: gpu.bus_id.in_sysfs().into(),
            bus_id: gpu.bus_id,
            minor: Some(gpu.minor),
            uuid: Some(gpu.uuid.clone()),
            ..KernelGpu::default()
        };
        inventory().gpus.iter().map(gpu).collect()
    }

    fn whole() -> Inventory {
        let mut whole = Inventory {
            driver_version: "535.1".into(),
            ..inventory()
        };
        for gpu in &mut whole.gpus {
            gpu.mig_enabled = false;
            gpu.mig_devices.clear();
        }
        whole
    }

    #[test]
    fn the_kernel_confirms_whole_gpus_only() {
        assert!(is_confirmed(&whole(), "535.1", &kernel(), &[], &Scope::All));
        type Change = fn(&mut Inventory, &mut Vec<KernelGpu>);
        let changes: [(&str, Change); 12] = [
            ("another GPU at the same place", |_, kernel| {
                kernel[1].uuid = Some("GPU-new".into())
            }),
            ("a GPU that does not say who it is", |_, kernel| {
                kernel[1].uuid = None
            }),
            ("another minor", |_, kernel| kernel[1].minor = Some(7)),
            ("another place", |_, kernel| kernel[1].bus_id.bus = 9),
            ("removed", |_, kernel| drop(kernel.pop())),
            ("added", |_, kernel| {
                kernel.push(KernelGpu {
                    uuid: Some("GPU-new".into()),
                    ..kernel[0].clone()
                })
            }),
            ("twice", |_, kernel| kernel[1] = kernel[0].clone()),
            ("none", |inventory, kernel| {
                (inventory.gpus.clear(), kernel.clear()).1
            }),
            ("MIG mode", |inventory, _| {
                inventory.gpus[0].mig_enabled = true
            }),
            ("MIG devices", |inventory, _| {
                inventory.gpus[0].mig_devices = super::super::select::tests::inventory().gpus[2]
                    .mig_devices
                    .clone();
            }),
            ("an index is left out", |inventory, _| {
                inventory.gpus[2].index = 3
            }),
            ("one failed", |inventory, _| {
                let failed = super::super::FailedGpu {
                    index: Some(3),
                    ..Default::default()
                };
                inventory.failed.push(failed);
            }),
        ];
        for (what, change) in changes {
            let (mut inventory, mut kernel) = (whole(), kernel());
            change(&mut inventory, &mut kernel);
            assert!(
                !is_confirmed(&inventory, "535.1", &kernel, &[], &Scope::All),
                "{what}"
            );
            assert!(
                !is_confirmed_in_part(&inventory, "535.1", &kernel, &[], &Scope::All),
                "{what}"
            );
        }
        // One that hangs is known by its index, and the others are confirmed.
        let mut inventory = whole();
        inventory.gpus.remove(1);
        inventory.failed.push(super::super::FailedGpu {
            index: Some(1),
            ..super::super::FailedGpu::default()
        });
        assert!(
            is_confirmed_in_part(&inventory, "535.1", &kernel(), &[], &Scope::All)
                && !is_confirmed(&inventory, "535.1", &kernel(), &[], &Scope::All)
        );
        inventory.failed[0].index = None;
        assert!(!is_confirmed_in_part(
            &inventory,
            "535.1",
            &kernel(),
            &[],
            &Scope::All
        ));
        assert!(
            !is_confirmed(&whole(), "570", &kernel(), &[], &Scope::All),
            "another driver"
        );
    }

    #[test]
    fn the_kernel_confirms_exactly_the_mig_devices_of_nvml() {
        let instance = |cap| Instance { cap, entry: None };
        let of = |gpu, instance| {
            [
                MigCap::GpuInstance(gpu, instance),
                MigCap::ComputeInstance(gpu, instance, 0),
            ]
        };
        // GPU 2 has the MIG devices 5/0 and 7/0.
        let cached = Inventory {
            driver_version: "535.1".into(),
            ..inventory()
        };
        let confirms = |cached: &Inventory, caps: &[MigCap]| {
            let instances: Vec<_> = caps.iter().copied().map(instance).collect();
            is_confirmed(cached, "535.1", &kernel(), &instances, &Scope::All)
        };
        let same = [of(2, 5), of(2, 7)].concat();
        assert!(confirms(&cached, &same));
        for (what, caps) in [
            ("none", vec![]),
            ("one less", of(2, 5).to_vec()),
            ("one more", [same.clone(), of(2, 9).to_vec()].concat()),
            ("another one", [of(2, 5), of(2, 9)].concat()),
            ("of another GPU", [of(1, 5), of(1, 7)].concat()),
            ("MIG mode of another GPU", {
                let mut caps = same.clone();
                caps.push(MigCap::GpuInstance(0, 1));
                caps
            }),
        ] {
            assert!(!confirms(&cached, &caps), "{what}");
        }
        let mut without = cached.clone();
        without.gpus[2].mig_devices.clear();
        assert!(!confirms(&without, &[]), "MIG mode without an instance");
        assert!(!confirms(&without, &[MigCap::GpuInstance(2, 5)]));
        let mut twice = cached.clone();
        let first = twice.gpus[2].mig_devices[0].clone();
        twice.gpus[2].mig_devices.push(first);
        assert!(!confirms(&twice, &same), "one twice");
    }

    #[test]
    fn an_excluded_gpu_is_not_missed() {
        let excluded = KernelGpu {
            bus_id: BusId {
                domain: 0,
                bus: 9,
                device: 0,
            },
            excluded: true,
            ..KernelGpu::default()
        };
        let more = [kernel(), vec![excluded]].concat();
        assert!(is_confirmed(&whole(), "535.1", &more, &[], &Scope::All));
        let mut kernel = kernel();
        kernel[1].excluded = true;
        assert!(
            !is_confirmed(&whole(), "535.1", &kernel, &[], &Scope::All),
            "NVML still lists it"
        );
    }
}
