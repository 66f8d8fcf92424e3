//! The time limit for a container's files, and the record of a start that it ends.

use std::time::Instant;

use anyhow::{Context as _, Result};

use base::json;
use base::report::{ErrorReport, Finding, failure, render};
use base::sys::deadline::{self, DeadlineReport, LastWords};
use findings::catalog;
use nvidia_host::timeouts;

use records::Outcome;

use super::call::{Call, NAME};

/// The seconds of processor time, as a share of the limit, from which the hook was busy and did not only wait.
const BUSY_SHARE: u64 = 3;

/// The hint for a hook that waited for files.
const WAITED: &str = "run \"findmnt\" on the host, and check that the servers of its FUSE and network file systems respond: the \
                      image or a volume may be on one of them";

/// The hint for a hook that was busy.
const WORKED: &str = "the host is overloaded, or files of the image make the hook work for long: compare with another image, and see \
                      what the image has in /etc/ld.so.conf.d";

/// Returns a report with another hint, or `None` if it does not have the hint `old`. To write it again would take a twentieth of a start.
fn with_hint(report: &DeadlineReport, old: &str, new: &str) -> Option<DeadlineReport> {
    let content = std::str::from_utf8(&report.content).ok()?;
    let (old_json, new_json) = (json::pretty(&old).ok()?, json::pretty(&new).ok()?);
    let has_both = report.text.contains(old) && content.contains(&old_json);
    has_both.then(|| DeadlineReport {
        text: report.text.replace(old, new),
        content: content.replace(&old_json, &new_json).into_bytes(),
    })
}

impl Call {
    /// Ends this process with an error if a container's files do not respond in time. Must be called before the first of them is
    /// opened; `start` is when the hook began.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn set_deadline(&mut self, start: Instant) -> Result<()> {
        let patience = timeouts::for_container(start.elapsed());
        let what = format!(
            "the container was not set up within {} seconds",
            patience.as_secs()
        );
        let report =
            |hint: &str| self.last_report(&failure(&catalog::TOO_LONG, what.clone(), hint));
        let waited = report(WAITED);
        let worked = with_hint(&waited, WAITED, WORKED).unwrap_or_else(|| report(WORKED));
        // A process that waits for a FUSE or NFS server runs no signal handler before the kernel kills it. Then this record stays.
        let last = format!(
            "it opened the container's files, and a file system may not have responded ({})",
            catalog::TOO_LONG.id
        );
        let reason = std::mem::replace(&mut self.record().reason, last);
        self.record_so_far();
        self.record().reason = reason;
        let busy_from = i64::try_from(patience.as_secs() / BUSY_SHARE).unwrap_or(i64::MAX);
        // A record that cannot be written as JSON must not replace one that can be read.
        let file = self
            .replacement()
            .filter(|_| !waited.content.is_empty() && !worked.content.is_empty());
        let words = LastWords {
            waited,
            worked,
            busy_from,
            file,
        };
        deadline::set(patience, words).context("cannot set a timer")
    }

    /// Returns what is printed and recorded if this error ends the process.
    fn last_report(&self, error: &anyhow::Error) -> DeadlineReport {
        let mut record = self.so_far().clone();
        record.add_finding(&Finding::error(error));
        record.end(Outcome::Failed, ErrorReport::new(error).line);
        DeadlineReport {
            text: format!("{NAME}: {}\n", render(error)),
            content: record.to_bytes().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_with_another_hint() {
        let mut call = Call::for_stage("prestart");
        call.name_container("c", records::Pod::default(), std::path::Path::new("/b"));
        let report =
            |hint: &str| call.last_report(&failure(&catalog::TOO_LONG, "it took too long", hint));
        let (waited, worked) = (report(WAITED), report(WORKED));
        let other = with_hint(&waited, WAITED, WORKED).unwrap();
        assert_eq!(
            (other.text, other.content),
            (worked.text.clone(), worked.content.clone())
        );
        assert!(with_hint(&worked, WAITED, WORKED).is_none());
    }
}
