//! The GPUs of the node: those that work, and those that are known and do not. Pure.
//!
//! A GPU that is lost disappears from NVML's list. Its ids stay in the list of the kubelet, because only a
//! device in the list can be unhealthy, and because restarted containers keep their ids.

use std::collections::BTreeMap;
use std::path::Path;

use nvidia_host::inventory::procfs::KernelGpu;
use nvidia_host::inventory::{BusId, FailedGpu, Gpu, Inventory};

/// The profile of each MIG device by UUID, such as `1g.5gb`.
pub type Profiles = BTreeMap<String, String>;

/// A GPU of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeGpu {
    /// The GPU and its MIG devices, as NVML last reported them
    pub gpu: Gpu,
    /// The profiles of its MIG devices
    pub profiles: Profiles,
    /// Why NVML does not list it now; `None` if it does
    pub failure: Option<String>,
}

impl NodeGpu {
    /// Returns a GPU that NVML has not reported yet. `None` without UUID, which is the id: the module knows it after the GPU was opened
    /// for the first time.
    fn from_kernel(gpu: &KernelGpu, why: &str) -> Option<Self> {
        let gpu = Gpu {
            index: 0,
            minor: gpu.minor?,
            uuid: gpu.uuid.clone()?,
            bus_id: gpu.bus_id,
            model: gpu.model.clone().unwrap_or_default(),
            compute_capability: String::new(),
            brand: String::new(),
            mig_enabled: false,
            mig_devices: Vec::new(),
            unlisted_mig: Vec::new(),
        };
        Some(Self {
            gpu,
            profiles: Profiles::new(),
            failure: Some(why.to_owned()),
        })
    }
}

/// Returns the GPUs that the kernel lists, before NVML has answered. `has_mig` reports GPUs in MIG mode, by minor number: the ids of
/// their MIG devices are unknown, and the id of the GPU would be a wrong one.
#[must_use]
pub fn unanswered(kernel: &[KernelGpu], has_mig: impl Fn(u32) -> bool, why: &str) -> Vec<NodeGpu> {
    let mut found = Vec::new();
    for gpu in kernel {
        if !gpu.excluded && !gpu.minor.is_some_and(&has_mig) {
            found.extend(NodeGpu::from_kernel(gpu, why));
        }
    }
    found
}

/// Updates the GPUs with a new inventory. A known GPU that NVML does not report remains, as failed, while the kernel or NVML still
/// lists it.
#[must_use]
pub fn update(known: &[NodeGpu], inventory: &Inventory, profiles: &Profiles) -> Vec<NodeGpu> {
    let mut gpus = Vec::new();
    for gpu in &inventory.gpus {
        gpus.push(working(gpu, profiles));
    }
    for failed in &inventory.failed {
        if gpus.iter().any(|gpu| is_it(failed, &gpu.gpu)) {
            continue;
        }
        gpus.extend(match known.iter().find(|gpu| is_it(failed, &gpu.gpu)) {
            Some(gpu) => Some(NodeGpu {
                failure: Some(failed.why.clone()),
                ..gpu.clone()
            }),
            None => NodeGpu::from_kernel(&as_kernel_gpu(failed), &failed.why),
        });
    }
    gpus.sort_by_key(|gpu| gpu.gpu.bus_id);
    gpus
}

fn working(gpu: &Gpu, profiles: &Profiles) -> NodeGpu {
    let mut own = Profiles::new();
    for mig in &gpu.mig_devices {
        if let Some(profile) = profiles.get(&mig.uuid) {
            own.insert(mig.uuid.clone(), profile.clone());
        }
    }
    NodeGpu {
        gpu: gpu.clone(),
        profiles: own,
        failure: None,
    }
}

fn is_it(failed: &FailedGpu, gpu: &Gpu) -> bool {
    match (&failed.uuid, failed.bus_id) {
        (Some(uuid), _) => *uuid == gpu.uuid,
        (None, bus_id) => bus_id == Some(gpu.bus_id),
    }
}

fn as_kernel_gpu(failed: &FailedGpu) -> KernelGpu {
    KernelGpu {
        bus_id: failed.bus_id.unwrap_or_default(),
        minor: failed.minor,
        uuid: failed.uuid.clone(),
        model: failed.model.clone(),
        ..KernelGpu::default()
    }
}

