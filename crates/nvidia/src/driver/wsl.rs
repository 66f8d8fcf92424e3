//! Finds the driver of WSL 2. The driver is part of Windows, which shows two directories to Linux:
//!
//! - [`LIBRARY_DIR`] has the libraries that programs load. libcuda and libnvidia-ml are small loaders there: they ask Windows through
//!   libdxcore and `/dev/dxg` where the driver of a GPU is, and load the library of that driver.
//! - [`STORES`] has a directory for each driver package of Windows, among them those of NVIDIA. Loaders open their files by path, so a
//!   container has them at the path of the host.
//!
//! The host's linker cache often lacks the first directory, and has libraries of a Linux driver that was installed by mistake. Therefore
//! it is not used. The names of these files have no driver version.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Error, Result};

use base::report::{Finding, Kind, failure};
use base::tree::Tree;
use findings::catalog;

use super::file_table::{LIBRARIES, LibraryKind, Row, WSL_LIBRARIES, characteristic};
use super::files::{self, Binary, PlacedFile};
use super::ldcache::Arch;
use super::libraries::{Library, Search, is_named};
use crate::capability::{Capabilities, Capability};

/// The directory of the libraries that programs load, and of nvidia-smi.
pub const LIBRARY_DIR: &str = "/usr/lib/wsl/lib";
/// The directory of the driver packages of Windows.
pub const STORES: &str = "/usr/lib/wsl/drivers";
/// The device node, which stands for all GPUs. The kernel module is dxgkrnl.
pub const NODE: &str = "dxg";
/// The path of the device node in containers.
pub const NODE_PATH: &str = "/dev/dxg";
/// The library through which all others use `/dev/dxg`. NVML opens it by name.
pub const DXCORE: &str = "/usr/lib/wsl/lib/libdxcore.so";

/// The file by which a driver package is recognized as one of NVIDIA.
const OF_NVIDIA: &str = "libcuda.so.1.1";

/// What to do if a part of the driver is missing.
const INSTALL: &str = "install or update the NVIDIA driver in Windows, then run \"wsl --shutdown\" in Windows and start WSL again";

/// Returns the error for a host whose Windows does not have NVIDIA's driver.
#[must_use]
pub fn no_driver(root: &Tree) -> Error {
    let what = format!(
        "this host is WSL 2, and NVIDIA's driver for Windows is missing: {LIBRARY_DIR:?} below {} does not contain libnvidia-ml",
        root.path()
    );
    failure(&catalog::NO_LIBRARIES, what, INSTALL)
}

/// Returns the directories of NVIDIA's driver packages. After an update, Windows can still have the previous one, and only a call of
/// libdxcore would show which one a GPU uses, so containers get all of them.
///
/// There are hundreds of packages, and each lookup goes to Windows. The names of NVIDIA's begin with `nv`, so the others are examined
/// only if none of those has the driver.
#[must_use]
pub fn stores(root: &Tree) -> Vec<PathBuf> {
    let names = root.names(Path::new(STORES));
    let is_likely = |name: &&OsString| name.as_encoded_bytes().starts_with(b"nv");
    let (likely, others): (Vec<&OsString>, Vec<_>) = names.iter().partition(is_likely);
    let having = |names: Vec<&OsString>| {
        let dirs = names.into_iter().map(|name| Path::new(STORES).join(name));
        dirs.filter(|dir| files::regular(root, &dir.join(OF_NVIDIA)).is_some())
            .collect::<Vec<_>>()
    };
    let found = having(likely);
    if found.is_empty() {
        having(others)
    } else {
        found
    }
}

/// Returns the identity of the driver: the names of its packages, which contain a hash. `None` if Windows does not have the driver. NVML
/// knows the version, which no file shows.
#[must_use]
pub fn identity(root: &Tree) -> Option<String> {
    let names = stores(root)
        .into_iter()
        .filter_map(|dir| Some(dir.file_name()?.to_string_lossy().replace(',', "_")));
    let names: Vec<_> = names.collect();
    (!names.is_empty()).then(|| names.join("+"))
}

/// Finds a library by its name in the catalog.
pub(super) fn library(search: &Search<'_>, name: &str) -> Option<Library> {
    let row = rows().find(|row| row.name == name)?;
    of_row(search, row, &search.root.names(Path::new(LIBRARY_DIR)))
}

fn rows() -> impl Iterator<Item = &'static Row> {
    WSL_LIBRARIES.iter().chain(LIBRARIES)
}

/// The driver's files for one set of capabilities.
pub(super) struct Found {
    pub(super) libraries: Vec<Library>,
    pub(super) binaries: Vec<Binary>,
    pub(super) placed: Vec<PlacedFile>,
    pub(super) findings: Vec<Finding>,
}

