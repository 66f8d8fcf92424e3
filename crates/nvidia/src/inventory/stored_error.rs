//! An error that one process passes to another.

use serde::{Deserialize, Serialize};

use base::report::{ErrorReport, failure};
use findings::catalog;

/// The number, the line and the hint of an error. The chain of its causes is part of the line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredError {
    id: String,
    line: String,
    hint: String,
}

impl StoredError {
    pub(super) fn new(error: &anyhow::Error) -> Self {
        let ErrorReport { kind, line, hint } = ErrorReport::new(error);
        Self {
            id: kind.id().to_owned(),
            line,
            hint,
        }
    }
}

impl From<StoredError> for anyhow::Error {
    fn from(stored: StoredError) -> Self {
        let kind = catalog::find(&stored.id).unwrap_or(&catalog::NVML);
        failure(kind, stored.line, stored.hint)
    }
}
