//! The fingerprint of a host: the state on which NVML's answer depends. The cached inventory is valid while the fingerprint stays the
//! same and the kernel confirms the inventory. [`super::cache`] stores both.

use super::Inventory;
use super::procfs::KernelGpu;

/// The fingerprint of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint {
    /// The fingerprint as text, to be compared
    pub text: String,
    /// Whether each GPU has a known UUID, responds on the bus and has its node
    pub is_whole: bool,
}

/// Whether the kernel confirms an inventory: it has the same GPUs with the same bus ids, UUIDs and minors. All of them work, and none is
/// in MIG mode.
#[must_use]
pub fn is_confirmed(inventory: &Inventory, version: &str, kernel: &[KernelGpu]) -> bool {
    inventory.failed.is_empty() && is_confirmed_in_part(inventory, version, kernel)
}

/// Like [`is_confirmed`] for the GPUs that have answered. Each of the other GPUs must have an index.
#[must_use]
pub(crate) fn is_confirmed_in_part(
    inventory: &Inventory,
    version: &str,
    kernel: &[KernelGpu],
) -> bool {
    let kernel: Vec<_> = kernel.iter().filter(|gpu| !gpu.excluded).collect();
    let failed = inventory.failed.iter().filter_map(|failed| failed.index);
    let mut indices: Vec<u32> = inventory
        .gpus
        .iter()
        .map(|gpu| gpu.index)
        .chain(failed)
        .collect();
    indices.sort();
    inventory.driver_version == version
        && inventory.gpus.len() + inventory.failed.len() == kernel.len()
        && !kernel.is_empty()
        && inventory
            .gpus
            .iter()
            .all(|gpu| is_listed_once(gpu, &kernel))
        && inventory.gpus.is_sorted_by_key(|gpu| gpu.index)
        && (0..).zip(&indices).all(|(index, known)| index == *known)
        && indices.len() == kernel.len()
}

fn is_listed_once(gpu: &super::Gpu, kernel: &[&KernelGpu]) -> bool {
    let same = kernel.iter().filter(|kernel| {
        kernel.bus_id == gpu.bus_id
            && kernel.uuid.as_deref() == Some(&gpu.uuid)
            && kernel.minor == Some(gpu.minor)
    });
    !gpu.mig_enabled && gpu.mig_devices.is_empty() && same.count() == 1
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
        assert!(is_confirmed(&whole(), "535.1", &kernel()));
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
            assert!(!is_confirmed(&inventory, "535.1", &kernel), "{what}");
            assert!(
                !is_confirmed_in_part(&inventory, "535.1", &kernel),
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
            is_confirmed_in_part(&inventory, "535.1", &kernel())
                && !is_confirmed(&inventory, "535.1", &kernel())
        );
        inventory.failed[0].index = None;
        assert!(!is_confirmed_in_part(&inventory, "535.1", &kernel()));
        assert!(!is_confirmed(&whole(), "570", &kernel()), "another driver");
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
        assert!(is_confirmed(&whole(), "535.1", &more));
        let mut kernel = kernel();
        kernel[1].excluded = true;
        assert!(
            !is_confirmed(&whole(), "535.1", &kernel),
            "NVML still lists it"
        );
    }
}