/// Finds the files for `capabilities`. `everything` is whether that is the whole driver, with libraries that are not in the catalog.
///
/// # Errors
/// If libdxcore or a required library of a capability is missing.
pub(super) fn find(
    search: &Search<'_>,
    capabilities: Capabilities,
    everything: bool,
) -> Result<Found> {
    let root = search.root;
    let names = root.names(Path::new(LIBRARY_DIR));
    let wanted: Vec<_> = rows()
        .filter(|row| capabilities.any(row.capabilities))
        .collect();
    let mut libraries: Vec<_> = wanted
        .iter()
        .filter_map(|row| of_row(search, row, &names))
        .collect();
    let required = wanted
        .iter()
        .filter(|row| row.kind == LibraryKind::Required);
    let required = required.filter(|row| {
        row.capabilities
            .first()
            .is_some_and(|first| capabilities.has(*first))
    });
    if let Some(row) = required
        .into_iter()
        .find(|row| !libraries.iter().any(|library| library.name == row.name))
    {
        let what = format!(
            "{}.so of the driver for WSL 2 is missing in {LIBRARY_DIR:?} below {}",
            row.name,
            root.path()
        );
        return Err(failure(&catalog::LIBRARY_MISSING, what, INSTALL));
    }
    let stores = stores(root);
    if stores.is_empty() && !wanted.is_empty() {
        let what = format!(
            "no directory in {STORES:?} below {} contains {OF_NVIDIA}",
            root.path()
        );
        return Err(failure(&catalog::LIBRARY_MISSING, what, INSTALL));
    }
    let mut findings = Vec::new();
    if everything {
        libraries.extend(unknown(search));
    } else {
        let lacking = capabilities
            .iter()
            .map(|capability| (capability, lacking_libraries(capability, &libraries)));
        let lacking: Vec<_> = lacking.filter(|(_, names)| !names.is_empty()).collect();
        findings.extend(
            (!lacking.is_empty()).then(|| lacking_finding(&catalog::LACKING_LIBRARIES, &lacking)),
        );
    }
    let dirs: Vec<&Path> = std::iter::once(Path::new(LIBRARY_DIR))
        .chain(stores.iter().map(PathBuf::as_path))
        .collect();
    let binaries = files::binaries_in(root, &dirs, capabilities);
    let placed = if wanted.is_empty() {
        Vec::new()
    } else {
        stores
            .iter()
            .flat_map(|dir| of_store(root, dir, capabilities))
            .collect()
    };
    Ok(Found {
        libraries,
        binaries,
        placed,
        findings,
    })
}

/// Returns the library of a row. The directory has a library under several names, which are files of their own and not links, such as
/// `libcuda.so`, `libcuda.so.1` and `libcuda.so.1.1`. Programs load the one with the SONAME.
fn of_row(search: &Search<'_>, row: &'static Row, names: &[OsString]) -> Option<Library> {
    let names = names
        .iter()
        .filter(|name| is_named(name, row.name))
        .map(OsString::as_os_str);
    Some(Library {
        name: row.name,
        ..chosen(search, names.collect())?
    })
}

/// Returns the file that programs load of those with these names, which are names of one library.
fn chosen(search: &Search<'_>, names: Vec<&OsStr>) -> Option<Library> {
    let found = names
        .into_iter()
        .filter_map(|name| search.at(Arch::native(), &Path::new(LIBRARY_DIR).join(name)));
    let found: Vec<Library> = found.collect();
    let with_soname = found
        .iter()
        .find(|library| library.sonames.contains(&library.file_name));
    let mut library = with_soname.or_else(|| found.first())?.clone();
    library.sonames.insert(library.file_name.clone());
    Some(library)
}

/// Returns the libraries that are not in the catalog.
pub(super) fn unknown(search: &Search<'_>) -> Vec<Library> {
    let names = search.root.names(Path::new(LIBRARY_DIR));
    let unknown = names
        .iter()
        .filter(|name| stem(name).is_some() && !rows().any(|row| is_named(name, row.name)));
    let stems: BTreeSet<_> = unknown.filter_map(|name| stem(name)).collect();
    let of_stem = |wanted: &str| {
        names
            .iter()
            .map(OsString::as_os_str)
            .filter(|name| stem(name) == Some(wanted))
            .collect()
    };
    stems
        .into_iter()
        .filter_map(|wanted| chosen(search, of_stem(wanted)))
        .collect()
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
    let names = root
        .names(dir)
        .into_iter()
        .filter(|name| name.to_str().is_some_and(is_used));
    names
        .filter_map(|name| files::at(root, &dir.join(name)))
        .collect()
}

/// Returns the libraries that a capability depends on and that are missing. Graphics use Microsoft's Direct3D.
#[must_use]
pub fn lacking_libraries(capability: Capability, libraries: &[Library]) -> Vec<String> {
    let groups: &[&[&str]] = match capability {
        Capability::Graphics | Capability::Display => &[&["libd3d12"]],
        other => characteristic(other),
    };
    let lacks = |group: &&&[&str]| {
        !group
            .iter()
            .any(|name| libraries.iter().any(|library| library.name == *name))
    };
    groups
        .iter()
        .filter(lacks)
        .filter_map(|group| Some(format!("{}.so", group.first()?)))
        .collect()
}

/// Returns the finding that names the missing libraries of capabilities.
#[must_use]
pub fn lacking_finding(kind: &'static Kind, lacking: &[(Capability, Vec<String>)]) -> Finding {
    let words = lacking
        .iter()
        .map(|(capability, names)| format!("{} ({})", capability.name(), names.join(", ")));
    let words: Vec<_> = words.collect();
    Finding::new(
        kind,
        format!(
            "the driver for WSL 2 does not have the libraries for {}",
            words.join(", ")
        ),
        INSTALL,
    )
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
