//! The driver's shared libraries: by the host's linker cache, and where that does not list one, in the directories
//! where the others are, or where distributions put them.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use super::catalog::{Kind, LIBRARIES, LIBRARY_DIRS, Row};
use super::elf;
use super::ldcache::{self, Arch, Cache};
use super::root::{DriverRoot, Located};
use crate::few;
use crate::finding::{Finding, catalog};
use crate::paths::HostPath;

/// A shared library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Its row in the catalogue
    pub name: &'static str,
    /// Whose programs load it
    pub arch: Arch,
    /// The real file, `…/libcuda.so.535.183.01`
    pub source: HostPath,
    /// `libcuda.so.535.183.01`
    pub file_name: OsString,
    /// The names by which ld.so finds it, `libcuda.so.1`; its file name among them if that is its SONAME
    pub sonames: BTreeSet<OsString>,
}

/// What the host's linker cache says of the driver's libraries.
#[derive(Debug, Default)]
pub struct LinkerCache {
    path: PathBuf,
    /// In the order of the file
    entries: Vec<(Arch, OsString, PathBuf)>,
    /// Why there is none
    pub missing: Option<Finding>,
}

impl LinkerCache {
    /// Reads the linker cache of the driver root. A host can do without: then libraries are looked for in directories.
    #[must_use]
    pub fn read(root: &DriverRoot, configured: Option<&HostPath>) -> Self {
        let path = configured.map_or_else(|| PathBuf::from("/etc/ld.so.cache"), |path| path.as_path().to_owned());
        match root.read(&path).and_then(|bytes| Ok(of_driver(&ldcache::parse(&bytes)?))) {
            Ok(entries) => Self { path, entries, missing: None },
            Err(error) => {
                // Some hosts never have one (NixOS, GKE): no reason to warn at each container.
                let error = error.context(format!("cannot read the linker cache {path:?}"));
                let missing = Finding::of(&catalog::NO_CACHE, crate::error::line(&error), "");
                Self { path, entries: Vec::new(), missing: Some(missing) }
            }
        }
    }

    /// The entries of a library: (soname, path).
    fn of(&self, arch: Arch, row: &Row) -> impl Iterator<Item = (&OsStr, &Path)> {
        let entries = self.entries.iter().filter(move |(of, name, _)| *of == arch && is_named(name, row.name));
        entries.map(|(_, name, path)| (name.as_os_str(), path.as_path()))
    }
}

fn of_driver(cache: &Cache<'_>) -> Vec<(Arch, OsString, PathBuf)> {
    let arches = || std::iter::once(Arch::native()).chain(Arch::native().compat32());
    let known = cache.entries().iter().filter(|entry| LIBRARIES.iter().any(|row| is_named(entry.name, row.name)));
    let with_arch = known.filter_map(|entry| Some((arches().find(|arch| entry.is_for(*arch))?, entry)));
    with_arch.map(|(arch, entry)| (arch, entry.name.to_owned(), entry.path.to_owned())).collect()
}

/// Whether `soname` is `name.so` or `name.so.…`. A mere prefix would take libcudart for libcuda.
fn is_named(soname: &OsStr, name: &str) -> bool {
    soname
        .to_str()
        .and_then(|soname| soname.strip_prefix(name))
        .and_then(|rest| rest.strip_prefix(".so"))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The driver's libraries end in its version; a file of another driver would not work with the loaded module.
fn is_of_version(file_name: &OsStr, version: &str) -> bool {
    file_name.to_str().and_then(|name| name.strip_suffix(version)).is_some_and(|rest| rest.ends_with('.'))
}

/// Looks for libraries of one driver version below a driver root.
#[derive(Debug)]
pub struct Search<'a> {
    /// Where
    pub root: &'a DriverRoot,
    /// The linker cache of that root
    pub cache: &'a LinkerCache,
    /// `535.183.01`; empty: any
    pub version: &'a str,
    /// Directories to look in before the usual ones
    pub dirs: &'a [PathBuf],
}

