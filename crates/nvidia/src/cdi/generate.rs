//! Edits of all devices → a CDI spec. Pure.

use std::collections::BTreeSet;

use cdi_spec::name;
use cdi_spec::spec::{ContainerEdits, Device, Spec};

use super::lower::{SpecContext, lower};
use crate::cdi::entry::RootfsEdits;
use crate::device_id::VISIBLE_DEVICES;
use crate::edits::Edits;
use crate::inventory::select;

/// The device that is all of the others.
pub const ALL: &str = "all";

/// How devices are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Naming {
    /// `0`, and `0:1` for a MIG device
    pub index: bool,
    /// `GPU-…`, `MIG-…`
    pub uuid: bool,
}

impl Default for Naming {
    fn default() -> Self {
        Self { index: true, uuid: true }
    }
}

impl Naming {
    /// The names of a device. A GPU that is split has none: its parts are what containers can use. A MIG device has no index
    /// while NVML does not list every MIG device of its GPU, because the index may name another one later.
    #[must_use]
    pub fn names(self, device: select::Device<'_>) -> Vec<String> {
        let index = match device {
            select::Device::Gpu(gpu) if gpu.mig_enabled => return Vec::new(),
            select::Device::Gpu(gpu) => gpu.index.to_string(),
            select::Device::Mig(gpu, mig) => format!("{}:{}", gpu.index, mig.index),
        };
        let has_index = self.index && device.gpu().unlisted_mig.is_empty();
        let uuid = device.uuid().to_owned();
        // Drivers before 470 have UUIDs of MIG devices with slashes in them.
        let uuid = Some(uuid).filter(|uuid| self.uuid && name::check_device(uuid).is_ok());
        Some(index).filter(|_| has_index).into_iter().chain(uuid).collect()
    }
}

/// A device of the host with its names, which may be none.
#[derive(Clone, Debug)]
pub struct Named {
    /// Without vendor and class
    pub names: Vec<String>,
    /// What it adds to the common edits
    pub edits: Edits,
}

/// The spec of these devices, and of all of them together. It has no device if none has a name. `more` is for the hook
/// entry that every container gets.
#[must_use]
pub fn spec(kind: &str, common: &Edits, devices: &[Named], host: &SpecContext, more: RootfsEdits) -> Spec {
    let mut container_edits = lower(common, host, more);
    // Else our own hook, where it is installed too, would do it all again.
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
        // Nothing else has this name: no index and no UUID is like it.
        listed.extend(Device::merged(&every, ALL).ok().flatten());
    }
    let mut spec = Spec { kind: kind.to_owned(), devices: listed, container_edits, ..Spec::default() }.simplify();
    spec.container_edits = spec.container_edits.sort();
    for device in &mut spec.devices {
        device.container_edits = fold_hooks(std::mem::take(&mut device.container_edits).sort());
    }
    spec.with_minimum_version()
}

/// One entry for what several of our entries say: each is a process at the start of a container.
#[must_use]
fn fold_hooks(mut edits: ContainerEdits) -> ContainerEdits {
    let mut folded = RootfsEdits::default();
    let mut first = None;
    edits.hooks.retain(|hook| {
        let Some(parsed) = RootfsEdits::of_entry(&hook.args) else { return true };
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

/// The paths on the host without which no container with one of the devices can start, sorted.
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
