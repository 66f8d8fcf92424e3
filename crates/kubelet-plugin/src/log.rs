//! The log on stderr. The journal shows the severity of a line that begins with its number, see sd-daemon(3).

use std::sync::atomic::{AtomicBool, Ordering};

use base::report::{ErrorReport, Finding, Severity, one_line};
use base::sys::stdio;

/// Whether `--debug` is on the command line.
static DEBUG: AtomicBool = AtomicBool::new(false);

/// Has [`Log::debug`] write.
pub fn enable_debug() {
    DEBUG.store(true, Ordering::Relaxed);
    base::debug::set(|line| Log::new().debug(|| line.to_owned()));
}

/// Writes lines to stderr.
#[derive(Clone, Copy, Debug)]
pub struct Log {
    to_journal: bool,
}

impl Log {
    /// Creates a log for the stderr of this process.
    #[must_use]
    #[allow(
        clippy::disallowed_methods,
        reason = "systemd sets it for this process"
    )]
    pub fn new() -> Self {
        Self {
            to_journal: std::env::var_os("JOURNAL_STREAM").is_some(),
        }
    }

    /// Writes what happened.
    pub fn note(self, text: &str) {
        self.write(6, text);
    }

    /// Writes what only a search for an error needs, with `--debug`.
    pub fn debug(self, text: impl FnOnce() -> String) {
        if DEBUG.load(Ordering::Relaxed) {
            self.write(7, &text());
        }
    }

    /// Writes a finding, with its hint.
    pub fn finding(self, finding: &Finding) {
        let level = match finding.kind.severity {
            Severity::Error => 3,
            Severity::Warning => 4,
            Severity::Note => 5,
        };
        self.write(level, &format!("{} ({})", finding.what, finding.kind.id()));
        if !finding.fix.is_empty() {
            self.write(level, &format!("hint: {}", finding.fix));
        }
    }

    /// Writes each finding.
    pub fn findings(self, findings: &[Finding]) {
        for finding in findings {
            self.finding(finding);
        }
    }

    /// Writes an error, with its hint.
    pub fn error(self, error: &anyhow::Error) {
        let ErrorReport { kind, line, hint } = ErrorReport::new(error);
        self.write(3, &format!("{line} ({})", kind.id()));
        if !hint.is_empty() {
            self.write(3, &format!("hint: {hint}"));
        }
    }

    fn write(self, level: u8, text: &str) {
        let prefix = match (self.to_journal, text.starts_with("hint: ")) {
            (true, _) => format!("<{level}>"),
            // A hint belongs to the line above it, as in the messages of the hook.
            (false, true) => String::new(),
            (false, false) => "oci-nvidia-kubelet-plugin: ".to_owned(),
        };
        // The kubelet and the monitor must not wait for a reader of the log.
        stdio::offer_stderr(&format!("{prefix}{}\n", one_line(text)));
    }
}

impl Default for Log {
    fn default() -> Self {
        Self::new()
    }
}
