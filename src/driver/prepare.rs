//! Modules and device nodes: what `nvidia-modprobe` does, without a set-uid program. The kernel module says in
//! /proc/driver/nvidia which owner and mode its nodes shall have, and whether anybody may make them.
//!
//! [`plan`] decides, [`carry_out`] does.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Uid};

use super::label;
use super::nodes::{CTL_MINOR, MODESET_MINOR, NVIDIA_MAJOR};
use super::root::DriverRoot;
use crate::few;
use crate::inventory::caps::{self, MIG_MINORS};
use crate::inventory::procfs::{self, DRIVER_PROC};
use crate::paths::HostPath;

/// What the module says of its nodes, in /proc/driver/nvidia/params.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePolicy {
    /// Owner
    pub uid: u32,
    /// Group
    pub gid: u32,
    /// Permissions
    pub mode: u32,
    /// Whether nodes may be made at all
    pub modify: bool,
}

impl Default for NodePolicy {
    fn default() -> Self {
        Self { uid: 0, gid: 0, mode: 0o666, modify: true }
    }
}

/// Parses `params`; what it does not say is NVIDIA's default.
#[must_use]
pub fn parse_policy(params: &str) -> NodePolicy {
    let number = |name: &str| {
        let value = params.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        value.trim().parse().ok()
    };
    let default = NodePolicy::default();
    NodePolicy {
        uid: number("DeviceFileUID").unwrap_or(default.uid),
        gid: number("DeviceFileGID").unwrap_or(default.gid),
        mode: number("DeviceFileMode").map_or(default.mode, |mode| mode & 0o777),
        modify: number("ModifyDeviceFiles") != Some(0),
    }
}

/// Parses /proc/devices: the majors of NVIDIA's character devices.
#[must_use]
pub fn parse_majors(devices: &str) -> BTreeMap<String, u32> {
    let character = devices.split("Block devices:").next().unwrap_or_default();
    let entries = character.lines().filter_map(|line| {
        let (major, name) = line.trim().split_once(' ')?;
        Some((name.trim().to_owned(), major.parse().ok()?))
    });
    few::map(entries.filter(|(name, _)| name == "nvidia" || name.starts_with("nvidia-")))
}

/// What a host has, as far as the plan depends on it.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// NVIDIA GPUs on the PCI bus
    pub pci_gpus: usize,
    /// Which of the three modules are loaded
    pub loaded: Vec<&'static str>,
    /// `params`, if the module is loaded
    pub policy: Option<NodePolicy>,
    /// From /proc/devices
    pub majors: BTreeMap<String, u32>,
    /// Device minors of the module's GPUs
    pub gpu_minors: Vec<u32>,
    /// Minors of the MIG capabilities whose files exist
    pub cap_minors: Vec<u32>,
}

/// The driver's modules, in the order in which they are loaded.
pub const MODULES: [&str; 3] = ["nvidia", "nvidia_uvm", "nvidia_modeset"];

/// A node as it shall be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Below /dev
    pub name: String,
    /// Its numbers
    pub device: (u32, u32),
    /// Owner, group and permissions
    pub policy: NodePolicy,
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, device: (major, minor), policy: NodePolicy { uid, gid, mode, .. } } = self;
        write!(f, "/dev/{name} c {major}:{minor} {uid}:{gid} {mode:04o}")
    }
}

/// The modules to load. After that the facts are others, and [`plan`] can say which nodes are due.
#[must_use]
pub fn missing_modules(facts: &Facts) -> Vec<&'static str> {
    if facts.pci_gpus == 0 {
        return Vec::new();
    }
    MODULES.into_iter().filter(|module| !facts.loaded.contains(module)).collect()
}

/// The nodes that there must be.
#[must_use]
pub fn plan(facts: &Facts) -> Vec<Node> {
    let Some(policy) = facts.policy.filter(|policy| policy.modify) else { return Vec::new() };
    let mut nodes = Vec::new();
    let mut add = |name: String, device, policy| nodes.push(Node { name, device, policy });
    add("nvidiactl".to_owned(), (NVIDIA_MAJOR, CTL_MINOR), policy);
    for minor in &facts.gpu_minors {
        add(format!("nvidia{minor}"), (NVIDIA_MAJOR, *minor), policy);
    }
    if facts.loaded.contains(&"nvidia_modeset") {
        add("nvidia-modeset".to_owned(), (NVIDIA_MAJOR, MODESET_MINOR), policy);
    }
    if let Some(major) = facts.majors.get("nvidia-uvm") {
        // The module's policy does not cover these: nvidia-modprobe makes them for everybody.
        for (minor, name) in [(0, "nvidia-uvm"), (1, "nvidia-uvm-tools")] {
            add(name.to_owned(), (*major, minor), NodePolicy::default());
        }
    }
    if let Some(major) = facts.majors.get("nvidia-caps") {
        for minor in &facts.cap_minors {
            add(format!("nvidia-caps/nvidia-cap{minor}"), (*major, *minor), policy);
        }
    }
    nodes
}

