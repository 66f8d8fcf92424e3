//! The checks of a container: pure functions of [`ContainerFacts`].

use std::collections::BTreeMap;

use base::sys::confine::Identity;
use findings::catalog;
use nvidia_host::driver::access::Permissions;
use nvidia_host::driver::node_name::NodeName;

use super::facts::{ContainerFacts, ContainerNode, ContainerProcess, FoundNode, Library};
use crate::cgroup::filter::Filter;
use crate::doctor::check::Check;
use crate::doctor::driver::{group, may_open, missing};
use crate::oci::device_rules::DeviceRule;

/// Returns the fix for a missing part.
fn again(facts: &ContainerFacts) -> String {
    let why = match facts.name.as_str() {
        "" => String::new(),
        name => format!("; \"oci-nvidia-hook why {name}\" shows what the hook did"),
    };
    format!(
        "start the container with -e NVIDIA_VISIBLE_DEVICES=all, or with --device nvidia.com/gpu=all{why}"
    )
}

pub(super) fn process(facts: &ContainerFacts) -> Check {
    let Identity { uid, gid } = facts.process.identity;
    let driver = match &facts.module {
        Some(version) => format!("driver {version}"),
        None if facts.is_of_wsl() => "the driver of WSL 2".to_owned(),
        None => {
            let what = "the kernel module of the host is not loaded";
            return Check::of(&catalog::NOT_LOADED, what, "oci-nvidia-hook doctor");
        }
    };
    Check::ok(format!(
        "process {} runs as user {uid}, group {gid} of the host; {driver}",
        facts.pid
    ))
}

pub(super) fn libraries(facts: &ContainerFacts) -> Vec<Check> {
    facts
        .libraries
        .iter()
        .map(|library| of_library(library, facts))
        .collect()
}

fn of_library(library: &Library, facts: &ContainerFacts) -> Check {
    let name = library.name.as_str();
    let Some(found) = &library.found else {
        if !is_asked_for(name, facts) {
            return Check::skipped(format!(
                "NVIDIA_DRIVER_CAPABILITIES does not request {name}"
            ));
        }
        let Some(place) = &library.elsewhere else {
            let what = format!("{name} is missing in the container");
            return Check::of(&catalog::CONTAINER_LIBRARY, what, again(facts));
        };
        let what =
            format!("the container's dynamic linker does not find {name}, which is at {place:?}");
        let dir = place.rsplit_once('/').map_or("/", |(dir, _)| dir);
        let fix = format!(
            "start the container with -e LD_LIBRARY_PATH={dir}, or have the hook or CDI place the libraries"
        );
        return Check::of(&catalog::CONTAINER_PATH, what, fix);
    };
    if found.is_empty {
        let what = format!(
            "{:?} is empty: it is the mount point of a driver file from an earlier start",
            found.path
        );
        return Check::of(&catalog::CONTAINER_LIBRARY, what, again(facts));
    }
    let path = &found.path;
    match (&found.version, &facts.module) {
        (_, Some(module)) if found.is_hosts == Some(true) => Check::ok(format!(
            "{name} is {path:?}, the host's file of driver {module}"
        )),
        _ if facts.is_of_wsl() && found.is_hosts == Some(true) => Check::ok(format!(
            "{name} is {path:?}, the host's file of the driver of WSL 2"
        )),
        (Some(version), None) if facts.is_of_wsl() => {
            let what = format!(
                "{path:?} belongs to the Linux driver {version}, which does not work on WSL 2"
            );
            let fix = "remove the library from the image, and restart the container";
            Check::of(&catalog::CONTAINER_VERSION, what, fix)
        }
        (Some(version), Some(module)) if version != module => {
            let what = format!(
                "{path:?} has version {version}, but the kernel module has version {module}"
            );
            let fix = "restart the container; if the image or a volume contains the library, remove or update it";
            Check::of(&catalog::CONTAINER_VERSION, what, fix)
        }
        // The content is not read: the container can have changed it.
        (Some(version), _) => Check::skipped(format!(
            "{name} is {path:?}, which is not the host's file: only its name has the version, {version}"
        )),
        (None, _) => Check::skipped(format!(
            "{name} is {path:?}, which is not the host's file and has no version in its name: its version is unknown"
        )),
    }
}

