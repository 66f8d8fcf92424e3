//! `doctor`: finds the problems of a host.
//!
//! [`inspect()`] reads the host once, below a prefix, into [`Facts`]. Each check is a pure function that turns facts into one or more
//! [`Outcome`]s. The checks are in the order in which the parts of the host depend on each other. Nothing is changed here. A check
//! that cannot be performed, for example without root, is reported as skipped.

pub(crate) mod bundle;
pub(crate) mod container;
mod driver;
mod engines;
mod facts;
mod gpus;
mod host;
mod inspect;
mod inspect_driver;

use serde::ser::{Serialize, SerializeStruct, Serializer};

pub(crate) use facts::Facts;
pub use inspect::{Caller, inspect};

use base::report::{Finding, Kind, Severity};

/// The result of a check, in ascending order of severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    Ok,
    /// Not performed, because a part is missing or root is required
    Skipped,
    Note,
    Warning,
    /// Containers that request GPUs do not start
    Error,
}

impl Status {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Skipped => "skipped",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The name of the check, which is part of the JSON interface
    pub check: &'static str,
    pub status: Status,
    /// The kind of finding; `None` if nothing has to be fixed
    pub kind: Option<&'static Kind>,
    pub what: String,
    pub fix: String,
}

impl Outcome {
    fn ok(what: impl Into<String>) -> Self {
        Self { check: "", status: Status::Ok, kind: None, what: what.into(), fix: String::new() }
    }

    fn skipped(why: impl Into<String>) -> Self {
        Self { check: "", status: Status::Skipped, kind: None, what: why.into(), fix: String::new() }
    }

    fn found(finding: Finding) -> Self {
        let status = match finding.kind.severity {
            Severity::Note => Status::Note,
            Severity::Warning => Status::Warning,
            Severity::Error => Status::Error,
        };
        Self { check: "", status, kind: Some(finding.kind), what: finding.what, fix: finding.fix }
    }

    /// Returns the outcome for a new finding.
    fn of(kind: &'static Kind, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::found(Finding::of(kind, what, fix))
    }
}

/// The field names are part of the JSON interface.
impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Outcome", 6)?;
        fields.serialize_field("check", self.check)?;
        fields.serialize_field("status", self.status.name())?;
        fields.serialize_field("id", &self.kind.map(|kind| kind.id))?;
        fields.serialize_field("what", &self.what)?;
        fields.serialize_field("why", self.kind.map_or("", |kind| kind.why))?;
        fields.serialize_field("fix", &self.fix)?;
        fields.end()
    }
}

/// Returns the outcomes of a check, or `otherwise` if it has none.
fn or(outcomes: impl IntoIterator<Item = Outcome>, otherwise: Outcome) -> Vec<Outcome> {
    let mut outcomes: Vec<_> = outcomes.into_iter().collect();
    if outcomes.is_empty() {
        outcomes.push(otherwise);
    }
    outcomes
}

/// A check with its name. The function returns outcomes without a name.
type Check<F> = (&'static str, fn(&F) -> Vec<Outcome>);

/// Runs the checks, and sets the names of the outcomes.
fn run<F>(checks: &[Check<F>], facts: &F) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for (check, examine) in checks {
        outcomes.extend(examine(facts).into_iter().map(|outcome| Outcome { check, ..outcome }));
    }
    outcomes
}

/// The checks in the order of their output.
const CHECKS: &[Check<Facts>] = &[
    ("pci", gpus::on_the_bus),
    ("module", driver::module),
    ("libraries", driver::libraries),
    ("versions", driver::versions),
    ("capabilities", driver::capabilities),
    ("nodes", driver::nodes),
    ("uvm", driver::uvm),
    ("modeset", driver::modeset),
    ("config", host::config),
    ("log", host::log),
    ("hook-user", driver::hooks_user),
    ("nvml", gpus::nvml),
    ("gpus", gpus::failed),
    ("persistence", gpus::persistence),
    ("fabric-manager", gpus::fabric),
    ("daemons", driver::daemons),
    ("mig", gpus::mig),
    ("limits", gpus::limits),
    ("hook", engines::hook),
    ("timeouts", engines::timeouts),
    ("second-hook", engines::second_hook),
    ("nvidia-toolkit", engines::nvidias_programs),
    ("runtime", engines::runtime),
    ("cgroups", engines::cgroups),
    ("dev-char", engines::dev_char),
    ("cdi", engines::cdi),
    ("exposed", engines::exposed),
    ("selinux", host::selinux),
    ("groups", host::groups),
];

pub fn examine(facts: &Facts) -> Vec<Outcome> {
    run(CHECKS, facts)
}

/// Returns the document of `doctor --json`.
///
/// # Errors
/// Never, because all values are strings.
pub(crate) fn document(outcomes: &[Outcome]) -> serde_json::Result<String> {
    base::json::document("checks", &outcomes)
}

pub fn worst(outcomes: &[Outcome]) -> Status {
    outcomes.iter().map(|outcome| outcome.status).max().unwrap_or(Status::Ok)
}
