//! Compares a CDI spec, or a container that an engine set up from one, with the host.
//!
//! The numbers of most nodes change when a module is loaded again and with each boot, a GPU can leave the host, and a MIG device can be
//! replaced by another one, while the spec and its paths stay the same. A node with an old number belongs to no driver or to another one.
//! Everything that decides whether a spec is the host's asks [`differences`].

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};

use base::paths::ContainerPath;
use base::report::{Finding, Kind};
use base::tree::Tree;
use cdi_spec::spec::{ContainerEdits, Spec};
use findings::catalog;
use rustix::fs::FileType;

use super::entry::RootfsEdits;
use super::stamp::Stamp;
use crate::bus_id::BusId;
use crate::driver::node_name::NodeName;
use crate::driver::pci;
use crate::host::Roots;
use crate::inventory::procfs::{self, KernelGpu};

/// What a spec, or a container that was set up from it, takes from the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// The driver for which the spec was written
    pub driver: Option<String>,
    /// The device nodes
    pub nodes: Vec<SpecNode>,
    /// The GPUs and MIG devices
    pub devices: Vec<SpecDevice>,
}

/// A device node of a spec or of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecNode {
    /// Its path in the container
    pub path: PathBuf,
    /// The path of the node on the host
    pub source: PathBuf,
    /// What the spec or config.json states
    pub state: NumberedNode,
}

/// What a spec or config.json states about a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberedNode {
    /// A character device with these numbers
    Character(u32, u32),
    /// No numbers: the engine takes those of the host
    OfHost,
    /// Another type of file
    NotCharacter,
}

/// A GPU or a MIG device of a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecDevice {
    /// Its node that no other device has
    pub node: NodeName,
    /// Its UUID; `None` in a spec of an earlier version of this program
    pub uuid: Option<String>,
    /// The directory of its GPU in /proc/driver/nvidia/gpus, if the kernel lists it
    pub gpu_dir: Option<OsString>,
    /// Its files in /proc/driver/nvidia
    pub files: Vec<PathBuf>,
    /// The nodes of the GPU in /dev/dri, by name
    pub drm: BTreeSet<String>,
}

impl Parts {
    /// Returns what a device of a spec takes from the host, with what all containers get.
    #[must_use]
    pub fn of_spec(spec: &Spec, device: &ContainerEdits) -> Self {
        let mut parts = Self::default();
        for edits in [device, &spec.container_edits] {
            for node in &edits.device_nodes {
                let path = PathBuf::from(&node.path);
                let source = node.host_path.as_ref().map(PathBuf::from);
                parts.nodes.push(SpecNode {
                    source: source.unwrap_or_else(|| path.clone()),
                    path,
                    state: NumberedNode::of(node.kind.as_deref(), node.major, node.minor),
                });
            }
        }
        let nodes: BTreeSet<_> = parts.nodes.iter().map(|node| node.path.clone()).collect();
        for hook in &spec.container_edits.hooks {
            if let Some(entry) = RootfsEdits::from_entry(&hook.args) {
                parts.add_entry(&entry, |node| nodes.contains(&node.absolute()));
            }
        }
        parts
    }

    /// Adds what a hook entry states about the devices whose nodes a container has.
    pub fn add_entry(&mut self, entry: &RootfsEdits, has: impl Fn(&ContainerPath) -> bool) {
        if let Some(stamp) = entry.stamp.as_deref().and_then(Stamp::parse) {
            self.driver = Some(stamp.driver);
        }
        for (node, more) in &entry.with_node {
            if has(node) {
                self.devices.extend(SpecDevice::of_entry(node, more));
            }
        }
    }

    /// Returns the UUIDs of the MIG devices among the devices. Only NVML lists those of the host.
    #[must_use]
    pub fn mig_uuids(&self) -> Vec<String> {
        let mut uuids = Vec::new();
        for device in &self.devices {
            if matches!(device.node, NodeName::Cap(_)) {
                uuids.extend(device.uuid.clone());
            }
        }
        uuids
    }
}

impl NumberedNode {
    /// Returns what the fields `type`, `major` and `minor` state. `u` is another word for `c`, see runtime-spec.
    #[must_use]
    pub fn of(kind: Option<&str>, major: Option<i64>, minor: Option<i64>) -> Self {
        if !matches!(kind, None | Some("" | "c" | "u")) {
            return Self::NotCharacter;
        }
        let number = |number: Option<i64>| u32::try_from(number?).ok();
        match (number(major), number(minor)) {
            (Some(major), Some(minor)) => Self::Character(major, minor),
            _ => Self::OfHost,
        }
    }
}

