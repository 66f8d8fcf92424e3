//! Finds the installed and loaded driver, and takes the inventory of its GPUs.

use std::time::{Instant, SystemTime};

use anyhow::{Error, Result};

use base::paths::HostPath;
use base::report::failure;
use base::tree::Tree;
use findings::catalog;

use super::parts::DriverParts;
use super::roots::MigNodes;
use super::{Host, HostState, Roots};
use crate::capability::Capabilities;
use crate::config::Config;
use crate::driver::diagnosis;
use crate::driver::platform::Platform;
use crate::inventory::cache::{Cache, KernelView};
use crate::inventory::fingerprint::uptime;
use crate::inventory::procfs::{self, KnownGpu};
use crate::inventory::scope::Scope;
use crate::inventory::{Inventory, cap_files, identity};
use crate::nvml::query::NvmlQuery;

/// A driver whose libnvidia-ml exists, and the configuration that names it.
#[derive(Debug)]
pub struct Driver<'a> {
    pub(super) config: &'a Config,
    pub(super) parts: DriverParts,
    /// The real path of libnvidia-ml
    pub(super) library: HostPath,
}

/// How the cached inventory is used.
#[expect(missing_debug_implementations, reason = "functions have none")]
pub struct Cached<'a> {
    /// The names of the devices for which the kernel has to confirm it; `None` for all
    pub names: Option<&'a [String]>,
    /// Is called before NVML, which can take seconds
    pub slow: &'a dyn Fn(),
}

/// Where the inventory of a host comes from.
#[expect(missing_debug_implementations, reason = "functions have none")]
pub enum Source<'a> {
    /// The cache if the kernel confirms it, otherwise NVML
    Cache(Cached<'a>),
    /// NVML, whose answer replaces the cached inventory
    Nvml,
    /// The caller. NVML is not queried.
    Given(Inventory),
}

impl<'a> Driver<'a> {
    /// Finds the driver.
    ///
    /// # Errors
    /// If there is no driver.
    pub fn find(config: &'a Config) -> Result<Self> {
        Self::of_parts(DriverParts::below(Roots::open(config)?, config), config)
    }

    /// Like [`Self::find`], but uses the result of an earlier search for these capabilities while it is valid.
    ///
    /// # Errors
    /// If there is no driver, as in [`Self::find`].
    pub fn find_cached(config: &'a Config, capabilities: Capabilities) -> Result<Self> {
        let parts = DriverParts::cached(Roots::open(config)?, config, capabilities);
        Self::of_parts(parts, config)
    }

    /// Checks that the driver is complete.
    ///
    /// # Errors
    /// If a part is missing that each driver has.
    pub fn of_parts(parts: DriverParts, config: &'a Config) -> Result<Self> {
        let root = &parts.roots.driver;
        let Some(library) = parts.library.clone() else {
            let fault = parts.fault(config, None);
            return Err(fault.unwrap_or_else(|| no_driver(root)));
        };
        if parts.lacks_module()
            && let Some(platform) = Platform::of_host(root, None)
        {
            return Err(platform.error(root));
        }
        Ok(Self {
            config,
            parts,
            library,
        })
    }

    /// Takes the inventory from this source. The program must have only one thread unless the source is [`Source::Given`], because a child
    /// is forked.
    ///
    /// # Errors
    /// If NVML fails, or the GPUs are of a platform that is not supported.
    pub fn host(self, source: Source<'_>) -> Result<Host> {
        let (inventory, view) = match source {
            Source::Cache(cached) => self.inventory(Some(&cached))?,
            Source::Nvml => self.inventory(None)?,
            Source::Given(inventory) => (inventory, KernelView::of_gpus(&self.parts.roots.proc)),
        };
        let models = inventory.gpus.iter().map(|gpu| gpu.model.as_str());
        if let Some(platform) = Platform::of_models(models) {
            return Err(platform.error(&self.parts.roots.driver));
        }
        Ok(Host::new(self.config, self.parts, inventory, view))
    }

