//! Finds the driver's shared libraries: in the host's linker cache, then in the directories of the libraries that were found, then in
//! the usual directories of the distributions.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use base::paths::HostPath;
use base::report::Finding;
use base::tree::{RegularFile, Tree};
use findings::catalog;

use super::elf;
use super::file_table::{FileRow, HOST_ONLY, LIBRARIES, LIBRARY_DIRS, LibraryKind};
use super::kind::DriverKind;
use super::ldcache::{self, Arch};
use super::mismatch::{self, SystemKind};
use super::packages;
use super::sonames::Sonames;

/// A shared library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// The name in the catalog
    pub name: &'static str,
    /// The architecture of the library
    pub arch: Arch,
    /// The real file, `…/libcuda.so.535.183.01`
    pub source: HostPath,
    /// `libcuda.so.535.183.01`
    pub file_name: OsString,
    /// The names in the linker cache, such as `libcuda.so.1`. They include the file name if that is the SONAME.
    pub sonames: Sonames,
}

/// An entry of the linker cache that is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedOver {
    /// The name in the catalog
    pub name: &'static str,
    /// The name that programs load
    pub soname: OsString,
    /// The file that programs would get, after links if it exists
    pub path: PathBuf,
    /// Whether the file exists. It then has another version.
    pub exists: bool,
}

impl PassedOver {
    /// Returns the version in the name of the file; empty without one.
    #[must_use]
    pub fn version(&self) -> &str {
        version_in(&self.path)
    }
}

/// Returns the version in the name of a file, such as `libcuda.so.535.183.01`; empty without one.
fn version_in(path: &Path) -> &str {
    let name = path.file_name().and_then(OsStr::to_str);
    let version = name.and_then(|name| name.split_once(".so."));
    version.map_or("", |(_, version)| version)
}

/// A library that each driver has.
const ANY: &str = "libcuda.so";

/// The host's linker cache, for the driver's libraries. It is read when the first library is searched for.
#[derive(Debug)]
pub struct LinkerCache {
    root: Tree,
    path: PathBuf,
    read: OnceLock<Content>,
}

/// The content of the linker cache.
#[derive(Debug)]
struct Content {
    /// The file, in which the libraries are searched for; empty if it cannot be read
    bytes: Vec<u8>,
    /// Why the cache cannot be read
    missing: Option<Finding>,
}

impl LinkerCache {
    /// Returns the linker cache of the driver root. Without a cache, libraries are searched for in directories.
    #[must_use]
    pub fn of(root: &Tree, configured: Option<&HostPath>) -> Self {
        let path = configured.map_or_else(|| Path::new("/etc/ld.so.cache"), HostPath::as_path);
        Self {
            root: root.clone(),
            path: path.to_owned(),
            read: OnceLock::new(),
        }
    }

    fn content(&self) -> &Content {
        self.read
            .get_or_init(|| match read_cache(&self.root, &self.path) {
                Ok(bytes) => Content {
                    bytes,
                    missing: None,
                },
                Err(error) => {
                    // Some hosts never have a cache (NixOS, GKE), so this is not a warning for each container.
                    let error =
                        error.context(format!("cannot read the linker cache {:?}", self.path));
                    let missing = Finding::new(&catalog::NO_CACHE, base::report::line(&error), "");
                    Content {
                        bytes: Vec::new(),
                        missing: Some(missing),
                    }
                }
            })
    }

    /// Returns why the cache cannot be read.
    #[must_use]
    pub fn missing(&self) -> Option<&Finding> {
        self.content().missing.as_ref()
    }

    /// Returns the entries of a library: (SONAME, path), in the order of the file.
    fn entries_of(&self, arch: Arch, row: &FileRow) -> Vec<(&OsStr, &Path)> {
        let mut entries = Vec::new();
        let bytes = &self.content().bytes;
        if bytes.is_empty() {
            return entries;
        }
        let found = ldcache::with_prefix(bytes, &format!("{}.so", row.name));
        for entry in found.unwrap_or_default() {
            if entry.is_for(arch) && is_named(entry.name, row.name) {
                entries.push((entry.name, entry.path));
            }
        }
        entries
    }
}

