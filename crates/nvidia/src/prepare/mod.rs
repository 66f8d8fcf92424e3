//! Loads modules and creates device nodes, like `nvidia-modprobe`, but without a set-uid program. The files of the kernel module in
//! /proc/driver/nvidia contain the owner and mode of the nodes, and whether user space may create them.
//!
//! [`plan()`] decides; [`host`] loads the modules and [`make_node`] creates the nodes.

pub mod host;
mod label;
pub mod make_node;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use base::report::failure;
use findings::catalog;

use crate::driver::node_name::{CONTROL, NodeName};
use crate::driver::nodes::{CTL_MINOR, IMEX_CHANNELS, MODESET_MINOR, NVIDIA_MAJOR, imex_channel};
use crate::driver::params::{Imex, NodePolicy, parse_imex, parse_policy};
use crate::driver::pci;
use crate::host::Roots;
use crate::inventory::cap_files::{self, CapFile};
use crate::inventory::procfs::{self, DRIVER_PROC};

/// Parses /proc/devices, and returns the major numbers of NVIDIA's character devices.
#[must_use]
pub fn parse_majors(devices: &str) -> BTreeMap<String, u32> {
    let character = devices.split("Block devices:").next().unwrap_or_default();
    let mut majors = BTreeMap::new();
    for (major, name) in character
        .lines()
        .filter_map(|line| line.trim().split_once(' '))
    {
        let name = name.trim();
        if let (true, Ok(major)) = (
            name == "nvidia" || name.starts_with("nvidia-"),
            major.parse(),
        ) {
            majors.insert(name.to_owned(), major);
        }
    }
    majors
}

/// The state of the host on which the plan depends.
#[derive(Clone, Debug, Default)]
pub struct ModuleState {
    /// The number of NVIDIA GPUs on the PCI bus
    pub pci_gpus: usize,
    /// The loaded modules of the driver
    pub loaded: Vec<&'static str>,
    /// The policy for device nodes, if the module is loaded
    pub policy: Option<NodePolicy>,
    /// The parameters for IMEX channels
    pub imex: Imex,
    /// The major numbers in /proc/devices
    pub majors: BTreeMap<String, u32>,
    /// The device minors of the GPUs
    pub gpu_minors: Vec<u32>,
    /// The existing MIG capabilities
    pub caps: Vec<CapFile>,
}

/// The driver's modules, in the order in which they are loaded.
pub const MODULES: [&str; 3] = ["nvidia", "nvidia_uvm", "nvidia_modeset"];

/// A device node to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeToCreate {
    /// The path below /dev
    pub name: String,
    /// The major and minor number
    pub device: (u32, u32),
    /// The owner, group and permissions
    pub policy: NodePolicy,
}

impl fmt::Display for NodeToCreate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            device: (major, minor),
            policy: NodePolicy { uid, gid, mode, .. },
        } = self;
        write!(f, "/dev/{name} c {major}:{minor} {uid}:{gid} {mode:04o}")
    }
}

/// Returns the modules to load. [`plan`] needs the state of the host after they are loaded.
#[must_use]
pub(crate) fn missing_modules(facts: &ModuleState) -> Vec<&'static str> {
    if facts.pci_gpus == 0 {
        return Vec::new();
    }
    MODULES
        .into_iter()
        .filter(|module| !facts.loaded.contains(module))
        .collect()
}

/// Returns the nodes that must exist, including the nodes of these IMEX channels.
#[must_use]
pub fn plan(facts: &ModuleState, channels: &[u32]) -> Vec<NodeToCreate> {
    let Some(policy) = facts.policy else {
        return Vec::new();
    };
    let mut nodes = Vec::new();
    let mut add = |name: String, device, policy| {
        nodes.push(NodeToCreate {
            name,
            device,
            policy,
        })
    };
    add(CONTROL.to_owned(), (NVIDIA_MAJOR, CTL_MINOR), policy);
    for minor in &facts.gpu_minors {
        add(
            NodeName::Gpu(*minor).to_string(),
            (NVIDIA_MAJOR, *minor),
            policy,
        );
    }
    if facts.loaded.contains(&"nvidia_modeset") {
        add(
            "nvidia-modeset".to_owned(),
            (NVIDIA_MAJOR, MODESET_MINOR),
            policy,
        );
    }
    if let Some(major) = facts.majors.get("nvidia-uvm") {
        // The owner and mode of the policy do not apply to these nodes: nvidia-modprobe creates them with mode 0666.
        let policy = NodePolicy {
            modify: policy.modify,
            ..NodePolicy::default()
        };
        for (minor, name) in [(0, "nvidia-uvm"), (1, "nvidia-uvm-tools")] {
            add(name.to_owned(), (*major, minor), policy);
        }
    }
    if let Some(major) = facts.majors.get("nvidia-caps") {
        // Each capability has its own policy. For example, only root may use "mig/config", which repartitions GPUs.
        for cap in &facts.caps {
            add(cap.node().name(), (*major, cap.minor), cap.policy);
        }
    }
    if let Some(major) = facts.majors.get(IMEX_CHANNELS) {
        let first = facts.imex.channel_0.then_some(0);
        let mut channels: Vec<u32> = first.into_iter().chain(channels.iter().copied()).collect();
        channels.retain(|channel| facts.imex.count.is_none_or(|count| *channel < count));
        channels.sort();
        channels.dedup();
        for channel in channels {
            add(imex_channel(channel), (*major, channel), policy);
        }
    }
    nodes
}

