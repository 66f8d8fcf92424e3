//! Determines from mode and owner whether a container's process can open the host's device nodes.
//!
//! On SUSE the nodes are root:video 0660, and most published images run as a user other than root. The device cgroup allows the
//! access, but the mode does not, and NVML reports "Insufficient Permissions". A runtime that creates nodes creates them for
//! the container's user; the hook does the same if it can.

use std::collections::BTreeMap;
use std::fmt::Display;

use base::paths::HostPath;
use base::report::{Finding, catalog};
use nvidia_host::cdi::lower::NodeFacts;

use super::live::Step;
use crate::oci::SpecView;
use crate::oci::spec_view::{IdMapping, OVERFLOW_ID};

/// The user and groups of the container's process, as ids of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    /// The user id in the container, for messages
    named: u32,
    /// `None` for an id that is not mapped on the host
    uid: Option<u32>,
    groups: Vec<u32>,
    /// Whether it is root with the capabilities of the host's root
    is_root: bool,
    /// Whether crun keeps it in the groups of the user who started the engine
    keeps_groups: bool,
    /// Whether the ids are those of the hook's own user namespace (rootless engines)
    is_rootless: bool,
}

impl Process {
    /// Reads the user and groups of the process from config.json.
    pub(crate) fn from_spec(spec: &SpecView, is_rootless: bool) -> Self {
        let (uid, gid) = spec.user;
        let outside =
            |mappings: &[_], id| if spec.user_namespace { IdMapping::outside(mappings, id) } else { Some(id) };
        let groups = std::iter::once(gid).chain(spec.additional_gids.iter().copied());
        Self {
            named: uid,
            uid: outside(&spec.uid_mappings, uid),
            groups: groups.filter_map(|gid| outside(&spec.gid_mappings, gid)).collect(),
            is_root: uid == 0 && !spec.user_namespace && !is_rootless,
            keeps_groups: spec.keeps_groups,
            is_rootless,
        }
    }

    /// Reports whether the engine and the hook are in a user namespace.
    pub(crate) const fn is_rootless(&self) -> bool {
        self.is_rootless
    }

    /// Adds groups of the host.
    pub(crate) fn with_groups(mut self, more: impl IntoIterator<Item = u32>) -> Self {
        self.groups.extend(more);
        self
    }

    /// Reports whether the process can open a node, by the rules of the kernel.
    pub(crate) fn may_open(&self, node: NodeFacts) -> bool {
        // Nodes of MIG capabilities have mode 0444 and are opened for reading.
        let wanted = if node.mode & 0o222 == 0 { 0o4 } else { 0o6 };
        let allows = |shift: u32| node.mode >> shift & wanted == wanted;
        let is_known = |id: u32| !(self.is_rootless && id == OVERFLOW_ID);
        if self.is_root {
            return true;
        }
        if self.uid == Some(node.uid) && is_known(node.uid) {
            return allows(6);
        }
        if self.groups.contains(&node.gid) && is_known(node.gid) {
            return allows(3);
        }
        allows(0) || self.keeps_groups && allows(3)
    }

    /// Returns the finding for nodes that the process cannot open; `None` without such nodes.
    pub(crate) fn finding(&self, mut nodes: impl Iterator<Item = (impl Display, NodeFacts)>) -> Option<Finding> {
        let (first, facts) = nodes.next()?;
        let more = match nodes.count() {
            0 => String::new(),
            count => format!(" and {count} other device nodes"),
        };
        // user_namespaces(7): stat(2) shows the overflow id for an owner that the namespace does not map.
        let owner = match self.is_rootless && facts.uid == OVERFLOW_ID {
            true => "owner outside the user namespace".to_owned(),
            false => format!("owner {}:{}", facts.uid, facts.gid),
        };
        let what =
            format!("user {} of the container cannot open {first}{more}: {owner}, mode {:04o}", self.named, facts.mode);
        let groups = match (self.is_rootless, facts.gid) {
            (true, _) => "use crun and \"--group-add keep-groups\"".to_owned(),
            (false, gid) => format!("add group {gid} (\"--group-add {gid}\", supplementalGroups: [{gid}])"),
        };
        let fix = format!(
            "{groups}, have the engine create the nodes (precreate, CDI, PASS_DEVICE_SPECS=true of the device plugin), or give \
             the host's nodes mode 0666"
        );
        Some(Finding::new(&catalog::NO_ACCESS, what, fix))
    }
}

/// Changes the steps so that the hook creates the nodes that only a group can open that the process is not in. Nodes that only
/// root can open are not changed: the driver creates the node that configures MIG devices in this way.
pub(crate) fn create_own(steps: &mut [Step], process: &Process, nodes: &BTreeMap<HostPath, NodeFacts>) {
    for step in steps {
        if let Step::MountNode { source, own, .. } = step
            && let Some(facts) = nodes.get(source)
            && facts.additional_gid().is_some()
            && !process.may_open(*facts)
        {
            *own = Some(process.clone());
        }
    }
}

