//! One observation about a host, a container or a request, with its number and its fix.

use serde::ser::{Serialize, SerializeStruct, Serializer};

use super::error::ErrorReport;
use super::kind::Kind;

/// One observation. Its texts have the form of error messages: see [`Failure::new`](super::Failure::new).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The entry of the catalog.
    pub kind: &'static Kind,
    /// The observation, with the names of this host or container.
    pub what: String,
    /// The command or setting that fixes it; empty if there is nothing to fix.
    pub fix: String,
}

impl Finding {
    /// Makes a finding of this kind.
    pub fn new(kind: &'static Kind, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            fix: fix.into(),
        }
    }

    /// Turns an error into a finding, to list it with others.
    #[must_use]
    pub fn error(error: &anyhow::Error) -> Self {
        let ErrorReport { kind, line, hint } = ErrorReport::new(error);
        Self {
            kind,
            what: line,
            fix: hint,
        }
    }
}

/// The names of the fields are an interface: `plan --json`, `doctor --json`, `cdi check --json` and records contain them.
impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Finding", 5)?;
        fields.serialize_field("id", self.kind.id())?;
        fields.serialize_field("severity", self.kind.severity.name())?;
        fields.serialize_field("what", &self.what)?;
        fields.serialize_field("why", self.kind.texts().why)?;
        fields.serialize_field("fix", &self.fix)?;
        fields.end()
    }
}
