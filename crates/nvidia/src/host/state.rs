//! The state of a host, as far as the driver is concerned: the answer to the question whether a host has changed. The cached inventory,
//! CDI specs and the device plugin depend on it. Reading it calls no function of the driver that could hang.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use rustix::fs::{FileType, OFlags, Stat};

use base::paths::{ContainerPath, HostPath};
use base::sys::file_id::FileId;
use base::sys::proc_file;
use base::tree::Tree;

use super::driver::Driver;
use super::roots::Roots;
use crate::config::Config;
use crate::driver::access::Permissions;
use crate::driver::node_name::{CONTROL, NodeName};
use crate::driver::nodes::{CTL_MINOR, DeviceNode, NVIDIA_MAJOR};
use crate::driver::pci::PCI_DEVICES;
use crate::inventory::cap_files::{Instance, InstanceNode};
use crate::inventory::caps::MigCap;
use crate::inventory::fingerprint::Fingerprint;
use crate::inventory::procfs::{self, KernelGpu};
use crate::inventory::scope::Scope;
use crate::inventory::{BusId, cap_files};

/// The directory of the module in sysfs.
pub(super) const MODULE: &str = "/sys/module/nvidia";

/// A device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostNode {
    /// Its inode number: a confined process can open only the nodes that existed when it was confined, and not another node of the same
    /// name. The times are left out, because writing to a device or changing its permissions makes no other node.
    pub inode: u64,
    /// RunAs can open it
    pub permissions: Permissions,
}

/// What the kernel shows of the driver, and the identity of its library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostState {
    /// The boot id; `None` if it cannot be read
    pub boot: Option<String>,
    /// The version of the loaded module
    pub module: Option<String>,
    /// A number that changes when the module is loaded again; 0 if sysfs does not show the module
    pub load: u64,
    /// The GPUs of the module
    pub gpus: Vec<KernelGpu>,
    /// The driver's control node and the nodes of the GPUs, by name. A missing node has no entry, like a file that is not the node.
    pub nodes: BTreeMap<String, HostNode>,
    /// The GPU instances and compute instances
    pub instances: Vec<MigCap>,
    /// The identity of libnvidia-ml, if it was examined
    pub library: Option<FileId>,
}

impl HostState {
    /// Reads the state of the host that the configuration names. Parts that cannot be found are empty.
    #[must_use]
    pub fn of_host(config: &Config) -> Self {
        if let Ok(Driver { parts, library, .. }) = Driver::find(config) {
            return Self::read(&parts.roots, parts.module, Some(&library));
        }
        match Roots::open(config) {
            Ok(roots) => Self::without_library(&roots),
            Err(_) => Self::default(),
        }
    }

    /// Reads the state of the driver below these roots.
    pub(crate) fn without_library(roots: &Roots) -> Self {
        Self::read(roots, procfs::read_version(&roots.proc), None)
    }

    /// Reads the state for this version of the loaded module and this library.
    fn read(roots: &Roots, module: Option<String>, library: Option<&HostPath>) -> Self {
        let instances = cap_files::instances(&roots.proc);
        let gpus = procfs::read_gpus(&roots.proc);
        Self::with_gpus(roots, module, library, gpus, &instances)
    }

    /// Reads the rest of the state, if the GPUs and the instances are known.
    pub(super) fn with_gpus(
        roots: &Roots,
        module: Option<String>,
        library: Option<&HostPath>,
        gpus: Vec<KernelGpu>,
        instances: &[Instance],
    ) -> Self {
        let state = Self::of_instances(module, gpus, instances);
        Self {
            nodes: nodes(&roots.dev, &state.gpus),
            library: library.and_then(|library| FileId::at(library.as_path()).ok()),
            ..state
        }
    }

    /// Reads only what the kernel shows below /proc and /sys, for this version of the loaded module.
    pub(crate) fn of_kernel(proc: &Tree, module: Option<String>) -> Self {
        Self::of_instances(module, procfs::read_gpus(proc), &cap_files::instances(proc))
    }

    fn of_instances(module: Option<String>, gpus: Vec<KernelGpu>, instances: &[Instance]) -> Self {
        Self {
            boot: proc_file::boot_id().map(str::to_owned),
            module,
            load: module_load(),
            gpus,
            instances: instances.iter().map(|instance| instance.cap).collect(),
            ..Self::default()
        }
    }

    /// Returns the nodes as containers get them, so that they need not be examined again.
    pub(super) fn device_nodes(&self, dev: &Tree) -> BTreeMap<String, DeviceNode> {
        let Ok(dir) = dev.open_dir(Path::new("/dev")) else {
            return BTreeMap::new();
        };
        let device = |(name, node): (&String, &HostNode)| {
            let minor = match NodeName::parse(name)? {
                NodeName::Control => CTL_MINOR,
                NodeName::Gpu(minor) => minor,
                NodeName::Cap(_) | NodeName::Dxg => return None,
            };
            let source = HostPath::new(dev.on_host(&dir.path().join(name)));
            let path = ContainerPath::new(Path::new("/dev").join(name))?;
            let device = DeviceNode {
                source,
                path,
                major: NVIDIA_MAJOR,
                minor,
                permissions: node.permissions,
            };
            Some((name.clone(), device))
        };
        self.nodes.iter().filter_map(device).collect()
    }

