//! Modules and device nodes: what `nvidia-modprobe` does, without a set-uid program. The kernel module states in
//! /proc/driver/nvidia which owner and mode its nodes shall have, and whether user space may make them at all.
//!
//! [`plan()`] decides; [`host`] loads the modules and [`make_node`] makes the nodes.

pub mod host;
mod label;
pub mod make_node;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::Result;

use base::paths::HostPath;
use base::report::{catalog, failure};
use base::tree::Tree;

use crate::driver::diagnosis::{self, PCI_DEVICES};
use crate::driver::nodes::{CTL_MINOR, IMEX_CHANNELS, MODESET_MINOR, NVIDIA_MAJOR};
use crate::driver::params::{Imex, NodePolicy, parse_imex, parse_policy};
use crate::inventory::cap_files::{self, CapFile};
use crate::inventory::procfs::{self, DRIVER_PROC};

/// Parses /proc/devices: the majors of NVIDIA's character devices.
#[must_use]
pub fn parse_majors(devices: &str) -> BTreeMap<String, u32> {
    let character = devices.split("Block devices:").next().unwrap_or_default();
    let mut majors = BTreeMap::new();
    for (major, name) in character.lines().filter_map(|line| line.trim().split_once(' ')) {
        let name = name.trim();
        if let (true, Ok(major)) = (name == "nvidia" || name.starts_with("nvidia-"), major.parse()) {
            majors.insert(name.to_owned(), major);
        }
    }
    majors
}

/// What a host has, as far as the plan depends on it.
#[derive(Clone, Debug, Default)]
pub struct ModuleState {
    /// NVIDIA GPUs on the PCI bus
    pub pci_gpus: usize,
    /// Which of the three modules are loaded
    pub loaded: Vec<&'static str>,
    /// `params`, if the module is loaded
    pub policy: Option<NodePolicy>,
    /// The same for IMEX channels
    pub imex: Imex,
    /// From /proc/devices
    pub majors: BTreeMap<String, u32>,
    /// Device minors of the module's GPUs
    pub gpu_minors: Vec<u32>,
    /// The capabilities that exist
    pub caps: Vec<CapFile>,
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
pub(crate) fn missing_modules(facts: &ModuleState) -> Vec<&'static str> {
    if facts.pci_gpus == 0 {
        return Vec::new();
    }
    MODULES.into_iter().filter(|module| !facts.loaded.contains(module)).collect()
}

/// The nodes that there must be, with these IMEX channels among them.
#[must_use]
pub fn plan(facts: &ModuleState, channels: &[u32]) -> Vec<Node> {
    let Some(policy) = facts.policy else { return Vec::new() };
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
        // Owner and mode of the module's policy do not cover these: nvidia-modprobe makes them for everybody.
        let policy = NodePolicy { modify: policy.modify, ..NodePolicy::default() };
        for (minor, name) in [(0, "nvidia-uvm"), (1, "nvidia-uvm-tools")] {
            add(name.to_owned(), (*major, minor), policy);
        }
    }
    if let Some(major) = facts.majors.get("nvidia-caps") {
        // Each capability has a policy of its own: "mig/config", which repartitions GPUs, is for root alone.
        for cap in &facts.caps {
            add(cap.node_name(), (*major, cap.minor), cap.policy);
        }
    }
    if let Some(major) = facts.majors.get(IMEX_CHANNELS) {
        let first = facts.imex.channel_0.then_some(0);
        let mut channels: Vec<u32> = first.into_iter().chain(channels.iter().copied()).collect();
        channels.retain(|channel| facts.imex.count.is_none_or(|count| *channel < count));
        channels.sort();
        channels.dedup();
        for channel in channels {
            add(format!("{IMEX_CHANNELS}/channel{channel}"), (*major, channel), policy);
        }
    }
    nodes
}

/// A module that cannot be loaded, if that is an error: without nvidia-modeset only graphics suffer, and the hook reports
/// that to the containers which ask for them.
#[must_use]
pub(crate) fn not_loaded(modprobe: &str, module: &str) -> Option<anyhow::Error> {
    let (kind, consequence) = match module {
        "nvidia" => (&catalog::NOT_LOADED, ""),
        "nvidia_uvm" => (&catalog::NO_UVM, ", which CUDA needs"),
        _ => return None,
    };
    let fix = format!(
        "run \"modprobe {module}\" and \"journalctl -k\" for the reason (Secure Boot refuses unsigned modules); \
         \"oci-nvidia-hook doctor\" checks for known ones"
    );
    Some(failure(kind, format!("{modprobe:?} cannot load the kernel module {module}{consequence}"), fix))
}

/// Why a channel cannot be had, if the driver has none of this number.
#[must_use]
pub(crate) fn no_such_channel(facts: &ModuleState, channel: u32) -> Option<anyhow::Error> {
    let (reason, fix) = match facts.imex.count {
        _ if !facts.majors.contains_key(IMEX_CHANNELS) => (
            format!("\"/proc/devices\" does not list {IMEX_CHANNELS}"),
            "ask for channels only where the driver and the GPUs support IMEX".to_owned(),
        ),
        Some(count) if channel >= count => (
            format!("the driver has {count} of them"),
            format!("load the module with a larger NVreg_ImexChannelCount, or ask for channels below {count}"),
        ),
        _ => return None,
    };
    Some(failure(&catalog::NODE_MISSING, format!("there is no IMEX channel {channel}: {reason}"), fix))
}

