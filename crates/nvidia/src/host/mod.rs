//! Finds the driver and the GPUs of a host, and determines what containers get.
//!
//! [`Host::inspect`] finds the driver and takes the inventory of its GPUs. Then [`crate::inventory::select`] selects devices,
//! [`Host::facts`] gathers the facts about them, and [`crate::edits::decide`] turns the facts into edits without reading anything.
//! [`Host::edits`] does the last two steps.

mod driver;
pub(crate) mod extra_devices;
mod gather;
mod located;
mod missing;
mod mps;
mod parts;
mod roots;
mod state;
mod watched;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::time::Instant;

use anyhow::Result;

use base::paths::HostPath;
use base::report::{Finding, failure};
use base::tree::Tree;

pub use self::driver::{Cached, Driver, Source};
pub(crate) use self::gather::SpecFiles;
pub use self::mps::{MpsPrograms, mode_process, mps_daemons};
pub use self::parts::DriverParts;
pub use self::roots::Roots;
pub use self::state::{HostNode, HostState};
pub use self::watched::{HostMarks, WatchedDriver};
use crate::capability::Capabilities;
use crate::config::Config;
use crate::device_id::Nodes;
use crate::driver::DriverKind;
use crate::driver::libraries::Search;
use crate::driver::nodes::{DeviceNode, NodeState};
use crate::driver::pci::{self, PCI_DEVICES};
use crate::driver::platform::Platform;
use crate::driver::wsl;
use crate::edits::{Edits, Wanted, decide};
use crate::feature::{Feature, Features};
use crate::inventory::cache::KernelView;
use crate::inventory::node_limits::NodeLimits;
use crate::inventory::processes::GpuProcesses;
use crate::inventory::procfs::{self, DRIVER_PROC};
use crate::inventory::select::{Device, names_of};
use crate::inventory::{Inventory, cap_files};
use crate::nvml::processes;

/// Whether this host has no NVIDIA GPU. A host with a missing or broken driver can have one.
#[must_use]
pub fn has_no_gpu(config: &Config) -> bool {
    count_gpus(config).is_ok_and(|count| count == Some(0))
}

/// Counts the GPUs of this host. Returns `None` if the PCI bus cannot be examined, or GPUs of this platform are not on it.
fn count_gpus(config: &Config) -> Result<Option<usize>> {
    let driver = crate::driver::open_root(&config.driver_root)?;
    // The GPU of an SoC is not on the PCI bus, but the kernel module lists it.
    let listed = procfs::read_gpus(&driver.owner_of(DRIVER_PROC)?);
    let on_bus = pci::count_gpus(&driver.owner_of(PCI_DEVICES)?);
    if on_bus.unwrap_or_default() == 0 && listed.is_empty() {
        match Platform::of_host(&driver, None) {
            // Windows can have GPUs of other vendors only.
            Some(Platform::Wsl) if wsl::identity(&driver).is_none() => return Ok(Some(0)),
            Some(_) => return Ok(None),
            None => {}
        }
    }
    Ok(on_bus.map(|count| count.max(listed.len())))
}

/// Returns the limits of config.toml for device nodes. Never calls NVML, and reads nothing if there are no limits.
///
/// # Errors
/// If the driver root cannot be opened.
pub fn node_limits(config: &Config) -> Result<NodeLimits> {
    if config.devices.permit_all_gpus() {
        return Ok(NodeLimits::new(
            config.devices.clone(),
            Vec::new(),
            Vec::new(),
        ));
    }
    let proc = crate::driver::open_root(&config.driver_root)?.owner_of(DRIVER_PROC)?;
    Ok(NodeLimits::new(
        config.devices.clone(),
        procfs::read_gpus(&proc),
        cap_files::existing(&proc),
    ))
}

