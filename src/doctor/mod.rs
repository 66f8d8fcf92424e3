//! `doctor`: what is wrong with a host, in the order in which things depend on each other.
//!
//! [`inspect()`] reads the host once, below a prefix, into [`Facts`]; each check is a pure function of them and gives one or more
//! [`Outcome`]s. Nothing is changed here. What cannot be seen without root is said, not guessed.

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

/// How a check ended, the worst last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    Ok,
    /// Not looked at: it depends on something that is missing, or takes root
    Skipped,
    Note,
    Warning,
    /// Containers that ask for GPUs do not start
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
    /// The check's name: stable
    pub check: &'static str,
    pub status: Status,
    /// Which finding it is; none where there is nothing to mend
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

    /// The same for a finding that is made here.
    fn of(kind: &'static Kind, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::found(Finding::of(kind, what, fix))
    }
}

/// The names are an interface: `doctor --json` has them.
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

/// The results of a check, or this one if it found nothing.
fn or(outcomes: impl IntoIterator<Item = Outcome>, otherwise: Outcome) -> Vec<Outcome> {
    let mut outcomes: Vec<_> = outcomes.into_iter().collect();
    if outcomes.is_empty() {
        outcomes.push(otherwise);
    }
    outcomes
}

/// A check with its name. It returns results without a name.
type Check<F> = (&'static str, fn(&F) -> Vec<Outcome>);

/// Runs the checks, and gives the results the names of their checks.
fn run<F>(checks: &[Check<F>], facts: &F) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for (check, examine) in checks {
        outcomes.extend(examine(facts).into_iter().map(|outcome| Outcome { check, ..outcome }));
    }
    outcomes
}

/// The checks in their order. Those of engines come once for each.
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

/// The document of `doctor --json`.
///
/// # Errors
/// None that can happen: each value is text.
pub(crate) fn document(outcomes: &[Outcome]) -> serde_json::Result<String> {
    base::json::document("checks", &outcomes)
}

pub fn worst(outcomes: &[Outcome]) -> Status {
    outcomes.iter().map(|outcome| outcome.status).max().unwrap_or(Status::Ok)
}
