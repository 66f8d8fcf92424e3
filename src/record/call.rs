//! Writes the hook's messages. runc shows stderr of a failed hook to the user; other runtimes and stages discard it. So
//! messages also go to the journal, to the configured file, and into the container's record.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

use anyhow::Result;
use base::paths::HostPath;
use base::report::{ErrorReport, Finding, Severity, one_line, render};
use base::sys::run_dir::Replacement;
use base::sys::stdio;

use super::journal::{Journal, priority};
use super::log_file::LogFile;
use records::store::Store;
use records::{Outcome, Pod, Record};

use super::{name, stderr};

/// The name of this program in logs.
pub(crate) const NAME: &str = "oci-nvidia-hook";

/// Whether `--debug` is on the command line.
static LOGS_TO_STDERR: AtomicBool = AtomicBool::new(false);

/// Logs all calls of this process to stderr, instead of the file that config.toml names.
pub(crate) fn log_to_stderr() {
    LOGS_TO_STDERR.store(true, Ordering::Relaxed);
}

/// Logs to stderr what this process reads and finds.
pub(crate) fn debug(line: &str) {
    let now = humantime::format_rfc3339_millis(SystemTime::now());
    stdio::offer_stderr(&format!(
        "{now} {NAME}[{}]: debug: {}\n",
        std::process::id(),
        one_line(line)
    ));
}

/// One call of the program: the destinations of its messages, and its record. All destinations must be open before the container's
/// mount namespace is entered.
#[derive(Debug, Default)]
pub(crate) struct Call {
    file: Option<LogFile>,
    journal: Option<Journal>,
    store: Option<Store>,
    record: Record,
    /// The record of an earlier call for the same start of the container
    earlier: Option<Record>,
    /// The warnings for stderr, which are printed after the error if there is one, because the error matters most
    warnings: String,
    step: Option<Instant>,
}

impl Call {
    /// Begins a call at this stage. It writes only to stderr until [`Call::keep`] or [`Call::open`] is called.
    pub(crate) fn for_stage(stage: &str) -> Self {
        let mut call = Self::default();
        call.record = Record::begin(stage, SystemTime::now());
        call.step = Some(Instant::now());
        call
    }

    /// Sets the container of the messages.
    pub(crate) fn name_container(&mut self, id: &str, pod: Pod, bundle: &std::path::Path) {
        self.record.name_container(one_line(id), pod, bundle);
    }

    /// Connects to the journal.
    pub(crate) fn connect(&mut self) {
        if self.journal.is_none() {
            self.journal = Journal::connect().ok();
        }
    }

    /// Connects to the journal and opens the store of records, because the container requests GPUs or the call fails.
    pub(crate) fn keep(&mut self) {
        self.connect();
        if self.store.is_none() {
            // A user without /run/user has no directory for records.
            self.store = Store::open_and_keep().ok();
            // Before the container's mount namespace is entered, because it checks whether bundles exist.
            if let Some(store) = &self.store {
                store.prune();
            }
            let earlier = self
                .store
                .as_ref()
                .and_then(|store| store.record_of(&self.record.container.id));
            self.earlier = earlier.filter(|earlier| earlier.is_of_start(&self.record));
            name::by_conmon(&mut self.record);
        }
    }

    /// Continues the record of the edit of config.json, whose second half this call is. Reports whether there is one.
    pub(crate) fn continue_edit(&mut self) -> bool {
        let set_up =
            |earlier: &mut Record| matches!(earlier.outcome, Outcome::Given | Outcome::Incomplete);
        let Some(earlier) = self.earlier.take_if(set_up) else {
            return false;
        };
        self.record.follow(earlier);
        true
    }

    /// Opens a log file.
    ///
    /// # Errors
    /// If it cannot be opened for appending, or another user can write or replace it.
    pub(crate) fn open(&mut self, path: &HostPath) -> Result<()> {
        self.file = Some(LogFile::open(path)?);
        Ok(())
    }

    /// Reports whether a log file is open.
    pub(crate) fn is_open(&self) -> bool {
        self.file.is_some() || LOGS_TO_STDERR.load(Ordering::Relaxed)
    }

    /// Returns the record of this call.
    pub(crate) const fn record(&mut self) -> &mut Record {
        &mut self.record
    }

