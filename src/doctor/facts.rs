//! Defines the facts about a host that the checks use.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use base::paths::HostPath;
use base::report::Finding;
use base::sys::confine::Identity;
use base::tree::ResolvedFile;
use nvidia_host::config::Config;
use nvidia_host::driver::packages::Distribution;
use nvidia_host::driver::pci::PciDevice;
use nvidia_host::feature::Feature;
use nvidia_host::host::Roots;
use nvidia_host::inventory::Inventory;
use nvidia_host::inventory::cap_files::CapFile;
use nvidia_host::mps::Daemon;
use nvidia_host::nvml::query::NvmlQuery;
use nvidia_host::prepare::host::Preparation;

use engines::cdi_check::CdiVerdict;
use engines::{Engine, User};
use plugin_api::control::{Offered, Unanswered};
use plugin_api::status::KubeletPlugin;

#[derive(Debug)]
pub struct Facts {
    /// The calling user; `None` if it is root
    pub user: Option<User>,
    /// The groups of the calling user
    pub groups: BTreeSet<u32>,
    pub distribution: Distribution,
    /// config.toml and its warnings, or its error
    pub config: Result<(Config, Vec<Finding>), Finding>,
    pub has_config: bool,
    /// The configuration file that a hook file names instead of the usual one, and this hook file
    pub config_of_hooks: Option<(PathBuf, PathBuf)>,
    /// Whether there are drop-in files
    pub has_drop_ins: bool,
    /// Whether the file with the commented defaults is installed
    pub has_defaults: bool,
    /// The log file in config.toml, and whether it is writable
    pub log: Option<(PathBuf, Result<(), String>)>,
    pub journal: bool,
    pub driver: DriverFacts,
    pub engines: Vec<Engine>,
    pub installed: Vec<PathBuf>,
    /// Programs of NVIDIA's container toolkit, without links to this program
    pub nvidias: Vec<PathBuf>,
    /// The enabled units of NVIDIA's container toolkit that write the same CDI spec as our units, if these are enabled too
    pub second_writers: Vec<&'static str>,
    /// Whether cgroups have version 2; `None` if no version is mounted
    pub cgroup_v2: Option<bool>,
    pub systemd: bool,
    /// `None` if the kernel does not have SELinux
    pub selinux: Option<Selinux>,
    /// The CDI specs, as engines see them
    pub cdi: Vec<CdiView>,
    /// Hook entries to which a runtime passes the environment of the container
    pub without_env: Vec<Finding>,
    /// The device plugin for Kubernetes, if it is installed
    pub kubelet_plugin: Option<KubeletPlugin>,
    /// What the running device plugin offers to the kubelet; `None` if it is not installed
    pub offered: Option<Result<Offered, Unanswered>>,
}