/// Returns whether the container requests this library. Without the variable, the default `compute,utility` includes both.
fn is_asked_for(library: &str, facts: &ContainerFacts) -> bool {
    let capability = if library.starts_with("libcuda") {
        "compute"
    } else {
        "utility"
    };
    let has = |asked: &String| {
        asked
            .split(',')
            .any(|word| [capability, "all", "video"].contains(&word.trim()))
    };
    facts
        .process
        .capabilities
        .as_ref()
        .filter(|asked| !asked.is_empty())
        .is_none_or(has)
}

pub(super) fn nodes(facts: &ContainerFacts) -> Vec<Check> {
    let mut outcomes = Vec::new();
    let absent: Vec<_> = facts
        .nodes
        .iter()
        .filter(|node| node.found.is_none())
        .map(|node| node.name.as_str())
        .collect();
    if !absent.is_empty() {
        let what = format!("{} in the container", missing(&absent));
        outcomes.push(Check::of(&catalog::CONTAINER_NODE, what, again(facts)));
    }
    for node in &facts.nodes {
        let Some(found) = &node.found else { continue };
        if found.device.is_some() && (node.expected.is_none() || found.device == node.expected) {
            continue;
        }
        let is = found.device.map_or_else(
            || "not a device node".to_owned(),
            |(major, minor)| format!("{major}:{minor}"),
        );
        let should = node.expected.map_or(String::new(), |(major, minor)| {
            format!(" instead of {major}:{minor}")
        });
        let what = format!("\"/dev/{}\" in the container is {is}{should}", node.name);
        // The numbers were right when it started: a module was loaded again.
        outcomes.push(Check::of(
            &catalog::CONTAINER_NODE,
            what,
            "restart the container",
        ));
    }
    for (node, _, _) in good(facts) {
        if is_gone(&node.name, facts) {
            let what = format!(
                "the GPU of \"/dev/{}\" does not exist on this host any more",
                node.name
            );
            let fix = "start the container again with a GPU that \"oci-nvidia-hook info\" lists";
            outcomes.push(Check::of(&catalog::UNKNOWN_DEVICE, what, fix));
        }
    }
    let is_gpu = |node: &&ContainerNode| {
        let name = NodeName::parse(&node.name);
        node.found.is_some() && name.is_some_and(NodeName::is_gpu)
    };
    let gpus = facts.nodes.iter().filter(is_gpu).count();
    if gpus == 0 && facts.is_of_wsl() {
        // It is reported as missing.
    } else if gpus == 0 {
        let what = "the container has no device node of a GPU (\"/dev/nvidia0\" and so on)";
        outcomes.push(Check::of(&catalog::CONTAINER_NODE, what, again(facts)));
    } else if outcomes.is_empty() {
        let names: Vec<_> = facts.nodes.iter().map(|node| node.name.as_str()).collect();
        outcomes.push(Check::ok(format!("the container has {}", names.join(", "))));
    }
    outcomes
}

/// Whether a node belongs to a GPU that the host's kernel does not list any more. The node stays in the container, with the same number.
fn is_gone(name: &str, facts: &ContainerFacts) -> bool {
    match (NodeName::parse(name), &facts.gpus) {
        (Some(NodeName::Gpu(minor)), Some(gpus)) => !gpus.contains(&minor),
        _ => false,
    }
}

/// Returns the device nodes that are the expected devices.
fn good(facts: &ContainerFacts) -> impl Iterator<Item = (&ContainerNode, &FoundNode, (u32, u32))> {
    facts.nodes.iter().filter_map(|node| {
        let found = node.found.as_ref()?;
        let device = found
            .device
            .filter(|device| node.expected.is_none_or(|expected| expected == *device))?;
        Some((node, found, device))
    })
}

