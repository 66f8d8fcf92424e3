//! What is known of a host.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use base::paths::HostPath;
use base::report::Finding;
use base::sys::confine::Identity;
use base::tree::Located;
use nvidia_host::capability::Capability;
use nvidia_host::config::Config;
use nvidia_host::driver::packages::Distribution;
use nvidia_host::inventory::Inventory;
use nvidia_host::inventory::ask::Question;
use nvidia_host::inventory::cap_files::CapFile;

use crate::cdi_check::Verdict;
use crate::engine::{Engine, User};

#[derive(Debug)]
pub struct Facts {
    /// Who asks, if it is not root
    pub user: Option<User>,
    /// The groups of who asks
    pub groups: BTreeSet<u32>,
    pub distribution: Distribution,
    /// Config.toml, or what is wrong with it
    pub config: Result<(Config, Vec<Finding>), Finding>,
    pub has_config: bool,
    /// Where config.toml lets the log be written, and whether that works
    pub log: Option<(PathBuf, Result<(), String>)>,
    pub journal: bool,
    pub driver: DriverFacts,
    pub engines: Vec<Engine>,
    pub installed: Vec<PathBuf>,
    /// Programs of NVIDIA's container toolkit, and not ours under their names
    pub nvidias: Vec<PathBuf>,
    /// Whether cgroups are of version 2; `None`: neither is mounted
    pub cgroup_v2: Option<bool>,
    pub systemd: bool,
    /// If the kernel has it
    pub selinux: Option<Selinux>,
    /// What engines make of CDI specs
    pub cdi: Vec<CdiView>,
}

/// The driver, its files and its GPUs.
#[derive(Debug, Default)]
pub struct DriverFacts {
    /// NVIDIA's PCI devices; `None`: sysfs cannot be read
    pub pci: Option<Vec<PciDevice>>,
    /// What is wrong as a whole
    pub diagnosis: Option<Finding>,
    /// The version of the loaded kernel module
    pub module: Option<String>,
    pub modules: BTreeSet<String>,
    pub secure_boot: bool,
    /// What the kernel said last of why the module was not loaded
    pub refused: Option<String>,
    /// What the kernel said last of a GPU's error
    pub xid: Option<String>,
    /// The versions of the libraries that are there
    pub on_disk: BTreeSet<String>,
    /// Driver capabilities whose libraries are not there, and which
    pub lacking: Vec<(Capability, Finding)>,
    /// The same for those that containers can do without, all in one
    pub not_installed: Option<Finding>,
    /// Libraries of the driver that are in no row of the catalogue
    pub unknown: Option<Finding>,
    /// The sockets and directories of daemons that containers get, and those that they do not
    pub daemons: (Vec<HostPath>, Vec<Finding>),
    /// Device nodes that every GPU needs, and those of each GPU
    pub nodes: Vec<Node>,
    /// `/dev/nvidia-uvm`
    pub uvm: Option<Located>,
    /// `/dev/nvidia-modeset`, if the kernel module is loaded
    pub modeset: Option<Node>,
    /// The MIG capabilities that the kernel module lists
    pub mig_caps: Vec<CapFile>,
    /// Who asks NVML, where that is known
    pub identity: Option<Result<Identity, Finding>>,
    /// Whether that has to be root, because no one else may open the nodes or reach the library
    pub only_root_may_ask: bool,
    /// NVML's answer, and how long it took; `None` if it was not asked, and why
    pub nvml: Option<(Result<Inventory, Finding>, Duration)>,
    /// Why it was not
    pub not_asked: String,
    pub question: Option<Question>,
    pub persistenced: bool,
    pub fabric_manager: bool,
    /// Device nodes without their link in /dev/char
    pub without_link: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// `0000:3b:00.0`
    pub address: String,
    /// `0x030200`
    pub class: String,
    /// The kernel module that drives it
    pub driver: Option<String>,
}

/// A device node as it is, and as it should be.
#[derive(Clone, Debug)]
pub struct Node {
    /// `nvidia0`
    pub name: String,
    /// Its minor number; the major is 195
    pub minor: u32,
    pub found: Option<Located>,
}

/// SELinux, if the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selinux {
    pub enforcing: bool,
    /// `container_use_devices`, if the policy has it
    pub devices: Option<bool>,
    /// `container_use_xserver_devices`, if the policy has it
    pub xserver_devices: Option<bool>,
}

/// CDI as engines that look in the same directories see it.
#[derive(Debug)]
pub struct CdiView {
    pub engines: String,
    pub dirs: Vec<PathBuf>,
    /// Of each device, and of each file that they do not read
    pub verdicts: Vec<Verdict>,
    /// Devices that two files have
    pub conflicts: Vec<Finding>,
}

impl Facts {
    /// Whether there is a GPU that the driver could drive.
    pub fn has_gpu(&self) -> bool {
        self.driver.pci.as_ref().is_none_or(|devices| devices.iter().any(PciDevice::is_gpu))
    }

    /// Config.toml, or the defaults where it is wrong.
    pub fn settings(&self) -> Config {
        self.config.as_ref().map_or_else(|_| Config::default(), |(config, _)| config.clone())
    }
}

impl PciDevice {
    pub fn is_gpu(&self) -> bool {
        self.class.starts_with("0x03")
    }

    /// NVSwitch says that it is a bridge of no known kind.
    pub fn is_switch(&self) -> bool {
        self.class.starts_with("0x0680")
    }
}