/// Returns the nodes of the host that the steps mount and that the process cannot open.
pub(crate) fn inaccessible<'a>(
    steps: &'a [Step],
    process: &'a Process,
    nodes: &'a BTreeMap<HostPath, NodeFacts>,
) -> impl Iterator<Item = (&'a HostPath, NodeFacts)> {
    steps.iter().filter_map(|step| match step {
        Step::MountNode { source, own: None, .. } => {
            nodes.get(source).filter(|facts| !process.may_open(**facts)).map(|facts| (source, *facts))
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(uid: u32, gid: u32, groups: &[u32]) -> SpecView {
        SpecView { user: (uid, gid), additional_gids: groups.to_vec(), ..SpecView::default() }
    }

    #[test]
    fn as_the_kernel_decides_it() {
        let node = |mode, uid, gid| NodeFacts { is_char: true, mode, uid, gid };
        let (suse, open) = (node(0o660, 0, 44), node(0o666, 0, 0));
        let (cap, root_only) = (node(0o444, 0, 0), node(0o400, 0, 0));
        for (uid, gid, groups, node, may) in [
            (0, 0, &[][..], suse, true),
            (1000, 1000, &[], suse, false),
            (1000, 44, &[], suse, true),
            (1000, 1000, &[7, 44], suse, true),
            (1000, 1000, &[], open, true),
            (1000, 1000, &[], cap, true),
            (1000, 1000, &[], root_only, false),
            (1000, 44, &[], self::NodeFacts { mode: 0o606, ..suse }, false),
        ] {
            assert_eq!(
                Process::from_spec(&spec(uid, gid, groups), false).may_open(node),
                may,
                "{uid} {gid} {groups:?} {node:?}"
            );
        }
        let mapping = |host_id| vec![IdMapping { container_id: 0, host_id, size: 65536 }];
        let mapped = |host| SpecView {
            user_namespace: true,
            uid_mappings: mapping(host),
            gid_mappings: mapping(host),
            ..spec(0, 0, &[44])
        };
        assert!(!Process::from_spec(&mapped(100_000), false).may_open(suse), "not root on the host");
        assert!(Process::from_spec(&mapped(0), false).may_open(suse), "root on the host");
        assert!(Process::from_spec(&mapped(100_000), false).may_open(open));
        // Rootless: the nodes' owner is not mapped, and has the same overflow id as all other unmapped users.
        let unmapped = node(0o660, OVERFLOW_ID, OVERFLOW_ID);
        assert!(!Process::from_spec(&spec(0, 0, &[OVERFLOW_ID]), true).may_open(unmapped));
        let keeps = SpecView { keeps_groups: true, ..spec(0, 0, &[]) };
        assert!(Process::from_spec(&keeps, true).may_open(unmapped));
    }

    #[test]
    fn nodes_of_a_group_are_created_and_others_are_named() {
        let step = |name: &str| Step::MountNode {
            source: HostPath::new(format!("/dev/{name}")),
            target: base::paths::ContainerPath::new(format!("/dev/{name}")).unwrap(),
            device: (195, 0),
            own: None,
        };
        let facts = |mode, gid| NodeFacts { is_char: true, mode, uid: 0, gid };
        let nodes = [("nvidia0", facts(0o660, 44)), ("cap1", facts(0o400, 0)), ("cap2", facts(0o444, 0))];
        let nodes = nodes.map(|(name, facts)| (HostPath::new(format!("/dev/{name}")), facts)).into();
        let mut steps = ["nvidia0", "cap1", "cap2"].map(step);
        let process = Process::from_spec(&spec(1000, 1000, &[]), false);
        assert_eq!(inaccessible(&steps, &process, &nodes).count(), 2);
        create_own(&mut steps, &process, &nodes);
        let own = |step: &Step| matches!(step, Step::MountNode { own: Some(_), .. });
        assert_eq!(steps.each_ref().map(own), [true, false, false]);
        let finding = process.finding(inaccessible(&steps, &process, &nodes)).unwrap();
        assert_eq!(finding.what, "user 1000 of the container cannot open \"/dev/cap1\": owner 0:0, mode 0400");
        let unmapped = NodeFacts { is_char: true, mode: 0o660, uid: OVERFLOW_ID, gid: OVERFLOW_ID };
        let finding = Process::from_spec(&SpecView::default(), true)
            .finding([("\"/dev/nvidia0\"", unmapped)].into_iter())
            .unwrap();
        assert!(finding.what.ends_with("\"/dev/nvidia0\": owner outside the user namespace, mode 0660"), "{finding:?}");
    }
}
