//! Finds the driver of WSL 2. The driver is part of Windows, which shows two directories to Linux:
//!
//! - [`LIBRARY_DIR`] has the libraries that programs load. libcuda and libnvidia-ml are small loaders there: they ask Windows through
//!   libdxcore and `/dev/dxg` where the driver of a GPU is, and load the library of that driver.
//! - [`STORES`] has a directory for each driver package of Windows, among them NVIDIA's packages. Loaders open their files by path, so a
//!   container has them at the path of the host.
//!
//! The host's linker cache often lacks the first directory, and has libraries of a Linux driver that was installed by mistake. Therefore
//! it is not used. The names of these files have no driver version.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Error, Result};

use base::report::{Finding, failure};
use base::tree::Tree;
use findings::catalog;

use super::file_table::{DXCORE, FileRow, LIBRARIES, LibraryKind, WSL_LIBRARIES};
use super::files::{self, DriverFiles, PlacedFile};
use super::kind::DriverKind;
use super::lacking::{self, IfMissing};
use super::ldcache::Arch;
use super::libraries::{Library, Search, is_named};
use super::packages::IN_WINDOWS;
use crate::capability::{Capabilities, Capability};

/// The directory of the libraries that programs load, and of nvidia-smi.
pub const LIBRARY_DIR: &str = "/usr/lib/wsl/lib";
/// The directory of the driver packages of Windows.
pub const STORES: &str = "/usr/lib/wsl/drivers";
/// The device node, which stands for all GPUs. The kernel module is dxgkrnl.
pub const NODE: &str = DriverKind::Wsl.control_node();
/// The path of the device node in containers.
pub const NODE_PATH: &str = "/dev/dxg";

/// The file by which a driver package is recognized as one of NVIDIA.
const OF_NVIDIA: &str = "libcuda.so.1.1";

/// Returns the error for a host whose Windows does not have NVIDIA's driver.
#[must_use]
pub fn no_driver(root: &Tree) -> Error {
    let what = format!(
        "this host is WSL 2, and NVIDIA's driver for Windows is missing: {LIBRARY_DIR:?} below {} does not contain libnvidia-ml",
        root.path()
    );
    failure(&catalog::NO_LIBRARIES, what, IN_WINDOWS)
}

/// Returns the directories of NVIDIA's driver packages. After an update, Windows can still have the previous one, and only a call of
/// libdxcore would show which one a GPU uses, so containers get all of them.
///
/// There are hundreds of packages, and each lookup goes to Windows. The names of NVIDIA's begin with `nv`, so the others are examined
/// only if none of those has the driver.
#[must_use]
pub fn stores(root: &Tree) -> Vec<PathBuf> {
    let (mut found, mut others) = (Vec::new(), Vec::new());
    for name in root.names(Path::new(STORES)) {
        let dir = Path::new(STORES).join(&name);
        if !name.as_encoded_bytes().starts_with(b"nv") {
            others.push(dir);
        } else if is_of_nvidia(root, &dir) {
            found.push(dir);
        }
    }
    if found.is_empty() {
        others.retain(|dir| is_of_nvidia(root, dir));
        return others;
    }
    found
}

fn is_of_nvidia(root: &Tree, store: &Path) -> bool {
    files::regular(root, &store.join(OF_NVIDIA)).is_some()
}

/// Returns the identity of the driver: the names of its packages, which contain a hash. `None` if Windows does not have the driver. NVML
/// knows the version, which no file shows.
#[must_use]
pub fn identity(root: &Tree) -> Option<String> {
    let mut names = Vec::new();
    for dir in stores(root) {
        names.push(dir.file_name()?.to_string_lossy().replace(',', "_"));
    }
    if names.is_empty() {
        return None;
    }
    Some(names.join("+"))
}

/// Finds a library by its name in the catalog.
pub(super) fn library(search: &Search<'_>, name: &str) -> Option<Library> {
    let row = rows().find(|row| row.name == name)?;
    of_row(search, row, &search.root.names(Path::new(LIBRARY_DIR)))
}

