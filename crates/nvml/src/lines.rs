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
    /// The lines that are written together with the next one
    held: Vec<u8>,
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
            held: Vec::new(),
            is_closed: false,
        })
    }

    /// Writes a line. An error means that nothing reads the lines any more.
    pub(crate) fn write(&mut self, line: &impl Serialize) {
        self.hold(line);
        self.flush();
    }

    /// Adds a line to those that [`Self::flush`] writes at once, because each write wakes the reader.
    pub(crate) fn hold(&mut self, line: &impl Serialize) {
        serde_json::to_writer(&mut self.held, line).ok();
        self.held.push(b'\n');
    }

    /// Writes the lines that are held.
    pub(crate) fn flush(&mut self) {
        if !self.held.is_empty() {
            self.is_closed |= self.out.write_all(&self.held).is_err();
            self.held.clear();
        }
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
