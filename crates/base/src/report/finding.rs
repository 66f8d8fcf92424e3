//! One observation about a host, a container or a request, with its number and its fix.

use serde::ser::{Serialize, SerializeStruct, Serializer};

use super::error::ErrorReport;
use super::kind::Kind;

/// One observation. Texts follow the rules of [`crate::report`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which one of the catalogue.
    pub kind: &'static Kind,
    /// What is the case, with the names at hand.
    pub what: String,
    /// The command or the setting that mends it; empty if there is nothing to mend.
    pub fix: String,
}

impl Finding {
    /// One of this kind.
    pub fn of(kind: &'static Kind, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { kind, what: what.into(), fix: fix.into() }
    }

    /// What stops a container, for those who list findings.
    #[must_use]
    pub fn error(error: &anyhow::Error) -> Self {
        let ErrorReport { kind, line, hint } = ErrorReport::new(error);
        Self { kind, what: line, fix: hint }
    }
}

/// The names are an interface: `explain --json`, `doctor --json`, `cdi check --json` and records have them.
impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Finding", 5)?;
        fields.serialize_field("id", self.kind.id)?;
        fields.serialize_field("severity", self.kind.severity.name())?;
        fields.serialize_field("what", &self.what)?;
        fields.serialize_field("why", self.kind.why)?;
        fields.serialize_field("fix", &self.fix)?;
        fields.end()
    }
}
