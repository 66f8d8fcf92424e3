//! Checks of config.toml, the log, SELinux, and the permissions of users.

use base::tree::ResolvedFile;
use findings::catalog;
use nvidia_host::driver::group::{GIVE_A_GROUP, join};

use super::check::{Check, or_ok};
use super::driver::{group, may_open, owned};
use super::facts::Facts;
use super::inspect::DEFAULTS;
use crate::record::log_file;
use engines::EngineKind;
use nvidia_host::config::NodeAccess;
use nvidia_host::driver::access::Permissions;

pub(super) fn config(facts: &Facts) -> Vec<Check> {
    let mut outcomes = Vec::new();
    match &facts.config {
        Err(finding) => outcomes.push(Check::found(finding.clone())),
        Ok((config, findings)) => {
            outcomes.extend(findings.iter().map(|finding| Check::found(finding.clone())));
            if !config.edit_cgroups && facts.user.is_none() {
                outcomes.push(Check::of(
                    &catalog::NO_CGROUPS,
                    "no-cgroups = true in config.toml: containers of rootful engines cannot open the GPUs unless \
                     config.json lists them (CDI)",
                    "remove no-cgroups from config.toml: rootless containers do not need it",
                ));
            }
        }
    }
    or_ok(outcomes, Check::ok(configuration(facts)))
}

/// Describes a valid configuration.
fn configuration(facts: &Facts) -> String {
    if let Some((config, hook_file)) = &facts.config_of_hooks {
        let file = hook_file.display();
        return format!("{config:?}, which {file} passes to the hook, is valid");
    }
    match (facts.has_config, facts.has_drop_ins, facts.has_defaults) {
        (true, ..) => "config.toml is valid".to_owned(),
        (false, true, _) => {
            "config.toml does not exist, and the files in config.toml.d are valid".to_owned()
        }
        (false, false, true) => {
            format!("config.toml does not exist: the defaults are used, which {DEFAULTS:?} lists")
        }
        (false, false, false) => "config.toml does not exist: the defaults are used".to_owned(),
    }
}

pub(super) fn log(facts: &Facts) -> Check {
    match &facts.log {
        None if facts.journal => {
            Check::ok("the hook logs to the journal: \"journalctl -t oci-nvidia-hook\"")
        }
        None => Check::ok(
            "config.toml names no log file, and the journal does not run; \"oci-nvidia-hook why\" shows what the hook did",
        ),
        Some((path, Ok(()))) => Check::ok(format!("the log file {path:?} is writable")),
        Some((path, Err(why))) if facts.user.is_some() => Check::skipped(format!(
            "the log file {path:?} is not written for this user: {why}"
        )),
        Some((path, Err(why))) => Check::found(log_file::finding(format!(
            "cannot open the log file {path:?}: {why}"
        ))),
    }
}

pub(super) fn selinux(facts: &Facts) -> Check {
    let Some(selinux) = facts.selinux else {
        return Check::skipped("the kernel has no SELinux");
    };
    if !selinux.enforcing {
        return Check::ok("SELinux is not in enforcing mode");
    }
    match (selinux.devices, selinux.xserver_devices) {
        (Some(true), _) => Check::ok("containers can use devices (container_use_devices)"),
        (_, Some(true)) => Check::ok("containers can use the GPUs (container_use_xserver_devices)"),
        (None, None) => Check::skipped(
            "the booleans of the policy for containers are missing, or cannot be read",
        ),
        _ if creates_all_nodes(facts) => Check::ok(
            "the hook creates the device nodes of containers, with their label (device-node-access)",
        ),
        (_, xserver) => {
            // container_use_xserver_devices is newer and allows less.
            let boolean = if xserver.is_some() {
                "container_use_xserver_devices"
            } else {
                "container_use_devices"
            };
            Check::of(
                &catalog::SELINUX,
                format!("SELinux is in enforcing mode, and {boolean} is off"),
                format!("setsebool -P {boolean} on"),
            )
        }
    }
}

/// Whether containers of rootful engines get no node of the host, because the hook creates nodes in place of those that only a group can
/// open ([`crate::plan::access`]). The nodes of MIG devices are the host's.
fn creates_all_nodes(facts: &Facts) -> bool {
    let settings = facts.settings();
    let creates = settings.edit_cgroups && settings.device_node_access == NodeAccess::Container;
    if facts.user.is_some() || !creates || !facts.driver.mig_caps.is_empty() {
        return false;
    }
    let nodes = facts.driver.nodes.iter().chain(&facts.driver.modeset);
    let mut found: Vec<&ResolvedFile> = nodes.filter_map(|node| node.found.as_ref()).collect();
    found.extend(&facts.driver.uvm);
    !found.is_empty() && found.into_iter().all(is_for_a_group)
}

fn is_for_a_group(node: &ResolvedFile) -> bool {
    Permissions::from(node).is_for_a_group()
}

pub(super) fn groups(facts: &Facts) -> Check {
    let nodes = || {
        facts
            .driver
            .nodes
            .iter()
            .filter_map(|node| node.found.as_ref())
    };
    if nodes().next().is_none() {
        return Check::skipped("the device nodes are missing");
    }
    let only_for_a_group = nodes().filter(|node| node.mode & 0o006 != 0o006);
    let Some((gid, mode)) = only_for_a_group.map(|node| (node.gid, node.mode)).min() else {
        return Check::ok("every user can open the device nodes");
    };
    let name = group(gid);
    let Some(user) = &facts.user else {
        // The check "hook-user" reports what this means for NVML.
        if join("USER", gid, mode) == GIVE_A_GROUP {
            let what = "only root can open the device nodes: containers need separate nodes, which the hook, CDI or a \
                        device plugin creates; rootless Podman has no access";
            return Check::of(&catalog::GROUP_NODES, what, GIVE_A_GROUP);
        }
        let what = format!(
            "only members of the group {name} can open the device nodes: users of rootless Podman must join it, and processes of \
             containers and pods that do not run as root too, unless the hook, CDI or a device plugin creates nodes for them"
        );
        let join = join("USER", gid, mode);
        let fix = format!(
            "{join}; for containers --group-add {gid}; in a pod supplementalGroups: [{gid}]"
        );
        return Check::of(&catalog::GROUP_NODES, what, fix);
    };
    if let Some(node) =
        nodes().find(|node| !may_open(*node, user.uid, |gid| facts.groups.contains(&gid)))
    {
        let what = format!("user {} cannot open {}", user.name, owned(node));
        let fix = format!("as root, {}", join(&user.name, node.gid, node.mode));
        return Check::of(&catalog::NODE_ACCESS, what, fix);
    }
    let podman = facts
        .engines
        .iter()
        .find(|engine| matches!(engine.kind, EngineKind::PodmanOf(_)));
    let runtime = podman.and_then(|engine| engine.runtime.as_ref());
    let what = format!(
        "{} can open the device nodes as a member of {name}, but containers lose this group",
        user.name
    );
    let fix = match runtime {
        Some(runtime) if runtime.name != "crun" => {
            format!(
                "{} does not support keep-groups: podman --runtime crun run --group-add keep-groups …",
                runtime.name
            )
        }
        _ => "podman run --group-add keep-groups …".to_owned(),
    };
    // No recipe works without this option.
    Check::of(&catalog::NODE_ACCESS, what, fix)
}