fn read_cache(root: &Tree, path: &Path) -> anyhow::Result<Vec<u8>> {
    let bytes = root.read(path)?;
    // A cache that cannot be searched for one library cannot be searched for the others.
    ldcache::with_prefix(&bytes, ANY)?;
    Ok(bytes)
}

/// Whether `soname` is `name.so` or `name.so.…`. Comparing only the prefix would confuse libcudart with libcuda.
pub(super) fn is_named(soname: &OsStr, name: &str) -> bool {
    let Some(rest) = soname.as_bytes().strip_prefix(name.as_bytes()) else {
        return false;
    };
    match rest.strip_prefix(b".so") {
        Some(rest) => rest.is_empty() || rest.starts_with(b"."),
        None => false,
    }
}

/// Whether a file name ends in this driver version. A library of another version does not work with the loaded kernel module.
fn is_of_version(file_name: &OsStr, version: &str) -> bool {
    match file_name.as_bytes().strip_suffix(version.as_bytes()) {
        Some(rest) => rest.ends_with(b"."),
        None => false,
    }
}

/// Whether a file name belongs to a library with this driver version.
fn is_library_of(file_name: &OsStr, version: &str) -> bool {
    match file_name.as_bytes().strip_suffix(version.as_bytes()) {
        Some(stem) => stem.starts_with(b"lib") && stem.ends_with(b".so."),
        None => false,
    }
}

/// Whether a library is in the catalog, or is known not to be for containers.
fn is_known(file_name: &OsStr) -> bool {
    LIBRARIES.iter().any(|row| is_named(file_name, row.name))
        || HOST_ONLY.iter().any(|name| is_named(file_name, name))
        || is_named(file_name, "libglxserver_nvidia")
}

/// A search for the libraries of one driver version below a driver root.
#[derive(Debug)]
pub struct Search<'a> {
    /// The driver root
    pub root: &'a Tree,
    /// The linker cache of that root
    pub cache: &'a LinkerCache,
    /// The driver version, such as `535.183.01`; empty for any
    pub version: &'a str,
    /// Directories to search before the usual ones
    pub dirs: &'a [PathBuf],
    /// The kind of the driver
    pub kind: DriverKind,
}

impl<'a> Search<'a> {
    /// Returns the same search for another driver version.
    #[must_use]
    pub const fn of_version(&self, version: &'a str) -> Self {
        Self { version, ..*self }
    }
}

