//! Answers of syscall(2), for the system calls that no crate has a function for.

use std::io;

use nix::libc::c_long;
use rustix::io::Errno;

/// Returns the answer of a call of syscall(2) that has just been made, or the errno if the answer is -1.
pub(super) fn of(answer: c_long) -> rustix::io::Result<c_long> {
    if answer == -1 {
        // last_os_error() always has a number, so this never returns EIO for another error.
        return Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok(answer)
}
