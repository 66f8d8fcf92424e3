//! Finds the files of the catalog below the driver root.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Result;
use base::report::{Finding, failure};
use base::tree::Tree;
use findings::catalog;

use super::file_table::{self, LIBRARIES, LibraryKind, Row, WINE_DIR, WINE_FILES};
use super::files::{self, Binary, PlacedFile};
use super::ldcache::Arch;
use super::libraries::{Library, PassedOver, Search};
use super::{packages, wsl};
use crate::capability::{Capabilities, Capability, Omit};

/// The driver's files for one set of capabilities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// Shared libraries, in the order of the catalog
    pub libraries: Vec<Library>,
    /// Programs
    pub binaries: Vec<Binary>,
    /// Descriptions, firmware and other files with a fixed path
    pub placed: Vec<PlacedFile>,
}

impl DriverFiles {
    /// Returns the architecture and the catalog name of each library.
    #[must_use]
    pub fn present(&self) -> Vec<(Arch, &'static str)> {
        present(&self.libraries)
    }

    /// Removes the files that are not wanted.
    pub fn leave_out(&mut self, omit: Omit) {
        self.placed
            .retain(|file| !(omit.firmware && file.is_firmware()));
    }
}

/// Finds the files for `capabilities`, and the files `more` that the administrator configured.
///
/// # Errors
/// If a required library of a capability is missing.
pub fn locate(
    search: &Search<'_>,
    capabilities: Capabilities,
    more: &[PathBuf],
) -> Result<(DriverFiles, Vec<Finding>)> {
    let (mut found, mut findings) = match search.is_wsl {
        true => {
            let wsl::Found {
                libraries,
                binaries,
                placed,
                findings,
            } = wsl::find(search, capabilities, is_everything(capabilities))?;
            (
                DriverFiles {
                    libraries,
                    binaries,
                    placed,
                },
                findings,
            )
        }
        false => find(search, capabilities)?,
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

fn find(search: &Search<'_>, capabilities: Capabilities) -> Result<(DriverFiles, Vec<Finding>)> {
    let Search {
        root,
        cache,
        version,
        ..
    } = *search;
    let rows: Vec<&'static Row> = LIBRARIES
        .iter()
        .filter(|row| capabilities.any(row.capabilities))
        .collect();
    let (mut libraries, mut passed) = search.find(Arch::native(), &rows);
    for row in rows.iter().filter(|row| row.kind == LibraryKind::Required) {
        let first = row.capabilities.first().copied();
        if let Some(capability) = first.filter(|capability| capabilities.has(*capability))
            && !libraries.iter().any(|library| library.name == row.name)
        {
            return Err(missing_library(search, row, capability, &passed));
        }
    }
    if let Some(compat32) = Arch::native()
        .compat32()
        .filter(|_| capabilities.has(Capability::Compat32))
    {
        let (more, others) = search.find(compat32, &rows);
        libraries.extend(more);
        passed.extend(others);
    }
    let mut findings = search.findings(&passed);
    findings.extend(cache.missing.clone());
    findings.extend(lacking(root, capabilities, &present(&libraries)));
    if is_everything(capabilities) {
        libraries.extend(search.unknown(&libraries));
    }
    if capabilities.has(Capability::Ngx) {
        libraries.extend(wine(search, &libraries));
    }
    let mut placed = files::descriptions(root, version, capabilities);
    placed.extend(files::firmware(root, version));
    if capabilities.has(Capability::Display) {
        placed.extend(files::xorg_modules(root, version));
    }
    let binaries = files::binaries(root, capabilities);
    Ok((
        DriverFiles {
            libraries,
            binaries,
            placed,
        },
        findings,
    ))
}

/// Returns the finding about a directory of `library-dirs` that does not exist.
fn missing_directory(root: &Tree, dir: &Path) -> Option<Finding> {
    let is_missing = root
        .locate(dir)
        .is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    is_missing.then(|| {
        let what = format!("the directory {dir:?} is missing below {}", root.path());
        Finding::new(
            &catalog::NO_FILE,
            what,
            "correct library-dirs in the [driver] table of config.toml",
        )
    })
}

fn present(libraries: &[Library]) -> Vec<(Arch, &'static str)> {
    libraries
        .iter()
        .map(|library| (library.arch, library.name))
        .collect()
}

/// Finds libnvidia-ml, in the version of the search.
#[must_use]
pub fn management_library(search: &Search<'_>) -> Option<Library> {
    library(search, "libnvidia-ml")
}

/// Finds a library of this machine's architecture by its name in the catalog, in the version of the search.
#[must_use]
pub fn library(search: &Search<'_>, name: &str) -> Option<Library> {
    if search.is_wsl {
        return wsl::library(search, name);
    }
    let rows: Vec<&'static Row> = LIBRARIES.iter().filter(|row| row.name == name).collect();
    search.find(Arch::native(), &rows).0.into_iter().next()
}

/// Returns the driver's libraries that are not in the catalog. Only containers that request `all` get them.
#[must_use]
pub fn unknown(search: &Search<'_>) -> Vec<Library> {
    if search.is_wsl {
        return wsl::unknown(search);
    }
    let rows: Vec<&'static Row> = LIBRARIES.iter().collect();
    let known: Vec<_> = Arch::supported()
        .flat_map(|arch| search.find(arch, &rows).0)
        .collect();
    search.unknown(&known)
}

/// Returns the finding that names libraries that are not in the catalog.
#[must_use]
pub fn unknown_finding(unknown: &[Library]) -> Option<Finding> {
    let names: BTreeSet<_> = unknown
        .iter()
        .map(|library| format!("{:?}", library.file_name))
        .collect();
    let names: Vec<_> = names.into_iter().collect();
    (!names.is_empty()).then(|| {
        let what = format!(
            "libraries of the driver are not in the catalog: {}",
            names.join(", ")
        );
        Finding::new(
            &catalog::UNKNOWN_LIBRARIES,
            what,
            "set NVIDIA_DRIVER_CAPABILITIES=all for containers that need them",
        )
    })
}

/// Whether the whole driver is requested. The container then also gets the libraries that are not in the catalog: each driver branch
/// adds some, and other libraries open them by name. Their capability is unknown. If `supported-driver-capabilities` denies one
/// capability, they are denied too, because they could belong to it.
fn is_everything(capabilities: Capabilities) -> bool {
    Capability::ALL
        .iter()
        .all(|capability| *capability == Capability::Compat32 || capabilities.has(*capability))
}

/// Returns the libraries that a capability depends on and that are missing. `present` contains the architecture and the catalog name
/// of the libraries that exist.
#[must_use]
pub fn lacking_libraries(capability: Capability, present: &[(Arch, &str)]) -> Vec<String> {
    let native = Arch::native();
    if capability == Capability::Compat32 {
        // Nothing is missing if the machine cannot run 32-bit programs, or if no other capability is requested.
        let lacks = native.compat32().is_some() && !present.is_empty();
        let lacks = lacks && present.iter().all(|(arch, _)| *arch == native);
        return if lacks {
            vec!["32-bit libraries".to_owned()]
        } else {
            Vec::new()
        };
    }
    let lacks =
        |group: &&&[&'static str]| !group.iter().any(|name| present.contains(&(native, *name)));
    let groups = file_table::characteristic(capability).iter().filter(lacks);
    groups
        .filter_map(|group| Some(format!("{}.so", group.first()?)))
        .collect()
}

/// Returns a finding about libraries of these capabilities that are not installed, with the packages that contain them. A request for
/// `all` has no such finding, because it means everything that is installed.
fn lacking(root: &Tree, capabilities: Capabilities, present: &[(Arch, &str)]) -> Option<Finding> {
    let lacking = capabilities
        .iter()
        .map(|capability| (capability, lacking_libraries(capability, present)));
    let lacking: Vec<_> = lacking.filter(|(_, names)| !names.is_empty()).collect();
    if lacking.is_empty() || is_everything(capabilities) {
        return None;
    }
    let fix = packages::commands(root, lacking.iter().map(|(capability, _)| *capability));
    Some(Finding::new(
        &catalog::LACKING_LIBRARIES,
        packages::lacking_in_words(root, &lacking),
        fix,
    ))
}

/// Finds the files that Windows programs load.
fn wine(search: &Search<'_>, found: &[Library]) -> Vec<Library> {
    let dirs = search.dirs_of(
        found
            .iter()
            .filter(|library| library.arch == Arch::native()),
    );
    let found = WINE_FILES.iter().filter_map(|name| {
        let found = dirs.iter().find_map(|dir| {
            search
                .root
                .regular_file(&dir.join(WINE_DIR).join(name))
                .ok()
        })??;
        Some(Library {
            name,
            arch: Arch::native(),
            source: found.host,
            file_name: (*name).into(),
            sonames: BTreeSet::new(),
        })
    });
    found.collect()
}

fn missing_library(
    search: &Search<'_>,
    row: &Row,
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
    let passed: Vec<_> = passed
        .iter()
        .filter(|passed| passed.name == row.name)
        .cloned()
        .collect();
    for finding in search.findings(&passed) {
        what.push_str("; ");
        what.push_str(&finding.what);
    }
    // A library that was installed without ldconfig is missing in the linker cache only.
    let ldconfig = packages::ldconfig(root);
    let fix = match packages::install(root, capability) {
        Some(command) => format!("{command}; if it is installed, {ldconfig}"),
        None => format!(
            "install the driver's libraries of the same version as its kernel module; then {ldconfig}"
        ),
    };
    failure(&catalog::LIBRARY_MISSING, what, fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_that_32_bit_programs_lack() {
        let native = Arch::native();
        let lacking =
            |present: &[(Arch, &str)]| lacking_libraries(Capability::Compat32, present).len();
        assert_eq!(lacking(&[]), 0, "no other capability is requested");
        // A machine that cannot run 32-bit programs lacks nothing.
        assert_eq!(
            lacking(&[(native, "libcuda.so")]),
            usize::from(native.compat32().is_some())
        );
        if let Some(other) = native.compat32() {
            assert_eq!(lacking(&[(native, "libcuda.so"), (other, "libcuda.so")]), 0);
        }
    }
}
