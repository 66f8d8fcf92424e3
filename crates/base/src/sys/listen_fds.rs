//! The descriptors that the service manager passes to a service: its sockets, and what an earlier process has stored (`sd_listen_fds(3)`).
#![allow(
    unsafe_code,
    reason = "only the environment states that the process owns these numbers"
)]

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Takes the descriptors that were passed to this process, with their names; later calls return none. Programs that this process starts
/// do not inherit them.
///
/// A process calls this before it opens files.
#[must_use]
pub fn take() -> Vec<(String, OwnedFd)> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    // Variables that are invalid are not those of a service manager.
    let Ok(passed) = sd_notify::listen_fds_with_names() else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for (fd, name) in passed {
        // SAFETY: LISTEN_PID is this process, so these numbers were open when the program started, and belong to nothing in it.
        // This function returns each of them once.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        found.push((name, fd));
    }
    found
}