impl SpecDevice {
    /// Returns `None` for a node that belongs to no GPU.
    fn of_entry(node: &ContainerPath, entry: &RootfsEdits) -> Option<Self> {
        let mut device = Self {
            node: NodeName::of_path(&node.absolute())?,
            uuid: entry.uuid.clone(),
            gpu_dir: None,
            files: Vec::new(),
            drm: BTreeSet::new(),
        };
        for (path, source) in &entry.shown {
            if let Ok(dir) = path.strip_prefix(procfs::GPUS) {
                device.gpu_dir = Some(dir.as_os_str().to_owned());
            }
            device.files.push(source.as_path().to_owned());
        }
        for (link, text) in &entry.links {
            if link.absolute().starts_with("/dev/dri") {
                let name = text.file_name().and_then(OsStr::to_str);
                device.drm.extend(name.map(str::to_owned));
            }
        }
        Some(device)
    }
}

/// The state of the host, as far as some parts depend on it.
#[derive(Clone, Debug, Default)]
pub struct HostView {
    /// The version of the loaded module, or another identity of the driver as in a stamp
    pub driver: Option<String>,
    /// The GPUs that the kernel lists among those of the parts, by directory
    pub gpus: BTreeMap<OsString, KernelGpu>,
    /// The nodes in /dev/dri of these GPUs
    pub drm: BTreeMap<BusId, Vec<String>>,
    /// The numbers of the device nodes, by the path on the host; `None` for another file
    pub nodes: BTreeMap<PathBuf, Option<(u32, u32)>>,
    /// Files that do not exist
    pub missing: BTreeSet<PathBuf>,
    /// The UUIDs of all MIG devices, if NVML has listed them
    pub mig_devices: Option<BTreeSet<String>>,
    /// That the loaded module and the libraries have different versions: no spec can be for both
    pub mismatch: Option<Finding>,
}

impl HostView {
    /// Examines the host for these parts, below the roots of its driver. Never calls NVML. The nodes of a spec are below `host`, which
    /// is `/` if it is `None`.
    #[must_use]
    pub fn examine<'p>(
        parts: impl IntoIterator<Item = &'p Parts>,
        roots: &Roots,
        host: Option<&Tree>,
    ) -> Self {
        let mut view = Self {
            driver: procfs::read_version(&roots.proc),
            ..Self::default()
        };
        for parts in parts {
            for node in &parts.nodes {
                view.add_node(&node.source, host);
            }
            for device in &parts.devices {
                view.add_device(device, roots, host);
            }
        }
        view
    }

    fn add_node(&mut self, path: &Path, host: Option<&Tree>) {
        if self.nodes.contains_key(path) || self.missing.contains(path) {
            return;
        }
        match device_number(&below(host, path)) {
            Ok(number) => drop(self.nodes.insert(path.to_owned(), number)),
            Err(_) => drop(self.missing.insert(path.to_owned())),
        }
    }

    fn add_device(&mut self, device: &SpecDevice, roots: &Roots, host: Option<&Tree>) {
        if let Some(dir) = &device.gpu_dir
            && !self.gpus.contains_key(dir)
            && let Some(gpu) = procfs::read_one_gpu(&roots.proc, dir)
        {
            if !device.drm.is_empty() {
                let names = pci::drm_names(&roots.sys, gpu.bus_id);
                self.drm.insert(gpu.bus_id, names);
            }
            self.gpus.insert(dir.clone(), gpu);
        }
        for file in &device.files {
            if rustix::fs::lstat(below(host, file)).is_err() {
                self.missing.insert(file.clone());
            }
        }
    }
}

fn below(host: Option<&Tree>, path: &Path) -> PathBuf {
    match host {
        Some(host) => host.on_host(path),
        None => path.to_owned(),
    }
}

/// Returns the major and minor number of a file on the host; `None` if it is not a character device.
fn device_number(path: &Path) -> rustix::io::Result<Option<(u32, u32)>> {
    let stat = rustix::fs::stat(path)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
        return Ok(None);
    }
    let number = stat.st_rdev;
    Ok(Some((rustix::fs::major(number), rustix::fs::minor(number))))
}

/// A part of a spec that is not the host's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// No driver is loaded.
    NotLoaded,
    /// Another driver is loaded.
    Driver {
        /// The driver of the spec
        spec: String,
        /// The loaded driver
        host: String,
    },
    /// A GPU or MIG device has left the host, or another one has taken its place.
    Gone(String),
    /// A node now belongs to another device than this one.
    Moved(PathBuf, String),
    /// The host has no node at the path.
    Missing(PathBuf),
    /// A node has other numbers on the host.
    Number {
        /// Its path in the container
        path: PathBuf,
        /// Its numbers in the spec or the container
        spec: (u32, u32),
        /// The numbers on the host; `None` if the host has another file there
        host: Option<(u32, u32)>,
    },
    /// The spec or the container has another type of file.
    NotCharacter(PathBuf),
}