pub(super) fn access(facts: &ContainerFacts) -> Vec<Check> {
    let ContainerProcess {
        identity,
        groups,
        overrides,
        ..
    } = &facts.process;
    let is_in = |gid: u32| gid == identity.gid || groups.contains(&gid);
    let (mut nodev, mut shut) = (Vec::new(), BTreeMap::<_, Vec<_>>::new());
    for (node, found, _) in good(facts) {
        let FoundNode { mode, uid, gid, .. } = *found;
        if found.nodev {
            nodev.push(format!("\"/dev/{}\"", node.name));
        } else if !overrides && !may_open(Permissions { mode, uid, gid }, identity.uid, is_in) {
            shut.entry((uid, gid, mode))
                .or_default()
                .push(format!("\"/dev/{}\"", node.name));
        }
    }
    let mut outcomes = Vec::new();
    if !nodev.is_empty() {
        let what = format!(
            "file systems that are mounted with nodev contain {}",
            nodev.join(", ")
        );
        let fix = "have the engine create the nodes: --device or CDI";
        outcomes.push(Check::of(&catalog::CONTAINER_ACCESS, what, fix));
    }
    for ((uid, gid, mode), nodes) in shut {
        let Identity {
            uid: user,
            gid: group_of_user,
        } = identity;
        let what = format!(
            "user {user}, group {group_of_user} of the host cannot open {} ({uid}:{} {mode:04o})",
            nodes.join(", "),
            group(gid)
        );
        let fix = format!(
            "request the GPUs with NVIDIA_VISIBLE_DEVICES or CDI instead of --device, without device-node-access = \"host\" in \
             config.toml, and create the container again: all its processes can open its nodes then; or add the group to the process: \
             --group-add {gid} (rootless: --group-add keep-groups, with crun; Kubernetes: supplementalGroups: [{gid}]); or give the \
             host's nodes mode 0666"
        );
        outcomes.push(Check::of(&catalog::CONTAINER_ACCESS, what, fix));
    }
    match (outcomes.is_empty(), good(facts).count()) {
        (true, 0) => vec![Check::skipped("the container has no device nodes")],
        (true, _) => vec![Check::ok(
            "the container's process has permission to open the device nodes",
        )],
        _ => outcomes,
    }
}

pub(super) fn cgroup(facts: &ContainerFacts) -> Vec<Check> {
    let filter = match &facts.filter {
        Ok(Filter::None) => return vec![Check::ok("no device cgroup limits the container")],
        Ok(filter) => filter,
        Err(why) => {
            return vec![Check::skipped(format!(
                "cannot read the device cgroup: {why}"
            ))];
        }
    };
    let fix = "restart the container; if the GPUs worked before, \"systemctl daemon-reload\" or an update of its resources \
               removed the rules: have the engine list the devices (--device, CDI)";
    let (mut denied, mut answers) = (Vec::new(), Vec::new());
    for (node, _, (major, minor)) in good(facts) {
        match filter.allows(DeviceRule { major, minor }) {
            Some(false) => {
                denied.push(format!("\"/dev/{}\" ({major}:{minor})", node.name));
            }
            answer => answers.push(answer),
        }
    }
    let otherwise = match answers.iter().min() {
        None => Check::skipped("the container has no device nodes"),
        Some(None) => {
            Check::skipped("cannot determine what the programs of the device cgroup allow")
        }
        Some(Some(_)) => Check::ok("the device cgroup allows the GPUs"),
    };
    if denied.is_empty() {
        return vec![otherwise];
    }
    vec![Check::of(
        &catalog::CONTAINER_CGROUP,
        format!("the device cgroup denies {}", denied.join(", ")),
        fix,
    )]
}
