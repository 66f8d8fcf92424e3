//! `doctor`: finds the problems of a host.
//!
//! [`inspect()`] reads the host once, below a prefix, into [`Facts`]. Each check is a pure function that turns facts into one or more
//! [`Check`]s. The checks belong to sections, and are in the order in which the parts of the host depend on each other. Nothing is
//! changed here. A check that cannot be performed, for example without root, is reported as skipped.

mod cdi_specs;
mod check;
pub(crate) mod container;
mod driver;
mod engines;
mod extras;
mod facts;
mod gpus;
mod host;
mod inspect;
mod inspect_driver;
mod kubelet_plugin;
mod mps;
mod runtimes;
mod start;
#[cfg(test)]
mod tests;

pub(crate) use check::count;
pub use check::{Check, Section, Status};
pub(crate) use facts::{Facts, Nvml};
pub use inspect::{Caller, inspect};

use check::Checker::{One, Several};
use check::{Named, run};

/// The checks of each section, in the order of their output.
const CHECKS: &[(Section, &[Named<Facts>])] = &[
    (
        Section::Driver,
        &[
            ("pci", One(gpus::on_the_bus)),
            ("module", One(driver::module)),
            ("libraries", One(driver::libraries)),
            ("versions", One(driver::versions)),
            ("capabilities", Several(driver::capabilities)),
            ("nodes", Several(driver::nodes)),
            ("uvm", One(driver::uvm)),
            ("modeset", Several(driver::modeset)),
            ("nvml", One(gpus::nvml)),
            ("gpus", Several(gpus::failed)),
            ("persistence", One(gpus::persistence)),
            ("fabric-manager", One(gpus::fabric)),
            ("daemons", Several(driver::daemons)),
            ("mps", Several(mps::check)),
            ("mig", Several(gpus::mig)),
            ("extra-devices", Several(extras::check)),
        ],
    ),
    (
        Section::Hook,
        &[
            ("config", Several(host::config)),
            ("log", One(host::log)),
            ("hook-user", One(driver::hooks_user)),
            ("limits", Several(gpus::limits)),
            ("engines", Several(engines::hook)),
            ("timeouts", Several(engines::timeouts)),
            ("second-hook", Several(engines::second_hook)),
            ("hook-env", Several(engines::hook_env)),
            ("nvidia-toolkit", Several(engines::nvidias_toolkit)),
            ("runtime", Several(runtimes::runtime)),
            ("cgroups", One(runtimes::cgroups)),
            ("dev-char", One(runtimes::dev_char)),
            ("exposed", One(engines::exposed)),
            ("selinux", One(host::selinux)),
            ("groups", One(host::groups)),
        ],
    ),
    (Section::Cdi, &[("specs", Several(cdi_specs::specs))]),
    (
        Section::Kubelet,
        &[("kubelet-plugin", One(kubelet_plugin::check))],
    ),
];

pub fn examine(facts: &Facts) -> Vec<Check> {
    let mut checks = Vec::new();
    for (section, of_section) in CHECKS {
        checks.extend(run(*section, of_section, facts));
    }
    start::temper(facts, &mut checks);
    checks.extend(start::report(facts, &checks));
    checks.sort_by_key(|check| check.section);
    checks
}

/// Returns the names of all checks with their sections, in the order of their output. A name can be in two sections.
pub fn names() -> Vec<(Section, &'static str)> {
    let mut names = Vec::new();
    for (section, checks) in CHECKS {
        for (name, _) in *checks {
            names.push((*section, *name));
        }
    }
    names.push(start::NAME);
    names.extend(container::names());
    names.sort_by_key(|(section, _)| *section);
    names
}

/// Returns the document of `doctor --json`.
///
/// # Errors
/// Never, because all values are strings.
pub(crate) fn document(checks: &[Check]) -> serde_json::Result<String> {
    base::json::document("checks", &checks)
}

pub(crate) fn worst(checks: &[Check]) -> Status {
    let statuses = checks.iter().map(|check| check.status);
    statuses.max().unwrap_or(Status::Ok)
}
