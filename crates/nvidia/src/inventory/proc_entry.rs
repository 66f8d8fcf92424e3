//! Identifies entries of procfs, to detect that one was removed and created again.

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::Stat;
use serde::{Deserialize, Serialize};

/// The identity of a directory in procfs.
///
/// procfs gives an inode its times when it is first looked up, and drops it with the entry (`proc_misc_d_revalidate`), so an entry that was
/// removed and created again has another time. The number of the inode alone does not identify the entry, because procfs gives out the
/// lowest free number. After the kernel has dropped its caches, the time of the same entry is another one too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct ProcEntry {
    /// The device of the mount of procfs
    pub device: u64,
    /// The number of the inode
    pub inode: u64,
    /// The time of its last change, in seconds since 1970
    pub changed: i64,
    /// The nanoseconds of that time
    pub nanoseconds: u64,
}

impl ProcEntry {
    /// Returns the identity of the directory with this state.
    #[must_use]
    pub const fn new(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            changed: stat.st_ctime,
            nanoseconds: stat.st_ctime_nsec,
        }
    }

    /// Whether a later entry can be distinguished from this one, at this time in seconds since 1970. The clock of file systems is coarse:
    /// two entries that are created within a tick can have the same time and number.
    #[must_use]
    pub const fn is_settled(&self, now: i64) -> bool {
        self.changed.saturating_add(2) <= now
    }
}

/// Returns the time in seconds since 1970; 0 if the clock is earlier.
pub(crate) fn seconds_since_1970() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs().try_into().unwrap_or_default())
}