impl Search<'_> {
    /// Returns the libraries of these rows, in their order, and the entries of the linker cache that are not used.
    #[must_use]
    pub fn find(&self, arch: Arch, rows: &[&'static FileRow]) -> (Vec<Library>, Vec<PassedOver>) {
        let mut passed = Vec::new();
        let mut found = Vec::new();
        for row in rows {
            found.push(self.in_cache(arch, row, &mut passed));
        }
        let is_uncached = found.iter().all(Option::is_none);
        let mut dirs = self.dirs_of(found.iter().flatten());
        dirs.extend_from_slice(self.dirs);
        self.complete(&mut found, arch, rows, &dirs);
        // With Debian's alternatives for Mesa, the cache lists the libraries of OpenGL, but not the others. Optional libraries are no
        // reason to search further: most drivers lack some.
        let mut is_partial = is_uncached;
        for (row, library) in std::iter::zip(rows, &found) {
            is_partial |= row.kind == LibraryKind::Required && library.is_none();
        }
        if is_partial {
            self.complete(&mut found, arch, rows, &self.usual_dirs(arch));
        }
        (found.into_iter().flatten().collect(), passed)
    }

    /// Adds the libraries that are missing from the first of these directories that has them.
    fn complete(
        &self,
        found: &mut [Option<Library>],
        arch: Arch,
        rows: &[&'static FileRow],
        dirs: &[PathBuf],
    ) {
        for (library, row) in found.iter_mut().zip(rows) {
            if library.is_none() {
                *library = dirs.iter().find_map(|dir| self.in_dir(arch, row, dir));
            }
        }
    }

    /// Returns findings about entries that are not used: one for all stale entries, and one for all libraries of another version.
    /// The packages of an old driver can leave dozens of them.
    #[must_use]
    pub fn findings(&self, passed: &[PassedOver]) -> Vec<Finding> {
        let (mut stale, mut other) = (Vec::new(), BTreeSet::new());
        let mut newest = "";
        for PassedOver {
            soname,
            path,
            exists,
            ..
        } in passed
        {
            if *exists {
                other.insert(format!("{path:?}"));
                let version = version_in(path);
                if mismatch::compare(version, newest) == Ordering::Greater {
                    newest = version;
                }
            } else {
                stale.push(format!("{soname:?} at {path:?}"));
            }
        }
        let mut findings = Vec::new();
        if !stale.is_empty() {
            let what = format!(
                "{:?} lists files that do not exist: {}",
                self.cache.path,
                some_of(&stale)
            );
            findings.push(Finding::new(
                &catalog::STALE_CACHE,
                what,
                format!("as root: {}", packages::ldconfig(self.root)),
            ));
        }
        if !other.is_empty() {
            let what = format!(
                "libraries are ignored because their version differs from the loaded driver {}: {}",
                self.version,
                some_of(&Vec::from_iter(other))
            );
            findings.push(Finding::new(
                &catalog::OTHER_VERSION,
                what,
                mismatch::of_some(
                    SystemKind::of(self.root),
                    self.version,
                    newest,
                    "remove the packages of the other version",
                ),
            ));
        }
        findings
    }

    /// Returns the driver's libraries that are not in the catalog: they have the driver version and are in the directories of the
    /// libraries that were found.
    #[must_use]
    pub fn unknown(&self, found: &[Library]) -> Vec<Library> {
        if self.version.is_empty() {
            return Vec::new();
        }
        let mut unknown = Vec::new();
        for arch in Arch::supported() {
            for dir in self.dirs_of(found.iter().filter(|library| library.arch == arch)) {
                for name in self.root.names(&dir) {
                    if is_library_of(&name, self.version) && !is_known(&name) {
                        unknown.extend(self.at(arch, &dir.join(name)));
                    }
                }
            }
        }
        // A directory can be a link to another one, with the same files.
        let mut seen = BTreeSet::new();
        unknown.retain(|library| {
            !found.iter().any(|known| known.source == library.source)
                && seen.insert(library.source.as_path().to_owned())
        });
        unknown
    }

    fn in_cache(
        &self,
        arch: Arch,
        row: &'static FileRow,
        passed: &mut Vec<PassedOver>,
    ) -> Option<Library> {
        let mut found: Option<Library> = None;
        for (soname, path) in self.cache.entries_of(arch, row) {
            let mut pass = |path: &Path, exists| {
                passed.push(PassedOver {
                    name: row.name,
                    soname: soname.to_owned(),
                    path: path.to_owned(),
                    exists,
                });
            };
            // The name in the linker cache is a link to the file.
            let Some((file, file_name)) = with_name(self.root.linked_file(path)) else {
                pass(path, false);
                continue;
            };
            if !self.fits(row, &file_name) {
                pass(&file.path, true);
                continue;
            }
            // ld.so uses the first file. Further names of the same file are links to it.
            let library = found.get_or_insert_with(|| Library {
                name: row.name,
                arch,
                source: file.host.clone(),
                file_name,
                sonames: Sonames::default(),
            });
            if library.source == file.host {
                library.sonames.insert(soname.to_owned());
            }
        }
        found
    }

    fn fits(&self, row: &FileRow, file_name: &OsStr) -> bool {
        self.version.is_empty()
            || matches!(row.kind, LibraryKind::OwnVersion(_))
            || is_of_version(file_name, self.version)
    }

    fn regular_file(&self, path: &Path) -> Option<(RegularFile, OsString)> {
        with_name(self.root.regular_file(path))
    }

    /// Returns the library at a path, with any name and version. Returns `None` if it is not a library of this architecture.
    #[must_use]
    pub fn at(&self, arch: Arch, path: &Path) -> Option<Library> {
        let (file, file_name) = self.regular_file(path)?;
        self.library("", arch, file, file_name)
    }

    fn library(
        &self,
        name: &'static str,
        arch: Arch,
        file: RegularFile,
        file_name: OsString,
    ) -> Option<Library> {
        let header = self.root.header::<{ elf::HEADER }>(&file.path)?;
        if !elf::is_for(&header, arch) {
            return None;
        }
        let soname = self.root.open_file(&file.path).ok().and_then(elf::soname);
        // ldconfig lists a library without a SONAME under its file name.
        let sonames = Sonames::from([soname.unwrap_or_else(|| file_name.clone())]);
        Some(Library {
            name,
            arch,
            source: file.host,
            file_name,
            sonames,
        })
    }

    /// Returns the directories of these libraries. Libraries that the cache does not list are often in the same directories.
    pub fn dirs_of<'l>(&self, found: impl Iterator<Item = &'l Library>) -> Vec<PathBuf> {
        let prefix = self.root.path();
        let mut dirs = Vec::new();
        for library in found {
            if let Ok(below) = library.source.as_path().strip_prefix(prefix.as_path())
                && let Some(dir) = below.parent()
            {
                let dir = Path::new("/").join(dir);
                if !dirs.contains(&dir) {
                    dirs.push(dir);
                }
            }
        }
        dirs
    }

    /// Returns the usual directories that contain a driver of this version.
    fn usual_dirs(&self, arch: Arch) -> Vec<PathBuf> {
        let has_driver = |dir: &Path| {
            LIBRARIES.iter().any(|row| {
                row.kind == LibraryKind::Required && self.in_dir(arch, row, dir).is_some()
            })
        };
        let mut dirs = Vec::new();
        for dir in self.root.existing(LIBRARY_DIRS) {
            if has_driver(dir) {
                dirs.push(dir.to_owned());
            }
        }
        dirs
    }

    /// Returns `dir/libX.so.<version>`. If the library has its own version or the driver version is unknown, returns the target of
    /// `dir/libX.so.1`.
    fn in_dir(&self, arch: Arch, row: &'static FileRow, dir: &Path) -> Option<Library> {
        let suffix = match row.kind {
            LibraryKind::OwnVersion(soname) => soname,
            _ if self.version.is_empty() => "1",
            _ => self.version,
        };
        let name = format!("{}.so.{suffix}", row.name);
        let below = match row.kind {
            LibraryKind::Below(below) if !dir.ends_with(below) => {
                self.regular_file(&dir.join(below).join(&name))
            }
            _ => None,
        };
        // Debian installs all libraries in one directory, and links to them in those that programs use.
        let (file, file_name) = below.or_else(|| self.regular_file(&dir.join(name)))?;
        self.library(row.name, arch, file, file_name)
    }
}