/// Where the parts of a driver are that nodes are made for.
#[derive(Clone, Debug)]
pub struct Places {
    /// The driver root
    pub driver: Tree,
    /// The root that has /proc/driver/nvidia
    pub proc: Tree,
    /// The root that has the PCI devices and the modules
    pub sys: Tree,
    /// The root in which nodes are made
    pub dev: Tree,
}

impl Places {
    /// A driver root that has `/proc` of its own is a driver container, whose nodes are in it; one that has files only uses
    /// the nodes of the host. `dev_root` is the administrator's choice.
    ///
    /// # Errors
    /// If a root cannot be opened.
    pub fn of(driver: Tree, dev_root: Option<&HostPath>) -> Result<Self> {
        let proc = driver.owner_of(DRIVER_PROC)?;
        let dev = match dev_root {
            Some(root) => crate::driver::open_root(root)?,
            None if proc.is(&driver) => driver.clone(),
            None => driver.owner_of("/dev/nvidiactl")?,
        };
        Ok(Self { sys: driver.owner_of(PCI_DEVICES)?, driver, proc, dev })
    }

    /// Looks at the host.
    #[must_use]
    pub fn look(&self) -> ModuleState {
        let text = |path: &Path| self.proc.read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).ok();
        let report = |name: &str| text(&Path::new(DRIVER_PROC).join(name));
        let params = report("params").unwrap_or_default();
        let is_loaded = |module: &&str| self.sys.locate(&Path::new("/sys/module").join(module)).is_ok();
        // The module opens no GPU that the administrator excluded (NVreg_ExcludedGpus).
        let gpus = procfs::read_gpus(&self.proc).into_iter();
        ModuleState {
            pci_gpus: diagnosis::pci_gpus(&self.sys).unwrap_or_default(),
            loaded: MODULES.into_iter().filter(is_loaded).collect(),
            policy: report("version").map(|_| parse_policy(&params)),
            imex: parse_imex(&params),
            majors: parse_majors(&text(Path::new("/proc/devices")).unwrap_or_default()),
            gpu_minors: gpus.filter(|gpu| !gpu.excluded).filter_map(|gpu| gpu.minor).collect(),
            caps: cap_files::existing(&self.proc),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::caps::MigCap;

    const PARAMS: &str = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 484\n\
                          DeviceFileMode: 432\n";

    #[test]
    fn the_modules_policy_is_read() {
        let suse = NodePolicy { uid: 0, gid: 484, mode: 0o660, modify: true };
        assert_eq!(parse_policy(PARAMS), suse);
        assert_eq!(parse_policy(""), NodePolicy::default());
        assert!(!parse_policy("ModifyDeviceFiles: 0\n").modify);
    }

    fn names(facts: &ModuleState, channels: &[u32]) -> Vec<String> {
        plan(facts, channels).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn nodes_of_a_loaded_driver() {
        let mut facts = ModuleState {
            pci_gpus: 2,
            loaded: vec!["nvidia", "nvidia_modeset"],
            policy: Some(parse_policy(PARAMS)),
            imex: parse_imex("ImexChannelCount: 8\nCreateImexChannel0: 0\n"),
            majors: parse_majors(
                "Character devices:\n195 nvidia\n 236 nvidia-uvm\n235 nvidia-caps\n234 nvidia-caps-imex-channels\n",
            ),
            gpu_minors: vec![0, 3],
            caps: vec![
                CapFile { cap: MigCap::Config, minor: 1, policy: NodePolicy { mode: 0o400, ..NodePolicy::default() } },
                CapFile {
                    cap: MigCap::GpuInstance(0, 1),
                    minor: 12,
                    policy: NodePolicy { mode: 0o444, ..NodePolicy::default() },
                },
            ],
        };
        assert_eq!(
            names(&facts, &[3, 8, 3]),
            [
                "/dev/nvidiactl c 195:255 0:484 0660",
                "/dev/nvidia0 c 195:0 0:484 0660",
                "/dev/nvidia3 c 195:3 0:484 0660",
                "/dev/nvidia-modeset c 195:254 0:484 0660",
                "/dev/nvidia-uvm c 236:0 0:0 0666",
                "/dev/nvidia-uvm-tools c 236:1 0:0 0666",
                "/dev/nvidia-caps/nvidia-cap1 c 235:1 0:0 0400",
                "/dev/nvidia-caps/nvidia-cap12 c 235:12 0:0 0444",
                "/dev/nvidia-caps-imex-channels/channel3 c 234:3 0:484 0660",
            ]
        );
        assert_eq!(missing_modules(&facts), ["nvidia_uvm"]);
        assert!(!names(&facts, &[]).iter().any(|node| node.contains("channel")));
        facts.imex.channel_0 = true;
        assert_eq!(names(&facts, &[]).last().unwrap(), "/dev/nvidia-caps-imex-channels/channel0 c 234:0 0:484 0660");
        // The switch for nodes of GPUs is not the one for capabilities.
        facts.policy = Some(parse_policy("ModifyDeviceFiles: 0"));
        let modified: Vec<_> = plan(&facts, &[]).into_iter().filter(|node| node.policy.modify).collect();
        assert!(modified.len() == 2 && modified.iter().all(|node| node.name.contains("nvidia-cap")), "{modified:?}");
        facts.pci_gpus = 0;
        assert!(missing_modules(&facts).is_empty());
        assert!(plan(&ModuleState::default(), &[0]).is_empty());
    }
}
