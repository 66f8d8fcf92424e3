//! What the catalog records for a finding, whatever host it is found on.

use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing; nothing has to be done.
    Note,
    /// The container starts, but lacks something.
    Warning,
    /// The container does not start, or the command fails.
    Error,
}

impl Severity {
    /// The word that messages, JSON and documents use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// An entry of the catalog. `explain ONH-030 --json` prints its fields under these names.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Kind {
    /// `ONH-` and three digits. A number is never reused.
    pub id: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// The meaning, without the names of a particular host.
    pub title: &'static str,
    /// Why it matters.
    pub why: &'static str,
    /// How to fix it in general; a finding of a particular host has its own command.
    pub fix: &'static str,
    /// The page that explains more, such as `usage.md`; empty if there is no such page.
    pub see: &'static str,
}
