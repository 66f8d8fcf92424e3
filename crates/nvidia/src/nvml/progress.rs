//! The call of NVML that the monitor makes now, for its supervisor.
//!
//! It is in memory that both have, and not in a line: each line wakes the supervisor, which needs to know the call only if the monitor hangs
//! or crashes in it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use serde::{Deserialize, Serialize};

use super::message::NvmlCall;

/// The size of the memory in bytes. A call has about 150.
const SIZE: usize = 4096;

/// The monitor can neither shrink nor enlarge the memory.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A call, and when it began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The time of CLOCK_MONOTONIC in milliseconds
    pub since_ms: u64,
    /// The call
    pub call: NvmlCall,
}

/// The memory of a monitor.
#[derive(Debug)]
pub struct Progress(File);

impl Progress {
    /// Creates the memory.
    ///
    /// # Errors
    /// If the kernel has no memory for it.
    pub fn new() -> io::Result<Self> {
        let memory = memfd_create("progress", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&memory, SIZE as u64)?;
        fcntl_add_seals(&memory, SEALS)?;
        Ok(Self(File::from(memory)))
    }

    /// Takes a descriptor that a parent has passed. Returns `None` if it is something else: a log, for example, would be overwritten.
    #[must_use]
    pub fn of_parent(descriptor: OwnedFd) -> Option<Self> {
        let seals = fcntl_get_seals(&descriptor).ok()?;
        seals.contains(SEALS).then(|| Self(File::from(descriptor)))
    }

    /// Returns a descriptor for the monitor.
    ///
    /// # Errors
    /// If this process has too many.
    pub fn for_monitor(&self) -> io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }

    /// Stores a call that begins now.
    pub fn store(&self, call: NvmlCall) {
        let step = Step {
            since_ms: u64::try_from(now().as_millis()).unwrap_or(u64::MAX),
            call,
        };
        let mut text = serde_json::to_vec(&step).unwrap_or_default();
        text.push(b'\n');
        // The supervisor then blames another call than the one that hangs.
        rustix::io::pwrite(&self.0, &text, 0).ok();
    }

    /// Returns the last call that was stored.
    #[must_use]
    pub fn last(&self) -> Option<Step> {
        let mut text = [0; SIZE];
        let length = rustix::io::pread(&self.0, &mut text, 0).ok()?;
        let mut lines = text.get(..length)?.split(|byte| *byte == b'\n');
        base::json::from_bytes(lines.next()?).ok()
    }
}

impl Step {
    /// Returns how long the call has lasted.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        now().saturating_sub(Duration::from_millis(self.since_ms))
    }
}

/// The time of a clock that all processes share.
fn now() -> Duration {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC);
    time.map(Duration::from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_call_replaces_a_longer_one() {
        let supervisor = Progress::new().unwrap();
        assert_eq!(supervisor.last(), None);
        let monitor = Progress::of_parent(supervisor.for_monitor().unwrap()).unwrap();
        let long = NvmlCall {
            index: Some(7),
            gpu: Some("GPU-51eed007-0007-4007-8000-0000fa4e0007".to_owned()),
            wait_ms: 5000,
        };
        for call in [long, NvmlCall::default()] {
            monitor.store(call.clone());
            let step = supervisor.last().unwrap();
            assert_eq!(step.call, call);
            assert!(step.elapsed() < Duration::from_secs(60), "{step:?}");
        }
        assert!(rustix::io::pwrite(&monitor.0, b"more", SIZE as u64).is_err());
    }

    #[test]
    fn another_file_is_not_written() {
        let file = tempfile::tempfile().unwrap();
        assert!(Progress::of_parent(file.into()).is_none());
    }
}
