//! Caches where the driver's files are: the result of a search is stored in the run-time directory for later containers.
//!
//! # Why the stored result is correct
//!
//! It is used only if all of these conditions are true:
//!
//! 1. *Same search*: the boot, the version of this program and of the kernel module, the settings of config.toml that name files and
//!    directories, and the driver capabilities.
//! 2. *Same directories*: each directory in which a name was looked up has the same mount, device, inode and time of the last status
//!    change, and each path at which nothing existed is still free. The kernel sets that time whenever a name is added, removed or
//!    replaced, which includes the target of a link. Links to directories are followed again, and must lead to the same directory.
//! 3. *Same content*: the files that were read, which are the linker cache and the headers of libraries, have the same identity and time.
//!    Files of the kernel are read again.
//!
//! A result is stored only if the last change of all of them was more than a second before the search, see [`Basis`]. An error is never
//! stored. The located files themselves are opened afterwards in each case, and a missing one is an error.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use base::paths::{ContainerPath, HostPath};
use base::report::Finding;
use base::sys::proc_file;
use base::sys::run_dir::RunDir;
use base::tree::Basis;
use findings::catalog;

use super::Roots;
use crate::capability::Capabilities;
use crate::config::Config;
use crate::driver::DriverKind;
use crate::driver::file_table;
use crate::driver::files::{Binary, DriverFiles, PlacedFile};
use crate::driver::ldcache::Arch;
use crate::driver::libraries::Library;
use crate::stored;

/// The kind of the file, with the number of its format.
const KIND: &str = "located 1";
/// The size limit in bytes. All files of a driver take 20 kB, and there are at most 256 sets of capabilities.
const MAX_SIZE: u64 = 8 << 20;

/// The content of the file.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    question: String,
    basis: Basis,
    /// libnvidia-ml of the module's version
    management: PathBuf,
    searches: Vec<Search>,
}

/// The result of one search.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Search {
    capabilities: Capabilities,
    libraries: Vec<StoredLibrary>,
    /// Name and path
    binaries: Vec<(String, PathBuf)>,
    /// Path on the host and in the container
    placed: Vec<(PathBuf, PathBuf)>,
    /// Number, observation and hint
    findings: Vec<(String, String, String)>,
}

/// A [`Library`], whose file name is the last component of its path.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct StoredLibrary {
    name: String,
    arch: Arch,
    source: PathBuf,
    sonames: Vec<String>,
}

/// Stored results without what they were based on, which is not needed after it was compared.
#[derive(Debug)]
struct Known {
    /// The path of libnvidia-ml
    management: PathBuf,
    searches: Vec<Search>,
}

/// The cache for the files of one driver root.
#[derive(Debug)]
pub(super) struct LocatedCache {
    /// The run-time directory, if it exists
    dir: Option<RunDir>,
    name: String,
    version: String,
    question: String,
    /// The time before the first lookup
    start: SystemTime,
    /// The stored results, if they are valid
    known: Option<Known>,
}

impl LocatedCache {
    /// Reads the stored results for this version of the kernel module. Returns `None` if results are not stored: on WSL 2, and for roots
    /// with unusual names.
    pub(super) fn open(roots: &Roots, config: &Config, version: &str) -> Option<Self> {
        let dir = RunDir::existing().ok()?;
        Self::open_in(dir, SystemTime::now(), roots, config, version)
    }

    fn open_in(
        dir: Option<RunDir>,
        start: SystemTime,
        roots: &Roots,
        config: &Config,
        version: &str,
    ) -> Option<Self> {
        if roots.kind != DriverKind::Linux {
            return None;
        }
        let root = roots.files.path();
        let root = root.as_path().to_str()?;
        let Config {
            ldcache,
            library_dirs,
            driver_files,
            ..
        } = config;
        let boot = proc_file::boot_id()?;
        let mut cache = Self {
            dir,
            name: stored::name_for("located", root),
            version: version.to_owned(),
            question: format!(
                "{root:?} {boot} {version} {ldcache:?} {library_dirs:?} {driver_files:?}"
            ),
            start,
            known: None,
        };
        if let Some(stored) = cache.read(roots) {
            cache.known = Some(Known {
                management: stored.management,
                searches: stored.searches,
            });
        }
        Some(cache)
    }

    fn read(&self, roots: &Roots) -> Option<Stored> {
        let bytes = self.dir.as_ref()?.read(&self.name, MAX_SIZE).ok()??;
        let stored: Stored = stored::parse(KIND, &bytes)?;
        let is_valid = stored.question == self.question && stored.basis.is_unchanged(&roots.files);
        is_valid.then_some(stored)
    }