    /// Records the duration of the step that just ended.
    pub(crate) fn step_done(&mut self, name: &str) {
        let now = Instant::now();
        if let Some(began) = self.step.replace(now) {
            self.record.step(name, now.duration_since(began));
        }
    }

    /// Returns the record of this call.
    pub(super) const fn so_far(&self) -> &Record {
        &self.record
    }

    /// Returns the means to replace the stored record in a signal handler.
    pub(super) fn replacement(&self) -> Option<Replacement<Arc<OwnedFd>>> {
        self.store.as_ref()?.replacement(&self.record.container.id)
    }

    /// Writes the record so far. Called before a slow operation, because the engine may kill the hook without a message.
    pub(crate) fn record_so_far(&self) {
        if let Some(store) = &self.store {
            store.write(&self.record);
        }
    }

    /// Writes the record with the result of the call.
    pub(crate) fn end(&mut self, outcome: Outcome, reason: &str) {
        self.record.end(outcome, one_line(reason));
        match (&self.earlier, &self.store) {
            // A record of a stage that did nothing does not replace the record of an earlier stage of the same start.
            (Some(earlier), Some(store)) if outcome == Outcome::Unchanged => store.write(earlier),
            _ => self.record_so_far(),
        }
    }

    /// Logs that the container got its GPUs, and writes the record.
    pub(crate) fn given(&mut self, what: &str) {
        let what = one_line(what);
        self.write("note", &what);
        self.send_given(&what);
        self.end(Outcome::Given, &what);
    }

    /// Writes the record of a `rootfs` call. What the edit of config.json gave to the container is more important than this
    /// reason.
    pub(crate) fn end_of_rootfs(&mut self, reason: &str) {
        let earlier = std::mem::take(&mut self.record.reason);
        if earlier.is_empty() {
            self.send_given(reason);
        }
        self.end(
            Outcome::Given,
            if earlier.is_empty() { reason } else { &earlier },
        );
    }

    /// Logs and prints the error that stops the container.
    pub(crate) fn error(&mut self, error: &anyhow::Error) {
        let text = render(error);
        self.print(&format!("{NAME}: {text}"));
        for line in text.lines() {
            self.write("error", line);
        }
        let ErrorReport { kind, line, hint } = ErrorReport::new(error);
        self.send(Severity::Error, &line, kind.id(), &hint);
        self.record.add_finding(&Finding::error(error));
    }

    /// Reports and records a failure, which stops the container.
    pub(crate) fn fail(&mut self, error: &anyhow::Error) {
        self.keep();
        self.error(error);
        self.print_warnings();
        name::remember(&mut self.record.container);
        self.end(Outcome::Failed, &ErrorReport::new(error).line);
    }