fn rows() -> impl Iterator<Item = &'static FileRow> {
    WSL_LIBRARIES.iter().chain(LIBRARIES)
}

/// Finds the files for `capabilities`.
///
/// # Errors
/// If libdxcore or a required library of a capability is missing.
pub(super) fn find(
    search: &Search<'_>,
    capabilities: Capabilities,
    missing: IfMissing,
) -> Result<(DriverFiles, Vec<Finding>)> {
    let root = search.root;
    let names = root.names(Path::new(LIBRARY_DIR));
    let wanted: Vec<_> = rows()
        .filter(|row| capabilities.any(row.capabilities))
        .collect();
    let (mut libraries, mut left_out) = (Vec::new(), Vec::new());
    for row in &wanted {
        if let Some(library) = of_row(search, row, &names) {
            libraries.push(library);
        } else if is_required(row, capabilities) {
            match row.capabilities {
                [first, ..] if missing == IfMissing::LeaveOut && row.name != DXCORE => {
                    left_out.push(lacking::of_row(*first, row));
                }
                _ => return Err(missing_library(root, row)),
            }
        }
    }
    let stores = stores(root);
    if stores.is_empty() && !wanted.is_empty() {
        let what = format!(
            "no directory in {STORES:?} below {} contains {OF_NVIDIA}",
            root.path()
        );
        return Err(failure(&catalog::LIBRARY_MISSING, what, IN_WINDOWS));
    }
    let mut findings = Vec::new();
    findings.extend(lacking::finding(&catalog::NOT_INSTALLED, search, &left_out));
    if capabilities.are_everything() {
        libraries.extend(unknown(search));
    } else {
        findings.extend(lacking::in_container(search, capabilities, &libraries));
    }
    let mut dirs = vec![Path::new(LIBRARY_DIR)];
    dirs.extend(stores.iter().map(PathBuf::as_path));
    let mut placed = Vec::new();
    if !wanted.is_empty() {
        for dir in &stores {
            placed.extend(of_store(root, dir, capabilities));
        }
    }
    let files = DriverFiles {
        libraries,
        binaries: files::binaries_in(root, &dirs, capabilities),
        placed,
    };
    Ok((files, findings))
}

/// Whether these capabilities, and not only ones that also use the library, require it.
fn is_required(row: &FileRow, capabilities: Capabilities) -> bool {
    let first = row.capabilities.first();
    row.kind == LibraryKind::Required && first.is_some_and(|first| capabilities.has(*first))
}

fn missing_library(root: &Tree, row: &FileRow) -> Error {
    let what = format!(
        "{}.so of the driver for WSL 2 is missing in {LIBRARY_DIR:?} below {}",
        row.name,
        root.path()
    );
    failure(&catalog::LIBRARY_MISSING, what, IN_WINDOWS)
}

/// Returns the library of a row. The directory has a library under several names, which are files of their own and not links, such as
/// `libcuda.so`, `libcuda.so.1` and `libcuda.so.1.1`. Programs load the one with the SONAME.
fn of_row(search: &Search<'_>, row: &'static FileRow, names: &[OsString]) -> Option<Library> {
    let mut found = chosen(search, names, |name| is_named(name, row.name))?;
    found.name = row.name;
    Some(found)
}

/// Returns the file of a library that programs load. `is_of_library` selects the names of the library.
fn chosen(
    search: &Search<'_>,
    names: &[OsString],
    is_of_library: impl Fn(&OsStr) -> bool,
) -> Option<Library> {
    let mut first = None;
    for name in names {
        if !is_of_library(name) {
            continue;
        }
        let path = Path::new(LIBRARY_DIR).join(name);
        let Some(library) = search.at(Arch::native(), &path) else {
            continue;
        };
        if library.sonames.contains(&library.file_name) {
            return Some(library);
        }
        first = first.or(Some(library));
    }
    let mut library = first?;
    library.sonames.insert(library.file_name.clone());
    Some(library)
}

