//! The identity of a file: whether a path still leads to the same file in the same state, which is decided without reading the file.

use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{Stat, Statx, StatxFlags};
use serde::{Deserialize, Serialize};

/// How long ago the last change of a file must be, so that the next one gives it another identity. The clock of file systems stands still
/// for up to a hundredth of a second before Linux 6.13, so two changes in quick succession can leave the same time.
pub(crate) const SETTLED: Duration = Duration::from_secs(1);

/// A file, in whatever state. A file system gives the number of a removed file to a new one, and after an unmount, another file system can
/// get the number of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inode {
    /// The device of the file system
    pub device: u64,
    /// The number in the file system
    pub number: u64,
}

/// A time of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileTime {
    /// Seconds since 1970
    pub seconds: i64,
    /// The nanoseconds after these seconds
    pub nanoseconds: u32,
}

/// A file in one state. It differs from the identity of another file, and from the identity of the same file after its content, the names
/// in the directory, or its owner and permissions have changed.
///
/// Programs can set the time of the last modification, but not the time of the last change (inode(7)). Images of file systems are an
/// exception: the program that makes an image writes all numbers and times. So a file of one image can have the identity of a file of
/// another image that is mounted in its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(from = "Numbers", into = "Numbers")]
pub struct FileId {
    /// The file
    pub inode: Inode,
    /// Its size in bytes
    pub size: u64,
    /// The last modification of its content
    pub modified: FileTime,
    /// The last change of its content, its names, its owner or its permissions
    pub changed: FileTime,
}

/// The form in files: device, inode number, size, and both times in seconds and nanoseconds.
type Numbers = (u64, u64, u64, i64, u32, i64, u32);

impl FileTime {
    fn new(seconds: i64, nanoseconds: impl TryInto<u32>) -> Self {
        Self {
            seconds,
            // The kernel reports less than 10^9.
            nanoseconds: nanoseconds.try_into().unwrap_or_default(),
        }
    }

    /// Returns the time that has passed since 1970; `None` for an earlier time.
    #[must_use]
    pub fn since_1970(self) -> Option<Duration> {
        let seconds = u64::try_from(self.seconds).ok()?;
        Some(Duration::new(seconds, self.nanoseconds))
    }
}

impl FileId {
    /// What statx(2) must be asked for.
    pub const ASKED: StatxFlags = StatxFlags::INO
        .union(StatxFlags::SIZE)
        .union(StatxFlags::MTIME)
        .union(StatxFlags::CTIME);

    /// Identifies the file at this path, after all links.
    ///
    /// # Errors
    /// If it is missing or cannot be examined.
    pub fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&rustix::fs::stat(path)?))
    }

    /// Whether each change after `now` gives the file another identity: its last change was more than a second before it.
    #[must_use]
    pub fn is_settled(&self, now: SystemTime) -> bool {
        let (Some(changed), Some(settled)) = (self.changed.since_1970(), now.checked_sub(SETTLED))
        else {
            return false;
        };
        let changed = UNIX_EPOCH.checked_add(changed);
        changed.is_some_and(|changed| changed < settled)
    }
}

impl From<&Stat> for Inode {
    fn from(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            number: stat.st_ino,
        }
    }
}

impl From<&Metadata> for Inode {
    fn from(stat: &Metadata) -> Self {
        Self {
            device: stat.dev(),
            number: stat.ino(),
        }
    }
}

impl From<&Stat> for FileId {
    fn from(stat: &Stat) -> Self {
        Self {
            inode: Inode::from(stat),
            size: u64::try_from(stat.st_size).unwrap_or_default(),
            modified: FileTime::new(stat.st_mtime, stat.st_mtime_nsec),
            changed: FileTime::new(stat.st_ctime, stat.st_ctime_nsec),
        }
    }
}

impl From<&Metadata> for FileId {
    fn from(stat: &Metadata) -> Self {
        Self {
            inode: Inode::from(stat),
            size: stat.size(),
            modified: FileTime::new(stat.mtime(), stat.mtime_nsec()),
            changed: FileTime::new(stat.ctime(), stat.ctime_nsec()),
        }
    }
}

