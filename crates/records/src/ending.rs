//! Several ends of one record. A start stores its record before it opens the container's files, and prepares the records of a start that
//! these files end. They differ only in the result, and the rest is written as JSON once.

use base::json;
use serde::Serialize;

use super::bound::MAX_SIZE;
use super::{Outcome, Record, StoredFinding};

/// The line that begins the last members of a record. Text in JSON has no line breaks, so no other line is the same.
const FIRST: &str = "\n  \"outcome\": ";

/// The last members of a record.
#[derive(Debug, Serialize)]
struct Ending<'a> {
    outcome: Outcome,
    reason: &'a str,
    findings: &'a [StoredFinding],
}

/// A record as JSON, up to the outcome.
#[derive(Debug)]
pub struct Beginning(String);

impl Record {
    /// Returns the record up to the outcome. `None` if it must be shortened, or the path of its bundle is not UTF-8.
    pub fn beginning(&self) -> Option<Beginning> {
        let mut text = self.unshortened()?;
        text.truncate(text.find(FIRST)?);
        Some(Beginning(text))
    }
}

impl Beginning {
    /// Returns the record with this end, as [`Record::to_bytes`] does. `None` if it is too long.
    #[must_use]
    pub fn ended(
        &self,
        outcome: Outcome,
        reason: &str,
        findings: &[StoredFinding],
    ) -> Option<Vec<u8>> {
        let ending = Ending {
            outcome,
            reason,
            findings,
        };
        let ending = json::pretty(&ending).ok()?;
        let text = [&*self.0, ending.strip_prefix('{')?].concat();
        (text.len() <= MAX_SIZE).then(|| text.into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::Pod;

    fn finding(what: &str) -> StoredFinding {
        StoredFinding {
            id: "ONH-049".to_owned(),
            severity: "error".to_owned(),
            what: what.to_owned(),
            ..StoredFinding::default()
        }
    }

    #[test]
    fn a_record_with_another_end_is_the_same_in_one_step() {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        let bundle = Path::new("/b/\"outcome\": \"ok\"");
        record.name_container("0a\n  \"outcome\": 7".to_owned(), Pod::default(), bundle);
        record.step("driver", Duration::from_millis(3));
        record.findings = vec![finding("first")];
        let beginning = record.beginning().unwrap();
        for findings in [
            Vec::new(),
            vec![finding("first")],
            vec![finding("first"), finding("last \"}\n")],
        ] {
            let ended = beginning.ended(Outcome::Failed, "a \"reason\"", &findings);
            record.outcome = Outcome::Failed;
            record.reason = "a \"reason\"".to_owned();
            record.findings = findings;
            assert_eq!(ended, record.to_bytes());
        }
    }

    #[test]
    fn a_long_record_has_no_such_end() {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        let beginning = record.beginning().unwrap();
        let long = "x".repeat(MAX_SIZE);
        assert_eq!(beginning.ended(Outcome::Failed, &long, &[]), None);
        record.request = long;
        assert!(record.beginning().is_none());
    }
}
