//! `doctor --container`: finds what a running container lacks: driver files, device nodes, or the permission to open them. Any program
//! can have set up the container.
//!
//! [`find`] finds its process, [`inspect`] reads a part of the container into [`ContainerFacts`], and the checks here are pure
//! functions. The container may be hostile: its files are opened below its root, only stored regular files are read, and none is
//! executed. Each part is examined in a child process with a deadline, see [`parts`].

pub(crate) mod find;
mod inspect;
mod parts;

use std::collections::BTreeMap;
use std::io;

use anyhow::Result;
use nix::errno::Errno;

use base::report::{Failure, failure};
use base::sys::confine::Identity;
use findings::catalog;
use nvidia_host::config::Config;
use nvidia_host::driver::DriverKind;
use nvidia_host::driver::access::Permissions;
use nvidia_host::driver::node_name::NodeName;

use super::check::Checker::{One, Several};
use super::check::{Check, Named, Section};
use super::driver::{group, may_open, missing};
use crate::cgroup::filter::Filter;
use crate::oci::device_rules::DeviceRule;
use find::ProcessId;
use inspect::Known;
use parts::{PATIENCE, Unanswered};

/// The properties of a running container that affect GPUs. Those of the parts that are not examined are empty.
#[derive(Debug)]
pub(crate) struct ContainerFacts {
    /// Its first process, as a number of the host
    pub pid: i32,
    /// The name or id from the command line; empty with `--pid`
    pub name: String,
    /// The version of the host's kernel module
    pub module: Option<String>,
    /// The kind of the host's driver. WSL 2 has no such module.
    pub driver_kind: DriverKind,
    pub process: ContainerProcess,
    /// The libraries that programs open by name
    pub libraries: Vec<Library>,
    /// The device nodes in its /dev
    pub nodes: Vec<ContainerNode>,
    /// Its device cgroup, or why that cannot be read
    pub filter: Result<Filter, String>,
}

impl ContainerFacts {
    fn is_of_wsl(&self) -> bool {
        self.driver_kind == DriverKind::Wsl
    }
}

/// A process, as the host sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContainerProcess {
    /// User and group with which files are opened
    pub identity: Identity,
    pub groups: Vec<u32>,
    /// Whether the process ignores permissions of the host's files (`CAP_DAC_OVERRIDE` in the host's user namespace)
    pub overrides: bool,
    /// `NVIDIA_DRIVER_CAPABILITIES`, if it is set
    pub capabilities: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Library {
    /// The name that programs open: `libcuda.so.1`
    pub name: &'static str,
    /// The file that the dynamic linker finds
    pub found: Option<FoundLibrary>,
    /// A file in another directory, if the dynamic linker finds none
    pub elsewhere: Option<String>,
}

/// The file of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundLibrary {
    pub path: String,
    /// The version in the file name, which can be wrong for a mount
    pub version: Option<String>,
    /// Its device and inode number
    pub id: (u64, u64),
    /// Whether it is the host's file in the version of the kernel module; `None` if that file is unknown
    pub is_hosts: Option<bool>,
    /// Whether the file is empty, as mount points of earlier starts are
    pub is_empty: bool,
}

/// An expected device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContainerNode {
    /// `nvidiactl`
    pub name: String,
    /// Its major and minor number, if they are known
    pub expected: Option<(u32, u32)>,
    pub found: Option<FoundNode>,
}

/// The file at the path of a device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundNode {
    /// Its major and minor number, if it is a character device
    pub device: Option<(u32, u32)>,
    pub mode: u32,
    /// Its owner, as an id of the host
    pub uid: u32,
    /// Its group, as an id of the host
    pub gid: u32,
    /// Whether its file system is mounted with nodev, with which device nodes cannot be opened
    pub nodev: bool,
}

/// What is examined in one child process.
struct Part {
    kind: Examined,
    /// Its name in messages
    name: &'static str,
    checks: &'static [Named<ContainerFacts>],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Examined {
    Process,
    Libraries,
    Nodes,
}

/// The parts and their checks, in the order of the output.
const PARTS: [Part; 3] = [
    Part {
        kind: Examined::Process,
        name: "the process",
        checks: &[("container", One(process))],
    },
    Part {
        kind: Examined::Libraries,
        name: "the driver libraries",
        checks: &[("libraries", Several(libraries))],
    },
    Part {
        kind: Examined::Nodes,
        name: "the directory \"/dev\"",
        checks: &[
            ("nodes", Several(nodes)),
            ("access", Several(access)),
            ("cgroup", Several(cgroup)),
        ],
    },
];