/// Returns the error for a module that cannot be loaded. A missing nvidia-modeset is not an error here: only graphics need it, and the
/// hook reports it for containers that request them.
#[must_use]
pub(crate) fn not_loaded(modprobe: &str, module: &str) -> Option<anyhow::Error> {
    let (kind, consequence) = match module {
        "nvidia" => (&catalog::NOT_LOADED, ""),
        "nvidia_uvm" => (&catalog::NO_UVM, ", which CUDA needs"),
        _ => return None,
    };
    let fix = format!(
        "run \"modprobe {module}\" and \"journalctl -k\" for the reason (Secure Boot rejects unsigned modules); \
         \"oci-nvidia-hook doctor\" checks for known ones"
    );
    Some(failure(
        kind,
        format!("{modprobe:?} cannot load the kernel module {module}{consequence}"),
        fix,
    ))
}

/// Returns an error if the driver does not have an IMEX channel with this number.
#[must_use]
pub(crate) fn no_such_channel(facts: &ModuleState, channel: u32) -> Option<anyhow::Error> {
    let (reason, fix) = match facts.imex.count {
        _ if !facts.majors.contains_key(IMEX_CHANNELS) => (
            format!("\"/proc/devices\" does not list {IMEX_CHANNELS}"),
            "request channels only where the driver and the GPUs support IMEX".to_owned(),
        ),
        Some(count) if channel >= count => (
            format!("the driver has {count} of them"),
            format!(
                "load the module with a larger NVreg_ImexChannelCount, or request channels below {count}"
            ),
        ),
        _ => return None,
    };
    Some(failure(
        &catalog::NODE_MISSING,
        format!("IMEX channel {channel} does not exist: {reason}"),
        fix,
    ))
}

impl ModuleState {
    /// Examines the host.
    #[must_use]
    pub(crate) fn read(Roots { proc, sys, .. }: &Roots) -> Self {
        let driver = Path::new(DRIVER_PROC);
        let params = proc.read_text(&driver.join("params")).unwrap_or_default();
        let devices = proc
            .read_text(Path::new("/proc/devices"))
            .unwrap_or_default();
        let is_loaded = |module: &&str| sys.locate(&Path::new("/sys/module").join(module)).is_ok();
        // The module does not open GPUs that the administrator excluded (NVreg_ExcludedGpus).
        let gpus = procfs::read_gpus(proc).into_iter();
        Self {
            pci_gpus: pci::count_gpus(sys).unwrap_or_default(),
            loaded: MODULES.into_iter().filter(is_loaded).collect(),
            policy: proc
                .read(&driver.join("version"))
                .ok()
                .map(|_| parse_policy(&params)),
            imex: parse_imex(&params),
            majors: parse_majors(&devices),
            gpu_minors: gpus
                .filter(|gpu| !gpu.excluded)
                .filter_map(|gpu| gpu.minor)
                .collect(),
            caps: cap_files::existing(proc),
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
        let suse = NodePolicy {
            uid: 0,
            gid: 484,
            mode: 0o660,
            modify: true,
        };
        assert_eq!(parse_policy(PARAMS), suse);
        assert_eq!(parse_policy(""), NodePolicy::default());
        assert!(!parse_policy("ModifyDeviceFiles: 0\n").modify);
    }

    fn names(facts: &ModuleState, channels: &[u32]) -> Vec<String> {
        plan(facts, channels)
            .iter()
            .map(ToString::to_string)
            .collect()
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
                CapFile {
                    cap: MigCap::Config,
                    minor: 1,
                    policy: NodePolicy {
                        mode: 0o400,
                        ..NodePolicy::default()
                    },
                },
                CapFile {
                    cap: MigCap::GpuInstance(0, 1),
                    minor: 12,
                    policy: NodePolicy {
                        mode: 0o444,
                        ..NodePolicy::default()
                    },
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
        assert!(
            !names(&facts, &[])
                .iter()
                .any(|node| node.contains("channel"))
        );
        facts.imex.channel_0 = true;
        assert_eq!(
            names(&facts, &[]).last().unwrap(),
            "/dev/nvidia-caps-imex-channels/channel0 c 234:0 0:484 0660"
        );
        // The switch for nodes of GPUs is not the one for capabilities.
        facts.policy = Some(parse_policy("ModifyDeviceFiles: 0"));
        let modified: Vec<_> = plan(&facts, &[])
            .into_iter()
            .filter(|node| node.policy.modify)
            .collect();
        assert!(
            modified.len() == 2 && modified.iter().all(|node| node.name.contains("nvidia-cap")),
            "{modified:?}"
        );
        facts.pci_gpus = 0;
        assert!(missing_modules(&facts).is_empty());
        assert!(plan(&ModuleState::default(), &[0]).is_empty());
    }
}
