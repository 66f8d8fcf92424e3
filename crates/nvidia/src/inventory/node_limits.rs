//! Applies the limits of `[devices]` to device nodes that a container has already, or that a CDI spec offers.
//!
//! The kernel module lists the bus id, the UUID and the minor number of its GPUs, with which most entries can be compared. Only NVML knows
//! the models and the MIG devices, and calling it can take seconds: the inventory is needed only if an entry depends on them.

use std::collections::BTreeMap;

use super::cap_files::CapFile;
use super::caps::MigCap;
use super::limits::{is_like, parse_leniently, permit, permit_failed};
use super::procfs::KernelGpu;
use super::select::{every_device, names_of, permitted};
use super::{Inventory, names};
use crate::config::Limits;
use crate::device_id::{DeviceId, Nodes};
use crate::feature::Feature;
use crate::limit_entry::LimitEntry;

/// What the limits state about device nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgment {
    /// Containers may have the GPUs of all nodes.
    Permitted,
    /// Containers may not have the GPU of the node with this minor number.
    Denied(u32),
    /// Only an inventory shows whether containers may have the GPU of the node with this minor number.
    Unknown(u32),
}

/// The limits, and what is known about the GPUs of the host.
#[derive(Clone, Debug, Default)]
pub struct NodeLimits {
    limits: Limits,
    gpus: Vec<KernelGpu>,
    caps: Vec<CapFile>,
    inventory: Option<Inventory>,
}

impl NodeLimits {
    /// Creates the limits for the GPUs and MIG capabilities of the kernel module.
    #[must_use]
    pub const fn new(limits: Limits, gpus: Vec<KernelGpu>, caps: Vec<CapFile>) -> Self {
        Self {
            limits,
            gpus,
            caps,
            inventory: None,
        }
    }

    /// Whether containers may not have the feature.
    #[must_use]
    pub const fn deny_feature(&self, feature: Feature) -> bool {
        self.limits.denied_features.has(feature)
    }

    /// Adds the inventory.
    #[must_use]
    pub fn with_inventory(self, inventory: Inventory) -> Self {
        Self {
            inventory: Some(inventory),
            ..self
        }
    }

