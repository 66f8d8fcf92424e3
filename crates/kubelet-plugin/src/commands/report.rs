//! What the reports of `check` for both interfaces have in common.

use std::process::ExitCode;

use anyhow::Result;
use base::json;
use base::report::{Finding, one_line};
use command_line::terminal::{Line, Terminal, Tone};
use plugin_api::control::Unanswered;
use serde::Serialize;

/// The exit status if a GPU is unhealthy, or a setting is wrong for this node.
const DEGRADED: u8 = 1;
/// The exit status if there are GPUs, and none can be offered.
const NOTHING: u8 = 3;

/// The document of `--json`.
pub trait JsonReport: Serialize {
    /// Returns the lines of the report.
    fn lines(&self, has_gpus: bool) -> Vec<Line>;

    /// Returns whether each device can be allocated.
    fn health(&self) -> Vec<bool>;

    /// Returns the findings.
    fn findings(&self) -> &[FindingEntry];

    /// Returns whether a pod would start.
    fn verdict(&self) -> &Verdict;
}

/// Whether a pod that requests a GPU of this node now would start with it, if one is free.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// `None` if that is not known
    #[serde(skip_serializing_if = "Option::is_none")]
    starts: Option<bool>,
    /// Why it would not start, or why that is not known
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

impl Verdict {
    /// The pod would start.
    #[must_use]
    pub const fn starts() -> Self {
        Self {
            starts: Some(true),
            why: None,
        }
    }

    /// The pod would not start, or would start without a GPU.
    #[must_use]
    pub fn fails(why: impl Into<String>) -> Self {
        Self {
            starts: Some(false),
            why: Some(why.into()),
        }
    }

    /// It depends on the pod, or on what this program does not see.
    #[must_use]
    pub fn unknown(why: impl Into<String>) -> Self {
        Self {
            starts: None,
            why: Some(why.into()),
        }
    }

    /// Whether the pod would start as far as this is known.
    #[must_use]
    pub fn is_start(&self) -> bool {
        self.starts == Some(true)
    }

    /// The running plugin has not answered.
    #[must_use]
    pub fn of_unanswered(error: &Unanswered) -> Self {
        let why = Some(error.to_string());
        let starts = match error {
            Unanswered::NotRunning => Some(false),
            Unanswered::Denied | Unanswered::Failed(_) => None,
        };
        Self { starts, why }
    }

    fn line(&self) -> Line {
        let (tone, word) = match self.starts {
            Some(true) => (Tone::Good, "would start"),
            Some(false) => (Tone::Bad, "would not start"),
            None => (Tone::Warning, "may or may not start"),
        };
        let why = match &self.why {
            Some(why) => format!(": {}", one_line(why)),
            None => String::new(),
        };
        let line = Line::new("a pod that requests a GPU ");
        line.then(tone, word).then(Tone::Plain, why)
    }
}

/// A finding in a document.
#[derive(Debug, Serialize)]
pub struct FindingEntry {
    id: &'static str,
    severity: &'static str,
    what: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    fix: String,
}

impl From<&Finding> for FindingEntry {
    fn from(finding: &Finding) -> Self {
        Self {
            id: finding.kind.id(),
            severity: finding.kind.severity.name(),
            what: finding.what.clone(),
            fix: finding.fix.clone(),
        }
    }
}

impl FindingEntry {
    /// Returns the finding with its hint.
    #[must_use]
    pub fn lines(&self) -> Vec<Line> {
        let line = Line::new(format!("{} ", self.id))
            .then(Tone::of_severity(self.severity), self.severity);
        let mut lines = vec![line.then(Tone::Plain, format!(": {}", one_line(&self.what)))];
        if !self.fix.is_empty() {
            lines.push(Line::new(format!("  hint: {}", one_line(&self.fix))));
        }
        lines
    }
}

/// Returns the devices, of those with the same reason only the first one, each with the number of the others. `reason` returns why a device
/// cannot be allocated.
pub(super) fn by_reason<'d, D, R: PartialEq>(
    devices: &'d [D],
    reason: impl Fn(&'d D) -> Option<R>,
) -> Vec<(&'d D, usize)> {
    let mut groups: Vec<(&D, usize)> = Vec::new();
    for device in devices {
        let why = reason(device);
        let mut known = groups.iter_mut();
        match known.find(|(first, _)| why.is_some() && reason(first) == why) {
            Some((_, others)) => *others += 1,
            None => groups.push((device, 0)),
        }
    }
    groups
}

/// Returns `gpu-0 and 3 more `, for a device and so many others.
pub(super) fn named(device: &str, others: usize) -> String {
    match others {
        0 => format!("{device} "),
        others => format!("{device} and {others} more "),
    }
}

/// What the node offers, as `check` reports it.
#[derive(Debug)]
pub struct CheckReport<D> {
    /// The document
    pub document: D,
    /// Whether the node has GPUs
    pub has_gpus: bool,
}

impl<D: JsonReport> CheckReport<D> {
    /// Returns the JSON document.
    ///
    /// # Errors
    /// If the document cannot be serialized.
    pub fn to_json(&self) -> Result<String> {
        Ok(json::pretty(&self.document)? + "\n")
    }

    /// Returns the report as text.
    #[must_use]
    pub fn to_text(&self, terminal: Terminal) -> String {
        let mut lines = self.document.lines(self.has_gpus);
        for finding in self.document.findings() {
            lines.extend(finding.lines());
        }
        lines.push(self.document.verdict().line());
        terminal.render(&lines)
    }

    /// Returns the exit status: 0 if everything can be allocated, 1 if something is degraded or a pod would not start, 3 if
    /// there are GPUs and none can be allocated.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        let findings = self.document.findings();
        let health = self.document.health();
        let has_errors = findings.iter().any(|finding| finding.severity == "error");
        if !health.contains(&true) && (self.has_gpus || has_errors) {
            return ExitCode::from(NOTHING);
        }
        let has_problems = findings.iter().any(|finding| finding.severity != "note");
        let fails = self.document.verdict().starts == Some(false);
        if health.contains(&false) || has_problems || fails {
            return ExitCode::from(DEGRADED);
        }
        ExitCode::SUCCESS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_printed_once() {
        let devices = [
            Some("lost"),
            None,
            Some("XID 79"),
            None,
            Some("lost"),
            Some("lost"),
        ];
        let groups = by_reason(&devices, |why| *why);
        let lines = groups
            .iter()
            .map(|(why, others)| named(why.unwrap_or("healthy"), *others));
        let expected = ["lost and 2 more ", "healthy ", "XID 79 ", "healthy "];
        assert_eq!(lines.collect::<Vec<_>>(), expected);
    }
}
