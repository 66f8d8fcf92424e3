//! The record of one call of the hook: request, decision, result, and the duration of each step. `why` prints it, long after
//! the engine has discarded the hook's stderr.

pub mod asked;
mod bound;
mod device;
mod pod;
mod prune;
mod shortfall;
pub mod store;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use base::report::{Finding, one_line};
use nvidia_host::programs::RUNTIME;

pub use device::RecordedDevice;
pub use pod::Pod;

use asked::RecordedRequest;

/// The version of the format. Records of other versions are not read.
const VERSION: u32 = 1;
/// The stage at which the NRI plugin answers an engine, before the container exists.
pub const NRI: &str = "nri";
/// Upper limit for the findings in memory; [`bound`] limits the written record.
const MAX_ENTRIES: usize = 64;

/// A record. The field names are an interface.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// The version of the program
    pub hook: String,
    /// The container of the call
    pub container: ContainerNames,
    /// `prestart`, [`NRI`], or the program that edits config.json: [`RUNTIME`]
    pub stage: String,
    /// When it began: RFC 3339, UTC
    pub started: String,
    /// If the record replaced failures of the same container: when the first of them began
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub since: String,
    /// When the container ended: RFC 3339, UTC; empty if that is unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ended: String,
    /// The process id of the container's init as the engine reported it; 0 before it exists
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pid: i32,
    /// The source of the request: a variable, mounts or device nodes
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub request: String,
    /// The request, if there is one
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<RecordedRequest>,
    /// The driver's version; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub driver: String,
    /// The selected GPUs
    pub devices: Vec<RecordedDevice>,
    /// The steps of the calls of this start
    pub steps: Vec<TimedStep>,
    /// The result
    pub outcome: Outcome,
    /// The result in words; for a failure, the error
    pub reason: String,
    /// What the calls of this start found
    pub findings: Vec<StoredFinding>,
}

/// Names and bundle of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerNames {
    /// The engine's id
    pub id: String,
    /// Its name in the engine; empty if it is unknown
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Names in Kubernetes; empty for other engines
    #[serde(skip_serializing_if = "Pod::is_empty")]
    pub pod: Pod,
    /// Its bundle; empty if unknown
    #[serde(skip_serializing_if = "is_empty_path")]
    pub bundle: PathBuf,
}

impl ContainerNames {
    /// Returns the id as engines print it: 12 digits of a hash.
    pub fn short(&self) -> &str {
        let is_hash = self.id.len() == 64 && self.id.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_hash {
            self.id.get(..12).unwrap_or_default()
        } else {
            &self.id
        }
    }

    /// Returns `namespace/pod/container`, or the name; empty if neither is known.
    pub fn display_name(&self) -> String {
        let Pod {
            name,
            namespace,
            container,
        } = &self.pod;
        one_line(&if name.is_empty() {
            self.name.clone()
        } else {
            format!("{namespace}/{name}/{container}")
        })
    }
}

/// The result of a call of the hook.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The call is still running, or the engine killed it.
    #[default]
    Unfinished,
    /// The container got what it asked for.
    #[serde(rename = "ok")]
    Given,
    /// It got less than it asked for, or cannot use all of it: [`Record::shortfall`].
    Incomplete,
    /// It requests nothing.
    Nothing,
    /// Its request was denied, or another program sets it up.
    #[serde(rename = "left-alone")]
    Unchanged,
    /// The hook failed, which stops the container.
    Failed,
}

/// A [`Finding`] as it is stored in a record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFinding {
    /// `ONH-nnn`
    pub id: String,
    /// `note`, `warning` or `error`
    pub severity: String,
    /// The message
    pub what: String,
    /// Its consequence
    pub why: String,
    /// How to fix it; empty if nothing has to be fixed
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fix: String,
}

impl From<&Finding> for StoredFinding {
    fn from(finding: &Finding) -> Self {
        Self {
            id: finding.kind.id().to_owned(),
            severity: finding.kind.severity.name().to_owned(),
            what: one_line(&finding.what),
            why: finding.kind.texts().why.to_owned(),
            fix: one_line(&finding.fix),
        }
    }
}

const fn is_zero(number: &i32) -> bool {
    *number == 0
}