    /// Returns the path of libnvidia-ml.
    pub(super) fn management_library(&self) -> Option<HostPath> {
        let known = self.known.as_ref()?;
        Some(HostPath::new(&known.management))
    }

    /// Returns the files and the findings of an earlier search for these capabilities.
    pub(super) fn files(
        &self,
        version: &str,
        capabilities: Capabilities,
    ) -> Option<(DriverFiles, Vec<Finding>)> {
        if version != self.version {
            return None;
        }
        let mut searches = self.known.as_ref()?.searches.iter();
        searches
            .find(|search| search.capabilities == capabilities)?
            .result()
    }

    /// Stores the result of a search below `roots`, together with the results that are valid. An error, such as a full disk, is ignored:
    /// the next container searches again.
    pub(super) fn store(
        &self,
        roots: &Roots,
        management: &HostPath,
        version: &str,
        capabilities: Capabilities,
        (files, findings): (&DriverFiles, &[Finding]),
    ) {
        if version != self.version {
            return;
        }
        let (Some(mut basis), Some(search)) = (
            roots.files.basis(self.start),
            Search::new(capabilities, files, findings),
        ) else {
            return;
        };
        let mut searches = Vec::new();
        if self.known.is_some() {
            // This search began with libnvidia-ml from the stored results. They are read again, because another process may have added
            // one.
            let Some(stored) = self.read(roots) else {
                return;
            };
            basis.add(stored.basis);
            searches = stored.searches;
            searches.retain(|search| search.capabilities != capabilities);
        }
        searches.push(search);
        let stored = Stored {
            question: self.question.clone(),
            basis,
            management: management.as_path().to_owned(),
            searches,
        };
        let dir = self.dir.clone();
        if let Some(dir) = dir.or_else(|| RunDir::open().ok()) {
            dir.replace(&self.name, &stored::to_bytes(KIND, &stored))
                .ok();
        }
    }
}

impl Search {
    /// Returns `None` if a file has another name than its path, or a name is not UTF-8.
    fn new(capabilities: Capabilities, files: &DriverFiles, findings: &[Finding]) -> Option<Self> {
        let mut search = Self {
            capabilities,
            libraries: Vec::new(),
            binaries: Vec::new(),
            placed: Vec::new(),
            findings: Vec::new(),
        };
        for library in &files.libraries {
            if library.source.as_path().file_name() != Some(&library.file_name) {
                return None;
            }
            let mut sonames = Vec::new();
            for soname in &library.sonames {
                sonames.push(soname.to_str()?.to_owned());
            }
            search.libraries.push(StoredLibrary {
                name: library.name.to_owned(),
                arch: library.arch,
                source: library.source.as_path().to_owned(),
                sonames,
            });
        }
        for Binary { source, name } in &files.binaries {
            let name = (*name).to_owned();
            search.binaries.push((name, source.as_path().to_owned()));
        }
        for PlacedFile { source, target } in &files.placed {
            let source = source.as_path().to_owned();
            search.placed.push((source, target.absolute()));
        }
        for Finding { kind, what, fix } in findings {
            let id = kind.id().to_owned();
            search.findings.push((id, what.clone(), fix.clone()));
        }
        Some(search)
    }

    /// Returns `None` if a name is not in the catalogs of this program.
    fn result(&self) -> Option<(DriverFiles, Vec<Finding>)> {
        let (mut files, mut findings) = (DriverFiles::default(), Vec::new());
        for library in &self.libraries {
            let StoredLibrary { arch, source, .. } = library;
            let sonames = library.sonames.iter().map(OsString::from);
            files.libraries.push(Library {
                name: file_table::name(&library.name)?,
                arch: *arch,
                source: HostPath::new(source),
                file_name: source.file_name()?.to_owned(),
                sonames: sonames.collect(),
            });
        }
        for (name, source) in &self.binaries {
            files.binaries.push(Binary {
                source: HostPath::new(source),
                name: file_table::name(name)?,
            });
        }
        for (source, target) in &self.placed {
            files.placed.push(PlacedFile {
                source: HostPath::new(source),
                target: ContainerPath::new(target)?,
            });
        }
        for (id, what, fix) in &self.findings {
            findings.push(Finding::new(catalog::find(id)?, what.clone(), fix.clone()));
        }
        Some((files, findings))
    }
}

#[cfg(test)]
mod tests;