impl Difference {
    /// Returns the kind of the finding about it.
    #[must_use]
    pub const fn kind(&self) -> &'static Kind {
        match self {
            Self::NotLoaded => &catalog::NOT_LOADED,
            Self::Driver { .. } => &catalog::MISMATCH,
            Self::Gone(_) => &catalog::UNKNOWN_DEVICE,
            Self::Missing(_) => &catalog::NODE_MISSING,
            Self::Moved(..) | Self::Number { .. } | Self::NotCharacter(_) => {
                &catalog::OUTDATED_NODE
            }
        }
    }

    /// Returns the difference in words, with this name of the spec.
    #[must_use]
    pub fn of_spec(&self, spec_name: &str) -> String {
        match self {
            Self::NotLoaded => "the kernel module nvidia is not loaded".to_owned(),
            Self::Driver { spec, host } => {
                format!("{spec_name} is for driver {spec}, but {host} is loaded")
            }
            Self::Gone(device) => format!("{device} does not exist on this host any more"),
            Self::Moved(node, device) => {
                format!("{node:?} now belongs to another device than {device}")
            }
            Self::Missing(path) => format!("{path:?} is missing on the host"),
            Self::Number { path, spec, host } => {
                let ((major, minor), path) = (spec, path.display());
                let states = format!("{spec_name} has {major}:{minor} for \"{path}\"");
                match host {
                    Some((major, minor)) => {
                        format!("{states}, which is {major}:{minor} on this host")
                    }
                    None => format!("{states}, which is not a device node on this host"),
                }
            }
            Self::NotCharacter(path) => {
                format!("{path:?} is not a character device in {spec_name}")
            }
        }
    }
}

/// Prints it for a container, whose spec is unknown.
impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.of_spec("the CDI spec"))
    }
}

/// Returns the parts that are not the host's, the causes before their consequences. Without any, a container gets the nodes and the devices
/// that a decision for this host would give.
#[must_use]
pub fn differences(parts: &Parts, host: &HostView) -> Vec<Difference> {
    let mut found = Vec::new();
    if let Some(spec) = &parts.driver {
        // On WSL 2, no module is loaded, and the kernel lists no GPUs.
        let needs_module = parts.devices.iter().any(|device| device.gpu_dir.is_some());
        match &host.driver {
            None if needs_module => return vec![Difference::NotLoaded],
            Some(driver) if driver != spec => found.push(Difference::Driver {
                spec: spec.clone(),
                host: driver.clone(),
            }),
            _ => {}
        }
    }
    for device in &parts.devices {
        found.extend(compare_device(device, host));
    }
    for node in &parts.nodes {
        found.extend(compare_node(node, host));
    }
    found
}

fn compare_device(device: &SpecDevice, host: &HostView) -> Option<Difference> {
    let dir = device.gpu_dir.as_ref()?;
    let name = name_of(device, dir);
    let gpu = host.gpus.get(dir);
    let has_files = !device.files.iter().any(|file| host.missing.contains(file));
    let Some(gpu) = gpu.filter(|_| has_files) else {
        return Some(Difference::Gone(name));
    };
    match device.node {
        NodeName::Gpu(minor) => {
            // The module does not know the UUID before it opens the GPU.
            if device.uuid.is_some() && gpu.uuid.is_some() && device.uuid != gpu.uuid {
                return Some(Difference::Gone(name));
            }
            if gpu.minor.is_some_and(|other| other != minor) {
                return Some(Difference::Moved(device.node.path(), name));
            }
        }
        NodeName::Cap(_) => {
            if let (Some(uuid), Some(known)) = (&device.uuid, &host.mig_devices)
                && !known.contains(uuid)
            {
                return Some(Difference::Gone(name));
            }
        }
        NodeName::Control | NodeName::Dxg => return None,
    }
    let drm = host.drm.get(&gpu.bus_id)?;
    let moved = device.drm.iter().find(|name| !drm.contains(*name))?;
    Some(Difference::Moved(Path::new("/dev/dri").join(moved), name))
}

/// Returns a device for messages: `GPU GPU-… at 0000:01:00.0`.
fn name_of(device: &SpecDevice, dir: &OsStr) -> String {
    let kind = match device.node {
        NodeName::Cap(_) => "MIG device",
        _ => "GPU",
    };
    let dir = dir.display();
    match &device.uuid {
        Some(uuid) => format!("{kind} {uuid} at {dir}"),
        None => format!("the {kind} at {dir}"),
    }
}

fn compare_node(node: &SpecNode, host: &HostView) -> Option<Difference> {
    let path = node.path.clone();
    if host.missing.contains(&node.source) {
        return Some(Difference::Missing(node.source.clone()));
    }
    let number = *host.nodes.get(&node.source)?;
    match node.state {
        NumberedNode::NotCharacter => Some(Difference::NotCharacter(path)),
        NumberedNode::Character(major, minor) if number != Some((major, minor)) => {
            Some(Difference::Number {
                path,
                spec: (major, minor),
                host: number,
            })
        }
        _ => None,
    }
}
