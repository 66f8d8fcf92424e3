//! Catalogue × driver root → the files that are there.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustix::fs::FileType;

use super::catalog::{self, Row};
use super::ldcache::{self, Arch, Cache};
use super::root::{DriverRoot, Located};
use crate::error::{Failure, failure};
use crate::finding::Finding;
use crate::paths::HostPath;
use crate::request::Capabilities;

/// The driver's files for one set of capabilities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// Shared libraries, in the catalogue's order.
    pub libraries: Vec<Library>,
    /// Programs.
    pub binaries: Vec<Binary>,
}

/// A shared library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Its name in the catalogue, `libcuda`
    pub name: &'static str,
    /// The real file, `…/libcuda.so.535.183.01`
    pub source: HostPath,
    /// `libcuda.so.535.183.01`
    pub file_name: OsString,
    /// The names by which ld.so finds it, `libcuda.so.1`: ldconfig takes them from the SONAME.
    pub sonames: BTreeSet<OsString>,
}

/// A program of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binary {
    /// The real file
    pub source: HostPath,
    /// Its name in the container; the catalogue's, also where the host's file is a link to another name.
    pub name: &'static str,
}

/// What the host's linker cache says of the driver's libraries.
#[derive(Debug)]
pub struct LinkerCache {
    path: PathBuf,
    /// (soname, path), of libraries of the catalogue for this architecture
    entries: Vec<(OsString, PathBuf)>,
}

/// Reads the linker cache of the driver root.
///
/// # Errors
/// If it is missing or malformed.
pub fn read_linker_cache(root: &DriverRoot, configured: Option<&HostPath>) -> Result<LinkerCache> {
    let path = configured.map_or_else(|| PathBuf::from("/etc/ld.so.cache"), |path| path.as_path().to_owned());
    let entries = root.read(&path).and_then(|bytes| Ok(of_driver(&ldcache::parse(&bytes)?))).map_err(|error| {
        let mend = if root.path().as_path() == Path::new("/") {
            "run \"ldconfig\" as root".to_owned()
        } else {
            format!("run \"ldconfig -r {}\" as root", root.path().as_path().display())
        };
        error.context(Failure::new(format!("cannot read the linker cache {path:?} below {}", root.path()), mend))
    })?;
    Ok(LinkerCache { path, entries })
}

fn of_driver(cache: &Cache<'_>) -> Vec<(OsString, PathBuf)> {
    let native = cache.entries().iter().filter(|entry| entry.is_for(Arch::native()));
    let ours = native.filter(|entry| catalog::LIBRARIES.iter().any(|row| is_named(entry.name, row.name)));
    ours.map(|entry| (entry.name.to_owned(), entry.path.to_owned())).collect()
}

impl LinkerCache {
    /// Where the library that ld.so would load for `soname` lies below the driver root.
    #[must_use]
    pub fn find(&self, soname: &str) -> Option<PathBuf> {
        self.entries.iter().find(|(name, _)| name == soname).map(|(_, path)| path.clone())
    }

    /// Every entry of a library of the catalogue: (soname, path).
    fn of(&self, row: &Row) -> impl Iterator<Item = (&OsStr, &Path)> {
        let entries = self.entries.iter().filter(|(name, _)| is_named(name, row.name));
        entries.map(|(name, path)| (name.as_os_str(), path.as_path()))
    }
}

/// Whether `soname` is `name.so` or `name.so.…`. A mere prefix would take libcudart for libcuda.
fn is_named(soname: &OsStr, name: &str) -> bool {
    soname
        .to_str()
        .and_then(|soname| soname.strip_prefix(name))
        .and_then(|rest| rest.strip_prefix(".so"))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Finds what `capabilities` need of driver `version`.
///
/// # Errors
/// If a library is missing without which one of them is of no use.
pub fn locate(
    root: &DriverRoot,
    cache: &LinkerCache,
    version: &str,
    capabilities: Capabilities,
) -> Result<(DriverFiles, Vec<Finding>)> {
    let mut files = DriverFiles::default();
    let mut findings = Vec::new();
    for row in catalog::LIBRARIES.iter().filter(|row| capabilities.any(row.capabilities)) {
        match find_library(root, cache, version, row, &mut findings) {
            Some(library) => files.libraries.push(library),
            None if row.required && row.capabilities.first().is_some_and(|c| capabilities.has(*c)) => {
                return Err(missing_library(cache, version, row, &findings));
            }
            None => {}
        }
    }
    for row in catalog::BINARIES.iter().filter(|row| capabilities.any(row.capabilities)) {
        if let Some(source) = find_binary(root, row.name) {
            files.binaries.push(Binary { source, name: row.name });
        }
    }
    Ok((files, findings))
}

fn find_library(
    root: &DriverRoot,
    cache: &LinkerCache,
    version: &str,
    row: &Row,
    findings: &mut Vec<Finding>,
) -> Option<Library> {
    let mut found: Option<Library> = None;
    for (soname, path) in cache.of(row) {
        let (located, file_name) = match root.locate(path) {
            Ok(located) if located.kind == FileType::RegularFile => match located.path.file_name() {
                Some(file_name) => (located.clone(), file_name.to_owned()),
                None => continue,
            },
            _ => {
                findings.push(Finding::warning(
                    "ONH-202",
                    format!("{:?} lists {soname:?} at {path:?}, where no such file is", cache.path),
                    "the library cannot be given to containers",
                    "run \"ldconfig\" as root on the host",
                ));
                continue;
            }
        };
        if !is_of_version(&file_name, version) {
            findings.push(Finding::warning(
                "ONH-203",
                format!("{:?} is not of the loaded driver {version} and is left out", located.path),
                "libraries work with the kernel module of their own version only",
                "if the driver was just updated, reboot the host",
            ));
            continue;
        }
        add(&mut found, row, soname, located, file_name);
    }
    found
}

/// The first file of a name is the one that ld.so takes; further names of the same file are its links.
fn add(found: &mut Option<Library>, row: &Row, soname: &OsStr, located: Located, file_name: OsString) {
    let library = found.get_or_insert_with(|| Library {
        name: row.name,
        source: located.host.clone(),
        file_name,
        sonames: BTreeSet::new(),
    });
    if library.source == located.host && soname != library.file_name {
        library.sonames.insert(soname.to_owned());
    }
}

/// The driver's libraries end in its version; a file of another driver would not work with the loaded module.
fn is_of_version(file_name: &OsStr, version: &str) -> bool {
    file_name.to_str().and_then(|name| name.strip_suffix(version)).is_some_and(|rest| rest.ends_with('.'))
}

fn missing_library(cache: &LinkerCache, version: &str, row: &Row, findings: &[Finding]) -> anyhow::Error {
    let capability = row.capabilities.first().map_or("", |capability| capability.name());
    let mut what = format!(
        "the driver capability {capability:?} needs {}.so of driver {version}, and {:?} does not have it",
        row.name, cache.path
    );
    for finding in findings.iter().filter(|finding| finding.what.contains(row.name)) {
        what.push_str("; ");
        what.push_str(&finding.what);
    }
    failure(what, "install the driver's libraries of the same version as its kernel module, and run \"ldconfig\"")
}

fn find_binary(root: &DriverRoot, name: &str) -> Option<HostPath> {
    catalog::BINARY_DIRS
        .iter()
        .filter_map(|dir| root.locate(&Path::new(dir).join(name)).ok())
        .find(|located| located.kind == FileType::RegularFile)
        .map(|located| located.host)
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
