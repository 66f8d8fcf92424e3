//! The line for a person who waits for NVML.

use std::io::IsTerminal;
use std::time::Duration;

use base::sys::stdio;
use nvidia_host::inventory::notice;

/// Has this process print a line if NVML takes long, unless stderr is not a terminal: logs and scripts need no sign of life.
pub(super) fn print_wait_notice() {
    if rustix::stdio::stderr().is_terminal() {
        notice::set(print);
    }
}

/// Prints the line. A terminal that is stopped must not extend the wait.
fn print(limit: Duration) {
    stdio::offer_stderr(&notice::line(limit));
}