impl Search<'_> {
    /// The libraries of these rows, in their order, and what is wrong with those that were passed over.
    #[must_use]
    pub fn find(&self, arch: Arch, rows: &[&'static Row]) -> (Vec<Library>, Vec<Finding>) {
        let mut findings = Vec::new();
        let by_cache: Vec<_> = rows.iter().map(|row| self.in_cache(arch, row, &mut findings)).collect();
        let mut dirs = self.dirs_of(by_cache.iter().flatten());
        dirs.extend_from_slice(self.dirs);
        if dirs.len() == self.dirs.len() {
            dirs.extend(self.usual_dirs(arch));
        }
        let found = rows
            .iter()
            .zip(by_cache)
            .filter_map(|(row, library)| library.or_else(|| dirs.iter().find_map(|dir| self.in_dir(arch, row, dir))));
        (found.collect(), findings)
    }

    fn in_cache(&self, arch: Arch, row: &'static Row, findings: &mut Vec<Finding>) -> Option<Library> {
        let mut found: Option<Library> = None;
        for (soname, path) in self.cache.of(arch, row) {
            let Some((located, file_name)) = self.regular_file(path) else {
                findings.push(Finding::of(
                    &catalog::STALE_CACHE,
                    format!("{:?} lists {soname:?} at {path:?}, where no such file is", self.cache.path),
                    "run \"ldconfig\" as root on the host",
                ));
                continue;
            };
            if !self.fits(row, &file_name) {
                findings.push(Finding::of(
                    &catalog::OTHER_VERSION,
                    format!("{:?} is not of the loaded driver {} and is left out", located.path, self.version),
                    "if the driver was just updated, reboot the host",
                ));
                continue;
            }
            // The first file of a name is the one that ld.so takes; further names of the same file are its links.
            let library = found.get_or_insert_with(|| Library {
                name: row.name,
                arch,
                source: located.host.clone(),
                file_name,
                sonames: BTreeSet::new(),
            });
            if library.source == located.host {
                library.sonames.insert(soname.to_owned());
            }
        }
        found
    }

    fn fits(&self, row: &Row, file_name: &OsStr) -> bool {
        self.version.is_empty() || row.kind == Kind::OwnVersion || is_of_version(file_name, self.version)
    }

    fn regular_file(&self, path: &Path) -> Option<(Located, OsString)> {
        let located = self.root.locate(path).ok().filter(|located| located.kind == FileType::RegularFile)?;
        let file_name = located.path.file_name()?.to_owned();
        Some((located, file_name))
    }

    /// A library by its path, whatever its name and version; `None` if it is no library of this architecture.
    #[must_use]
    pub fn at(&self, arch: Arch, path: &Path) -> Option<Library> {
        let (located, file_name) = self.regular_file(path)?;
        if !self.root.header(&located.path).is_some_and(|header| elf::is_for(&header, arch)) {
            return None;
        }
        let soname = self.root.open_file(&located.path).ok().and_then(elf::soname)?;
        Some(Library { name: "", arch, source: located.host, file_name, sonames: few::set([soname]) })
    }

    /// Where the libraries are that were found: what the cache does not list is beside them.
    fn dirs_of<'l>(&self, found: impl Iterator<Item = &'l Library>) -> Vec<PathBuf> {
        let prefix = self.root.path();
        let mut dirs = Vec::new();
        for library in found {
            let below = library.source.as_path().strip_prefix(prefix.as_path()).ok();
            if let Some(dir) = below.and_then(Path::parent).map(|dir| Path::new("/").join(dir))
                && !dirs.contains(&dir)
            {
                dirs.push(dir);
            }
        }
        dirs
    }

    /// The usual directories that have a driver of this version.
    fn usual_dirs(&self, arch: Arch) -> Vec<PathBuf> {
        let has_driver = |dir: &&Path| {
            let mut required = LIBRARIES.iter().filter(|row| row.kind == Kind::Required);
            required.any(|row| self.in_dir(arch, row, dir).is_some())
        };
        LIBRARY_DIRS.iter().map(Path::new).filter(has_driver).map(Path::to_owned).collect()
    }

    /// `dir/libX.so.<version>`, or where the version is not known or its own, what `dir/libX.so.1` leads to.
    fn in_dir(&self, arch: Arch, row: &'static Row, dir: &Path) -> Option<Library> {
        let dir = match row.kind {
            Kind::Below(below) if !dir.ends_with(below) => dir.join(below),
            _ => dir.to_owned(),
        };
        let by_version = || self.regular_file(&dir.join(format!("{}.so.{}", row.name, self.version)));
        let by_link = || self.regular_file(&dir.join(format!("{}.so.1", row.name)));
        let (located, file_name) =
            if row.kind == Kind::OwnVersion || self.version.is_empty() { by_link()? } else { by_version()? };
        if !self.root.header(&located.path).is_some_and(|header| elf::is_for(&header, arch)) {
            return None;
        }
        let sonames = few::set(self.root.open_file(&located.path).ok().and_then(elf::soname));
        Some(Library { name: row.name, arch, source: located.host, file_name, sonames })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_not_a_name() {
        for (soname, name, is) in [
            ("libcuda.so.1", "libcuda", true),
            ("libcuda.so", "libcuda", true),
            ("libcudadebugger.so.1", "libcuda", false),
            ("libcuda.something", "libcuda", false),
            ("libnvidia-pkcs11-openssl3.so.1", "libnvidia-pkcs11", false),
        ] {
            assert_eq!(is_named(OsStr::new(soname), name), is, "{soname}");
        }
    }

    #[test]
    fn versions_are_whole() {
        for (file, is) in [("libcuda.so.535.183.01", true), ("libcuda.so.1535.183.01", false), ("libcuda.so.1", false)]
        {
            assert_eq!(is_of_version(OsStr::new(file), "535.183.01"), is, "{file}");
        }
    }
}
