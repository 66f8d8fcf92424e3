//! The record of one call: what was asked, decided and done for a container, and how long each step took. It is what
//! `why` tells, long after the engine has dropped what was on stderr.

mod bound;
pub(crate) mod created;
mod prune;
mod shortfall;
pub(crate) mod storage;
pub(crate) mod store;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use base::report::{Finding, one_line};

use crate::oci::Pod;
use crate::request::asked::Asked;

/// The form of records. One of another form is not read.
const VERSION: u32 = 1;
/// Findings that are collected at most; [`bound`] limits what is written.
const MAX_ENTRIES: usize = 64;

/// It. The names are an interface.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    pub hook: String,
    /// The container that the call was for
    pub container: Container,
    /// `prestart`, `precreate` and so on
    pub stage: String,
    /// When it began: RFC 3339, UTC
    pub started: String,
    pub outcome: Outcome,
    pub reason: String,
    /// What asks, and for which devices
    pub request: String,
    /// What it asked for, if it did
    pub asked: Option<Asked>,
    pub driver: String,
    /// The GPUs that it was to get, by name
    pub devices: Vec<String>,
    pub findings: Vec<Said>,
    pub steps: Vec<Step>,
    /// What was created in the container's file system, for `poststop`: inode numbers and paths
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub created: Vec<created::Entry>,
}

/// Names and place of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Container {
    pub id: String,
    /// As the user calls it; kept where the engine would forget it
    pub name: String,
    /// Names in Kubernetes; empty for other engines
    pub pod: Pod,
    pub bundle: PathBuf,
}

impl Container {
    /// The id as engines print it.
    pub fn short(&self) -> &str {
        let is_hash = self.id.len() == 64 && self.id.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_hash { self.id.get(..12).unwrap_or_default() } else { &self.id }
    }
}

/// The result of a call of the hook.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Nobody said: the call is not done, or the engine ended it.
    #[default]
    Unfinished,
    /// The container got what it asked for.
    Given,
    /// It got less than it asked for, or cannot use all of it: [`Record::shortfall`].
    Partly,
    Nothing,
    /// It asked and may not, or somebody else sets it up.
    LeftAlone,
    /// The hook failed, which stops the container.
    Failed,
}

/// A [`Finding`] as it is stored in a record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    /// `ONH-nnn`
    pub id: String,
    /// `note`, `warning` or `error`
    pub severity: String,
    /// The message, with the names at hand
    pub what: String,
    pub why: String,
    /// How to fix it; empty if nothing has to be fixed
    pub fix: String,
}

/// A step of the call, with its duration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    pub name: String,
    pub milliseconds: f64,
}

impl Record {
    /// A record for a call at this stage that begins now.
    pub fn begin(stage: &str, now: SystemTime) -> Self {
        Self {
            version: VERSION,
            hook: env!("CARGO_PKG_VERSION").to_owned(),
            stage: stage.to_owned(),
            started: humantime::format_rfc3339_millis(now).to_string(),
            ..Self::default()
        }
    }

    /// Sets the container that the call is for.
    pub fn name_container(&mut self, id: String, pod: Pod, bundle: &Path) {
        self.container = Container { id, pod, bundle: bundle.to_owned(), ..Container::default() };
    }

    /// Keeps the name by which the engine's user knows the container: one that fails to start is often removed at once.
    pub fn remember_name(&mut self) {
        let Container { id, bundle, .. } = &self.container;
        if let Some(name) = storage::name_of(id, bundle) {
            self.container.name = one_line(&name);
        }
    }

    /// Adds to what there was to say.
    pub fn found(&mut self, finding: &Finding) {
        if self.findings.len() < MAX_ENTRIES {
            self.findings.push(Said {
                id: finding.kind.id.to_owned(),
                severity: finding.kind.severity.name().to_owned(),
                what: one_line(&finding.what),
                why: finding.kind.why.to_owned(),
                fix: one_line(&finding.fix),
            });
        }
    }

    pub fn step(&mut self, name: &str, took: Duration) {
        self.steps.push(Step { name: name.to_owned(), milliseconds: took.as_secs_f64() * 1000.0 });
    }

    /// Ends the call. A container that was given GPUs has the outcome [`Outcome::Partly`] if a finding reports a shortfall.
    pub fn end(&mut self, outcome: Outcome, reason: String) {
        let is_short = outcome == Outcome::Given && self.shortfall().is_some();
        self.outcome = if is_short { Outcome::Partly } else { outcome };
        self.reason = reason;
    }

    /// What a container that was given GPUs lacks or cannot use, after the words "the container got".
    pub fn shortfall(&self) -> Option<&'static str> {
        shortfall::of(&self.findings)
    }

    /// Reads one.
    ///
    /// # Errors
    /// If it is none, or of another form.
    pub fn parse(bytes: &[u8]) -> anyhow::Result<Self> {
        let record: Self = serde_json::from_slice(bytes)?;
        anyhow::ensure!(record.version == VERSION, "a record of form {}, not {VERSION}", record.version);
        Ok(record)
    }
}
