//! The descriptors that the service manager passes to a service: its sockets, and what an earlier process has stored (`sd_listen_fds(3)`).
#![allow(
    unsafe_code,
    reason = "only the environment states that the process owns these numbers"
)]

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The number of the first descriptor (`SD_LISTEN_FDS_START`).
const FIRST: RawFd = 3;
/// More than a service of ours can have. The variable may have any value.
const MOST: usize = 64;

/// What the service manager states in the environment: `LISTEN_PID`, `LISTEN_FDS` and `LISTEN_FDNAMES`.
#[derive(Clone, Debug, Default)]
pub struct ListenVariables {
    /// The process that has the descriptors
    pub pid: String,
    /// Their number
    pub fds: String,
    /// Their names, separated by colons
    pub names: String,
}

/// Takes the descriptors that were passed to this process, with their names; later calls return none. Programs that this process starts
/// do not inherit them.
///
/// A process calls this before it opens files.
#[must_use]
pub fn take(variables: &ListenVariables) -> Vec<(String, OwnedFd)> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let count = passed(&variables.pid, &variables.fds, std::process::id());
    let mut names = variables.names.split(':');
    let mut found = Vec::new();
    for fd in (FIRST..).take(count) {
        // SAFETY: LISTEN_PID is this process, so these numbers were open when the program started, and belong to nothing in it.
        // This function returns each of them once.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let name = names.next().unwrap_or_default().to_owned();
        if rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).is_ok() {
            found.push((name, fd));
        }
    }
    found
}

/// Returns how many descriptors these values of the variables give to a process.
fn passed(listen_pid: &str, listen_fds: &str, pid: u32) -> usize {
    if listen_pid.parse() != Ok(pid) {
        return 0;
    }
    let count = listen_fds.parse().unwrap_or(0);
    if count > MOST { 0 } else { count }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_that_is_named_has_descriptors() {
        assert_eq!(passed("7", "2", 7), 2);
        for (listen_pid, listen_fds) in [
            ("8", "2"),
            ("", "2"),
            ("7", ""),
            ("7", "-1"),
            ("7", "two"),
            ("7", "65"),
            ("7", "99999999999999999999"),
        ] {
            assert_eq!(passed(listen_pid, listen_fds, 7), 0, "{listen_fds:?}");
        }
    }
}