fn with_name(found: io::Result<Option<RegularFile>>) -> Option<(RegularFile, OsString)> {
    let file = found.ok()??;
    let name = file.path.file_name()?.to_owned();
    Some((file, name))
}

/// How many libraries a finding names.
const NAMED: usize = 3;

fn some_of(names: &[String]) -> String {
    match names.split_at_checked(NAMED) {
        Some((named, rest)) if !rest.is_empty() => {
            format!("{} and {} more", named.join(", "), rest.len())
        }
        _ => names.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::ldcache::{Cache, CacheFormat, NewEntry};

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
    fn libraries_of_the_driver_that_are_not_in_the_catalogue() {
        for (file, is) in [
            ("libnvidia-new.so.535.183.01", true),
            ("libnew.so.535.183.01", true),
            ("libnvidia-new.so.1", false),
            ("libnvidia-new.so.1535.183.01", false),
            ("libnvidia-new-535.183.01", false),
            ("new.so.535.183.01", false),
        ] {
            assert_eq!(is_library_of(OsStr::new(file), "535.183.01"), is, "{file}");
        }
        assert!(
            is_known(OsStr::new("libcuda.so.535.183.01"))
                && is_known(OsStr::new("libnvidia-gtk3.so.535.183.01"))
        );
        assert!(!is_known(OsStr::new("libnvidia-new.so.535.183.01")));
    }

    /// Returns the bytes of a linker cache.
    fn cache_of(entries: &[(&str, PathBuf)]) -> Vec<u8> {
        let new = entries.iter().map(|(name, path)| NewEntry {
            name: OsStr::new(name),
            path,
            arch: Arch::native(),
        });
        let mut cache = Cache::empty(CacheFormat::New);
        cache.merge(&new.collect::<Vec<_>>());
        cache.to_bytes().unwrap()
    }

    /// A library of another version, a directory, a missing file, two names of the library, and a second library of that version.
    #[test]
    fn entries_of_the_linker_cache() {
        let dir = tempfile::tempdir().unwrap();
        let lib = |name: &str| dir.path().join("lib").join(name);
        std::fs::create_dir_all(lib("libcuda.so.9")).unwrap();
        std::fs::create_dir(lib("other")).unwrap();
        for file in ["libcuda.so.470", "libcuda.so.535", "other/libcuda.so.535"] {
            std::fs::write(lib(file), "").unwrap();
        }
        std::os::unix::fs::symlink("libcuda.so.535", lib("libcuda.so.1")).unwrap();
        let entries = [
            ("libcuda.so.470", "libcuda.so.470"),
            ("libcuda.so.9", "libcuda.so.9"),
            ("libcuda.so.8", "libcuda.so.8"),
            ("libcuda.so.1", "libcuda.so.1"),
            ("libcuda.so", "libcuda.so.535"),
            ("libcuda.so.0", "other/libcuda.so.535"),
            ("libcuda-other.so.1", "libcuda.so.535"),
        ];
        let entries = entries.map(|(soname, file)| (soname, Path::new("/lib").join(file)));
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        std::fs::write(dir.path().join("etc/ld.so.cache"), cache_of(&entries)).unwrap();
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        let cache = LinkerCache::of(&root, None);
        let search = Search {
            root: &root,
            cache: &cache,
            version: "535",
            dirs: &[],
            kind: DriverKind::Linux,
        };
        let row = LIBRARIES.iter().find(|row| row.name == "libcuda").unwrap();
        let (found, passed) = search.find(Arch::native(), &[row]);
        assert_eq!(
            (found.len(), &found[0].sonames),
            (
                1,
                &Sonames::from(["libcuda.so", "libcuda.so.1"].map(Into::into))
            )
        );
        assert_eq!(found[0].source.as_path(), lib("libcuda.so.535"));
        let passed: Vec<_> = passed
            .iter()
            .map(|passed| (passed.soname.to_str().unwrap(), passed.exists))
            .collect();
        assert_eq!(
            passed,
            [
                ("libcuda.so.470", true),
                ("libcuda.so.9", false),
                ("libcuda.so.8", false)
            ]
        );
    }

    #[test]
    fn versions_are_whole() {
        for (file, is) in [
            ("libcuda.so.535.183.01", true),
            ("libcuda.so.1535.183.01", false),
            ("libcuda.so.1", false),
        ] {
            assert_eq!(is_of_version(OsStr::new(file), "535.183.01"), is, "{file}");
        }
    }
}
