//! The log file that `debug` in config.toml names.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

use base::paths::HostPath;
use base::report::Finding;
use base::sys::in_root::Root;
use base::sys::{log_file, stdio};
use base::tree::Tree;
use findings::catalog;

use super::stderr;

/// This path means the stderr of the hook. It leads to a file that may not be openable again, such as a socket.
const STDERR: &str = "/dev/stderr";

/// An open log.
#[derive(Debug)]
pub(super) enum LogFile {
    Stderr,
    File(File),
}

impl LogFile {
    pub(super) fn open(path: &HostPath) -> Result<Self> {
        if path.as_path() == Path::new(STDERR) {
            return Ok(Self::Stderr);
        }
        let file = if path.as_path() == Path::new(log_file::TERMINAL) {
            log_file::open_terminal()
        } else {
            open_below_root(path)
        };
        Ok(Self::File(file.with_context(|| {
            format!("cannot open the log file {path}")
        })?))
    }

    /// Writes a line in one write(2), so that lines of concurrent hooks do not mix. Errors are ignored: a full disk must not stop a
    /// container.
    pub(super) fn write(&mut self, line: &str) {
        match self {
            Self::Stderr => stdio::offer_stderr(&stderr::reworded(line)),
            Self::File(file) => drop(file.write_all(line.as_bytes())),
        }
    }
}

fn open_below_root(path: &HostPath) -> Result<File> {
    log_file::open(&Root::open(Path::new("/"))?, path.as_path())
}

/// Checks whether the hook would open this log on a host, without creating the file.
///
/// # Errors
/// Why it would not.
pub(crate) fn check(host: &Tree, path: &Path) -> Result<()> {
    if path == Path::new(STDERR) {
        Ok(())
    } else {
        log_file::check(host.as_root(), path)
    }
}

/// Returns the finding about a log that cannot be opened.
pub(crate) fn finding(what: String) -> Finding {
    let fix = "set debug in config.toml to a file in an existing directory that only root can write to; \
               check each directory with \"namei -l FILE\"";
    Finding::new(&catalog::NO_LOG, what, fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stderr_is_a_log() {
        assert!(matches!(
            LogFile::open(&HostPath::new(STDERR)),
            Ok(LogFile::Stderr)
        ));
        let host = tempfile::tempdir().unwrap();
        let host = Tree::open(&HostPath::new(host.path())).unwrap();
        assert!(
            check(&host, Path::new(STDERR)).is_ok()
                && check(&host, Path::new("/dev/stdout")).is_err()
        );
    }

    #[test]
    fn not_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("target", dir.path().join("log")).unwrap();
        let error = LogFile::open(&HostPath::new(dir.path().join("log"))).unwrap_err();
        assert!(
            base::report::line(&error).ends_with("/log\": it is a symbolic link"),
            "{error:?}"
        );
        assert!(!dir.path().join("target").try_exists().unwrap());
    }
}
