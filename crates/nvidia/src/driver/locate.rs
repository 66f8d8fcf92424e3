//! Finds the files of the catalog below the driver root.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::Result;
use base::report::{Finding, failure};
use base::sys::in_root::open_host_file;
use base::tree::Tree;
use findings::catalog;

use super::file_table::{FileRow, LIBRARIES, LibraryKind, WINE_DIR, WINE_FILES};
use super::files::{self, DriverFiles};
use super::kind::DriverKind;
use super::lacking::{self, IfMissing};
use super::ldcache::Arch;
use super::libraries::{Library, PassedOver, Search};
use super::mismatch::{self, SystemKind};
use super::sonames::Sonames;
use super::{elf, packages, wsl};
use crate::capability::{Capabilities, Capability};

/// Finds the files for `capabilities`, and the files `more` that the administrator configured. All capabilities are a request for what the
/// driver has.
///
/// # Errors
/// If a required library of a capability is missing, or is not a whole library.
pub fn locate(
    search: &Search<'_>,
    capabilities: Capabilities,
    more: &[PathBuf],
) -> Result<(DriverFiles, Vec<Finding>)> {
    let missing = if capabilities.are_everything() {
        IfMissing::LeaveOut
    } else {
        IfMissing::Refuse
    };
    locate_with(search, capabilities, more, missing)
}

/// Finds the files that the driver has for `capabilities`, as [`locate`]. A driver can be installed for graphics only.
///
/// # Errors
/// If a required library has another version than the driver, or is not a whole library.
pub(crate) fn locate_installed(
    search: &Search<'_>,
    capabilities: Capabilities,
    more: &[PathBuf],
) -> Result<(DriverFiles, Vec<Finding>)> {
    locate_with(search, capabilities, more, IfMissing::LeaveOut)
}

fn locate_with(
    search: &Search<'_>,
    capabilities: Capabilities,
    more: &[PathBuf],
    missing: IfMissing,
) -> Result<(DriverFiles, Vec<Finding>)> {
    let (mut found, mut findings) = match search.kind {
        DriverKind::Linux => find(search, capabilities, missing)?,
        DriverKind::Wsl => wsl::find(search, capabilities, missing)?,
    };
    for path in more {
        match search.at(Arch::native(), path) {
            Some(library) => found.libraries.push(library),
            None => match files::at(search.root, path) {
                Some(file) => found.placed.push(file),
                None => findings.push(Finding::new(
                    &catalog::NO_FILE,
                    format!("{path:?} is missing below {}", search.root.path()),
                    "correct files in the [driver] table of config.toml",
                )),
            },
        }
    }
    findings.extend(
        search
            .dirs
            .iter()
            .filter_map(|dir| missing_directory(search.root, dir)),
    );
    Ok((found, findings))
}

fn find(
    search: &Search<'_>,
    capabilities: Capabilities,
    missing: IfMissing,
) -> Result<(DriverFiles, Vec<Finding>)> {
    let Search {
        root,
        cache,
        version,
        ..
    } = *search;
    let rows = rows_of(capabilities);
    let (mut libraries, mut passed) = search.find(Arch::native(), &rows);
    let mut left_out = Vec::new();
    for row in &rows {
        let Some(capability) = requires(capabilities, row) else {
            continue;
        };
        let is_known = passed.iter().any(|passed| passed.name == row.name);
        match libraries.iter().find(|library| library.name == row.name) {
            Some(library) => require_whole(search, library, capability)?,
            None if missing == IfMissing::LeaveOut && !is_known => {
                left_out.push(lacking::of_row(capability, row));
            }
            None => return Err(missing_library(search, row, capability, &passed)),
        }
    }
    if capabilities.has(Capability::Compat32)
        && let Some(compat32) = Arch::native().compat32()
    {
        let (more, others) = search.find(compat32, &rows);
        libraries.extend(more);
        passed.extend(others);
    }
    let mut findings = search.findings(&passed);
    findings.extend(cache.missing().cloned());
    findings.extend(lacking::finding(&catalog::NOT_INSTALLED, search, &left_out));
    if capabilities.are_everything() {
        libraries.extend(search.unknown(&libraries));
    } else {
        findings.extend(lacking::in_container(search, capabilities, &libraries));
    }
    if capabilities.has(Capability::Ngx) {
        libraries.extend(wine(search, &libraries));
    }
    let mut placed = files::descriptions(root, version, capabilities);
    placed.extend(files::firmware(root, version));
    if capabilities.has(Capability::Display) {
        placed.extend(files::xorg_modules(root, version));
    }
    let library_dirs = search.dirs_of(libraries.iter());
    let binaries = files::binaries(root, &library_dirs, capabilities);
    Ok((
        DriverFiles {
            libraries,
            binaries,
            placed,
        },
        findings,
    ))
}

fn rows_of(capabilities: Capabilities) -> Vec<&'static FileRow> {
    let mut rows: Vec<&'static FileRow> = LIBRARIES.iter().collect();
    rows.retain(|row| capabilities.any(row.capabilities));
    rows
}

/// Returns the requested capability that requires the library of this row; `None` if containers can do without it.
fn requires(capabilities: Capabilities, row: &FileRow) -> Option<Capability> {
    let capability = *row.capabilities.first()?;
    let is_required = row.kind == LibraryKind::Required && capabilities.has(capability);
    is_required.then_some(capability)
}