fn is_empty_path(path: &Path) -> bool {
    path.as_os_str().is_empty()
}

/// A step of the call, with its duration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimedStep {
    /// What was done
    pub name: String,
    /// How long it took
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

    /// Returns when the call began, or the first call for the same container that failed like this one.
    pub fn since(&self) -> &str {
        if self.since.is_empty() {
            &self.started
        } else {
            &self.since
        }
    }

    /// Sets the container that the call is for.
    pub fn name_container(&mut self, id: String, pod: Pod, bundle: &Path) {
        self.container = ContainerNames {
            id,
            pod,
            bundle: bundle.to_owned(),
            ..ContainerNames::default()
        };
    }

    /// Reports whether a later call of the hook belongs to the same start of the container as this one. The edit of config.json begins a
    /// start, before the container has a process; all later calls of a start are for the same process.
    #[must_use]
    pub fn is_of_start(&self, later: &Self) -> bool {
        let follows_edit = self.stage == RUNTIME && self.pid == 0 && later.stage != RUNTIME;
        self.ended.is_empty() && (follows_edit || self.pid != 0 && self.pid == later.pid)
    }

    /// Continues the record of an earlier call for the same start.
    pub fn follow(&mut self, earlier: Self) {
        let Self {
            container,
            pid,
            findings,
            steps,
            ..
        } = std::mem::take(self);
        *self = Self {
            container,
            pid,
            outcome: Outcome::Unfinished,
            ..earlier
        };
        self.findings.extend(findings);
        self.steps.extend(steps);
    }

    /// Records that the container has ended.
    fn end_of_container(&mut self, now: SystemTime) {
        self.ended = humantime::format_rfc3339_millis(now).to_string();
    }

    /// Adds a finding, up to a limit. Calls for the same start can report the same finding.
    pub fn add_finding(&mut self, finding: &Finding) {
        let finding = StoredFinding::from(finding);
        if self.findings.len() < MAX_ENTRIES && !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    /// Adds a step.
    pub fn step(&mut self, name: &str, took: Duration) {
        // Whole microseconds, because JSON would have all digits of the binary fraction.
        let milliseconds = (took.as_secs_f64() * 1_000_000.0).round() / 1000.0;
        self.steps.push(TimedStep {
            name: name.to_owned(),
            milliseconds,
        });
    }

    /// Ends the call. A container that was given GPUs has the outcome [`Outcome::Incomplete`] if a finding reports a shortfall.
    pub fn end(&mut self, outcome: Outcome, reason: String) {
        let is_short = outcome == Outcome::Given && self.shortfall().is_some();
        self.outcome = if is_short {
            Outcome::Incomplete
        } else {
            outcome
        };
        self.reason = reason;
    }

    /// What a container that was given GPUs lacks or cannot use, after the words "the container got".
    pub fn shortfall(&self) -> Option<&'static str> {
        shortfall::of(&self.findings).map(|(_, words)| words)
    }

    /// Reports whether the container started without the GPUs that it requested, or that it has device nodes of.
    #[must_use]
    pub fn is_without_gpus(&self) -> bool {
        self.outcome == Outcome::Unchanged && shortfall::is_without_gpus(&self.findings)
    }

    /// Returns the most severe finding, except for notes.
    pub fn most_severe(&self) -> Option<&StoredFinding> {
        let of = |severity: &str| {
            self.findings
                .iter()
                .find(|finding| finding.severity == severity)
        };
        of("error")
            .or_else(|| self.of_shortfall())
            .or_else(|| of("warning"))
    }

    /// Returns the finding that reports the shortfall.
    fn of_shortfall(&self) -> Option<&StoredFinding> {
        let (id, _) = shortfall::of(&self.findings)?;
        self.findings.iter().find(|finding| finding.id == id)
    }

    /// Parses a record.
    ///
    /// # Errors
    /// If the text is not a record, or has another version.
    pub fn parse(bytes: &[u8]) -> anyhow::Result<Self> {
        let record: Self = base::json::from_bytes(bytes)?;
        anyhow::ensure!(
            record.version == VERSION,
            "record version {}, expected {VERSION}",
            record.version
        );
        Ok(record)
    }
}