    /// Whether containers may have every GPU.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.limits.permit_all_gpus()
    }

    /// Whether containers may not have the GPUs of WSL 2, because that includes a denied one.
    #[must_use]
    pub fn deny_wsl(&self) -> bool {
        let Some(inventory) = &self.inventory else {
            return false;
        };
        if !inventory.driver_kind.has_one_node_for_all() || self.is_empty() {
            return false;
        }
        let Inventory { gpus, failed, .. } = inventory;
        gpus.iter().any(|gpu| !permit(&self.limits, gpu, None))
            || failed.iter().any(|gpu| !permit_failed(&self.limits, gpu))
    }

    /// Judges the nodes of a container.
    #[must_use]
    pub fn judge(&self, nodes: &Nodes) -> Judgment {
        if self.is_empty() {
            return Judgment::Permitted;
        }
        let mut unknown = None;
        for minor in nodes.gpus.iter().copied() {
            match self.permits(minor, nodes) {
                Some(true) => {}
                Some(false) => return Judgment::Denied(minor),
                None => unknown = unknown.or(Some(minor)),
            }
        }
        unknown.map_or(Judgment::Permitted, Judgment::Unknown)
    }

    /// Whether containers may have the GPU with this minor number, or the MIG devices of it to which the nodes belong. Returns `None` if
    /// that is unknown.
    fn permits(&self, minor: u32, nodes: &Nodes) -> Option<bool> {
        match &self.inventory {
            Some(inventory) => self.permits_by_inventory(minor, nodes, inventory),
            None => self.permits_by_kernel(minor, nodes),
        }
    }

    fn permits_by_inventory(
        &self,
        minor: u32,
        nodes: &Nodes,
        inventory: &Inventory,
    ) -> Option<bool> {
        let nodes = Nodes {
            gpus: [minor].into(),
            caps: nodes.caps.clone(),
        };
        let minors: BTreeMap<MigCap, u32> = self
            .caps
            .iter()
            .map(|file| (file.cap, file.minor))
            .collect();
        let names = names_of(&nodes, inventory, &minors);
        let mut all_permitted = None;
        for device in every_device(inventory) {
            if names.iter().any(|name| name == device.uuid()) {
                let permitted = permitted(device, &self.limits);
                all_permitted = Some(permitted && all_permitted.unwrap_or(true));
            }
        }
        if all_permitted.is_some() {
            return all_permitted;
        }
        let failed = inventory
            .failed
            .iter()
            .find(|gpu| gpu.minor == Some(minor))?;
        Some(permit_failed(&self.limits, failed))
    }

    fn permits_by_kernel(&self, minor: u32, nodes: &Nodes) -> Option<bool> {
        let mut counted = self.gpus.iter().filter(|gpu| !gpu.excluded).enumerate();
        let (place, gpu) = counted.find(|(_, gpu)| gpu.minor == Some(minor))?;
        let index = u32::try_from(place).ok()?;
        let parts = self.given_instances(minor, nodes);
        if parts.is_empty() {
            return self.permits_part(gpu, index, None);
        }
        let mut judged = Some(true);
        for part in parts {
            judged = both(judged, self.permits_part(gpu, index, Some(part)));
        }
        judged
    }

    /// Returns the GPU instance and the compute instance of each MIG device of a GPU whose nodes are all among these.
    fn given_instances(&self, minor: u32, nodes: &Nodes) -> Vec<(u32, u32)> {
        let is_given = |cap: MigCap| {
            let mut files = self.caps.iter();
            files.any(|file| file.cap == cap && nodes.caps.contains(&file.minor))
        };
        let mut given = Vec::new();
        for file in &self.caps {
            if let MigCap::ComputeInstance(of, instance, compute) = file.cap
                && of == minor
                && is_given(MigCap::GpuInstance(minor, instance))
                && is_given(file.cap)
            {
                given.push((instance, compute));
            }
        }
        given
    }

    fn permits_part(&self, gpu: &KernelGpu, index: u32, part: Option<(u32, u32)>) -> Option<bool> {
        let matches = |entry: &String| matches(entry, gpu, index, part);
        let Limits { allow, deny, .. } = &self.limits;
        let allowed = if allow.is_empty() {
            Some(true)
        } else {
            any(allow.iter().map(matches))
        };
        both(allowed, any(deny.iter().map(matches)).map(|denied| !denied))
    }
}

/// Whether an entry matches a GPU, or the MIG device with these instances. Returns `None` if only NVML knows.
fn matches(entry: &str, gpu: &KernelGpu, index: u32, part: Option<(u32, u32)>) -> Option<bool> {
    // An entry for a GPU also applies to its MIG devices.
    match parse_leniently(entry) {
        LimitEntry::Id(DeviceId::Mig { gpu: of, .. }) if of == index && part.is_some() => None,
        LimitEntry::Id(DeviceId::Mig { .. }) => Some(false),
        LimitEntry::Id(DeviceId::Uuid(uuid)) if uuid.starts_with("MIG-") => {
            match (part, uuid.contains('/')) {
                (None, _) => Some(false),
                (Some((instance, compute)), true) => {
                    let name = format!("MIG-{}/{instance}/{compute}", gpu.uuid.as_deref()?);
                    Some(name.eq_ignore_ascii_case(&uuid))
                }
                (Some(_), false) => None,
            }
        }
        LimitEntry::Id(id @ DeviceId::Uuid(_)) => {
            Some(names(&id, None, Some(gpu.uuid.as_deref()?), None))
        }
        LimitEntry::Id(id) => Some(names(&id, Some(index), None, Some(gpu.bus_id))),
        LimitEntry::Uuid(pattern) => match is_like(&pattern, gpu.uuid.as_deref()?) {
            false if part.is_some() && !pattern.starts_with("GPU-") => None,
            known => Some(known),
        },
        // The kernel module's name of a model need not be NVML's.
        LimitEntry::Model(_) => None,
    }
}