/// Returns the NUMA node from the text of `numa_node` in sysfs, which is -1 if the firmware does not report one.
#[must_use]
pub fn parse_numa_node(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

/// The NUMA node of each GPU that has one.
pub type NumaNodes = BTreeMap<BusId, u32>;

/// Returns the root of the PCI hierarchy from the path of a device in sysfs, such as `pci0000:00`. Network adapters with a root in common
/// are close.
#[must_use]
pub fn pcie_root(path: &Path) -> Option<String> {
    let names = path.strip_prefix("/sys/devices").ok()?;
    // On Hyper-V, the root is below the devices of ACPI and the virtual bus:
    // LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/<GUID>/pci0001:00.
    let mut names = names.iter().filter_map(|name| name.to_str());
    let root = names.find(|name| name.starts_with("pci") && name.contains(':'))?;
    Some(root.to_owned())
}

/// The root of the PCI hierarchy of each GPU.
pub type PcieRoots = BTreeMap<BusId, String>;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use nvidia_host::inventory::MigDevice;

    /// A GPU with MIG devices of these profiles; without profiles, MIG is disabled.
    pub(crate) fn gpu(index: u32, model: &str, profiles: &[&str]) -> NodeGpu {
        let mig = |at: usize| MigDevice {
            index: u32::try_from(at).unwrap(),
            uuid: format!("MIG-{index}-{at}"),
            profile: Some(profiles[at].to_owned()),
            gpu_instance: u32::try_from(at).unwrap() + 7,
            compute_instance: 0,
        };
        let mig_devices: Vec<_> = (0..profiles.len()).map(mig).collect();
        let names = mig_devices
            .iter()
            .zip(profiles)
            .map(|(mig, profile)| (mig.uuid.clone(), (*profile).to_owned()));
        NodeGpu {
            profiles: names.collect(),
            gpu: Gpu {
                index,
                minor: index,
                uuid: format!("GPU-{index}"),
                bus_id: BusId {
                    domain: 0,
                    bus: index + 1,
                    device: 0,
                },
                model: model.to_owned(),
                compute_capability: "9.0".to_owned(),
                brand: String::new(),
                mig_enabled: !profiles.is_empty(),
                mig_devices,
                unlisted_mig: Vec::new(),
            },
            failure: None,
        }
    }

    fn inventory(gpus: &[NodeGpu], failed: Vec<FailedGpu>) -> Inventory {
        Inventory {
            gpus: gpus.iter().map(|gpu| gpu.gpu.clone()).collect(),
            failed,
            ..Inventory::default()
        }
    }

    #[test]
    fn a_lost_gpu_keeps_its_ids() {
        let known = [gpu(0, "A", &["1g.5gb", "2g.10gb"]), gpu(1, "B", &[])];
        for lost in [
            FailedGpu {
                uuid: Some("GPU-0".into()),
                why: "lost".into(),
                ..FailedGpu::default()
            },
            FailedGpu {
                bus_id: Some(known[0].gpu.bus_id),
                why: "lost".into(),
                ..FailedGpu::default()
            },
        ] {
            let gpus = update(
                &known,
                &inventory(&known[1..], vec![lost]),
                &Profiles::new(),
            );
            assert_eq!(
                gpus[0],
                NodeGpu {
                    failure: Some("lost".into()),
                    ..known[0].clone()
                }
            );
            assert_eq!(gpus[1], known[1]);
            let back = update(&gpus, &inventory(&known, vec![]), &known[0].profiles);
            assert_eq!(back, known);
        }
        assert_eq!(
            update(&known, &inventory(&known[1..], vec![]), &Profiles::new()),
            known[1..],
            "removed"
        );
    }

    #[test]
    fn before_nvml_answers() {
        let kernel = |minor, uuid: Option<&str>, excluded| KernelGpu {
            minor: Some(minor),
            uuid: uuid.map(str::to_owned),
            excluded,
            ..KernelGpu::default()
        };
        let gpus = unanswered(
            &[
                kernel(0, Some("GPU-a"), false),
                kernel(1, None, false),
                kernel(2, Some("GPU-c"), true),
                kernel(3, Some("GPU-d"), false),
            ],
            |minor| minor == 3,
            "NVML has not answered yet",
        );
        assert_eq!(gpus.len(), 1);
        assert_eq!(
            (gpus[0].gpu.uuid.as_str(), gpus[0].failure.is_some()),
            ("GPU-a", true)
        );
    }

    #[test]
    fn roots_of_the_pci_hierarchy() {
        for (path, root) in [
            (
                "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0",
                Some("pci0000:00"),
            ),
            (
                "/sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500/pci0001:00/0001:00:00.0",
                Some("pci0001:00"),
            ),
            ("/sys/devices/platform/x", None),
            ("/sys/bus/pci/devices", None),
        ] {
            assert_eq!(pcie_root(Path::new(path)).as_deref(), root, "{path}");
        }
    }

    #[test]
    fn numa_nodes() {
        for (text, node) in [("1\n", Some(1)), ("0", Some(0)), ("-1\n", None), ("", None)] {
            assert_eq!(parse_numa_node(text), node, "{text:?}");
        }
    }
}
