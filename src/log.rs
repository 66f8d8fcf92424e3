//! What the hook says: to stderr, which runc shows to the user when we fail, and to the configured file, because
//! other runtimes drop it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::SystemTime;

use anyhow::{Context, Result};

use crate::error::one_line;
use crate::finding::{Finding, Severity};
use crate::paths::HostPath;

const NAME: &str = "oci-nvidia-hook";

/// Where lines go. The file must be opened before the container's mount namespace is entered.
#[derive(Debug, Default)]
pub struct Log {
    file: Option<File>,
    container: String,
}

impl Log {
    /// For the container of this id; on stderr only, until [`Log::open`].
    #[must_use]
    pub fn of(container: &str) -> Self {
        Self { file: None, container: one_line(container) }
    }

    /// Lines go to this file too.
    ///
    /// # Errors
    /// If it cannot be opened for appending.
    pub fn open(&mut self, path: &HostPath) -> Result<()> {
        // What the descriptor is open for already; the path is a link, and may be to what cannot be opened again.
        if path.as_path() == std::path::Path::new("/dev/stderr") {
            let stderr = std::io::stderr().as_fd().try_clone_to_owned();
            self.file = Some(stderr.with_context(|| format!("cannot open the log file {path}"))?.into());
            return Ok(());
        }
        // Not through a link: whoever may write in the log's directory must not choose a file for root to append to.
        let open = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o640)
            .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
            .open(path.as_path());
        self.file = Some(open.with_context(|| format!("cannot open the log file {path}"))?);
        Ok(())
    }

    /// Lines from here on are about this container.
    pub fn about(&mut self, container: &str) {
        self.container = one_line(container);
    }

    /// Whether lines go to a file.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.file.is_some()
    }

    /// What stops the container.
    pub fn error(&mut self, error: &anyhow::Error) {
        let text = crate::error::render(error);
        say(&format!("{NAME}: {text}"));
        for line in text.lines() {
            self.write("error", line);
        }
    }

    /// What does not. Notes go to the file only.
    pub fn finding(&mut self, finding: &Finding) {
        let what = one_line(&finding.what);
        match finding.kind.severity {
            Severity::Note => self.write("note", &what),
            Severity::Warning | Severity::Error => {
                let fix = one_line(&finding.fix);
                say(&format!("{NAME}: warning: {what} ({})\nhint: {fix}", finding.kind.id));
                self.write("warning", &format!("{what} ({}); hint: {fix}", finding.kind.id));
            }
        }
    }

    /// What was done, for the file only.
    pub fn note(&mut self, what: &str) {
        self.write("note", &one_line(what));
    }

    fn write(&mut self, level: &str, line: &str) {
        let Some(file) = &mut self.file else { return };
        let now = humantime::format_rfc3339_millis(SystemTime::now());
        let pid = std::process::id();
        // One write(2), so that lines of hooks running side by side do not mix. A full disk stops no container.
        file.write_all(format!("{now} {NAME}[{pid}]: {level}: {}: {line}\n", self.container).as_bytes()).ok();
    }
}

#[expect(clippy::print_stderr, reason = "the one place")]
fn say(text: &str) {
    eprintln!("{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = Log::of("c1\nx");
        log.open(&HostPath::new(&path)).unwrap();
        log.error(&crate::error::failure(&crate::finding::catalog::CONFIG, "a", "b"));
        log.note("c\nd");
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().map(|line| line.split_once("]: ").unwrap().1).collect();
        assert_eq!(lines, ["error: c1\\nx: a (ONH-005)", "error: c1\\nx: hint: b", "note: c1\\nx: c\\nd"]);
    }

    #[test]
    fn not_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("target", dir.path().join("log")).unwrap();
        assert!(Log::of("c").open(&HostPath::new(dir.path().join("log"))).is_err());
        assert!(!dir.path().join("target").try_exists().unwrap());
    }
}
