//! Determines from mode and owner whether a container's process can open the host's device nodes.
//!
//! On SUSE the nodes are root:video 0660, and most published images run as a user other than root. The device cgroup allows the
//! access, but the mode does not, and NVML reports "Insufficient Permissions". A runtime that creates nodes creates them for
//! the container's user; the hook does the same if it can.

use std::fmt::Display;

use base::paths::ContainerPath;
use base::report::Finding;
use findings::catalog;
use nvidia_host::driver::access::Permissions;

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
    /// Whether the ids belong to the hook's user namespace (rootless engines)
    is_rootless: bool,
}

/// A device node, and who can open it.
pub(crate) struct NodePermissions<'a> {
    pub path: &'a dyn Display,
    pub permissions: Permissions,
}

impl Process {
    /// Reads the user and groups of the process from config.json.
    pub(crate) fn from_spec(spec: &SpecView, is_rootless: bool) -> Self {
        let (uid, gid) = spec.user;
        let outside = |mappings: &[_], id| {
            if spec.user_namespace {
                IdMapping::outside(mappings, id)
            } else {
                Some(id)
            }
        };
        let mut groups = Vec::new();
        groups.extend(outside(&spec.gid_mappings, gid));
        for gid in &spec.additional_gids {
            groups.extend(outside(&spec.gid_mappings, *gid));
        }
        Self {
            named: uid,
            uid: outside(&spec.uid_mappings, uid),
            groups,
            is_root: uid == 0 && !spec.user_namespace && !is_rootless,
            keeps_groups: spec.keeps_groups,
            is_rootless,
        }
    }

    /// Reports whether the engine and the hook are in a user namespace.
    pub(crate) const fn is_rootless(&self) -> bool {
        self.is_rootless
    }

    /// Reports whether the process starts as root of the host: as root, and without a user namespace.
    pub(crate) const fn is_root(&self) -> bool {
        self.is_root
    }

    /// Adds a group of the host.
    pub(crate) fn add_group(&mut self, gid: u32) {
        self.groups.push(gid);
    }

    /// Reports whether the process can open a node, by the rules of the kernel.
    pub(crate) fn may_open(&self, node: Permissions) -> bool {
        let is_owner = self.uid == Some(node.uid) && self.knows(node.uid);
        let is_in_group = self.groups.contains(&node.gid) && self.knows(node.gid);
        let is_kept = self.keeps_groups && !is_owner && node.allow(node.wanted(), false, true);
        self.is_root || is_kept || node.allow(node.wanted(), is_owner, is_in_group)
    }

    /// Returns whether this is the id of a user or group. user_namespaces(7): stat(2) shows the overflow id for all that the namespace
    /// does not map.
    const fn knows(&self, id: u32) -> bool {
        !(self.is_rootless && id == OVERFLOW_ID)
    }

    /// Returns the finding for a node that the process cannot open. Only for the first node: all nodes usually have the same owner and
    /// mode.
    pub(crate) fn shut_out(
        &self,
        path: &ContainerPath,
        permissions: Permissions,
        known: &[Finding],
    ) -> Option<Finding> {
        let is_known = known
            .iter()
            .any(|finding| finding.kind == &catalog::NO_ACCESS);
        if is_known {
            return None;
        }
        self.finding(&[NodePermissions { path, permissions }])
    }

    /// Returns the finding for the nodes that the process cannot open; `None` if it can open all.
    pub(crate) fn finding(&self, nodes: &[NodePermissions<'_>]) -> Option<Finding> {
        let mut shut = nodes.iter().filter(|node| !self.may_open(node.permissions));
        let NodePermissions {
            path: first,
            permissions: facts,
        } = shut.next()?;
        let more = match shut.count() {
            0 => String::new(),
            count => format!(" and {count} other device nodes"),
        };
        // user_namespaces(7): stat(2) shows the overflow id for an owner that the namespace does not map.
        let owner = if self.is_rootless && facts.uid == OVERFLOW_ID {
            "owner outside the user namespace".to_owned()
        } else {
            format!("owner {}:{}", facts.uid, facts.gid)
        };
        let what = format!(
            "user {} of the container cannot open {first}{more}: {owner}, mode {:04o}",
            self.named, facts.mode
        );
        let gid = facts.gid;
        // A runtime in a user namespace cannot create nodes.
        let fix = if self.is_rootless {
            "use crun and \"--group-add keep-groups\" (Podman), map the group of the nodes into the container (LXC, Incus: idmap), \
             or give the host's nodes mode 0666"
                .to_owned()
        } else {
            format!(
                "add group {gid} (\"--group-add {gid}\", supplementalGroups: [{gid}]), have the engine create the nodes \
                 (CDI, PASS_DEVICE_SPECS=true of a device plugin), or give the host's nodes mode 0666"
            )
        };
        Some(Finding::new(&catalog::NO_ACCESS, what, fix))
    }
}
