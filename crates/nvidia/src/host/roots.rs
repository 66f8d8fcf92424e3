//! Finds the directories that contain the parts of a driver, because the driver root may have only some of them.

use std::fmt;
use std::path::Path;

use anyhow::Result;

use base::debug;
use base::report::Finding;
use base::tree::Tree;
use findings::catalog;

use crate::config::Config;
use crate::driver::libraries::{LinkerCache, Search};
use crate::driver::nodes::{NodeState, is_denied_by_cgroup};
use crate::driver::pci::PCI_DEVICES;
use crate::driver::platform::Platform;
use crate::driver::{DriverKind, open_dev_root, open_root, wsl};
use crate::inventory::cap_files::CapNode;
use crate::inventory::caps::MIG_MINORS;
use crate::inventory::procfs::{self, DRIVER_PROC, KernelGpu};
use crate::inventory::{Inventory, cap_files, merge};

/// The directories that contain the parts of the driver. The root of a driver container has all parts. A driver root with only the driver
/// files uses the device nodes, /proc and /sys of the host.
#[derive(Clone, Debug)]
pub struct Roots {
    /// The driver root: libraries, programs, sockets
    pub driver: Tree,
    /// The driver root, for the search for the driver's files, with a record of what it was based on
    pub files: Tree,
    /// The root that has the device nodes
    pub dev: Tree,
    /// The root that has /proc/driver/nvidia
    pub proc: Tree,
    /// The root that has the PCI devices and the modules
    pub sys: Tree,
    /// The kind of the driver
    pub kind: DriverKind,
}

/// The nodes of MIG capabilities.
#[derive(Clone, Copy, Debug)]
pub(super) struct MigNodes<'a> {
    pub(super) caps: &'a [CapNode],
    /// The nodes among these that are missing
    pub(super) missing: &'a [CapNode],
}

impl fmt::Display for Roots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [dev, proc, sys] = [&self.dev, &self.proc, &self.sys].map(Tree::path);
        let (dev, proc, sys) = (dev.as_path(), proc.as_path(), sys.as_path());
        write!(
            f,
            "device nodes below {dev:?}, /proc/driver/nvidia below {proc:?}, /sys below {sys:?}"
        )
    }
}

impl Roots {
    /// Opens the roots that config.toml names, or finds them.
    ///
    /// # Errors
    /// If one cannot be opened.
    pub fn open(config: &Config) -> Result<Self> {
        Self::open_on(None, config)
    }

    /// Like [`Self::open`], on a host that is a directory.
    ///
    /// # Errors
    /// If a root cannot be opened, as in [`Self::open`].
    pub fn open_on(host: Option<&Tree>, config: &Config) -> Result<Self> {
        let driver = open_root(&config.driver_root)?;
        let mut dev = match &config.dev_root {
            Some(root) => open_dev_root(root)?,
            None => driver.owner_on(host, "/dev/nvidiactl")?,
        };
        let proc = driver.owner_on(host, DRIVER_PROC)?;
        let sys = driver.owner_on(host, PCI_DEVICES)?;
        // A driver root with the control node, the usual one, is not examined further: this is part of the start of each container.
        let is_wsl = !dev.is(&driver)
            && Platform::of_wsl(&driver, host)
            && procfs::read_version(&proc).is_none();
        let kind = if is_wsl {
            DriverKind::Wsl
        } else {
            DriverKind::Linux
        };
        if is_wsl && config.dev_root.is_none() {
            dev = driver.owner_on(host, wsl::NODE_PATH)?;
        }
        let roots = Self {
            files: driver.recording(),
            driver,
            dev,
            proc,
            sys,
            kind,
        };
        debug::log(|| roots.to_string());
        Ok(roots)
    }

    /// Returns the same roots, see [`Tree::afresh`].
    #[must_use]
    pub fn afresh(&self) -> Self {
        Self {
            driver: self.driver.afresh(),
            files: self.driver.recording(),
            dev: self.dev.afresh(),
            proc: self.proc.afresh(),
            sys: self.sys.afresh(),
            kind: self.kind,
        }
    }

    /// Like [`Self::open`], but `dev` is the root in which nodes are created. A driver root with its own `/proc` is a driver container,
    /// which contains the nodes even if there are none yet.
    ///
    /// # Errors
    /// If one cannot be opened.
    pub fn open_to_prepare(config: &Config) -> Result<Self> {
        let roots = Self::open(config)?;
        let has_nodes = config.dev_root.is_none() && roots.proc.is(&roots.driver);
        let dev = if has_nodes {
            roots.driver.clone()
        } else {
            roots.dev
        };
        Ok(Self { dev, ..roots })
    }

    /// Adds to the answer of NVML what it does not contain, after reading it from the kernel.
    pub fn complete_afresh(&self, inventory: &mut Inventory) {
        let caps = if inventory.gpus.iter().any(|gpu| gpu.mig_enabled) {
            cap_files::nodes_in_table(&self.proc, &cap_files::instances(&self.proc))
        } else {
            Vec::new()
        };
        let mig = MigNodes {
            caps: &caps,
            missing: &cap_files::missing(&self.dev, &caps, &[]),
        };
        self.complete(inventory, &procfs::read_gpus(&self.proc), mig);
    }

    /// Adds to NVML's answer what it does not contain: the kind of the driver, GPUs that only the kernel module lists, and MIG devices
    /// without nodes.
    pub(super) fn complete(
        &self,
        inventory: &mut Inventory,
        gpus: &[KernelGpu],
        mig: MigNodes<'_>,
    ) {
        inventory.driver_kind = self.kind;
        let node = |minor| NodeState::inspect(&self.dev, &DriverKind::Linux.gpu_node(minor));
        merge::complete(inventory, gpus, node, |node| {
            is_denied_by_cgroup(node.source.as_path())
        });
        if inventory.gpus.iter().any(|gpu| gpu.mig_enabled)
            && self.proc.locate(Path::new(MIG_MINORS)).is_ok()
        {
            cap_files::note_missing_nodes(inventory, mig.caps, mig.missing);
        }
    }

    /// Returns the linker cache of the driver root, which is read when it is needed.
    #[must_use]
    pub fn linker_cache(&self, config: &Config) -> LinkerCache {
        LinkerCache::of(&self.files, config.ldcache.as_ref())
    }

    /// Returns the search for the libraries of this driver version, with the directories of config.toml.
    #[must_use]
    pub fn search<'a>(
        &'a self,
        cache: &'a LinkerCache,
        version: &'a str,
        config: &'a Config,
    ) -> Search<'a> {
        Search {
            root: &self.files,
            cache,
            version,
            dirs: &config.library_dirs,
            kind: self.kind,
        }
    }

    /// Returns a finding for each path that could not be examined so far, and that containers therefore lack.
    pub fn findings(&self) -> impl Iterator<Item = Finding> {
        let mut roots: Vec<&Tree> = Vec::new();
        for root in [&self.driver, &self.files, &self.dev, &self.proc, &self.sys] {
            if !roots.iter().any(|known| known.is(root)) {
                roots.push(root);
            }
        }
        roots
            .into_iter()
            .flat_map(Tree::troubles)
            .map(|(path, why)| unreadable(&path, &why))
    }
}

fn unreadable(path: &Path, why: &str) -> Finding {
    let fix = format!("run \"stat {}\" as root", path.display());
    Finding::new(
        &catalog::UNREADABLE,
        format!("cannot examine {path:?}: {why}"),
        fix,
    )
}