/// Returns the finding about a directory of `library-dirs` that does not exist.
fn missing_directory(root: &Tree, dir: &Path) -> Option<Finding> {
    match root.locate(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        _ => return None,
    }
    let what = format!("the directory {dir:?} is missing below {}", root.path());
    let fix = "correct library-dirs in the [driver] table of config.toml";
    Some(Finding::new(&catalog::NO_FILE, what, fix))
}

/// Finds libnvidia-ml, in the version of the search.
#[must_use]
pub fn management_library(search: &Search<'_>) -> Option<Library> {
    library(search, "libnvidia-ml")
}

/// Finds a library of this machine's architecture by its name in the catalog, in the version of the search.
#[must_use]
pub fn library(search: &Search<'_>, name: &str) -> Option<Library> {
    if search.kind == DriverKind::Wsl {
        return wsl::library(search, name);
    }
    let rows: Vec<&'static FileRow> = LIBRARIES.iter().filter(|row| row.name == name).collect();
    search.find(Arch::native(), &rows).0.into_iter().next()
}

/// Returns the driver's libraries that are not in the catalog. Only containers that request `all` get them.
#[must_use]
pub fn unknown(search: &Search<'_>) -> Vec<Library> {
    if search.kind == DriverKind::Wsl {
        return wsl::unknown(search);
    }
    let rows: Vec<&'static FileRow> = LIBRARIES.iter().collect();
    let mut known = Vec::new();
    for arch in Arch::supported() {
        known.extend(search.find(arch, &rows).0);
    }
    search.unknown(&known)
}

/// Returns the finding that names libraries that are not in the catalog.
#[must_use]
pub fn unknown_finding(unknown: &[Library]) -> Option<Finding> {
    if unknown.is_empty() {
        return None;
    }
    let mut names = BTreeSet::new();
    for library in unknown {
        names.insert(format!("{:?}", library.file_name));
    }
    let what = format!(
        "libraries of the driver are not in the catalog: {}",
        Vec::from_iter(names).join(", ")
    );
    let fix = "set NVIDIA_DRIVER_CAPABILITIES=all for containers that need them";
    Some(Finding::new(&catalog::UNKNOWN_LIBRARIES, what, fix))
}

/// Finds the files that Windows programs load.
fn wine(search: &Search<'_>, found: &[Library]) -> Vec<Library> {
    let arch = Arch::native();
    let dirs = search.dirs_of(found.iter().filter(|library| library.arch == arch));
    let mut files = Vec::new();
    for name in WINE_FILES {
        let file = |dir: &PathBuf| files::regular(search.root, &dir.join(WINE_DIR).join(name));
        if let Some(file) = dirs.iter().find_map(file) {
            files.push(Library {
                name,
                arch,
                source: file.host,
                file_name: name.into(),
                sonames: Sonames::default(),
            });
        }
    }
    files
}

/// Checks that a file is a whole library: with an empty one, programs would start and find no GPU.
fn require_whole(search: &Search<'_>, library: &Library, capability: Capability) -> Result<()> {
    let Search { root, version, .. } = *search;
    // A file that cannot be read here fails where it is mounted.
    let Ok((mut file, stat)) = open_host_file(library.source.as_path()) else {
        root.note_unrecorded();
        return Ok(());
    };
    root.note_content(&root.inside(&library.source)?, &stat);
    let mut header = [0; elf::FULL_HEADER];
    let size = u64::try_from(stat.st_size).unwrap_or_default();
    // A shorter file is reported by its size.
    if size >= elf::FULL_HEADER as u64 {
        file.read_exact(&mut header)?;
    }
    let Some(fault) = elf::fault(&header, size, library.arch) else {
        return Ok(());
    };
    let fix = match packages::install(root, capability, version) {
        Some(command) => {
            format!("check the free space of the disk, and install the package again: {command}")
        }
        None => "check the free space of the disk, and install the driver again".to_owned(),
    };
    let what = format!(
        "the driver library {} is not a library: {fault}",
        library.source
    );
    Err(failure(&catalog::LIBRARY_MISSING, what, fix))
}

fn missing_library(
    search: &Search<'_>,
    row: &FileRow,
    capability: Capability,
    passed: &[PassedOver],
) -> anyhow::Error {
    let Search { root, version, .. } = *search;
    let mut what = format!(
        "the driver capability \"{}\" requires {}.so of driver {version}, which is missing below {}",
        capability.name(),
        row.name,
        root.path()
    );
    let mut passed = passed.to_vec();
    passed.retain(|passed| passed.name == row.name);
    for finding in search.findings(&passed) {
        what.push_str("; ");
        what.push_str(&finding.what);
    }
    let command = packages::install(root, capability, version);
    // ldconfig does not help if the library is there in another version.
    if let Some(other) = passed.iter().find(|passed| passed.exists) {
        let mut install = format!("install {}.so of driver {version}", row.name);
        if let Some(command) = command {
            install = format!("{install}: {command}");
        }
        let fix = mismatch::of_some(SystemKind::of(root), version, other.version(), &install);
        return failure(&catalog::LIBRARY_MISSING, what, fix);
    }
    // A library that was installed without ldconfig is missing in the linker cache only.
    let ldconfig = packages::ldconfig(root);
    let fix = match command {
        // An update of a snapshot, and a package that the command only mentions, come before the linker cache.
        Some(command) if command.contains(" # ") || command.contains("transactional") => command,
        Some(command) => format!("{command} && {ldconfig}"),
        None => format!(
            "install the driver's libraries in the version of its kernel module, and update the linker cache: {ldconfig}"
        ),
    };
    failure(&catalog::LIBRARY_MISSING, what, fix)
}
