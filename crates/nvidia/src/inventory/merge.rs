//! Merges NVML's answer and the list of the kernel module into one inventory.
//!
//! NVML counts only the GPUs whose device node it can open. If the node of the first GPU is missing, NVML's GPU 0 is the second one, and
//! a container that requests `0` would get another physical GPU than before. Therefore, if NVML omits a GPU, all GPUs are numbered
//! in the order of their bus ids, which is also NVML's order. An index then always refers to the same GPU, or causes an error.

use super::procfs::KernelGpu;
use super::{BusId, ExcludedGpu, FailedGpu, Gpu, Inventory};
use crate::driver::access::Permissions;
use crate::driver::nodes::{DeviceNode, NodeState};

/// Adds what the kernel module knows to NVML's answer: GPUs that NVML does not list, the identity of those that did not
/// answer, and those that the administrator excluded.
/// `is_denied` returns whether the device cgroup of this process denies a node.
pub fn complete(
    inventory: &mut Inventory,
    kernel: &[KernelGpu],
    node: impl Fn(u32) -> NodeState,
    is_denied: impl Fn(&DeviceNode) -> bool,
) {
    inventory.excluded.clear();
    let (mut closed, mut openable) = (Vec::new(), Vec::new());
    for gpu in kernel {
        if lists(inventory, gpu) {
            continue;
        }
        match gpu.minor {
            _ if gpu.excluded => inventory.excluded.push(ExcludedGpu {
                bus_id: gpu.bus_id,
                uuid: gpu.uuid.clone(),
            }),
            Some(minor) => match node(minor) {
                NodeState::Device(node) if is_denied(&node) => {
                    closed.push(denied(gpu, &node));
                }
                NodeState::Device(node) if node.is_shut() => {
                    closed.push(cannot_open(gpu, &node));
                }
                NodeState::Device(_) => openable.push(gpu),
                _ => closed.push(lacks_node(gpu, minor)),
            },
            None => openable.push(gpu),
        }
    }
    let of_failed = identify(inventory, &openable);
    let reported = match of_failed {
        Some(why) => format!(", or reports of it: {why}"),
        None => String::new(),
    };
    for gpu in openable {
        if !lists(inventory, gpu) {
            let why = format!("NVML does not list the GPU at {}{reported}", gpu.bus_id);
            inventory.failed.push(failed(gpu, why));
        }
    }
    inventory.failed.extend(closed);
    for failed in &mut inventory.failed {
        if let Some(gpu) = kernel.iter().find(|gpu| failed.bus_id == Some(gpu.bus_id)) {
            failed.uuid = failed.uuid.take().or_else(|| gpu.uuid.clone());
            failed.model = failed.model.take().or_else(|| gpu.model.clone());
            failed.minor = failed.minor.or(gpu.minor);
        }
    }
    number(inventory);
}

fn lists(inventory: &Inventory, gpu: &KernelGpu) -> bool {
    let Inventory { gpus, failed, .. } = inventory;
    gpus.iter().any(|known| known.bus_id == gpu.bus_id)
        || failed.iter().any(|known| known.bus_id == Some(gpu.bus_id))
}

fn failed(gpu: &KernelGpu, why: String) -> FailedGpu {
    FailedGpu {
        bus_id: Some(gpu.bus_id),
        why,
        ..FailedGpu::default()
    }
}

fn lacks_node(gpu: &KernelGpu, minor: u32) -> FailedGpu {
    let why = format!(
        "the device node \"/dev/nvidia{minor}\" is missing (bus id {})",
        gpu.bus_id
    );
    FailedGpu {
        node_missing: true,
        ..failed(gpu, why)
    }
}

fn denied(gpu: &KernelGpu, node: &DeviceNode) -> FailedGpu {
    let why = format!(
        "the device cgroup of this process denies {} (bus id {})",
        node.source, gpu.bus_id
    );
    FailedGpu {
        denied: true,
        ..failed(gpu, why)
    }
}

fn cannot_open(gpu: &KernelGpu, node: &DeviceNode) -> FailedGpu {
    let Permissions { mode, uid, gid } = node.permissions;
    let why = format!(
        "NVML cannot open {} (owner {uid}, group {gid}, mode {mode:04o}; bus id {})",
        node.source, gpu.bus_id
    );
    FailedGpu {
        node_shut: true,
        ..failed(gpu, why)
    }
}

/// Assigns bus ids to GPUs that failed in NVML's first call because they fell off the bus. For these, NVML only knows an index, and the
/// kernel module only a bus id. If both have the same number of such GPUs, they are the same ones, in the same order. If the kernel
/// module has more, it is unknown which of them failed in NVML: each keeps its entry, and NVML's errors are returned for all of them.
fn identify(inventory: &mut Inventory, openable: &[&KernelGpu]) -> Option<String> {
    let mut anonymous = Vec::new();
    for failed in &mut inventory.failed {
        if is_anonymous(failed) {
            anonymous.push(failed);
        }
    }
    if anonymous.is_empty() || anonymous.len() > openable.len() {
        return None;
    }
    if anonymous.len() == openable.len() {
        for (failed, gpu) in std::iter::zip(anonymous, openable) {
            failed.bus_id = Some(gpu.bus_id);
        }
        return None;
    }
    let reported: Vec<_> = anonymous.iter().map(|failed| failed.why.clone()).collect();
    inventory.failed.retain(|failed| !is_anonymous(failed));
    Some(reported.join("; "))
}