/// Returns the features that this host has, with the names of their nodes below /dev.
#[must_use]
pub fn features(roots: &Roots) -> Vec<(Feature, Vec<String>)> {
    let names = |feature| {
        extra_devices::nodes(&roots.dev, feature)
            .into_iter()
            .map(|(name, _)| name)
            .collect::<Vec<_>>()
    };
    let all = Feature::ALL
        .into_iter()
        .map(|feature| (feature, names(feature)));
    all.filter(|(_, names)| !names.is_empty()).collect()
}

/// Checks the directories that containers get with these features. The engine mounts the directories of CDI specs by their paths.
///
/// # Errors
/// If the driver root cannot be opened, another user may have replaced a directory, or it contains a socket, a FIFO or a device.
pub fn check_directories(config: &Config, features: Features) -> Result<()> {
    if features.is_empty() {
        return Ok(());
    }
    let driver = crate::driver::open_root(&config.driver_root)?;
    for feature in features.iter() {
        if let Some(refused) = extra_devices::parts(&driver, feature)
            .findings
            .into_iter()
            .next()
        {
            return Err(failure(refused.kind, refused.what, refused.fix));
        }
    }
    Ok(())
}

/// The versions that are known without querying NVML.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions {
    /// Of the loaded kernel module or, if none is loaded, of the installed libraries.
    pub driver: Option<String>,
    /// Of the loaded kernel module and of the installed libraries, if they differ
    pub mismatch: Option<(String, String)>,
    /// The newest CUDA version that the driver supports, if the inventory is cached.
    pub cuda: Option<String>,
}

/// Returns the versions of the driver and of CUDA, without querying NVML.
#[must_use]
pub fn versions(config: &Config) -> Versions {
    let Ok(driver) = Driver::find(config) else {
        return Versions {
            mismatch: mismatch(config),
            ..Versions::default()
        };
    };
    Versions {
        driver: driver.version(),
        mismatch: None,
        cuda: driver.cached().map(|cached| cached.cuda_version),
    }
}

/// Returns the versions of the loaded kernel module and of the libraries, if both exist. A driver is found only if they are equal.
fn mismatch(config: &Config) -> Option<(String, String)> {
    let parts = DriverParts::below(Roots::open(config).ok()?, config);
    let libraries = crate::driver::diagnosis::version_of_libraries(&parts.search(config))?;
    Some((parts.module?, libraries))
}

/// Asks NVML which processes use each GPU of this host. The program must have only one thread, because a child is forked.
///
/// # Errors
/// If there is no driver, or NVML fails.
pub fn gpu_processes(config: &Config) -> Result<Vec<GpuProcesses>> {
    let question = Driver::find(config)?.question()?;
    processes::ask(&question, Instant::now() + config.nvml_timeout)
}

/// The driver and the GPUs of this host at one moment.
#[derive(Debug)]
pub struct Host {
    parts: DriverParts,
    config: Config,
    /// /proc/driver/nvidia, if it exists
    proc_dir: Option<HostPath>,
    /// The GPUs of the kernel module and, if NVML or the cache was asked, the nodes that were examined for this
    view: KernelView,
    /// The driver version and the GPUs, according to NVML and the kernel module
    pub inventory: Inventory,
}

impl Host {
    /// Finds the driver and its GPUs. If there is no cached inventory that the kernel confirms, calls `slow` and then queries NVML, which can
    /// take seconds. The program must have only one thread, because a child is forked. libnvidia-ml is found as for a container whose image does
    /// not name its capabilities.
    ///
    /// # Errors
    /// If there is no driver, or NVML fails.
    pub fn inspect(config: &Config, slow: &dyn Fn()) -> Result<Self> {
        let capabilities = Capabilities::default_set(config.supported_driver_capabilities);
        let cached = Cached { names: None, slow };
        Driver::find_cached(config, capabilities)?.host(Source::Cache(cached))
    }

