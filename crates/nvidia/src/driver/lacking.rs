//! Determines which libraries of the driver capabilities are not installed, and how to install them.

use base::report::{Finding, Kind};
use findings::catalog;

use super::file_table::{self, FileRow};
use super::kind::DriverKind;
use super::ldcache::Arch;
use super::libraries::{Library, Search};
use super::packages::{self, Lacking};
use crate::capability::{Capabilities, Capability};

/// What follows if the required library of a driver capability is not installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IfMissing {
    /// An error, because the capability was requested
    Refuse,
    /// A note, because everything was requested that the driver has
    LeaveOut,
}

/// Returns each of these capabilities that lacks libraries. `present` are the libraries that exist.
#[must_use]
pub fn of(kind: DriverKind, capabilities: Capabilities, present: &[Library]) -> Vec<Lacking> {
    let mut lacking = Vec::new();
    for capability in capabilities.iter() {
        let libraries = match capability {
            Capability::Compat32 => compat32(kind, present),
            _ => libraries(kind, capability, present),
        };
        if !libraries.is_empty() {
            lacking.push(Lacking {
                capability,
                libraries,
            });
        }
    }
    lacking
}

/// Nothing is missing if the machine cannot run 32-bit programs, or if no other capability is requested. WSL 2 has no 32-bit libraries.
fn compat32(kind: DriverKind, present: &[Library]) -> Vec<String> {
    let native = Arch::native();
    if kind == DriverKind::Linux
        && native.compat32().is_some()
        && !present.is_empty()
        && present.iter().all(|library| library.arch == native)
    {
        return vec!["32-bit libraries".to_owned()];
    }
    Vec::new()
}

fn libraries(kind: DriverKind, capability: Capability, present: &[Library]) -> Vec<String> {
    let mut lacking = Vec::new();
    for group in file_table::characteristic(kind, capability) {
        let is_present =
            |library: &Library| library.arch == Arch::native() && group.contains(&library.name);
        if !present.iter().any(is_present)
            && let Some(name) = group.first()
        {
            lacking.push(format!("{name}.so"));
        }
    }
    lacking
}

/// Returns the capability without its required library.
pub(super) fn of_row(capability: Capability, row: &FileRow) -> Lacking {
    Lacking {
        capability,
        libraries: vec![format!("{}.so", row.name)],
    }
}

/// Returns the finding about libraries of these capabilities that are missing. `present` are the libraries that exist.
pub(super) fn in_container(
    search: &Search<'_>,
    capabilities: Capabilities,
    present: &[Library],
) -> Option<Finding> {
    let lacking = of(search.kind, capabilities, present);
    finding(&catalog::LACKING_LIBRARIES, search, &lacking)
}

/// Returns the finding about missing libraries, with the commands that install them. `None` if no capability lacks one.
#[must_use]
pub fn finding(kind: &'static Kind, search: &Search<'_>, lacking: &[Lacking]) -> Option<Finding> {
    if lacking.is_empty() {
        return None;
    }
    let (what, fix) = match search.kind {
        DriverKind::Linux => (
            packages::lacking_in_words(search.root, lacking),
            packages::commands(search.root, lacking, search.version),
        ),
        DriverKind::Wsl => (
            packages::lacking_in_windows(lacking),
            packages::IN_WINDOWS.to_owned(),
        ),
    };
    Some(Finding::new(kind, what, fix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;

    #[test]
    fn libraries_that_32_bit_programs_lack() {
        let native = Arch::native();
        let library = |arch| Library {
            name: "libcuda",
            arch,
            source: HostPath::new("/libcuda.so.1"),
            file_name: "libcuda.so.1".into(),
            sonames: [].into(),
        };
        let compat32 = Capabilities::new(&[Capability::Compat32]);
        let lacking = |kind, present: &[Library]| of(kind, compat32, present).len();
        let linux = DriverKind::Linux;
        assert_eq!(lacking(linux, &[]), 0, "no other capability is requested");
        assert_eq!(lacking(DriverKind::Wsl, &[library(native)]), 0);
        // A machine that cannot run 32-bit programs lacks nothing.
        assert_eq!(
            lacking(linux, &[library(native)]),
            usize::from(native.compat32().is_some())
        );
        if let Some(other) = native.compat32() {
            assert_eq!(lacking(linux, &[library(native), library(other)]), 0);
        }
    }
}
