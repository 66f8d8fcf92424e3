//! Receives signals at a place in the program that waits for them, instead of in a handler.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The signals that ask this process to stop, and those of its children. Programs that this process starts do not inherit that they are
/// blocked (std resets the mask).
#[derive(Debug)]
pub struct Signals {
    file: SignalFd,
}

/// A signal, or a group of signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// SIGTERM or SIGINT
    Stop,
    /// SIGCHLD: at least one child has ended or stopped.
    Child,
}

impl Signals {
    /// Blocks the signals, so that they wait for [`Self::next`]. The process must have one thread.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn block() -> io::Result<Self> {
        let mut set = SigSet::empty();
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD] {
            set.add(signal);
        }
        set.thread_block()?;
        let file = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Self { file })
    }

    /// Waits for a signal until `end`.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn next(&mut self, end: Instant) -> io::Result<Option<Received>> {
        loop {
            if let Some(info) = self.file.read_signal()? {
                let child = Signal::SIGCHLD as u32;
                return Ok(Some(match info.ssi_signo {
                    signal if signal == child => Received::Child,
                    _ => Received::Stop,
                }));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Ok(None);
            }
            let timeout = Timespec::try_from(left).ok();
            let mut polled = [PollFd::from_borrowed_fd(self.file.as_fd(), PollFlags::IN)];
            match poll(&mut polled, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