/// Looks at a host.
#[must_use]
pub fn look(root: &DriverRoot) -> Facts {
    let text = |path: &Path| root.read(path).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let proc = |name: &str| text(&Path::new(DRIVER_PROC).join(name));
    let caps = text(Path::new(MIG_MINORS)).map(|text| caps::parse_mig_minors(&text)).unwrap_or_default();
    let exist = caps.into_iter().filter(|(cap, _)| root.locate(&cap.proc_path()).is_ok());
    Facts {
        pci_gpus: super::diagnosis::pci_gpus(root).unwrap_or_default(),
        loaded: MODULES
            .into_iter()
            .filter(|module| root.locate(&Path::new("/sys/module").join(module)).is_ok())
            .collect(),
        policy: proc("version").map(|_| parse_policy(&proc("params").unwrap_or_default())),
        majors: parse_majors(&text(Path::new("/proc/devices")).unwrap_or_default()),
        gpu_minors: procfs::read_gpus(root).into_iter().filter_map(|gpu| gpu.minor).collect(),
        cap_minors: exist.map(|(_, minor)| minor).collect(),
    }
}

/// Makes the node, if it is not there as it shall be, and its `/dev/char` link, by which runc and systemd find the device of
/// a number. Whether anything was done.
///
/// # Errors
/// If the directory cannot be written.
pub fn carry_out(root: &HostPath, node: &Node) -> Result<bool> {
    let dev = root.as_path().join("dev");
    let path = dev.join(&node.name);
    let made = make(&path, node).with_context(|| format!("cannot make {path:?}"))?;
    let (major, minor) = node.device;
    let chars = dev.join("char");
    let link = chars.join(format!("{major}:{minor}"));
    let text = PathBuf::from("..").join(&node.name);
    if rustix::fs::readlinkat(CWD, &link, Vec::new())
        .is_ok_and(|old| old.as_bytes() == text.as_os_str().as_encoded_bytes())
    {
        return Ok(made);
    }
    std::fs::create_dir_all(&chars).with_context(|| format!("cannot make {chars:?}"))?;
    rustix::fs::unlinkat(CWD, &link, AtFlags::empty()).ok();
    rustix::fs::symlinkat(&text, CWD, &link).with_context(|| format!("cannot make {link:?}"))?;
    Ok(true)
}

fn make(path: &Path, node: &Node) -> Result<bool> {
    let NodePolicy { uid, gid, mode, .. } = node.policy;
    let (major, minor) = node.device;
    let device = rustix::fs::makedev(major, minor);
    if let Ok(stat) = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
        let right = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == device;
        if right && stat.st_mode & 0o777 == mode && (stat.st_uid, stat.st_gid) == (uid, gid) {
            return Ok(false);
        }
        if !right {
            rustix::fs::unlinkat(CWD, path, AtFlags::empty())?;
        }
    } else if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match rustix::fs::mknodat(CWD, path, FileType::CharacterDevice, Mode::from_raw_mode(0o600), device) {
        Ok(()) => label::give(path),
        Err(rustix::io::Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    // The owner first: a mode for others' eyes goes to a node that has its owner already.
    rustix::fs::chownat(CWD, path, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::SYMLINK_NOFOLLOW)?;
    rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: &str = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 484\n\
                          DeviceFileMode: 432\n";

    #[test]
    fn the_modules_policy_is_read() {
        let suse = NodePolicy { uid: 0, gid: 484, mode: 0o660, modify: true };
        assert_eq!(parse_policy(PARAMS), suse);
        assert_eq!(parse_policy(""), NodePolicy::default());
        assert!(!parse_policy("ModifyDeviceFiles: 0\n").modify);
    }

    fn names(facts: &Facts) -> Vec<String> {
        plan(facts).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn nodes_of_a_loaded_driver() {
        let mut facts = Facts {
            pci_gpus: 2,
            loaded: vec!["nvidia", "nvidia_modeset"],
            policy: Some(parse_policy(PARAMS)),
            majors: parse_majors("Character devices:\n195 nvidia\n 236 nvidia-uvm\n235 nvidia-caps\n"),
            gpu_minors: vec![0, 3],
            cap_minors: vec![1, 12],
        };
        assert_eq!(
            names(&facts),
            [
                "/dev/nvidiactl c 195:255 0:484 0660",
                "/dev/nvidia0 c 195:0 0:484 0660",
                "/dev/nvidia3 c 195:3 0:484 0660",
                "/dev/nvidia-modeset c 195:254 0:484 0660",
                "/dev/nvidia-uvm c 236:0 0:0 0666",
                "/dev/nvidia-uvm-tools c 236:1 0:0 0666",
                "/dev/nvidia-caps/nvidia-cap1 c 235:1 0:484 0660",
                "/dev/nvidia-caps/nvidia-cap12 c 235:12 0:484 0660",
            ]
        );
        assert_eq!(missing_modules(&facts), ["nvidia_uvm"]);
        facts.policy = Some(parse_policy("ModifyDeviceFiles: 0"));
        assert!(plan(&facts).is_empty(), "the administrator makes them");
        facts.pci_gpus = 0;
        assert!(missing_modules(&facts).is_empty());
        assert!(plan(&Facts::default()).is_empty());
    }
}