fn is_anonymous(failed: &FailedGpu) -> bool {
    failed.index.is_some() && failed.bus_id.is_none()
}

/// Numbers all GPUs in the order of their bus ids, if NVML does not count all of them.
fn number(inventory: &mut Inventory) {
    if inventory.failed.iter().all(|failed| failed.index.is_some()) {
        return;
    }
    let mut places: Vec<BusId> = inventory.gpus.iter().map(|gpu| gpu.bus_id).collect();
    for failed in &inventory.failed {
        // If a GPU has no bus id, NVML's numbers stay. That happens only with a driver without /proc/driver/nvidia/gpus.
        let Some(bus_id) = failed.bus_id else { return };
        places.push(bus_id);
    }
    places.sort_unstable();
    places.dedup();
    let place = |bus_id: &BusId| {
        places
            .binary_search(bus_id)
            .ok()
            .and_then(|place| u32::try_from(place).ok())
    };
    for gpu in std::mem::take(&mut inventory.gpus) {
        inventory.add_gpu(Gpu {
            index: place(&gpu.bus_id).unwrap_or(gpu.index),
            ..gpu
        });
    }
    for failed in std::mem::take(&mut inventory.failed) {
        inventory.add_failed(FailedGpu {
            index: failed.bus_id.as_ref().and_then(place),
            ..failed
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::select::tests::inventory as sample;
    use base::paths::{ContainerPath, HostPath};

    const NO_NODE: &str =
        "GPU 0: the device node \"/dev/nvidia0\" is missing (bus id 00000000:01:00.0)";

    fn bus_id(bus: u32) -> BusId {
        BusId {
            domain: 0,
            bus,
            device: 0,
        }
    }

    /// At bus N + 1, with minor N, like the GPUs of [`sample`].
    fn kernel(count: u32) -> Vec<KernelGpu> {
        let gpu = |minor: u32| KernelGpu {
            bus_id: bus_id(minor + 1),
            minor: Some(minor),
            uuid: Some(format!("GPU-0000000{minor}")),
            model: Some("NVIDIA H100 80GB HBM3".into()),
            ..KernelGpu::default()
        };
        (0..count).map(gpu).collect()
    }

    /// What NVML lists if it cannot open the nodes with these minors.
    fn nvml_without(left_out: &[u32]) -> Inventory {
        let gpus: Vec<_> = sample()
            .gpus
            .into_iter()
            .filter(|gpu| !left_out.contains(&gpu.minor))
            .collect();
        let gpus = (0..)
            .zip(gpus)
            .map(|(index, gpu)| Gpu { index, ..gpu })
            .collect();
        Inventory {
            gpus,
            ..Inventory::default()
        }
    }

    fn node(exists: bool) -> NodeState {
        if exists {
            node_of_mode(0o666)
        } else {
            NodeState::Missing
        }
    }

    fn node_of_mode(mode: u32) -> NodeState {
        NodeState::Device(DeviceNode {
            source: HostPath::new("/dev/nvidia0"),
            path: ContainerPath::new("/dev/nvidia0").unwrap(),
            major: 195,
            minor: 0,
            permissions: Permissions {
                mode,
                uid: 1000,
                gid: 0,
            },
        })
    }

    /// NVML fails in its first call for a GPU.
    fn lost(index: u32) -> FailedGpu {
        FailedGpu {
            index: Some(index),
            why: "it is lost".into(),
            ..FailedGpu::default()
        }
    }

    fn indices(inventory: &Inventory) -> Vec<(u32, u32)> {
        inventory
            .gpus
            .iter()
            .map(|gpu| (gpu.index, gpu.minor))
            .collect()
    }

    fn words(inventory: &Inventory) -> Vec<String> {
        inventory.failed.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_missing_node_moves_no_index() {
        let mut inventory = nvml_without(&[0]);
        assert_eq!(indices(&inventory), [(0, 1), (1, 2)], "NVML's own count");
        complete(
            &mut inventory,
            &kernel(3),
            |minor| node(minor != 0),
            |_| false,
        );
        assert_eq!(indices(&inventory), [(1, 1), (2, 2)]);
        assert_eq!(words(&inventory), [NO_NODE]);
        let gone = &inventory.failed[0];
        assert!(gone.node_missing);
        assert_eq!(
            (gone.uuid.as_deref(), gone.model.as_deref()),
            (Some("GPU-00000000"), Some("NVIDIA H100 80GB HBM3"))
        );
    }

    #[test]
    fn where_nothing_is_missing_the_order_is_nvmls() {
        let mut inventory = sample();
        inventory.gpus.swap(0, 1);
        let before = inventory.clone();
        complete(&mut inventory, &kernel(3), |_| node(true), |_| false);
        assert_eq!(inventory, before);
    }

    #[test]
    fn a_lost_gpu_is_one_gpu() {
        let mut inventory = nvml_without(&[1]);
        inventory.gpus[1].index = 2;
        inventory.failed.push(lost(1));
        complete(&mut inventory, &kernel(3), |_| node(true), |_| false);
        assert_eq!(words(&inventory), ["GPU 1: it is lost"]);
        assert_eq!(inventory.failed[0].uuid.as_deref(), Some("GPU-00000001"));
        assert_eq!(indices(&inventory), [(0, 0), (2, 2)]);
    }

    #[test]
    fn a_lost_gpu_beside_one_without_a_node() {
        // NVML counts two: minor 1 is its 0, and minor 2, which is lost, its 1.
        let mut inventory = nvml_without(&[0, 2]);
        inventory.failed.push(lost(1));
        complete(
            &mut inventory,
            &kernel(3),
            |minor| node(minor != 0),
            |_| false,
        );
        assert_eq!(indices(&inventory), [(1, 1)]);
        assert_eq!(words(&inventory), [NO_NODE, "GPU 2: it is lost"]);
        assert_eq!(inventory.failed[1].bus_id, Some(bus_id(3)));
    }

    #[test]
    fn which_one_is_lost_may_be_unknown() {
        let mut inventory = nvml_without(&[0, 1]);
        inventory.failed.push(lost(0));
        complete(&mut inventory, &kernel(3), |_| node(true), |_| false);
        let of = |index: u32| {
            format!(
                "GPU {index}: NVML does not list the GPU at {}, or reports of it: it is lost",
                bus_id(index + 1)
            )
        };
        let expected = [of(0), of(1)];
        assert_eq!(words(&inventory), expected);
        assert_eq!(indices(&inventory), [(2, 2)]);
    }

    #[test]
    fn without_the_kernels_list_nothing_is_guessed() {
        let mut inventory = nvml_without(&[1]);
        inventory.failed.push(lost(2));
        complete(&mut inventory, &[], |_| node(true), |_| false);
        assert_eq!(
            (words(&inventory), indices(&inventory)),
            (vec!["GPU 2: it is lost".into()], vec![(0, 0), (1, 2)])
        );
    }

    #[test]
    fn an_excluded_gpu_has_no_place() {
        let mut inventory = nvml_without(&[1]);
        let mut kernel = kernel(3);
        kernel[1].excluded = true;
        complete(&mut inventory, &kernel, |minor| node(minor != 1), |_| false);
        assert_eq!(
            (words(&inventory), indices(&inventory)),
            (vec![], vec![(0, 0), (1, 2)])
        );
        assert_eq!(
            inventory.excluded,
            [ExcludedGpu {
                bus_id: bus_id(2),
                uuid: Some("GPU-00000001".into())
            }]
        );
        let printed = inventory.excluded[0].to_string();
        assert_eq!(
            printed,
            "GPU at 00000000:02:00.0 (GPU-00000001): excluded by the module parameter NVreg_ExcludedGpus"
        );
    }

    /// The owner's bits do not count: NVML does not run as the owner.
    #[test]
    fn a_node_that_nvml_cannot_open() {
        for (mode, is_shut) in [(0, true), (0o600, true), (0o660, false), (0o606, false)] {
            let mut inventory = nvml_without(&[0]);
            complete(
                &mut inventory,
                &kernel(3),
                |_| node_of_mode(mode),
                |_| false,
            );
            let failed = &inventory.failed[0];
            assert_eq!((failed.node_shut, failed.node_missing), (is_shut, false));
            let why = format!(
                "NVML cannot open \"/dev/nvidia0\" (owner 1000, group 0, mode {mode:04o}; bus id 00000000:01:00.0)"
            );
            assert_eq!(failed.why == why, is_shut, "{}", failed.why);
        }
    }

    /// A job of Slurm has one of three GPUs. NVML lists only this one, and nothing is wrong with the others.
    #[test]
    fn gpus_that_the_device_cgroup_denies() {
        let mut inventory = nvml_without(&[0, 2]);
        let node = |minor| match node_of_mode(0o660) {
            NodeState::Device(node) => NodeState::Device(DeviceNode { minor, ..node }),
            other => other,
        };
        complete(&mut inventory, &kernel(3), node, |node| node.minor == 0);
        let [first, last] = inventory.failed.as_slice() else {
            panic!("{inventory:?}")
        };
        assert!(
            first.denied && !first.node_shut && !last.denied,
            "{inventory:?}"
        );
        assert_eq!(
            first.why,
            "the device cgroup of this process denies \"/dev/nvidia0\" (bus id 00000000:01:00.0)"
        );
    }
}
