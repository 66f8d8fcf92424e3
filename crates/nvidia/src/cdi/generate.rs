//! Creates a CDI spec from the edits of all devices.

use std::collections::BTreeSet;

use base::paths::ContainerPath;
use cdi_spec::name;
use cdi_spec::spec::{ContainerEdits, Device, Spec};

use super::lower::{SpecContext, lower, lower_for_engine, rootfs_edits};
use crate::cdi::entry::RootfsEdits;
use crate::device_id::VISIBLE_DEVICES;
use crate::driver::nodes::CAPS;
use crate::edits::{DeviceNode, Edits};
use crate::inventory::select;

/// The name of the device that stands for all devices.
pub const ALL: &str = "all";

/// The names that devices get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Naming {
    /// Indices: `0`, and `0:1` for a MIG device
    pub index: bool,
    /// UUIDs: `GPU-…`, `MIG-…`
    pub uuid: bool,
    /// The kind and the index: `gpu0`, and `mig0:1` for a MIG device
    pub type_index: bool,
}

impl Default for Naming {
    fn default() -> Self {
        Self {
            index: true,
            uuid: true,
            type_index: false,
        }
    }
}

impl Naming {
    /// Returns the names of a device. A GPU in MIG mode has none, because containers can only use its MIG devices. A MIG device has no
    /// index while NVML does not list every MIG device of its GPU, because the index could later belong to another one.
    #[must_use]
    pub fn names(self, device: select::Device<'_>) -> Vec<String> {
        let (kind, index) = match device {
            select::Device::Gpu(gpu) if gpu.mig_enabled => return Vec::new(),
            select::Device::Gpu(gpu) => ("gpu", gpu.index.to_string()),
            select::Device::Mig(gpu, mig) => ("mig", format!("{}:{}", gpu.index, mig.index)),
        };
        let is_certain = device.gpu().unlisted_mig.is_empty();
        let mut names = Vec::new();
        if self.index && is_certain {
            names.push(index.clone());
        }
        if self.type_index && is_certain {
            names.push(format!("{kind}{index}"));
        }
        // In drivers before 470, the UUIDs of MIG devices contain slashes, which CDI does not permit.
        if self.uuid && name::check_device(device.uuid()).is_ok() {
            names.push(device.uuid().to_owned());
        }
        names
    }
}

/// A device of the host with its names. A device may have no name.
#[derive(Clone, Debug)]
pub struct Named {
    /// The names, without vendor and class
    pub names: Vec<String>,
    /// The UUID
    pub uuid: String,
    /// The edits in addition to the common ones
    pub edits: Edits,
}

/// Creates the spec of these devices and of `all`. The spec has no devices if none of them has a name. `more` is added to the hook
/// entry for all containers.
#[must_use]
pub fn spec(
    kind: &str,
    common: &Edits,
    devices: &[Named],
    host: &SpecContext,
    more: RootfsEdits,
) -> Spec {
    let mut more = more;
    let (mut listed, mut every) = (Vec::new(), Vec::new());
    for device in devices {
        let edits = lower_device(device, devices, common, host, &mut more);
        for name in &device.names {
            listed.push(named(name, edits.clone()));
        }
        every.push(named("", edits));
    }
    let mut container_edits = lower(common, host, more);
    // With "void", the hook ignores the container, if it is installed too.
    container_edits.env.push(format!("{VISIBLE_DEVICES}=void"));
    if !listed.is_empty() {
        // No index or UUID equals this name.
        listed.extend(Device::merged(&every, ALL).ok().flatten());
    }
    let mut spec = Spec {
        kind: kind.to_owned(),
        devices: listed,
        container_edits,
        ..Spec::default()
    }
    .simplify();
    spec.container_edits = spec.container_edits.sort();
    for device in &mut spec.devices {
        device.container_edits = std::mem::take(&mut device.container_edits).sort();
    }
    spec.with_minimum_version()
}

fn named(name: &str, container_edits: ContainerEdits) -> Device {
    Device {
        name: name.to_owned(),
        container_edits,
        ..Device::default()
    }
}

/// Converts the edits of a device. What its hook entry would do is added to `more`, for containers that have a node of the device.
fn lower_device(
    Named { names, uuid, edits }: &Named,
    devices: &[Named],
    common: &Edits,
    host: &SpecContext,
    more: &mut RootfsEdits,
) -> ContainerEdits {
    let node = match own_node(edits, devices) {
        Some(node) => node,
        // A GPU in MIG mode. Its MIG devices have its nodes too, and make the same changes.
        None if names.is_empty() => return lower_for_engine(edits, host),
        None => return lower(edits, host, RootfsEdits::default()),
    };
    let mut rest = rootfs_edits(edits, host);
    if common.proc_mask.is_some() {
        rest.mask = None;
    }
    rest.uuid = Some(uuid.clone());
    let with_node = vec![(node.clone(), rest)];
    *more = std::mem::take(more).merge(RootfsEdits {
        with_node,
        ..RootfsEdits::default()
    });
    lower_for_engine(edits, host)
}

