//! `doctor`: finds the problems of a host.
//!
//! [`inspect()`] reads the host once, below a prefix, into [`Facts`]. Each check is a pure function that turns facts into one or more
//! [`Check`]s. The checks belong to sections, and are in the order in which the parts of the host depend on each other. Nothing is
//! changed here. A check that cannot be performed, for example without root, is reported as skipped.

pub(crate) mod bundle;
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
mod start;

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

pub(crate) use facts::{Facts, Nvml};
pub use inspect::{Caller, inspect};

use base::report::{Finding, Kind, Severity};

use Checker::{One, Several};

/// The status of a check, in ascending order of severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// Not performed, because a part is missing or root is required
    Skipped,
    Note,
    Warning,
    /// Containers that request GPUs do not start
    Error,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A group of checks. The names are arguments of `doctor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Section {
    /// The driver, its files and the GPUs
    Driver,
    /// The hook: config.toml, the engines and runtimes, and the start of a container
    Hook,
    /// The CDI specs
    Cdi,
    /// The device plugin for Kubernetes
    Kubelet,
    /// A running container, with --container or --pid
    #[value(skip)]
    Container,
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The result of a check. The field names are part of the JSON interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub section: Section,
    /// The name of the check
    pub check: &'static str,
    pub status: Status,
    /// The number of the finding; `None` if nothing has to be fixed
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'static str>,
    pub what: String,
    /// The consequence; empty if nothing has to be fixed
    #[serde(skip_serializing_if = "str::is_empty")]
    pub why: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fix: String,
}

impl Check {
    fn ok(what: impl Into<String>) -> Self {
        let (section, check) = UNNAMED;
        Self {
            section,
            check,
            status: Status::Ok,
            id: None,
            what: what.into(),
            why: "",
            fix: String::new(),
        }
    }

    fn skipped(why: impl Into<String>) -> Self {
        Self {
            status: Status::Skipped,
            ..Self::ok(why)
        }
    }

    fn found(Finding { kind, what, fix }: Finding) -> Self {
        let status = match kind.severity {
            Severity::Note => Status::Note,
            Severity::Warning => Status::Warning,
            Severity::Error => Status::Error,
        };
        let (section, check) = UNNAMED;
        Self {
            section,
            check,
            status,
            id: Some(kind.id),
            what,
            why: kind.why,
            fix,
        }
    }

    /// Returns the result for a new finding.
    fn of(kind: &'static Kind, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::found(Finding::new(kind, what, fix))
    }
}

/// The section and name of a result before [`run`] sets them.
const UNNAMED: (Section, &str) = (Section::Driver, "");

/// Returns a number with a noun, in the singular or plural.
pub(crate) fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Returns the results of a check, or `otherwise` if it has none.
fn or(results: impl IntoIterator<Item = Check>, otherwise: Check) -> Vec<Check> {
    let mut results: Vec<_> = results.into_iter().collect();
    if results.is_empty() {
        results.push(otherwise);
    }
    results
}

/// A function that checks facts. The results do not have the name of the check yet.
enum Checker<F> {
    One(fn(&F) -> Check),
    Several(fn(&F) -> Vec<Check>),
}

/// A check with its name.
type Named<F> = (&'static str, Checker<F>);

/// Runs the checks of a section, and sets their names in the results.
fn run<F>(section: Section, checks: &[Named<F>], facts: &F) -> Vec<Check> {
    let mut results = Vec::new();
    for (check, checker) in checks {
        let found = match checker {
            One(examine) => vec![examine(facts)],
            Several(examine) => examine(facts),
        };
        results.extend(found.into_iter().map(|result| Check {
            section,
            check,
            ..result
        }));
    }
    results
}

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
            ("hooks-dir", Several(engines::hooks_dir)),
            ("timeouts", Several(engines::timeouts)),
            ("second-hook", Several(engines::second_hook)),
            ("hook-env", Several(engines::hook_env)),
            ("nvidia-toolkit", Several(engines::nvidias_toolkit)),
            ("runtime", Several(engines::runtime)),
            ("cgroups", One(engines::cgroups)),
            ("dev-char", One(engines::dev_char)),
            ("exposed", One(engines::exposed)),
            ("selinux", One(host::selinux)),
            ("groups", One(host::groups)),
        ],
    ),
    (Section::Cdi, &[("specs", Several(engines::cdi))]),
    (
        Section::Kubelet,
        &[("kubelet-plugin", One(kubelet_plugin::check))],
    ),
];

pub fn examine(facts: &Facts) -> Vec<Check> {
    let mut checks: Vec<_> = CHECKS
        .iter()
        .flat_map(|(section, checks)| run(*section, checks, facts))
        .collect();
    checks.extend(start::report(facts, &checks));
    checks.sort_by_key(|check| check.section);
    checks
}

/// Returns the names of all checks with their sections, in the order of their output. A name can be in two sections.
pub fn names() -> Vec<(Section, &'static str)> {
    let of_host = CHECKS
        .iter()
        .flat_map(|(section, checks)| checks.iter().map(|(name, _)| (*section, *name)));
    let mut names: Vec<_> = of_host
        .chain([start::NAME])
        .chain(container::names())
        .collect();
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
    checks
        .iter()
        .map(|check| check.status)
        .max()
        .unwrap_or(Status::Ok)
}
