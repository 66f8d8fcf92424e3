//! Findings: what we noticed that does not stop the container, said once, with the fix.

/// How much it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth knowing, nothing to do.
    Note,
    /// The container starts, but lacks something.
    Warning,
}

/// One observation. Texts follow the rules of [`crate::error`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// What is the case, with its cause.
    pub what: String,
    /// The command or the setting that mends it; empty if there is nothing to mend.
    pub fix: String,
}

impl Finding {
    /// A finding worth a look.
    pub fn warning(what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, what: what.into(), fix: fix.into() }
    }

    /// A finding for the log.
    pub fn note(what: impl Into<String>) -> Self {
        Self { severity: Severity::Note, what: what.into(), fix: String::new() }
    }
}
