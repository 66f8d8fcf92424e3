//! The results of checks, and their names.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

use base::report::{Finding, Kind, Severity};

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
    pub(super) fn ok(what: impl Into<String>) -> Self {
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

    pub(super) fn skipped(why: impl Into<String>) -> Self {
        Self {
            status: Status::Skipped,
            ..Self::ok(why)
        }
    }

    pub(super) fn found(Finding { kind, what, fix }: Finding) -> Self {
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
            id: Some(kind.id()),
            what,
            why: kind.texts().why,
            fix,
        }
    }

    /// Returns the result with the name of its check.
    pub(super) fn named(self, section: Section, check: &'static str) -> Self {
        Self {
            section,
            check,
            ..self
        }
    }

    /// Returns the result for a new finding.
    pub(super) fn of(kind: &'static Kind, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::found(Finding::new(kind, what, fix))
    }
}

/// The section and name of a result before [`run`] sets them.
const UNNAMED: (Section, &str) = (Section::Driver, "");

/// Returns a number with a noun, in the singular or plural.
pub(crate) fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Returns the results of a check, or `ok` if it found nothing.
pub(super) fn or_ok(results: impl IntoIterator<Item = Check>, ok: Check) -> Vec<Check> {
    let mut results = Vec::from_iter(results);
    if results.is_empty() {
        results.push(ok);
    }
    results
}

/// A function that checks facts. The results do not have the name of the check yet.
pub(super) enum Checker<F> {
    One(fn(&F) -> Check),
    Several(fn(&F) -> Vec<Check>),
}

/// A check with its name.
pub(super) type Named<F> = (&'static str, Checker<F>);

/// Runs the checks of a section, and sets their names in the results.
pub(super) fn run<F>(section: Section, checks: &[Named<F>], facts: &F) -> Vec<Check> {
    let mut results = Vec::new();
    for (check, checker) in checks {
        let found = match checker {
            Checker::One(examine) => vec![examine(facts)],
            Checker::Several(examine) => examine(facts),
        };
        for result in found {
            results.push(result.named(section, check));
        }
    }
    results
}
