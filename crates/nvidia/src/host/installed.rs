//! Finds the installed and loaded driver, and queries NVML for the inventory.

use std::path::Path;
use std::time::Instant;

use anyhow::{Error, Result};

use base::paths::HostPath;
use base::report::failure;
use base::tree::Tree;
use findings::catalog;

use super::{HostState, Roots};
use crate::config::Config;
use crate::driver::libraries::{LinkerCache, Search};
use crate::driver::nodes::NodeState;
use crate::driver::platform::Platform;
use crate::driver::{diagnosis, locate};
use crate::inventory::ask::{self, Question};
use crate::inventory::cache::{Cache, KernelView};
use crate::inventory::caps::MIG_MINORS;
use crate::inventory::fingerprint::uptime;
use crate::inventory::gather::NvmlAnswer;
use crate::inventory::procfs::{self, KernelGpu};
use crate::inventory::{Inventory, cap_files, identity, merge};

pub(super) struct Installed {
    pub(super) roots: Roots,
    pub(super) linker_cache: LinkerCache,
    /// The version of the loaded kernel module
    pub(super) module: Option<String>,
    /// The module's file with the version
    pub(super) version_file: Option<Vec<u8>>,
    /// The real path of libnvidia-ml
    pub(super) library: HostPath,
}

impl Installed {
    pub(super) fn find(config: &Config) -> Result<Self> {
        Self::find_below(Roots::open(config)?, config)
    }

    pub(super) fn find_below(roots: Roots, config: &Config) -> Result<Self> {
        let linker_cache = LinkerCache::read(&roots.driver, config.ldcache.as_ref());
        let version_file = procfs::read_version_file(&roots.proc);
        let module = version_file.as_deref().and_then(procfs::version_of);
        let version = module.as_deref().unwrap_or_default();
        let search = search(&roots, &linker_cache, version, config);
        let Some(library) = locate::management_library(&search) else {
            let reason = diagnose(&search, module.clone());
            return Err(reason.unwrap_or_else(|| no_driver(&roots.driver)));
        };
        if module.is_none()
            && !roots.is_wsl
            && let Some(platform) = Platform::of_host(&roots.driver, None)
        {
            return Err(platform.error(&roots.driver));
        }
        let library = library.source;
        Ok(Self {
            roots,
            linker_cache,
            module,
            version_file,
            library,
        })
    }

    /// Returns the inventory, completed with the GPUs that only the kernel module lists. It is from the cache if the kernel confirms that
    /// and it need not be taken `afresh`.
    pub(super) fn inventory(
        &self,
        config: &Config,
        afresh: bool,
        slow: &dyn Fn(),
    ) -> Result<(Inventory, KernelView)> {
        let question = self.question(config)?;
        let ask = |end| self.ask(&question, config, end);
        let view = || self.kernel_view();
        let (mut inventory, view) = match self.cache(&question) {
            Some(cache) if afresh => cache.renew(&view, &ask)?,
            Some(cache) => cache.get(&view, slow, &ask)?,
            None => {
                slow();
                (ask(Instant::now() + config.nvml_timeout)?.inventory, view())
            }
        };
        complete(&self.roots, &mut inventory, &view.gpus);
        inventory.is_wsl = self.roots.is_wsl;
        Ok((inventory, view))
    }

    pub(super) fn question(&self, config: &Config) -> Result<Question> {
        let (root, library) = Question::place(&self.roots.driver, &self.roots.dev, &self.library)?;
        let (who, is_wsl) = (identity::from_config(config)?, self.roots.is_wsl);
        Ok(Question {
            root,
            library,
            who,
            deadline: config.nvml_timeout,
            is_wsl,
        })
    }

    /// Returns the cache. Without a loaded module, the kernel cannot confirm a cached inventory. On WSL 2, only NVML lists the GPUs.
    fn cache(&self, question: &Question) -> Option<Cache> {
        self.module.as_ref()?;
        question.cache()
    }

    /// Returns the cached inventory if the kernel confirms it. Creates nothing, and never queries NVML.
    pub(super) fn cached(&self, config: &Config) -> Option<Inventory> {
        self.module.as_ref()?;
        self.question(config)
            .ok()?
            .existing_cache()?
            .confirmed(&self.kernel_view())
    }

    /// Queries NVML. If the module is not loaded, the error names that cause instead of NVML's error.
    fn ask(&self, question: &Question, config: &Config, end: Instant) -> Result<NvmlAnswer> {
        ask::ask(question, end).map_err(|error| match self.module {
            Some(_) => error,
            None if self.roots.is_wsl => error,
            None => diagnose(&self.search(config), None).unwrap_or(error),
        })
    }

    /// Returns the version of the kernel module or, if none is loaded, of the libraries.
    pub(super) fn version(&self, config: &Config) -> Option<String> {
        self.module
            .clone()
            .or_else(|| diagnosis::inspect(&self.search(config), None).libraries)
    }

    fn search<'a>(&'a self, config: &'a Config) -> Search<'a> {
        search(
            &self.roots,
            &self.linker_cache,
            self.module.as_deref().unwrap_or_default(),
            config,
        )
    }

    fn kernel_view(&self) -> KernelView {
        let state = HostState::read(&self.roots, self.module.clone(), Some(&self.library));
        let fingerprint = state.fingerprint(&self.roots.sys);
        let nodes = state.device_nodes(&self.roots.dev);
        let HostState { module, gpus, .. } = state;
        KernelView {
            version: module.unwrap_or_default(),
            state: fingerprint,
            gpus,
            nodes,
            uptime: uptime(),
        }
    }
}

/// Adds the GPUs to NVML's answer that only the kernel module lists, and MIG devices without nodes.
pub fn complete(roots: &Roots, inventory: &mut Inventory, gpus: &[KernelGpu]) {
    let Roots { dev, proc, .. } = roots;
    let has_node = |minor| {
        matches!(
            NodeState::inspect(dev, &format!("nvidia{minor}")),
            NodeState::Device(_)
        )
    };
    merge::complete(inventory, gpus, has_node);
    if inventory.gpus.iter().any(|gpu| gpu.mig_enabled)
        && proc.locate(Path::new(MIG_MINORS)).is_ok()
    {
        cap_files::note_missing_nodes(inventory, &cap_files::existing(proc), dev);
    }
}

fn search<'a>(
    roots: &'a Roots,
    cache: &'a LinkerCache,
    version: &'a str,
    config: &'a Config,
) -> Search<'a> {
    Search {
        root: &roots.driver,
        cache,
        version,
        dirs: &config.library_dirs,
        is_wsl: roots.is_wsl,
    }
}

fn diagnose(search: &Search<'_>, module: Option<String>) -> Option<Error> {
    diagnosis::diagnose(&diagnosis::inspect(search, module), search.root)
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