/// Returns the names of the checks.
pub(super) fn names() -> impl Iterator<Item = (Section, &'static str)> {
    PARTS
        .iter()
        .flat_map(|part| part.checks)
        .map(|(name, _)| (Section::Container, *name))
}

/// Examines the container of this process. `name` is the name or id from the command line.
///
/// # Errors
/// If the process is not in a container, has ended, or may not be inspected.
pub(crate) fn examine(process: ProcessId, name: &str, config: &Config) -> Result<Vec<Check>> {
    let pid = process.pid;
    let known = Known::read(process, name, config)?;
    let mut checks = Vec::new();
    for part in &PARTS {
        match parts::ask(PATIENCE, part, &|reporter| {
            inspect::inspect(&known, part.kind, reporter)
        }) {
            Ok(Ok(examined)) => checks.extend(examined),
            Ok(Err(error)) if error.raw_os_error() == Some(Errno::ESRCH as i32) => {
                return Err(ended(pid));
            }
            Ok(Err(error)) => return Err(cannot_enter(pid, error)),
            Err(why) => checks.extend(unanswered(part, &why, pid)),
        }
    }
    // The cgroup that was read is that of another process, if the number is used again.
    if find::by_pid(pid).ok() != Some(process) {
        return Err(ended(pid));
    }
    Ok(checks)
}

fn ended(pid: i32) -> anyhow::Error {
    failure(
        &catalog::NOT_EXAMINED,
        format!("process {pid} has ended"),
        EXISTING,
    )
}

const EXISTING: &str = "give a running container with --container; \"oci-nvidia-hook ps\" and \"podman ps\" list containers";

/// Returns the error for a file of a process in /proc that cannot be opened.
fn cannot_enter(pid: i32, error: io::Error) -> anyhow::Error {
    // The option hidepid= of /proc hides the processes of other users from everyone but root.
    if error.kind() == io::ErrorKind::NotFound && rustix::process::geteuid().is_root() {
        return failure(
            &catalog::NOT_EXAMINED,
            format!("process {pid} does not exist"),
            EXISTING,
        );
    }
    let what = format!("cannot inspect the container of process {pid}");
    let hint = if rustix::process::geteuid().is_root() {
        EXISTING
    } else {
        "run the command as root; \"ps -e\" lists the existing processes"
    };
    anyhow::Error::new(error).context(Failure::new(&catalog::NOT_EXAMINED, what, hint))
}

/// Returns the results for a part of the container that does not answer.
fn unanswered(part: &Part, why: &Unanswered, pid: i32) -> Vec<Check> {
    let what = match why {
        Unanswered::Silent(path) => {
            let place = if path.is_empty() {
                String::new()
            } else {
                format!(", at \"{path}\"")
            };
            format!("no answer within {} seconds{place}", PATIENCE.as_secs())
        }
        Unanswered::Failed(why) => why.clone(),
    };
    let what = format!("{} of the container cannot be examined: {what}", part.name);
    let fix = format!(
        "run \"findmnt --task {pid}\", and check that the servers of its FUSE and network file systems respond"
    );
    let mut checks = vec![Check::of(&catalog::CONTAINER_SILENT, what, fix)];
    let skipped = || Check::skipped(format!("{} cannot be examined", part.name));
    checks.resize_with(part.checks.len(), skipped);
    let named = checks.into_iter().zip(part.checks);
    named
        .map(|(check, (name, _))| Check {
            section: Section::Container,
            check: name,
            ..check
        })
        .collect()
}

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

fn process(facts: &ContainerFacts) -> Check {
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

fn libraries(facts: &ContainerFacts) -> Vec<Check> {
    facts
        .libraries
        .iter()
        .map(|library| of_library(library, facts))
        .collect()
}

fn of_library(library: &Library, facts: &ContainerFacts) -> Check {
    let name = library.name;
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

fn nodes(facts: &ContainerFacts) -> Vec<Check> {
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
        outcomes.push(Check::of(&catalog::CONTAINER_NODE, what, again(facts)));
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

fn access(facts: &ContainerFacts) -> Vec<Check> {
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
        let fix = "have the engine create the nodes: --device, CDI, or precreate";
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

fn cgroup(facts: &ContainerFacts) -> Vec<Check> {
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
               removed the rules: have the engine list the devices (--device, CDI, precreate)";
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