    /// Whether NVML must be initialized again to see the GPUs as they are now, because it counts those that it can open then. UUIDs do
    /// not matter: the module learns them when NVML opens the GPUs.
    #[must_use]
    pub fn has_other_gpus(&self, before: &Self) -> bool {
        let gpus = |state: &Self| state.gpus.iter().map(|gpu| gpu.bus_id).collect::<Vec<_>>();
        self.module != before.module || gpus(self) != gpus(before) || self.nodes != before.nodes
    }

    /// Returns the fingerprint for the cached inventory, or `None` if the inventory must not be cached, because a file cannot be examined.
    /// `sys` is the root that has the PCI devices, and `mig` are the instances of the GPUs in `scope` with their nodes.
    pub(super) fn fingerprint(
        &self,
        sys: &Tree,
        mig: &[InstanceNode],
        scope: &Scope,
    ) -> Option<Fingerprint> {
        let (boot, library, module) = (
            self.boot.as_ref()?,
            self.library.as_ref()?,
            self.module.as_deref(),
        );
        let mut host = format!(
            "module {} {}\nboot {boot}\nlibrary {library}\n",
            module.unwrap_or_default(),
            self.load
        );
        writeln!(
            host,
            "{CONTROL} {}",
            access(self.nodes.get(CONTROL)?.permissions)
        )
        .ok()?;
        let (mut gpus, mut is_whole) = (BTreeMap::new(), true);
        for gpu in &self.gpus {
            if gpu.excluded {
                // NVML does not count the GPU. It may lack a node, and it never gets a UUID.
                writeln!(host, "{} excluded", gpu.bus_id).ok()?;
                continue;
            }
            let node = gpu
                .minor
                .and_then(|minor| self.nodes.get(&NodeName::Gpu(minor).to_string()))
                .map(|node| access(node.permissions));
            is_whole &= node.is_some() && gpu.uuid.is_some();
            let (minor, uuid) = (
                gpu.minor.unwrap_or(u32::MAX),
                gpu.uuid.as_deref().unwrap_or("?"),
            );
            let node = node.as_deref().unwrap_or("?");
            writeln!(host, "{} {minor} {uuid} {node}", gpu.bus_id).ok()?;
            if scope.has(minor) {
                let responds = is_on_the_bus(sys, gpu.bus_id);
                is_whole &= responds;
                gpus.insert(minor, format!("responds {responds}\n"));
            }
        }
        for (Instance { cap, entry }, node) in mig {
            let entry = (*entry)?;
            let access = node.map_or("?".to_owned(), access);
            is_whole &= node.is_some();
            let text = gpus.entry(cap.gpu()?).or_default();
            writeln!(text, "{cap:?} {entry} {access}").ok()?;
        }
        Some(Fingerprint {
            host,
            gpus,
            is_whole,
        })
    }
}

/// Returns the control node and the nodes of the GPUs that NVML can count.
fn nodes(dev: &Tree, gpus: &[KernelGpu]) -> BTreeMap<String, HostNode> {
    let of_gpus = gpus
        .iter()
        .filter(|gpu| !gpu.excluded)
        .filter_map(|gpu| gpu.minor);
    let known = of_gpus
        .map(|minor| (NodeName::Gpu(minor).to_string(), minor))
        .chain([(CONTROL.to_owned(), CTL_MINOR)]);
    let existing = known.filter_map(|(name, minor)| {
        let stat = examine(dev, &name).filter(|stat| is_node(stat, minor))?;
        Some((
            name,
            HostNode {
                inode: stat.st_ino,
                permissions: Permissions::from_stat(&stat),
            },
        ))
    });
    existing.collect()
}

/// Examines a file in /dev, without following a link. A process that has entered the driver root does not find its file descriptors in
/// /proc, which the first lookup needs on kernels without openat2(2).
pub(super) fn examine(dev: &Tree, name: &str) -> Option<Stat> {
    if let Ok(dir) = dev.open_dir(Path::new("/dev")) {
        return dir.stat(name);
    }
    let file = dev
        .as_root()
        .open_at(
            &Path::new("/dev").join(name),
            OFlags::PATH | OFlags::NOFOLLOW,
        )
        .ok()?;
    rustix::fs::fstat(file).ok()
}

/// Whether a file is the driver's device node with this minor number. A symbolic link is rejected, because its target could change
/// without a trace in the state.
fn is_node(stat: &Stat, minor: u32) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && stat.st_rdev == rustix::fs::makedev(NVIDIA_MAJOR, minor)
}

/// Formats the permissions of a node: NVML counts only the GPUs whose nodes it can open.
fn access(permissions: Permissions) -> String {
    let Permissions { mode, uid, gid } = permissions;
    format!("{mode:o} {uid}:{gid}")
}

/// Returns the inode number of the module's directory in sysfs, which is not reused before the next boot (`kernfs_new_node`). procfs has
/// no such number.
fn module_load() -> u64 {
    rustix::fs::stat(MODULE).map_or(0, |stat| stat.st_ino)
}

/// Whether a GPU responds on the PCI bus. If it has fallen off the bus, all bits of its registers are 1, but the module still lists it.
/// Reading the configuration space wakes a GPU that sleeps (`pci_config_pm_runtime_get` in drivers/pci/pci-sysfs.c).
fn is_on_the_bus(sys: &Tree, bus_id: BusId) -> bool {
    let config = Path::new(PCI_DEVICES)
        .join(bus_id.in_sysfs())
        .join("config");
    sys.kernel_bytes(&config)
        .is_some_and(|vendor: [u8; 2]| vendor != [0xff; 2])
}

#[cfg(test)]
mod tests;
