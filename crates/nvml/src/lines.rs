//! The lines of the answer.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::fs::{CWD, Mode, OFlags};
use serde::Serialize;

/// The standard output.
#[derive(Debug)]
pub(crate) struct Lines {
    out: File,
    is_closed: bool,
}

impl Lines {
    /// Takes the standard output, and replaces it and the standard error with /dev/null: NVML and the libraries that it loads may print.
    pub(crate) fn take_stdout() -> Result<Self> {
        let out = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)
            .context("cannot duplicate stdout")?;
        let null: OwnedFd = rustix::fs::openat(
            CWD,
            c"/dev/null",
            OFlags::RDWR | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(&null)?;
        Ok(Self {
            out: File::from(out),
            is_closed: false,
        })
    }

    /// Writes a line. An error means that nothing reads the lines any more.
    pub(crate) fn write(&mut self, line: &impl Serialize) {
        let mut bytes = serde_json::to_vec(line).unwrap_or_default();
        bytes.push(b'\n');
        self.is_closed |= self.out.write_all(&bytes).is_err();
    }

    /// Whether nothing reads the lines.
    pub(crate) const fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// The pipe to the process that asks.
    pub(crate) const fn pipe(&self) -> &File {
        &self.out
    }
}