/// Whether any of these is true.
fn any(all: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    let mut found = Some(false);
    for one in all {
        match one {
            Some(true) => return one,
            Some(false) => {}
            None => found = None,
        }
    }
    found
}

/// Whether both are true.
fn both(a: Option<bool>, b: Option<bool>) -> Option<bool> {
    match (a, b) {
        (Some(false), _) | (_, Some(false)) => Some(false),
        (Some(true), Some(true)) => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::params::parse_policy;
    use crate::inventory::select::tests::inventory;
    use crate::inventory::{BusId, FailedGpu};
    use proptest::prelude::*;

    /// The GPUs of the sample; the third one has MIG devices.
    fn kernel() -> Vec<KernelGpu> {
        let gpu = |gpu: &super::super::Gpu| KernelGpu {
            bus_id: gpu.bus_id,
            minor: Some(gpu.minor),
            uuid: Some(gpu.uuid.clone()),
            model: Some(gpu.model.clone()),
            ..KernelGpu::default()
        };
        inventory().gpus.iter().map(gpu).collect()
    }

    /// Minor numbers of both nodes of a MIG device.
    fn caps_of(part: usize) -> [u32; 2] {
        [[20, 21], [30, 31]][part]
    }

    fn caps() -> Vec<CapFile> {
        let inventory = inventory();
        let gpu = &inventory.gpus[2];
        let files = gpu.mig_devices.iter().enumerate().flat_map(|(at, mig)| {
            let (instance, compute) = (mig.gpu_instance, mig.compute_instance);
            let caps = [
                MigCap::GpuInstance(gpu.minor, instance),
                MigCap::ComputeInstance(gpu.minor, instance, compute),
            ];
            caps.into_iter()
                .zip(caps_of(at))
                .map(|(cap, minor)| CapFile {
                    cap,
                    minor,
                    policy: parse_policy(""),
                })
        });
        files.collect()
    }

    fn limits(allow: &[&str], deny: &[&str]) -> Limits {
        let list = |list: &[&str]| list.iter().map(|entry| (*entry).to_owned()).collect();
        Limits {
            allow: list(allow),
            deny: list(deny),
            ..Limits::default()
        }
    }

    fn nodes(gpus: &[u32], caps: &[u32]) -> Nodes {
        Nodes {
            gpus: gpus.iter().copied().collect(),
            caps: caps.iter().copied().collect(),
        }
    }

    #[test]
    fn what_the_kernel_module_knows() {
        use Judgment::{Denied, Permitted, Unknown};
        let mig = caps_of(1);
        for (allow, deny, nodes, expected) in [
            (&[][..], &[][..], nodes(&[0, 9], &[]), Permitted),
            (&[], &["1"], nodes(&[0], &[]), Permitted),
            (&[], &["1"], nodes(&[0, 1], &[]), Denied(1)),
            (&[], &["GPU-00000001*"], nodes(&[1], &[]), Denied(1)),
            (&[], &["02:00.0"], nodes(&[1], &[]), Denied(1)),
            (&["0", "02:00.0"], &[], nodes(&[0, 1], &[]), Permitted),
            (&["0"], &[], nodes(&[0, 1], &[]), Denied(1)),
            (&[], &["*A100*"], nodes(&[1], &[]), Unknown(1)),
            (&[], &["*A100*", "1"], nodes(&[1], &[]), Denied(1)),
            (&["*H100*"], &["0"], nodes(&[0], &[]), Denied(0)),
            (&["*H100*"], &[], nodes(&[0], &[]), Unknown(0)),
            // A GPU that the kernel module does not list
            (&[], &["1"], nodes(&[9], &[]), Unknown(9)),
            // MIG devices
            (&[], &["2"], nodes(&[2], &mig), Denied(2)),
            (&[], &["1"], nodes(&[2], &mig), Permitted),
            (&[], &["2:0"], nodes(&[2], &mig), Unknown(2)),
            (&[], &["1:0"], nodes(&[2], &mig), Permitted),
            (&["2:0"], &[], nodes(&[2], &[]), Denied(2)),
            (&["2:0"], &["2"], nodes(&[2], &mig), Denied(2)),
            (&[], &["MIG-*"], nodes(&[2], &mig), Unknown(2)),
            (&[], &["MIG-*"], nodes(&[2], &[]), Permitted),
            (&[], &["GPU-00000001*"], nodes(&[2], &mig), Permitted),
        ] {
            let known = NodeLimits::new(limits(allow, deny), kernel(), caps());
            assert_eq!(
                known.judge(&nodes),
                expected,
                "{allow:?} {deny:?} {nodes:?}"
            );
        }
    }

    #[test]
    fn a_gpu_without_a_uuid_is_unknown() {
        let mut gpus = kernel();
        gpus[1].uuid = None;
        let judge = |deny: &str| {
            NodeLimits::new(limits(&[], &[deny]), gpus.clone(), caps()).judge(&nodes(&[1], &[]))
        };
        assert_eq!(judge("GPU-0000000*"), Judgment::Unknown(1));
        assert_eq!(judge("1"), Judgment::Denied(1));
    }

    /// Only GPUs that the driver does not exclude have an index.
    #[test]
    fn an_excluded_gpu_has_no_index() {
        let mut gpus = kernel();
        gpus[0].excluded = true;
        let judge = |deny: &str| {
            NodeLimits::new(limits(&[], &[deny]), gpus.clone(), caps()).judge(&nodes(&[1], &[]))
        };
        assert_eq!(judge("0"), Judgment::Denied(1));
        assert_eq!(judge("1"), Judgment::Permitted);
    }

    #[test]
    fn a_gpu_that_failed() {
        let mut inventory = inventory();
        let lost = inventory.gpus.remove(1);
        let failed = FailedGpu {
            index: Some(1),
            minor: Some(1),
            uuid: Some(lost.uuid),
            bus_id: BusId::parse("0000:02:00.0"),
            ..FailedGpu::default()
        };
        inventory.failed.push(failed);
        let judge = |deny: &str, minor: u32| {
            NodeLimits::new(limits(&[], &[deny]), vec![], vec![])
                .with_inventory(inventory.clone())
                .judge(&nodes(&[minor], &[]))
        };
        assert_eq!(judge("1", 1), Judgment::Denied(1));
        assert_eq!(judge("0", 1), Judgment::Permitted);
        assert_eq!(judge("0", 9), Judgment::Unknown(9));
    }

    const ENTRIES: &[&str] = &[
        "0",
        "1",
        "2",
        "02:00.0",
        "0000:03:00",
        "GPU-*",
        "GPU-00000001*",
        "MIG-*",
        "MIG-2?",
        "2:0",
        "2:1",
        "1:0",
        "*H100*",
        "*A100*",
        "*",
    ];

    proptest! {
        /// The kernel module decides nothing differently from NVML.
        #[test]
        fn as_with_an_inventory(
            allow in prop::collection::vec(prop::sample::select(ENTRIES), 0..3),
            deny in prop::collection::vec(prop::sample::select(ENTRIES), 0..3),
            gpus in prop::collection::btree_set(0_u32..3, 1..4),
            caps_of_container in prop::collection::btree_set(prop::sample::select(vec![20_u32, 21, 30, 31]), 0..5),
        ) {
            let nodes = Nodes { gpus, caps: caps_of_container };
            let by_kernel = NodeLimits::new(limits(&allow, &deny), kernel(), caps());
            let by_nvml = by_kernel.clone().with_inventory(inventory());
            match (by_kernel.judge(&nodes), by_nvml.judge(&nodes)) {
                (Judgment::Unknown(_), Judgment::Permitted | Judgment::Denied(_)) => {}
                (Judgment::Denied(_), decided) => prop_assert!(matches!(decided, Judgment::Denied(_))),
                (a, b) => prop_assert_eq!(a, b),
            }
        }
    }
}