/// The answer must have been asked for [`FileId::ASKED`].
impl From<&Statx> for FileId {
    fn from(stat: &Statx) -> Self {
        Self {
            inode: Inode {
                device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
                number: stat.stx_ino,
            },
            size: stat.stx_size,
            modified: FileTime::new(stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            changed: FileTime::new(stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
        }
    }
}

impl From<FileId> for Numbers {
    fn from(id: FileId) -> Self {
        let FileId {
            inode,
            size,
            modified,
            changed,
        } = id;
        (
            inode.device,
            inode.number,
            size,
            modified.seconds,
            modified.nanoseconds,
            changed.seconds,
            changed.nanoseconds,
        )
    }
}

impl From<Numbers> for FileId {
    fn from(numbers: Numbers) -> Self {
        let (device, number, size, modified, modified_ns, changed, changed_ns) = numbers;
        Self {
            inode: Inode { device, number },
            size,
            modified: FileTime::new(modified, modified_ns),
            changed: FileTime::new(changed, changed_ns),
        }
    }
}

/// A text to be compared: other identities have other texts.
impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            inode: Inode { device, number },
            size,
            modified,
            changed,
        } = self;
        write!(f, "{device} {number} {size} {modified} {changed}")
    }
}

impl fmt::Display for FileTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            seconds,
            nanoseconds,
        } = self;
        write!(f, "{seconds}.{nanoseconds}")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fs::{AtFlags, CWD};

    use super::*;

    /// Longer than the clock of file systems stands still.
    fn tick() {
        std::thread::sleep(Duration::from_millis(20));
    }

    #[test]
    fn each_change_makes_another_identity() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("file"), dir.path().join("other"));
        fs::write(&path, "a").unwrap();
        let old = fs::metadata(&path).unwrap().modified().unwrap();
        let mut seen = vec![FileId::at(&path).unwrap()];
        let mut next = |what: &str, change: &dyn Fn()| {
            tick();
            change();
            let id = FileId::at(&path).unwrap();
            assert_eq!(id, FileId::at(&path).unwrap(), "nothing has changed");
            assert!(!seen.contains(&id), "{what}: {id:?}");
            seen.push(id);
        };
        next("content", &|| fs::write(&path, "b").unwrap());
        next("size", &|| fs::write(&path, "bb").unwrap());
        next("a time that a program sets", &|| {
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.set_modified(old).unwrap();
        });
        next("permissions", &|| {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        });
        next("another file", &|| {
            fs::write(&other, "bb").unwrap();
            fs::rename(&other, &path).unwrap();
        });
        fs::remove_file(&path).unwrap();
        assert!(FileId::at(&path).is_err());
    }

    #[test]
    fn all_calls_identify_a_file_alike() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&path, "abc").unwrap();
        symlink("file", &link).unwrap();
        let id = FileId::at(&link).unwrap();
        assert_eq!((id.size, id.modified), (3, id.changed));
        let stat = rustix::fs::statx(CWD, &path, AtFlags::empty(), FileId::ASKED).unwrap();
        assert_eq!(FileId::from(&stat), id);
        assert_eq!(FileId::from(&fs::metadata(&path).unwrap()), id);
        assert_eq!(FileId::from(&rustix::fs::stat(&path).unwrap()), id);
        assert_eq!(Inode::from(&fs::metadata(&path).unwrap()), id.inode);
        assert_ne!(FileId::from(&rustix::fs::lstat(&link).unwrap()), id);
    }

    #[test]
    fn a_stored_identity_is_the_same() {
        let id = FileId {
            inode: Inode {
                device: u64::MAX,
                number: 2,
            },
            size: 3,
            modified: FileTime::new(-4, 5),
            changed: FileTime::new(6, 7),
        };
        let text = serde_json::to_string(&id).unwrap();
        assert_eq!(text, "[18446744073709551615,2,3,-4,5,6,7]");
        assert_eq!(serde_json::from_str::<FileId>(&text).unwrap(), id);
        assert_eq!(id.to_string(), "18446744073709551615 2 3 -4.5 6.7");
    }

    #[test]
    fn an_identity_is_settled_after_a_second() {
        let at = |seconds, nanoseconds| FileId {
            changed: FileTime::new(seconds, nanoseconds),
            ..FileId::default()
        };
        let time = |milliseconds| UNIX_EPOCH + Duration::from_millis(milliseconds);
        let id = at(100, 500_000_000);
        assert!(id.is_settled(time(101_501)));
        assert!(!id.is_settled(time(101_500)));
        assert!(!id.is_settled(time(50_000)), "the clock was set");
        assert!(!id.is_settled(UNIX_EPOCH));
        assert!(!at(-1, 0).is_settled(time(101_501)), "before 1970");
        assert!(!at(i64::MAX, 0).is_settled(time(101_501)));
    }
}
