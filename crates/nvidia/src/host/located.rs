//! Caches where the driver's files are: the result of a search is stored in the run-time directory for later containers.
//!
//! # Why the stored result is correct
//!
//! It is used only if all of these conditions are true:
//!
//! 1. *Same search*: the boot, the version of this program and of the kernel module, the settings of config.toml that name files and
//!    directories, and the set of driver capabilities.
//! 2. *Same directories*: each directory in which a name was looked up has the same mount and the same [`base::sys::file_id::FileId`], and
//!    each path at which nothing existed is still free. The kernel sets the time of the last change whenever a name is added, removed or
//!    replaced, which includes the target of a link. Links to directories are followed again, and must lead to the same directory.
//! 3. *Same content*: the files that were read, which are the linker cache and the headers of libraries, have the same mount and identity.
//!    Files of the kernel are read again.
//!
//! A result is stored only if the last change of all of them was more than a second before the search, see [`Basis`]. An error is never
//! stored. The located files themselves are opened afterwards in each case, and a missing one is an error.
//!
//! # Files
//!
//! Each set of capabilities has a file with its own basis: a start reads one file, whatever other containers request. A user can request
//! any set, so there are at most [`MAX_SETS`] files. A process that has stored a result lists the directory and removes the oldest files.
//! The file of the set that images get by default goes last, so that a user who requests many sets does not slow down most of the other
//! containers. Processes that remove files at the same time can remove one that another process has just replaced. A start that finds
//! no file, or one that it cannot use, searches.

use std::ffi::OsString;
use std::io;
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
const KIND: &str = "located 2";
/// The size limit in bytes. All files of a driver take 20 kB.
const MAX_SIZE: u64 = 1 << 20;
/// How many results are kept. Images request two or three sets of capabilities.
const MAX_SETS: usize = 16;
/// The beginning of the names of the files.
const PREFIX: &str = "located-";

/// The content of the file.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    question: String,
    basis: Basis,
    /// libnvidia-ml of the module's version
    management: PathBuf,
    files: StoredFiles,
}

/// The result of a search.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct StoredFiles {
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

/// The cache for the files of one driver root and one set of capabilities.
#[derive(Debug)]
pub(super) struct LocatedCache {
    /// The run-time directory, if it exists
    dir: Option<RunDir>,
    name: String,
    /// The beginning of the names of the files that are removed last
    last: String,
    capabilities: Capabilities,
    version: String,
    question: String,
    /// The time before the first lookup
    start: SystemTime,
    /// The stored result, if it is valid
    known: Option<Stored>,
}

impl LocatedCache {
    /// Reads the stored result for this version of the kernel module and these capabilities. Returns `None` if results are not stored:
    /// on WSL 2, and for roots with unusual names.
    pub(super) fn open(
        roots: &Roots,
        config: &Config,
        version: &str,
        capabilities: Capabilities,
    ) -> Option<Self> {
        let dir = RunDir::existing().ok()?;
        Self::open_in(dir, SystemTime::now(), roots, config, version, capabilities)
    }

    fn open_in(
        dir: Option<RunDir>,
        start: SystemTime,
        roots: &Roots,
        config: &Config,
        version: &str,
        capabilities: Capabilities,
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
            supported_driver_capabilities,
            ..
        } = config;
        let boot = proc_file::boot_id()?;
        let mut cache = Self {
            dir,
            name: stored::name_for(&name_of(capabilities), root),
            last: name_of(Capabilities::default_set(*supported_driver_capabilities)),
            capabilities,
            version: version.to_owned(),
            question: format!(
                "{root:?} {boot} {version} {capabilities} {ldcache:?} {library_dirs:?} {driver_files:?}"
            ),
            start,
            known: None,
        };
        cache.known = cache.read(roots);
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

    /// Whether it is for the files of this version of the driver and these capabilities.
    pub(super) fn is_for(&self, version: &str, capabilities: Capabilities) -> bool {
        (version, capabilities) == (&self.version, self.capabilities)
    }

    /// Returns the files and the findings of an earlier search.
    pub(super) fn files(&self) -> Option<(DriverFiles, Vec<Finding>)> {
        self.known.as_ref()?.files.result()
    }

    /// Stores the result of a search below `roots`. An error, such as a full disk, is ignored: the next container searches again.
    pub(super) fn store(
        &self,
        roots: &Roots,
        management: &HostPath,
        (files, findings): (&DriverFiles, &[Finding]),
    ) {
        if self.known.is_some() {
            // libnvidia-ml was not searched for, so the basis lacks the lookups for it.
            return;
        }
        let (Some(basis), Some(files)) = (
            roots.files.basis(self.start),
            StoredFiles::new(files, findings),
        ) else {
            return;
        };
        let bytes = stored::to_bytes(
            KIND,
            &Stored {
                question: self.question.clone(),
                basis,
                management: management.as_path().to_owned(),
                files,
            },
        );
        if u64::try_from(bytes.len()).is_ok_and(|size| size <= MAX_SIZE) {
            self.write(&bytes).ok();
        }
    }

    /// Writes the file, and removes the files that are not used any more.
    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let dir = match &self.dir {
            Some(dir) => dir.clone(),
            None => RunDir::open()?,
        };
        dir.replace(&self.name, bytes)?;
        self.remove_surplus(&dir)
    }

    fn remove_surplus(&self, dir: &RunDir) -> io::Result<()> {
        let mut others = Vec::new();
        for name in dir.names()? {
            if name.starts_with(PREFIX) && name != self.name {
                others.push(name);
            }
        }
        let surplus = (others.len() + 1).saturating_sub(MAX_SETS);
        if surplus == 0 {
            return Ok(());
        }
        // The oldest are the first.
        others.sort_by_cached_key(|name| (name.starts_with(&self.last), dir.written(name)));
        for name in others.iter().take(surplus) {
            dir.remove(name)?;
        }
        Ok(())
    }
}

/// Returns the beginning of the name of the file of a set, before the part for the driver root.
fn name_of(capabilities: Capabilities) -> String {
    format!("{PREFIX}{:02x}", capabilities.bits())
}

impl StoredFiles {
    /// Returns `None` if a file has another name than its path, or a name is not UTF-8.
    fn new(files: &DriverFiles, findings: &[Finding]) -> Option<Self> {
        let mut stored = Self {
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
            stored.libraries.push(StoredLibrary {
                name: library.name.to_owned(),
                arch: library.arch,
                source: library.source.as_path().to_owned(),
                sonames,
            });
        }
        for Binary { source, name } in &files.binaries {
            let name = (*name).to_owned();
            stored.binaries.push((name, source.as_path().to_owned()));
        }
        for PlacedFile { source, target } in &files.placed {
            let source = source.as_path().to_owned();
            stored.placed.push((source, target.absolute()));
        }
        for Finding { kind, what, fix } in findings {
            let id = kind.id().to_owned();
            stored.findings.push((id, what.clone(), fix.clone()));
        }
        Some(stored)
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
