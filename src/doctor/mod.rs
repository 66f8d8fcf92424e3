//! `doctor`: what is wrong with a host, in the order in which things depend on each other.
//!
//! [`look()`] reads the host once, below a prefix, into [`Facts`]; each check is a pure function of them and gives one or more
//! [`Outcome`]s. Nothing is changed here. What cannot be seen without root is said, not guessed.

pub(crate) mod bundle;
pub(crate) mod container;
mod driver;
mod engines;
mod facts;
mod gpus;
mod host;
mod look;
mod look_driver;

use serde::ser::{Serialize, SerializeStruct, Serializer};

pub(crate) use facts::Facts;
pub use look::{Caller, look};

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
    fn ok(check: &'static str, what: impl Into<String>) -> Self {
        Self { check, status: Status::Ok, kind: None, what: what.into(), fix: String::new() }
    }

    fn skipped(check: &'static str, why: impl Into<String>) -> Self {
        Self { check, status: Status::Skipped, kind: None, what: why.into(), fix: String::new() }
    }

    fn found(check: &'static str, finding: Finding) -> Self {
        let status = match finding.kind.severity {
            Severity::Note => Status::Note,
            Severity::Warning => Status::Warning,
            Severity::Error => Status::Error,
        };
        Self { check, status, kind: Some(finding.kind), what: finding.what, fix: finding.fix }
    }

    /// The same for a finding that is made here.
    fn of(check: &'static str, kind: &'static Kind, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::found(check, Finding::of(kind, what, fix))
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

/// The checks in their order. Those of engines come once for each.
const CHECKS: &[fn(&Facts) -> Vec<Outcome>] = &[
    gpus::on_the_bus,
    driver::module,
    driver::libraries,
    driver::versions,
    driver::capabilities,
    driver::nodes,
    driver::uvm,
    driver::modeset,
    host::config,
    host::log,
    driver::hooks_user,
    gpus::nvml,
    gpus::failed,
    gpus::persistence,
    gpus::fabric,
    driver::daemons,
    gpus::mig,
    gpus::limits,
    engines::hook,
    engines::timeouts,
    engines::second_hook,
    engines::nvidias_programs,
    engines::runtime,
    engines::cgroups,
    engines::dev_char,
    engines::cdi,
    engines::exposed,
    host::selinux,
    host::groups,
];

pub fn examine(facts: &Facts) -> Vec<Outcome> {
    CHECKS.iter().flat_map(|check| check(facts)).collect()
}

pub fn worst(outcomes: &[Outcome]) -> Status {
    outcomes.iter().map(|outcome| outcome.status).max().unwrap_or(Status::Ok)
}