/// Returns a node that no other device has: the node of a GPU, or of the compute instance of a MIG device. Returns `None` for MIG devices if
/// the driver has no nodes for capabilities, because containers must not see the capability files of other MIG devices.
fn own_node<'a>(edits: &'a Edits, devices: &[Named]) -> Option<&'a ContainerPath> {
    let has = |device: &Named, node: &DeviceNode| {
        let mut nodes = device.edits.nodes.iter();
        nodes.any(|other| other.path == node.path)
    };
    let is_own = |node: &&DeviceNode| {
        let owners = devices.iter().filter(|device| has(device, node));
        owners.count() == 1
    };
    let mounts = edits.proc_mask.iter().flat_map(|mask| &mask.mounts);
    let mut paths = mounts.map(|(path, _)| path);
    let is_mig = paths.any(|path| path.starts_with("capabilities"));
    let mut own = edits.nodes.iter().filter(is_own);
    let node = if is_mig {
        own.find(|node| node.path.absolute().starts_with(CAPS))
    } else {
        own.next()
    };
    node.map(|node| &node.path)
}

/// Returns the sorted paths on the host that must exist for containers with a device of the spec to start.
#[must_use]
pub fn sources(spec: &Spec) -> BTreeSet<&str> {
    let mut sources = BTreeSet::new();
    for edits in spec
        .devices
        .iter()
        .map(|device| &device.container_edits)
        .chain([&spec.container_edits])
    {
        let nodes = edits
            .device_nodes
            .iter()
            .map(|node| node.host_path.as_ref().unwrap_or(&node.path));
        let mounts = edits.mounts.iter().map(|mount| &mount.host_path);
        let hooks = edits.hooks.iter().map(|hook| &hook.path);
        nodes.chain(mounts).chain(hooks).for_each(|path| {
            sources.insert(path.as_str());
        });
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::access::Permissions;
    use crate::edits::ProcMask;
    use base::paths::HostPath;

    fn device(nodes: &[&str], shown: &str) -> Named {
        let node = |path: &&str| DeviceNode {
            source: HostPath::new(path),
            path: ContainerPath::new(path).unwrap(),
            major: 195,
            minor: 0,
            permissions: Permissions::default(),
        };
        let mounts = vec![(
            shown.into(),
            HostPath::new(format!("/proc/driver/nvidia/{shown}")),
        )];
        let proc_mask = Some(ProcMask {
            files: vec![],
            mounts,
        });
        Named {
            names: vec!["x".into()],
            uuid: "GPU-x".into(),
            edits: Edits {
                nodes: nodes.iter().map(node).collect(),
                proc_mask,
                ..Edits::default()
            },
        }
    }

    #[test]
    fn a_node_that_no_other_device_has() {
        let (gi, ci_0, ci_1) = (
            "/dev/nvidia-caps/nvidia-cap12",
            "/dev/nvidia-caps/nvidia-cap13",
            "/dev/nvidia-caps/nvidia-cap14",
        );
        let capability = "capabilities/gpu0/mig/gi1/access";
        for (devices, expected) in [
            (
                vec![
                    device(&["/dev/nvidia0", "/dev/dri/card1"], "gpus/0"),
                    device(&["/dev/nvidia1"], "gpus/1"),
                ],
                [Some("/dev/nvidia0"), Some("/dev/nvidia1")],
            ),
            (
                vec![
                    device(&["/dev/nvidia0", gi, ci_0], capability),
                    device(&["/dev/nvidia0", gi, ci_1], capability),
                ],
                [Some(ci_0), Some(ci_1)],
            ),
            // The driver has no nodes for capabilities.
            (
                vec![
                    device(&["/dev/nvidia0"], capability),
                    device(&["/dev/nvidia1"], capability),
                ],
                [None, None],
            ),
        ] {
            let found: Vec<_> = devices
                .iter()
                .map(|device| own_node(&device.edits, &devices))
                .collect();
            assert_eq!(
                found,
                expected
                    .map(|path| path.map(|path| ContainerPath::new(path).unwrap()))
                    .each_ref()
                    .map(Option::as_ref)
            );
        }
    }
}