/// The driver, its files and its GPUs.
#[derive(Debug, Default)]
pub struct DriverFacts {
    /// Where the parts of the driver are; `None` if one cannot be opened
    pub roots: Option<Roots>,
    /// What the hook would decide for the usual requests
    pub starts: Vec<Start>,
    /// NVIDIA's PCI devices; `None` if sysfs cannot be read
    pub pci: Option<Vec<PciDevice>>,
    /// Why the driver as a whole does not work
    pub diagnosis: Option<Finding>,
    /// The version of the loaded kernel module
    pub module: Option<String>,
    /// The names of NVIDIA's driver packages in Windows, which may be none; `None` if the host is not WSL 2
    pub wsl: Option<String>,
    pub modules: BTreeSet<String>,
    pub secure_boot: bool,
    /// The last kernel message about a module that was rejected
    pub refused: Option<String>,
    /// The last kernel message about an error of a GPU
    pub xid: Option<String>,
    /// The versions of the installed libraries
    pub on_disk: BTreeSet<String>,
    /// An error for each driver capability without its required library
    pub lacking: Vec<Finding>,
    /// The running containers that have the files of another driver than the loaded one
    pub other_driver: Vec<String>,
    /// A finding about missing optional libraries
    pub not_installed: Option<Finding>,
    /// A finding about driver libraries that are not in the catalog
    pub unknown: Option<Finding>,
    /// The sockets and directories of daemons that containers get, and findings about those that they do not get
    pub daemons: (Vec<HostPath>, Vec<Finding>),
    /// The MPS daemons of the GPUs that config.toml shares
    pub mps: Vec<MpsDaemon>,
    /// The UUIDs of other GPUs that have been shared since this boot, and whose compute mode was not restored
    pub mps_before: Vec<String>,
    /// Device nodes that every GPU needs, and the nodes of each GPU
    pub nodes: Vec<HostNode>,
    /// Whether only NVML reports the driver, because /proc does not have the files of its kernel module
    pub is_hidden: bool,
    /// `/dev/nvidia-uvm`
    pub uvm: Option<ResolvedFile>,
    /// `/dev/nvidia-modeset`, if the kernel module is loaded
    pub modeset: Option<HostNode>,
    /// The devices next to the GPUs, with the names of their nodes below /dev
    pub features: Vec<(Feature, Vec<String>)>,
    /// The MIG capabilities that the kernel module lists
    pub mig_caps: Vec<CapFile>,
    /// The user and group that ask NVML; `None` if they are unknown
    pub identity: Option<Result<Identity, Finding>>,
    /// Whether NVML must run as root, because no other user can open the nodes or read the library
    pub only_root_may_ask: bool,
    /// `None` if NVML was not asked
    pub nvml: Option<Nvml>,
    /// Why NVML was not asked
    pub not_asked: String,
    pub persistenced: bool,
    pub fabric_manager: bool,
    /// Device nodes without their link in /dev/char
    pub without_link: Vec<String>,
}

/// An MPS daemon.
#[derive(Clone, Debug)]
pub struct MpsDaemon {
    pub daemon: Daemon,
    /// Whether its program was replaced or removed since it started
    pub is_replaced: bool,
}

/// What the hook decides for a request.
#[derive(Clone, Debug)]
pub struct Start {
    /// The requested driver capabilities
    pub capabilities: &'static str,
    pub findings: Vec<Finding>,
    /// Why the container does not start
    pub error: Option<Finding>,
    /// What the start does on the host first
    pub prepares: Preparation,
}

/// An expected device node, and the file that was found.
#[derive(Clone, Debug)]
pub struct HostNode {
    /// `nvidia0`
    pub name: String,
    /// Its minor number; the major is 195
    pub minor: u32,
    pub found: Option<ResolvedFile>,
}

/// A question for NVML, and the answer.
#[derive(Debug)]
pub struct Nvml {
    pub question: NvmlQuery,
    pub answer: Result<Inventory, Finding>,
    pub took: Duration,
}

/// The settings of SELinux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selinux {
    pub enforcing: bool,
    /// `container_use_devices`, if the policy has it
    pub devices: Option<bool>,
    /// `container_use_xserver_devices`, if the policy has it
    pub xserver_devices: Option<bool>,
}

/// The CDI specs of engines that search the same directories.
#[derive(Debug)]
pub struct CdiView {
    pub engines: String,
    pub dirs: Vec<PathBuf>,
    /// A verdict for each device, and for each file that the engines cannot read
    pub verdicts: Vec<CdiVerdict>,
    /// Devices that two files contain
    pub conflicts: Vec<Finding>,
}

impl DriverFacts {
    /// Returns the inventory, if NVML answered.
    pub fn inventory(&self) -> Option<&Inventory> {
        self.nvml.as_ref()?.answer.as_ref().ok()
    }

    /// Returns the number of NVSwitch devices on the PCI bus.
    pub fn switches(&self) -> usize {
        let devices = self.pci.iter().flatten();
        devices.filter(|device| device.is_switch()).count()
    }
}

impl Facts {
    /// Returns whether the host has an NVIDIA GPU, or may have one.
    pub fn has_gpu(&self) -> bool {
        self.driver
            .wsl
            .as_ref()
            .is_some_and(|packages| !packages.is_empty())
            || self
                .driver
                .pci
                .as_ref()
                .is_none_or(|devices| devices.iter().any(PciDevice::is_gpu))
    }

    /// Returns the settings in config.toml, or the defaults if it is invalid.
    pub fn settings(&self) -> Config {
        self.config
            .as_ref()
            .map_or_else(|_| Config::default(), |(config, _)| config.clone())
    }
}