    /// Logs and prints findings.
    pub(crate) fn findings<'f>(&mut self, findings: impl IntoIterator<Item = &'f Finding>) {
        for finding in findings {
            self.finding(finding);
        }
    }

    /// Logs and prints a finding, which does not stop the container. Notes are not printed to stderr.
    pub(crate) fn finding(&mut self, finding: &Finding) {
        let (what, fix) = (one_line(&finding.what), one_line(&finding.fix));
        let id = finding.kind.id();
        match finding.kind.severity {
            Severity::Note => self.write("note", &format!("{what} ({id})")),
            Severity::Warning | Severity::Error => {
                let text = format!("{NAME}: warning: {what} ({id})\nhint: {fix}");
                match self.is_hook() {
                    true => self.warnings.push_str(&(stderr::reworded(&text) + "\n")),
                    false => self.print(&text),
                }
                self.write("warning", &format!("{what} ({id}); hint: {fix}"));
            }
        }
        self.send(
            finding.kind.severity.min(Severity::Warning),
            &what,
            id,
            &fix,
        );
        self.record.add_finding(finding);
    }

    /// Prints the warnings of a stage.
    fn print_warnings(&mut self) {
        if !self.warnings.is_empty() {
            stdio::offer_stderr(&std::mem::take(&mut self.warnings));
        }
    }

    /// Prints a message for the user of a command to stderr.
    pub(crate) fn report(&self, what: &str) {
        self.print(&format!("{NAME}: {}", one_line(what)));
    }

    /// Prints a finding as a note for the user of a command to stderr.
    pub(crate) fn remark(&self, finding: &Finding) {
        let (what, fix) = (one_line(&finding.what), one_line(&finding.fix));
        self.print(&format!(
            "{NAME}: note: {what} ({})\nhint: {fix}",
            finding.kind.id()
        ));
    }

    /// Logs a message without printing it.
    pub(crate) fn note(&mut self, what: &str) {
        let what = one_line(what);
        self.write("note", &what);
        self.send(Severity::Note, &what, "", "");
    }

    /// Logs a line to the log file only, and not to the journal.
    pub(crate) fn log(&mut self, line: &str) {
        self.write("note", &one_line(line));
    }

    fn write(&mut self, level: &str, line: &str) {
        let mut to_stderr = LOGS_TO_STDERR
            .load(Ordering::Relaxed)
            .then_some(LogFile::Stderr);
        let Some(file) = to_stderr.as_mut().or(self.file.as_mut()) else {
            return;
        };
        let now = humantime::format_rfc3339_millis(SystemTime::now());
        let (pid, container) = (std::process::id(), &self.record.container.id);
        // A command has no container.
        let of = if container.is_empty() { "" } else { ": " };
        file.write(&format!(
            "{now} {NAME}[{pid}]: {level}: {container}{of}{line}\n"
        ));
    }

    /// Prints to stderr. A container does not wait for an engine that does not read the messages of a hook.
    fn print(&self, text: &str) {
        match self.is_hook() {
            true => stdio::offer_stderr(&(stderr::reworded(text) + "\n")),
            false => stdio::print_stderr(&format!("{text}\n")),
        }
    }

    /// Reports whether an engine, and not a user, reads stderr.
    const fn is_hook(&self) -> bool {
        !self.record.stage.is_empty()
    }

    fn send(&self, severity: Severity, what: &str, id: &str, hint: &str) {
        self.send_about(&[], severity, what, id, hint);
    }

    /// Sends the entry of a container that got its GPUs, with a field for each of them, as an answer to who had a GPU: records end with
    /// the next boot.
    fn send_given(&self, what: &str) {
        let (mut names, mut gpus) = (Vec::new(), Vec::new());
        for device in &self.record.devices {
            names.push(device.to_string());
            gpus.push(("ONH_GPU", device.id()));
        }
        let what = format!("{what}: {}", names.join(", "));
        self.send_about(&gpus, Severity::Note, &what, "", "");
    }

    fn send_about(
        &self,
        gpus: &[(&str, &str)],
        severity: Severity,
        what: &str,
        id: &str,
        hint: &str,
    ) {
        let Some(journal) = &self.journal else { return };
        let container = &self.record.container;
        let number = if id.is_empty() {
            String::new()
        } else {
            format!(" ({id})")
        };
        let fields = [
            (
                "MESSAGE",
                &*format!("{}: {what}{number}", container.short()),
            ),
            ("PRIORITY", priority(severity)),
            ("SYSLOG_IDENTIFIER", NAME),
            // The field names of Podman's and Docker's journald drivers.
            ("CONTAINER_ID_FULL", &container.id),
            ("CONTAINER_ID", container.short()),
            ("CONTAINER_NAME", &container.pod.container),
            ("ONH_POD", &container.pod.name),
            ("ONH_NAMESPACE", &container.pod.namespace),
            ("ONH_STAGE", &self.record.stage),
            ("ONH_FINDING", id),
            ("ONH_HINT", hint),
        ];
        journal.send(&[&fields, gpus].concat());
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.print_warnings();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut call = Call::for_stage("prestart");
        call.name_container("c1\nx", Pod::default(), dir.path());
        call.open(&HostPath::new(&path)).unwrap();
        call.error(&base::report::failure(&findings::catalog::CONFIG, "a", "b"));
        call.note("c\nd");
        call.error(&anyhow::Error::new(rustix::io::Errno::NOENT));
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text
            .lines()
            .map(|line| line.split_once("]: ").unwrap().1)
            .collect();
        assert_eq!(
            lines,
            [
                "error: c1\\nx: a (ONH-005)",
                "error: c1\\nx: hint: b",
                "note: c1\\nx: c\\nd",
                "error: c1\\nx: no such file or directory (ENOENT) (ONH-001)",
            ]
        );
    }
}
