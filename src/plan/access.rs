//! Chooses which device nodes the hook creates for a container, because its processes cannot open the host's.

use nvidia_host::driver::access::Permissions;
use nvidia_host::edits::DeviceNode;

use super::process::{NodePermissions, Process};
use super::step::Step;
use crate::oci::SpecView;
use crate::oci::spec_view::LinuxDevice;

/// Changes the steps so that the hook creates the nodes that only a group can open. The first process of the container does not
/// decide: it is often root, and starts a service as another user, which has none of the container's groups (gosu, s6-setuidgid,
/// `podman exec --user`).
pub(crate) fn create_own(steps: &mut [Step], process: &Process, spec: &SpecView) {
    for step in steps {
        if let Step::MountNode { node, own } = step
            && permissions(node, spec).is_for_a_group()
        {
            *own = Some(process.clone());
        }
    }
}

/// Returns the nodes that the hook does not create, with their mode and owner in the container.
pub(crate) fn of_others<'a>(steps: &'a [Step], spec: &SpecView) -> Vec<NodePermissions<'a>> {
    let mut nodes = Vec::new();
    for step in steps {
        if let Step::MountNode { node, own: None } = step {
            nodes.push(NodePermissions {
                path: &node.source,
                permissions: permissions(node, spec),
            });
        }
    }
    nodes
}

/// Returns the mode and owner of a node in the container. The runtime creates the nodes in config.json. `--device` and `--privileged`
/// copy the host's mode: on SUSE, only the group "video" can open such a node.
pub(crate) fn permissions(node: &DeviceNode, spec: &SpecView) -> Permissions {
    match listed(node, spec) {
        // In a user namespace, the runtime mounts the host's node, because it cannot create one.
        Some(device) if !spec.user_namespace => device.permissions(),
        _ => node.permissions,
    }
}

/// Returns the entry of config.json for the node.
pub(crate) fn listed<'s>(node: &DeviceNode, spec: &'s SpecView) -> Option<&'s LinuxDevice> {
    let path = node.path.absolute();
    spec.devices.iter().find(|device| device.path == path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::spec_view::{IdMapping, OVERFLOW_ID};
    use base::paths::HostPath;

    fn spec(uid: u32, gid: u32, groups: &[u32]) -> SpecView {
        SpecView {
            user: (uid, gid),
            additional_gids: groups.to_vec(),
            ..SpecView::default()
        }
    }

    #[test]
    fn as_the_kernel_decides_it() {
        let node = |mode, uid, gid| Permissions { mode, uid, gid };
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
            (
                1000,
                44,
                &[],
                Permissions {
                    mode: 0o606,
                    ..suse
                },
                false,
            ),
            // Readable, but not writable.
            (
                1000,
                1000,
                &[],
                Permissions {
                    mode: 0o664,
                    ..suse
                },
                false,
            ),
        ] {
            assert_eq!(
                Process::from_spec(&spec(uid, gid, groups), false).may_open(node),
                may,
                "{uid} {gid} {groups:?} {node:?}"
            );
        }
        let mapping = |host_id| {
            vec![IdMapping {
                container_id: 0,
                host_id,
                size: 65536,
            }]
        };
        let mapped = |host| SpecView {
            user_namespace: true,
            uid_mappings: mapping(host),
            gid_mappings: mapping(host),
            ..spec(0, 0, &[44])
        };
        assert!(
            !Process::from_spec(&mapped(100_000), false).may_open(suse),
            "not root on the host"
        );
        assert!(
            Process::from_spec(&mapped(0), false).may_open(suse),
            "root on the host"
        );
        assert!(Process::from_spec(&mapped(100_000), false).may_open(open));
        // Rootless: the nodes' owner is not mapped, and has the same overflow id as all other unmapped users.
        let unmapped = node(0o660, OVERFLOW_ID, OVERFLOW_ID);
        assert!(!Process::from_spec(&spec(0, 0, &[OVERFLOW_ID]), true).may_open(unmapped));
        let keeps = SpecView {
            keeps_groups: true,
            ..spec(0, 0, &[])
        };
        assert!(Process::from_spec(&keeps, true).may_open(unmapped));
    }

    #[test]
    fn nodes_of_a_group_are_created_and_others_are_named() {
        let step = |(name, mode, gid): (&str, u32, u32)| Step::MountNode {
            node: DeviceNode {
                source: HostPath::new(format!("/dev/{name}")),
                path: base::paths::ContainerPath::new(format!("/dev/{name}")).unwrap(),
                major: 195,
                minor: 0,
                permissions: Permissions { mode, uid: 0, gid },
            },
            own: None,
        };
        let nodes = [
            ("nvidia0", 0o660, 44),
            ("cap1", 0o400, 0),
            ("cap2", 0o444, 0),
        ];
        // Processes that root of the container starts are not root.
        let process = |uid, gid| Process::from_spec(&spec(uid, gid, &[]), false);
        let owns = |listed: &[LinuxDevice]| {
            let spec = SpecView {
                devices: listed.to_vec(),
                ..SpecView::default()
            };
            let mut steps = nodes.map(step);
            create_own(&mut steps, &process(0, 0), &spec);
            let own = steps
                .each_ref()
                .map(|step| matches!(step, Step::MountNode { own: Some(_), .. }));
            let finding = process(1000, 1000).finding(&of_others(&steps, &spec));
            (own, finding.map(|finding| finding.what).unwrap_or_default())
        };
        let cap1 = "user 1000 of the container cannot open \"/dev/cap1\"";
        let (own, finding) = owns(&[]);
        assert_eq!(own, [true, false, false]);
        assert_eq!(finding, format!("{cap1}: owner 0:0, mode 0400"));
        let device = |file_mode, gid| LinuxDevice {
            path: "/dev/nvidia0".into(),
            file_mode,
            gid,
            ..LinuxDevice::default()
        };
        // The runtime creates the node, for all unless config.json says something else, as with --device and --privileged.
        for (listed, expected, shut) in [
            (device(None, None), false, format!("{cap1}:")),
            (device(Some(0o666), Some(44)), false, format!("{cap1}:")),
            (device(Some(0o660), Some(44)), true, format!("{cap1}:")),
            (device(Some(0o020_660), Some(44)), true, format!("{cap1}:")),
            (
                device(Some(0o600), None),
                false,
                "open \"/dev/nvidia0\" and 1 other device nodes: owner 0:0, mode 0600".to_owned(),
            ),
        ] {
            let (own, finding) = owns(std::slice::from_ref(&listed));
            assert_eq!(own, [expected, false, false], "{listed:?}");
            assert!(finding.contains(&shut), "{listed:?}: {finding}");
        }
        let unmapped = NodePermissions {
            path: &HostPath::new("/dev/nvidia0"),
            permissions: Permissions {
                mode: 0o660,
                uid: OVERFLOW_ID,
                gid: OVERFLOW_ID,
            },
        };
        let process = Process::from_spec(&SpecView::default(), true);
        let finding = process.finding(&[unmapped]).unwrap();
        assert!(
            finding
                .what
                .ends_with("\"/dev/nvidia0\": owner outside the user namespace, mode 0660"),
            "{finding:?}"
        );
    }
}