    /// Like [`Self::inspect`], for a decision that depends only on the devices with these names.
    ///
    /// # Errors
    /// As [`Self::inspect`].
    pub fn inspect_devices(config: &Config, names: &[String]) -> Result<Self> {
        let capabilities = Capabilities::default_set(config.supported_driver_capabilities);
        let cached = Cached {
            names: Some(names),
            slow: &|| (),
        };
        Driver::find_cached(config, capabilities)?.host(Source::Cache(cached))
    }

    /// Opens the host only for [`Self::device_facts`]. Searches for no driver file, so it is cheap
    /// enough for each answer to the kubelet.
    ///
    /// # Errors
    /// If the driver root or the directory with device nodes cannot be opened.
    pub fn for_devices(config: &Config, inventory: Inventory) -> Result<Self> {
        let parts = DriverParts::without_library(Roots::open(config)?, config);
        let view = KernelView::of_gpus(&parts.roots.proc);
        Ok(Self::new(config, parts, inventory, view))
    }

    fn new(config: &Config, parts: DriverParts, inventory: Inventory, view: KernelView) -> Self {
        let proc = &parts.roots.proc;
        let proc_dir = proc.open_dir(Path::new(DRIVER_PROC)).ok();
        Self {
            proc_dir: proc_dir.map(|dir| HostPath::new(proc.on_host(dir.path()))),
            parts,
            config: config.clone(),
            view,
            inventory,
        }
    }

    /// Returns this host as it would be with these nodes, by their names below /dev, to foresee a decision.
    #[must_use]
    pub fn with_nodes(mut self, foreseen: BTreeMap<String, DeviceNode>) -> Self {
        self.view.nodes.extend(foreseen);
        self
    }

    const fn roots(&self) -> &Roots {
        &self.parts.roots
    }

    /// Examines `/dev/NAME`.
    fn node(&self, name: &str) -> NodeState {
        match self.view.nodes.get(name) {
            Some(node) => NodeState::Device(node.clone()),
            None => NodeState::inspect(&self.roots().dev, name),
        }
    }

    /// Returns the edits that give these devices to a container, and findings about them. Reads from the host, but changes nothing.
    ///
    /// # Errors
    /// If something is missing that the container requires.
    pub fn edits(&self, wanted: &Wanted, devices: &[Device<'_>]) -> Result<(Edits, Vec<Finding>)> {
        let (edits, mut findings) = decide::edits(&self.facts(wanted, devices)?, wanted, devices)?;
        findings.extend(self.findings());
        Ok((edits, findings))
    }

    /// Returns a finding for each path that could not be examined so far, and that containers therefore lack.
    pub fn findings(&self) -> impl Iterator<Item = Finding> {
        self.roots().findings()
    }

    /// Returns the UUIDs of the GPUs and MIG devices that these device nodes belong to.
    #[must_use]
    pub fn names_of(&self, nodes: &Nodes) -> Vec<String> {
        names_of(
            nodes,
            &self.inventory,
            &self.mig_minors().unwrap_or_default(),
        )
    }

    /// Returns the names of the directories of all GPUs below `/proc/driver/nvidia/gpus`.
    #[must_use]
    pub fn gpu_dirs(&self) -> Vec<&OsStr> {
        self.view
            .gpus
            .iter()
            .map(|gpu| gpu.dir.as_os_str())
            .collect()
    }

    /// Returns the driver root.
    #[must_use]
    pub const fn driver(&self) -> &Tree {
        &self.roots().driver
    }

    /// Returns the kind of the driver.
    #[must_use]
    pub const fn driver_kind(&self) -> DriverKind {
        self.roots().kind
    }

    /// Returns the path of `/proc/driver/nvidia` on the host, if it exists.
    #[must_use]
    pub fn proc_dir(&self) -> Option<HostPath> {
        self.proc_dir.clone()
    }

    fn search(&self) -> Search<'_> {
        let version = &self.inventory.driver_version;
        let DriverParts {
            roots,
            linker_cache,
            ..
        } = &self.parts;
        roots.search(linker_cache, version, &self.config)
    }
}
