//! Catalogue × driver root → the files that are there.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::catalog::{Kind, LIBRARIES, Row};
use super::files::{self, Binary, PlacedFile};
use super::ldcache::Arch;
use super::libraries::{Library, Search};
use super::root::DriverRoot;
use crate::error::failure;
use crate::finding::{Finding, catalog};
use crate::request::{Capabilities, Capability, Omit};

/// The driver's files for one set of capabilities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// Shared libraries, in the catalogue's order
    pub libraries: Vec<Library>,
    /// Programs
    pub binaries: Vec<Binary>,
    /// Descriptions and firmware
    pub placed: Vec<PlacedFile>,
}

impl DriverFiles {
    /// Takes out what is not wanted.
    pub fn leave_out(&mut self, omit: Omit) {
        self.placed.retain(|file| !(omit.firmware && file.is_firmware()));
    }
}

/// Finds what `capabilities` need, and the administrator's `more`.
///
/// # Errors
/// If a library is missing without which one of them is of no use.
pub fn locate(
    search: &Search<'_>,
    capabilities: Capabilities,
    more: &[PathBuf],
) -> Result<(DriverFiles, Vec<Finding>)> {
    let Search { root, cache, version, .. } = *search;
    let rows: Vec<&'static Row> = LIBRARIES.iter().filter(|row| capabilities.any(row.capabilities)).collect();
    let (mut libraries, mut findings) = search.find(Arch::native(), &rows);
    for row in rows.iter().filter(|row| row.kind == Kind::Required) {
        let first = row.capabilities.first().copied();
        if let Some(capability) = first.filter(|capability| capabilities.has(*capability))
            && !libraries.iter().any(|library| library.name == row.name)
        {
            return Err(missing_library(root, version, row, capability, &findings));
        }
    }
    if let Some(compat32) = Arch::native().compat32().filter(|_| capabilities.has(Capability::Compat32)) {
        let (more, others) = search.find(compat32, &rows);
        libraries.extend(more);
        findings.extend(others);
    }
    findings.extend(cache.missing.clone());
    let mut placed = files::descriptions(root, capabilities);
    if capabilities.any(&[Capability::Compute, Capability::Graphics, Capability::Display, Capability::Utility]) {
        placed.extend(files::firmware(root, version));
    }
    if capabilities.has(Capability::Display) {
        placed.extend(files::xorg_modules(root, version));
    }
    for path in more {
        match search.at(Arch::native(), path) {
            Some(library) => libraries.push(library),
            None => match files::at(root, path) {
                Some(file) => placed.push(file),
                None => findings.push(Finding::of(
                    &catalog::NO_FILE,
                    format!("{path:?} is not below {}", root.path()),
                    "check files in the [driver] table of config.toml",
                )),
            },
        }
    }
    let binaries = files::binaries(root, capabilities);
    Ok((DriverFiles { libraries, binaries, placed }, findings))
}

/// Where the library is that asks NVML: of the driver version that is loaded, if that is known.
#[must_use]
pub fn management_library(search: &Search<'_>) -> Option<Library> {
    let rows: Vec<&'static Row> = LIBRARIES.iter().filter(|row| row.name == "libnvidia-ml").collect();
    search.find(Arch::native(), &rows).0.into_iter().next()
}

fn missing_library(
    root: &DriverRoot,
    version: &str,
    row: &Row,
    capability: Capability,
    findings: &[Finding],
) -> anyhow::Error {
    let mut what = format!(
        "the driver capability \"{}\" needs {}.so of driver {version}, which is not below {}",
        capability.name(),
        row.name,
        root.path()
    );
    for finding in findings.iter().filter(|finding| finding.what.contains(row.name)) {
        what.push_str("; ");
        what.push_str(&finding.what);
    }
    let ldconfig = match root.path().as_path() {
        root if root == Path::new("/") => "ldconfig".to_owned(),
        root => format!("ldconfig -r {}", root.display()),
    };
    failure(
        &catalog::LIBRARY_MISSING,
        what,
        format!("install the driver's libraries of the same version as its kernel module, and run \"{ldconfig}\""),
    )
}
