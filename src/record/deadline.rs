//! The time limit for a container's files, and the record of a start that it ends.

use std::time::Instant;

use anyhow::{Context as _, Result};

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
        let error = |hint: &str| failure(&catalog::TOO_LONG, what.clone(), hint);
        self.record_opening();
        let report = |hint: &str| self.last_report(&error(hint));
        let (waited, worked) = (report(WAITED), report(WORKED));
        let busy_from = i64::try_from(patience.as_secs() / BUSY_SHARE).unwrap_or(i64::MAX);
        // A record that cannot be written as JSON must not replace one that can be read.
        let is_json = !waited.content.is_empty() && !worked.content.is_empty();
        let words = LastWords {
            waited,
            worked,
            busy_from,
            file: self.replacement().filter(|_| is_json),
        };
        deadline::set(patience, words).context("cannot set a timer")
    }

    /// Records that the container's files are opened now. A process that waits for a FUSE or NFS server runs no signal handler before the
    /// kernel kills it. Then this record stays, and is the only trace of the start. Therefore it is written, although almost every start
    /// replaces it a few milliseconds later.
    fn record_opening(&mut self) {
        let reason = format!(
            "it opened the container's files, and a file system may not have responded ({})",
            catalog::TOO_LONG.id()
        );
        let earlier = std::mem::replace(&mut self.record().reason, reason);
        self.record_so_far();
        self.record().reason = earlier;
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
    fn the_last_report_is_a_failure() {
        let mut call = Call::for_stage("prestart");
        call.name_container("c", records::Pod::default(), std::path::Path::new("/b"));
        call.record().request = "all".to_owned();
        let error = failure(&catalog::TOO_LONG, "it took too long", WAITED);
        let record = records::Record::parse(&call.last_report(&error).content).unwrap();
        assert_eq!(record.outcome, Outcome::Failed);
        assert_eq!(record.findings[0].id, catalog::TOO_LONG.id());
        assert_eq!(record.findings[0].fix, WAITED);
    }
}