    /// Returns the inventory, completed with the GPUs that only the kernel module lists. Without `cached`, it is NVML's
    /// current answer.
    fn inventory(&self, cached: Option<&Cached<'_>>) -> Result<(Inventory, KernelView)> {
        let question = self.question()?;
        let ask = |end| self.parts.ask(&question, self.config, end);
        let view = |known: &[KnownGpu], scope| self.kernel_view(known, scope);
        let (mut inventory, view) = match (self.cache(&question), cached) {
            (Some(cache), Some(Cached { names, slow })) => cache.get(*names, &view, slow, &ask)?,
            (Some(cache), None) => cache.renew(&view, &ask)?,
            (None, cached) => {
                if let Some(Cached { slow, .. }) = cached {
                    slow();
                }
                (
                    ask(Instant::now() + self.config.nvml_timeout)?.inventory,
                    view(&[], Scope::All),
                )
            }
        };
        let roots = &self.parts.roots;
        let mig = MigNodes {
            caps: &view.caps,
            missing: &view.missing_caps,
        };
        roots.complete(&mut inventory, &view.gpus, mig);
        Ok((inventory, view))
    }

    pub(super) fn question(&self) -> Result<NvmlQuery> {
        let Roots {
            driver, dev, kind, ..
        } = &self.parts.roots;
        let (root, library) = NvmlQuery::place(driver, dev, &self.library)?;
        Ok(NvmlQuery {
            root,
            library,
            who: identity::from_config(self.config)?,
            deadline: self.config.nvml_timeout,
            kind: *kind,
        })
    }

    /// Returns the cache. Without a loaded module, the kernel cannot confirm a cached inventory. On WSL 2, only NVML lists the GPUs.
    fn cache(&self, question: &NvmlQuery) -> Option<Cache> {
        self.parts.module.as_ref()?;
        question.cache()
    }

    /// Returns the cached inventory if the kernel confirms it. Creates nothing, and never queries NVML.
    pub(super) fn cached(&self) -> Option<Inventory> {
        self.parts.module.as_ref()?;
        let cache = self.question().ok()?.existing_cache()?;
        cache.confirmed(&self.kernel_view(&[], Scope::All))
    }

    /// Returns what is known about the driver without NVML: the cached inventory, or one without GPUs. `None` if no kernel module of
    /// NVIDIA is loaded.
    #[must_use]
    pub fn known(&self) -> Option<Inventory> {
        let version = self.parts.module.clone()?;
        Some(self.cached().unwrap_or_else(|| Inventory {
            driver_version: version,
            driver_kind: self.parts.roots.kind,
            ..Inventory::default()
        }))
    }

    /// Returns the version of the kernel module or, if none is loaded, of the libraries.
    pub(super) fn version(&self) -> Option<String> {
        match &self.parts.module {
            Some(version) => Some(version.clone()),
            None => diagnosis::version_of_libraries(&self.parts.search(self.config)),
        }
    }

    fn kernel_view(&self, known: &[KnownGpu], scope: Scope) -> KernelView {
        let roots = &self.parts.roots;
        let Roots { dev, proc, sys, .. } = roots;
        let instances = cap_files::instances_in(proc, &scope);
        let caps = if instances.is_empty() {
            Vec::new()
        } else {
            cap_files::nodes_in_table(proc, &instances)
        };
        let module = self.parts.module.clone();
        let (gpus, known_gpus) = procfs::gpus_with(proc, known, SystemTime::now());
        let state = HostState::with_gpus(roots, module, Some(&self.library), gpus, &instances);
        let of_instances = cap_files::nodes(dev, &instances, &caps);
        let fingerprint = state.fingerprint(sys, &of_instances, &scope);
        let nodes = state.device_nodes(dev);
        let HostState { module, gpus, .. } = state;
        KernelView {
            scope,
            version: module.unwrap_or_default(),
            state: fingerprint,
            gpus,
            known_gpus,
            nodes,
            instances,
            missing_caps: cap_files::missing(dev, &caps, &of_instances),
            caps,
            uptime: uptime(),
        }
    }
}

fn no_driver(root: &Tree) -> Error {
    failure(
        &catalog::NO_LIBRARIES,
        format!(
            "there is no NVIDIA driver below {}: \"libnvidia-ml.so.1\" is missing",
            root.path()
        ),
        "install the driver (openSUSE: nvidia-compute-utils-G07, before Turing -G06; Debian: nvidia-smi), or unset \
         NVIDIA_VISIBLE_DEVICES to run the container without GPUs",
    )
}
