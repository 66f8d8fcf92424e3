//! The driver and the GPUs of a host, and what containers get of them.
//!
//! [`Host::inspect`] finds the driver and takes the inventory of its GPUs. From there, [`crate::inventory::select`] chooses
//! devices, [`Host::facts`] examines what they need, and [`crate::edits::decide`] makes edits of that without reading
//! anything. [`Host::edits`] does both of the last steps.

mod gather;
mod installed;
mod missing;
mod roots;

use std::path::Path;

use anyhow::Result;

use base::paths::HostPath;
use base::report::Finding;
use base::tree::Tree;

pub use self::roots::Roots;
use crate::config::Config;
use crate::device_id::Nodes;
use crate::driver::diagnosis::{self, PCI_DEVICES};
use crate::driver::libraries::{LinkerCache, Search};
use crate::edits::{Edits, Wanted, decide};
use crate::inventory::Inventory;
use crate::inventory::procfs::{self, DRIVER_PROC, KernelGpu};
use crate::inventory::select::{Device, names_of};
use installed::Installed;

/// Whether this host has no NVIDIA GPU at all. A host whose driver is missing or broken has one.
#[must_use]
pub fn has_no_gpu(config: &Config) -> bool {
    count_gpus(config).is_ok_and(|count| count == Some(0))
}

/// `None` if the PCI bus cannot be examined.
fn count_gpus(config: &Config) -> Result<Option<usize>> {
    let driver = crate::driver::open_root(&config.driver_root)?;
    // The GPU of an SoC is on no PCI bus, and the kernel module lists it.
    let listed = procfs::read_gpus(&driver.owner_of(DRIVER_PROC)?);
    let on_bus = diagnosis::pci_gpus(&driver.owner_of(PCI_DEVICES)?);
    Ok(on_bus.map(|count| count.max(listed.len())))
}

/// The driver and the GPUs of this host, as they were at one moment.
#[derive(Debug)]
pub struct Host {
    roots: Roots,
    linker_cache: LinkerCache,
    config: Config,
    /// /proc/driver/nvidia, if it exists
    proc_dir: Option<HostPath>,
    kernel_gpus: Vec<KernelGpu>,
    /// The driver version and the GPUs, according to NVML and the kernel module
    pub inventory: Inventory,
}

/// How [`Host::inspect_with`] takes the inventory.
#[derive(Clone, Copy, Debug, Default)]
pub struct InspectOptions<'a> {
    /// Ask NVML even if there is a cached inventory that the kernel confirms
    pub afresh: bool,
    /// The program that asks NVML: see [`crate::inventory::probe`]. Without one a child is forked, which only a program with
    /// one thread may do.
    pub nvml_program: Option<&'a Path>,
}

impl Host {
    /// Finds the driver and its GPUs. NVML is asked if there is no cached inventory, or the kernel does not confirm it any
    /// more. That can take seconds; `slow` is called before. For a program with one thread.
    ///
    /// # Errors
    /// If there is no driver, or NVML fails.
    pub fn inspect(config: &Config, slow: &dyn Fn()) -> Result<Self> {
        Self::inspect_with(config, InspectOptions::default(), slow)
    }

    /// The same, but NVML is asked in any case, and its answer replaces the cached inventory.
    ///
    /// # Errors
    /// If there is no driver, or NVML fails.
    pub fn inspect_afresh(config: &Config) -> Result<Self> {
        Self::inspect_with(config, InspectOptions { afresh: true, ..InspectOptions::default() }, &|| ())
    }

    /// The same with these options. A program with threads has to name one that asks NVML for it.
    ///
    /// # Errors
    /// If there is no driver, or NVML fails.
    pub fn inspect_with(config: &Config, options: InspectOptions<'_>, slow: &dyn Fn()) -> Result<Self> {
        let installed = Installed::find(config)?;
        let (inventory, kernel_gpus) = installed.inventory(config, options, slow)?;
        let Installed { roots, linker_cache, .. } = installed;
        let proc_dir = roots.proc.locate(Path::new(DRIVER_PROC)).ok().map(|located| located.host);
        Ok(Self { roots, linker_cache, config: config.clone(), proc_dir, kernel_gpus, inventory })
    }

    /// The edits that give these devices to a container, and what is wrong with them. Examines the host, and changes nothing.
    ///
    /// # Errors
    /// If something is missing that the container cannot do without.
    pub fn edits(&self, wanted: &Wanted, devices: &[Device<'_>]) -> Result<(Edits, Vec<Finding>)> {
        let (edits, mut findings) = decide::edits(&self.facts(wanted, devices)?, wanted, devices)?;
        findings.extend(self.findings());
        Ok((edits, findings))
    }

    /// A finding for each path that could not be examined so far, and so is missing in what containers get.
    pub fn findings(&self) -> impl Iterator<Item = Finding> {
        self.roots.findings()
    }

    /// The UUIDs of the GPUs and MIG devices that these device nodes belong to.
    #[must_use]
    pub fn names_of(&self, nodes: &Nodes) -> Vec<String> {
        names_of(nodes, &self.inventory, &self.mig_minors().unwrap_or_default())
    }

    /// The driver root: paths of driver files in a CDI spec are relative to it.
    #[must_use]
    pub const fn driver(&self) -> &Tree {
        &self.roots.driver
    }

    /// `/proc/driver/nvidia` on the host, if it exists.
    #[must_use]
    pub fn proc_dir(&self) -> Option<HostPath> {
        self.proc_dir.clone()
    }

    fn search(&self) -> Search<'_> {
        Search {
            root: &self.roots.driver,
            cache: &self.linker_cache,
            version: &self.inventory.driver_version,
            dirs: &self.config.library_dirs,
        }
    }
}
