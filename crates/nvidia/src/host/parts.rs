//! Examines the driver of a host. A start decides from this, and doctor shows it.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Error, Result};

use base::paths::HostPath;
use base::report::Finding;
use base::tree::Tree;

use findings::catalog;

use super::Roots;
use super::located::LocatedCache;
use crate::capability::Capabilities;
use crate::config::Config;
use crate::driver::libraries::{LinkerCache, Search};
use crate::driver::{DriverKind, diagnosis, locate};
use crate::inventory::Inventory;
use crate::inventory::cap_files::AtQuery;
use crate::inventory::gather::NvmlAnswer;
use crate::inventory::procfs;
use crate::nvml::query::{self, NvmlQuery};

/// The parts of a driver that exist below its roots. One or several of them can be missing.
#[derive(Debug)]
pub struct DriverParts {
    /// The directories that contain the parts
    pub roots: Roots,
    /// The linker cache of the driver root
    pub linker_cache: LinkerCache,
    /// The version of the loaded kernel module
    pub module: Option<String>,
    /// The module's file with the version
    pub(super) version_file: Option<Vec<u8>>,
    /// The real path of libnvidia-ml in the version of the module
    pub library: Option<HostPath>,
    /// The cache of located files, if it may be used
    pub(super) located: Option<LocatedCache>,
}

impl DriverParts {
    /// Examines the driver below these roots.
    #[must_use]
    pub fn below(roots: Roots, config: &Config) -> Self {
        let mut parts = Self::without_library(roots, config);
        parts.library = parts.search_library(config);
        parts
    }

    /// Like [`Self::below`], but uses the result of an earlier search for these capabilities while it is valid.
    pub(super) fn cached(roots: Roots, config: &Config, capabilities: Capabilities) -> Self {
        let mut parts = Self::without_library(roots, config);
        if let Some(module) = &parts.module {
            parts.located = LocatedCache::open(&parts.roots, config, module, capabilities);
        }
        let located = parts.located.as_ref();
        let known = located.and_then(LocatedCache::management_library);
        parts.library = known.or_else(|| parts.search_library(config));
        parts
    }

    pub(super) fn without_library(roots: Roots, config: &Config) -> Self {
        let version_file = procfs::read_version_file(&roots.proc);
        Self {
            linker_cache: roots.linker_cache(config),
            roots,
            module: version_file.as_deref().and_then(procfs::version_of),
            version_file,
            library: None,
            located: None,
        }
    }

    fn search_library(&self, config: &Config) -> Option<HostPath> {
        let library = locate::management_library(&self.search(config))?;
        Some(library.source)
    }

    /// Returns the search for the libraries of the loaded module's version or, if none is loaded, of any version.
    #[must_use]
    pub fn search<'a>(&'a self, config: &'a Config) -> Search<'a> {
        let version = self.module.as_deref().unwrap_or_default();
        self.roots.search(&self.linker_cache, version, config)
    }

    /// Whether the kernel module is missing that the driver needs.
    #[must_use]
    pub fn lacks_module(&self) -> bool {
        self.roots.kind == DriverKind::Linux && self.module.is_none()
    }

    /// Returns why the driver as a whole does not work: its library is missing, or its module is not loaded. `host` is the directory that is
    /// the host, if that is not `/`.
    #[must_use]
    pub fn fault(&self, config: &Config, host: Option<&Tree>) -> Option<Error> {
        if self.library.is_some() && !self.lacks_module() {
            return None;
        }
        let seen = diagnosis::inspect(&self.search(config), self.module.clone(), host);
        diagnosis::diagnose(&seen, &self.roots.driver)
    }

    /// Returns the finding if the libraries have another version than the loaded kernel module.
    #[must_use]
    pub fn mismatch(&self, config: &Config, host: Option<&Tree>) -> Option<Finding> {
        let finding = Finding::error(&self.fault(config, host)?);
        Some(finding).filter(|finding| *finding.kind == catalog::MISMATCH)
    }

    /// Returns the root directory for NVML, and the path of the library below it. `None` if the library is missing.
    #[must_use]
    pub fn place(&self) -> Option<(HostPath, PathBuf)> {
        NvmlQuery::place(&self.roots.driver, &self.roots.dev, self.library.as_ref()?).ok()
    }

    /// Queries NVML. If the module is not loaded, the error names that cause instead of NVML's error.
    pub(super) fn ask(
        &self,
        question: &NvmlQuery,
        config: &Config,
        end: Instant,
    ) -> Result<NvmlAnswer> {
        let mig = AtQuery::now(&self.roots.proc);
        match query::ask(question, end) {
            Ok(answer) => Ok(NvmlAnswer { mig, ..answer }),
            Err(error) if self.lacks_module() => Err(self.fault(config, None).unwrap_or(error)),
            Err(error) => Err(error),
        }
    }

    /// Queries NVML and not the cache, and adds what only the kernel lists.
    ///
    /// # Errors
    /// If NVML fails.
    pub fn ask_for_inventory(&self, question: &NvmlQuery, config: &Config) -> Result<Inventory> {
        let end = Instant::now() + config.nvml_timeout;
        let mut inventory = self.ask(question, config, end)?.inventory;
        self.roots.complete_afresh(&mut inventory);
        Ok(inventory)
    }
}
