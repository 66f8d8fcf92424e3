//! Creates a CDI spec from the edits of all devices.

use std::collections::BTreeSet;

use cdi_spec::name;
use cdi_spec::spec::{ContainerEdits, Device, Spec};

use super::lower::{SpecContext, lower};
use crate::cdi::entry::RootfsEdits;
use crate::device_id::VISIBLE_DEVICES;
use crate::edits::Edits;
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
}

impl Default for Naming {
    fn default() -> Self {
        Self { index: true, uuid: true }
    }
}

impl Naming {
    /// Returns the names of a device. A GPU in MIG mode has none, because containers can only use its MIG devices. A MIG device has no
    /// index while NVML does not list every MIG device of its GPU, because the index could later belong to another one.
    #[must_use]
    pub fn names(self, device: select::Device<'_>) -> Vec<String> {
        let index = match device {
            select::Device::Gpu(gpu) if gpu.mig_enabled => return Vec::new(),
            select::Device::Gpu(gpu) => gpu.index.to_string(),
            select::Device::Mig(gpu, mig) => format!("{}:{}", gpu.index, mig.index),
        };
        let has_index = self.index && device.gpu().unlisted_mig.is_empty();
        let uuid = device.uuid().to_owned();
        // In drivers before 470, the UUIDs of MIG devices contain slashes, which CDI does not permit.
        let uuid = Some(uuid).filter(|uuid| self.uuid && name::check_device(uuid).is_ok());
        Some(index).filter(|_| has_index).into_iter().chain(uuid).collect()
    }
}

/// A device of the host with its names. A device may have no name.
#[derive(Clone, Debug)]
pub struct Named {
    /// The names, without vendor and class
    pub names: Vec<String>,
    /// The edits in addition to the common ones
    pub edits: Edits,
}

/// Creates the spec of these devices and of `all`. The spec has no devices if none of them has a name. `more` is added to the hook
/// entry for all containers.
#[must_use]
pub fn spec(kind: &str, common: &Edits, devices: &[Named], host: &SpecContext, more: RootfsEdits) -> Spec {
    let mut container_edits = lower(common, host, more);
    // With "void", the hook ignores the container, if it is installed too.
    container_edits.env.push(format!("{VISIBLE_DEVICES}=void"));
    let lowered: Vec<_> = devices.iter().map(|device| lower(&device.edits, host, RootfsEdits::default())).collect();
    let device = |(name, edits): (&String, &ContainerEdits)| Device {
        name: name.clone(),
        container_edits: edits.clone(),
        ..Device::default()
    };
    let with_names = devices.iter().zip(&lowered);
    let names = with_names.flat_map(|(device, edits)| device.names.iter().map(move |name| (name, edits)));
    let mut listed: Vec<_> = names.map(device).collect();
    if !listed.is_empty() {
        let every: Vec<_> = lowered.iter().map(|edits| device((&String::new(), edits))).collect();
        // No index or UUID equals this name.
        listed.extend(Device::merged(&every, ALL).ok().flatten());
    }
    let mut spec = Spec { kind: kind.to_owned(), devices: listed, container_edits, ..Spec::default() }.simplify();
    spec.container_edits = spec.container_edits.sort();
    for device in &mut spec.devices {
        device.container_edits = fold_hooks(std::mem::take(&mut device.container_edits).sort());
    }
    spec.with_minimum_version()
}

/// Merges our hook entries into one, because the runtime starts a process for each of them.
#[must_use]
fn fold_hooks(mut edits: ContainerEdits) -> ContainerEdits {
    let mut folded = RootfsEdits::default();
    let mut first = None;
    edits.hooks.retain(|hook| {
        let Some(parsed) = RootfsEdits::from_entry(&hook.args) else { return true };
        folded = std::mem::take(&mut folded).merge(parsed);
        first.get_or_insert_with(|| hook.clone());
        false
    });
    if let Some((mut hook, args)) = first.zip(folded.to_args()) {
        hook.args = args;
        edits.hooks.push(hook);
    }
    edits
}

/// Returns the sorted paths on the host that must exist for containers with a device of the spec to start.
#[must_use]
pub fn sources(spec: &Spec) -> BTreeSet<&str> {
    let mut sources = BTreeSet::new();
    for edits in spec.devices.iter().map(|device| &device.container_edits).chain([&spec.container_edits]) {
        let nodes = edits.device_nodes.iter().map(|node| node.host_path.as_ref().unwrap_or(&node.path));
        let mounts = edits.mounts.iter().map(|mount| &mount.host_path);
        let hooks = edits.hooks.iter().map(|hook| &hook.path);
        nodes.chain(mounts).chain(hooks).for_each(|path| {
            sources.insert(path.as_str());
        });
    }
    sources
}