/// Returns the libraries that are not in the catalog.
pub(super) fn unknown(search: &Search<'_>) -> Vec<Library> {
    let names = search.root.names(Path::new(LIBRARY_DIR));
    let mut stems = BTreeSet::new();
    for name in &names {
        if !rows().any(|row| is_named(name, row.name)) {
            stems.extend(stem(name));
        }
    }
    let mut unknown = Vec::new();
    for wanted in stems {
        unknown.extend(chosen(search, &names, |name| stem(name) == Some(wanted)));
    }
    unknown
}

/// Returns the part of a library's file name before `.so`.
fn stem(name: &OsStr) -> Option<&str> {
    let (stem, rest) = name.to_str()?.split_once(".so")?;
    (stem.starts_with("lib") && (rest.is_empty() || rest.starts_with('.'))).then_some(stem)
}

/// Returns the files of a driver package that Linux programs use. The rest belongs to Windows.
fn of_store(root: &Tree, dir: &Path, capabilities: Capabilities) -> Vec<PlacedFile> {
    let is_used = |name: &str| match name.rsplit_once('.') {
        Some((_, "bin")) => true, // code for the GPU, such as nvcubins.bin
        // The libraries of NGX load DLLs.
        Some((_, "dll")) => capabilities.has(Capability::Ngx),
        _ => stem(OsStr::new(name)).is_some(),
    };
    let mut files = Vec::new();
    for name in root.names(dir) {
        if name.to_str().is_some_and(is_used) {
            files.extend(files::at(root, &dir.join(name)));
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;

    #[test]
    fn packages_of_nvidia() {
        let dir = tempfile::tempdir().unwrap();
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        assert_eq!((stores(&root), identity(&root)), (Vec::new(), None));
        for (package, file, expected) in [
            ("u019.inf", "libamdxc64.so", None),
            ("nvhda.inf", "nvhda64v.sys", None),
            ("zz_oem,x.inf", OF_NVIDIA, Some("zz_oem_x.inf")),
            ("nvlti.inf", OF_NVIDIA, Some("nvlti.inf")),
            ("nv_dispi.inf", OF_NVIDIA, Some("nv_dispi.inf+nvlti.inf")),
        ] {
            let package = dir.path().join("usr/lib/wsl/drivers").join(package);
            std::fs::create_dir_all(&package).unwrap();
            std::fs::write(package.join(file), "").unwrap();
            assert_eq!(identity(&root.afresh()).as_deref(), expected, "{package:?}");
        }
    }

    /// The rest of a package belongs to Windows, and its DLLs to the libraries of NGX.
    #[test]
    fn files_of_a_package_that_containers_get() {
        let dir = tempfile::tempdir().unwrap();
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        let store = Path::new(STORES).join("nv_dispi.inf");
        let on_host = dir.path().join(store.strip_prefix("/").unwrap());
        std::fs::create_dir_all(&on_host).unwrap();
        for name in [OF_NVIDIA, "nvcubins.bin", "nvngx.dll", "nvlddmkm.sys"] {
            std::fs::write(on_host.join(name), "").unwrap();
        }
        for (capability, expected) in [
            (Capability::Compute, vec!["libcuda.so.1.1", "nvcubins.bin"]),
            (
                Capability::Ngx,
                vec!["libcuda.so.1.1", "nvcubins.bin", "nvngx.dll"],
            ),
        ] {
            let capabilities = Capabilities::new(&[capability]);
            let mut names = Vec::new();
            for file in of_store(&root.afresh(), &store, capabilities) {
                let name = file.source.as_path().file_name().unwrap();
                names.push(name.to_str().unwrap().to_owned());
            }
            names.sort();
            assert_eq!(names, expected, "{capability:?}");
        }
    }

    #[test]
    fn names_of_libraries() {
        for (name, expected) in [
            ("libcuda.so.1.1", Some("libcuda")),
            ("libcuda_loader.so", Some("libcuda_loader")),
            ("libcuda.sox", None),
            ("nvcubins.bin", None),
            ("nvlddmkm.sys", None),
        ] {
            assert_eq!(stem(OsStr::new(name)), expected, "{name}");
        }
    }
}
