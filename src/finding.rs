//! Findings: what we noticed that does not stop the container, said once, with the fix.

use serde::Serialize;

/// How much it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing, nothing to do.
    Note,
    /// The container starts, but lacks something.
    Warning,
    /// The container does not start.
    Error,
}

/// One observation. Texts follow the rules of [`crate::error`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable: `ONH-` and three digits. 0xx errors, 1xx configuration, 2xx the host's driver and GPUs, 3xx the container.
    pub id: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What is the case.
    pub what: String,
    /// Why it matters.
    pub why: String,
    /// The command or the setting that mends it; empty if there is nothing to mend.
    pub fix: String,
}

impl Finding {
    /// A finding worth a look.
    pub fn warning(id: &'static str, what: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { id, severity: Severity::Warning, what: what.into(), why: why.into(), fix: fix.into() }
    }

    /// A finding for the log.
    pub fn note(id: &'static str, what: impl Into<String>) -> Self {
        Self { id, severity: Severity::Note, what: what.into(), why: String::new(), fix: String::new() }
    }

    /// What stops a container, for those who list findings.
    #[must_use]
    pub fn error(error: &anyhow::Error) -> Self {
        let text = crate::error::render(error);
        let (what, fix) = text.split_once("\nhint: ").unwrap_or((&text, ""));
        Self {
            id: "ONH-001",
            severity: Severity::Error,
            what: what.to_owned(),
            why: "the container does not start".to_owned(),
            fix: fix.to_owned(),
        }
    }
}
