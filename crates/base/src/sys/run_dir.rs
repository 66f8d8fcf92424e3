//! The run-time directory, whose files stay until the next boot: `/run/oci-nvidia-hook` for root, and
//! `/run/user/UID/oci-nvidia-hook` for a user with rootless containers.
//!
//! The directory has mode 0700 and its files have mode 0600: records contain the names and requests of all users' containers.
//! Symbolic links, fifos, and files or directories that another user owns or can write are neither read nor written (CWE-377,
//! CWE-59). A directory that others can only read, because an administrator or an archive created it, gets mode 0700.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, RawDir, Stat, flock};
use rustix::io::Errno;

use super::file_id::FileId;
use super::in_root::or_missing;
use super::ns;
use super::proc_file::{Length, read_whole};

const NAME: &str = "oci-nvidia-hook";
/// The time between two attempts to take a lock.
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// An open directory. Its files stay accessible after the hook has entered the mount namespace of a container.
#[derive(Clone, Debug)]
pub struct RunDir {
    fd: Arc<OwnedFd>,
    /// The user of this process
    us: u32,
    /// The size in bytes when it was opened
    size: i64,
}

/// A lock that is held until the value is dropped or the process ends.
#[derive(Debug)]
pub struct Lock {
    file: OwnedFd,
}

impl Drop for Lock {
    /// Unlocks the file, which closing it does only if no other process has a copy of the descriptor (flock(2)). KERNEL(5.9): before, a
    /// child that NVML blocks in the kernel keeps one.
    fn drop(&mut self) {
        flock(&self.file, FlockOperation::Unlock).ok();
    }
}

/// The directory that [`RunDir::open_and_keep`] opened.
static KEPT: OnceLock<RunDir> = OnceLock::new();

impl RunDir {
    /// Opens the run-time directory, and creates it if it is missing.
    ///
    /// # Errors
    /// If there is no parent directory for this user, the directory cannot be created, or it is not only this user's.
    pub fn open() -> io::Result<Self> {
        if let Some(kept) = KEPT.get() {
            return Ok(kept.clone());
        }
        let (base, us) = base()?;
        match open_dir(CWD, &base.join(NAME), us) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::made_in(&base, us),
            opened => close_to_others(opened?),
        }
    }

    /// Like [`Self::open`]. All later calls in this process return the same open directory, so only for a program that ends soon.
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn open_and_keep() -> io::Result<Self> {
        let opened = Self::open()?;
        Ok(KEPT.get_or_init(|| opened).clone())
    }

    /// Opens the run-time directory if it exists.
    ///
    /// # Errors
    /// If the directory exists, but cannot be opened or is not only this user's.
    pub fn existing() -> io::Result<Option<Self>> {
        if let Some(kept) = KEPT.get() {
            return Ok(Some(kept.clone()));
        }
        let (base, us) = base()?;
        or_missing(open_dir(CWD, &base.join(NAME), us)).map(|found| found.map(|(dir, _)| dir))
    }

    /// Opens or creates the run-time directory in `base`, which must exist.
    ///
    /// # Errors
    /// If `base` does not exist, the directory cannot be created, or it is not only this user's.
    pub fn open_in(base: &Path) -> io::Result<Self> {
        Self::made_in(base, rustix::process::geteuid().as_raw())
    }

    fn made_in(base: &Path, us: u32) -> io::Result<Self> {
        let base = rustix::fs::openat(
            CWD,
            base,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        make_dir(base.as_fd(), Path::new(NAME), us)
    }

    /// Opens a directory below this one, and creates it if it is missing.
    ///
    /// # Errors
    /// If the directory cannot be created, or is not only this user's.
    pub fn below(&self, name: &str) -> io::Result<Self> {
        make_dir(self.fd.as_fd(), Path::new(name), self.us)
    }

    /// Opens a directory below this one if it exists.
    ///
    /// # Errors
    /// If the directory exists, but cannot be opened or is not only this user's.
    pub fn existing_below(&self, name: &str) -> io::Result<Option<Self>> {
        or_missing(open_dir(self.fd.as_fd(), Path::new(name), self.us))
            .map(|found| found.map(|(dir, _)| dir))
    }

    /// Reads a file of at most `limit` bytes. Returns `None` if it does not exist.
    ///
    /// # Errors
    /// If the file cannot be read, is longer than `limit` (`FileTooLarge`), or is not a regular file that only this user can write.
    pub fn read(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Some(fd) = or_missing(
            rustix::fs::openat(&self.fd, name, flags, Mode::empty()).map_err(Into::into),
        )?
        else {
            return Ok(None);
        };
        let size = check_ours(fd.as_fd(), FileType::RegularFile, self.us)?.st_size;
        let most = limit.saturating_add(1);
        let size =
            usize::try_from(size.min(i64::try_from(most).unwrap_or(i64::MAX))).unwrap_or_default();
        let length = if size > 0 {
            Length::Known(size)
        } else {
            Length::Unknown
        };
        let bytes = read_whole(File::from(fd).take(most), length)?;
        if u64::try_from(bytes.len()).is_ok_and(|read| read > limit) {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        Ok(Some(bytes))
    }

    /// Replaces a file atomically: a process that reads it at the same time gets the old content.
    ///
    /// # Errors
    /// If the file cannot be written or renamed. The old content then remains.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        Replacement::new(self.fd.as_fd(), name)?.write(bytes)
    }

    /// Prepares a [`Replacement`] of a file.
    ///
    /// # Errors
    /// If the name contains NUL.
    pub fn replacement(&self, name: &str) -> io::Result<Replacement<Arc<OwnedFd>>> {
        Replacement::new(Arc::clone(&self.fd), name)
    }

    /// Removes a file. A missing file is not an error.
    ///
    /// # Errors
    /// If the file exists and cannot be removed.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the directory may have had this many names when it was opened. On tmpfs, each name adds 20 bytes to its size (`BOGO_DIRENT_SIZE` in
    /// mm/shmem.c), and on other file systems at least 12. A size of 0 means that the file system does not show it.
    #[must_use]
    pub fn may_have(&self, names: usize) -> bool {
        const LEAST: i64 = 12;
        let most = i64::try_from(names).unwrap_or(i64::MAX);
        self.size <= 0 || self.size >= most.saturating_mul(LEAST)
    }

    /// Returns the names that are UTF-8 and do not begin with a dot, unsorted.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = self.all_names()?;
        names.retain(|name| !name.starts_with('.'));
        Ok(names)
    }

    /// Like [`Self::names`], with the names of temporary files.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn all_names(&self) -> io::Result<Vec<String>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(&self.fd, ".", flags, Mode::empty())?;
        let mut buffer = Vec::with_capacity(8192);
        let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
        let mut names = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry?;
            names.extend(
                entry
                    .file_name()
                    .to_str()
                    .ok()
                    .filter(|name| !matches!(*name, "." | ".."))
                    .map(str::to_owned),
            );
        }
        Ok(names)
    }

    /// Returns when a file was written, in time since 1970, or `None` if that is unknown.
    #[must_use]
    pub fn written(&self, name: &str) -> Option<Duration> {
        let stat = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        FileId::from(&stat).modified.since_1970()
    }

    /// Returns how long ago a file was written, or `None` if that is unknown.
    #[must_use]
    pub fn age(&self, name: &str) -> Option<Duration> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        now.ok()?.checked_sub(self.written(name)?)
    }

    /// Takes the lock with this name. Returns `None` if other processes hold it for the whole of `patience`.
    ///
    /// # Errors
    /// If the file cannot be opened or locked, or is not a regular file that only this user can write.
    pub fn lock(&self, name: &str, patience: Duration) -> io::Result<Option<Lock>> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)?;
        check_ours(fd.as_fd(), FileType::RegularFile, self.us)?;
        let until = Instant::now() + patience;
        // flock(2) has no time limit, so the lock is tried until the patience is over.
        loop {
            match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Lock { file: fd })),
                Err(Errno::WOULDBLOCK) if Instant::now() >= until => return Ok(None),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            std::thread::sleep(LOCK_PAUSE);
        }
    }
}

/// A file that is to be replaced atomically.
#[derive(Debug)]
pub struct Replacement<Fd> {
    dir: Fd,
    temporary: CString,
    name: CString,
}

impl<Fd: AsFd> Replacement<Fd> {
    fn new(dir: Fd, name: &str) -> io::Result<Self> {
        let temporary = CString::new(format!(".{name}.{}", std::process::id()))?;
        Ok(Self {
            dir,
            temporary,
            name: CString::new(name)?,
        })
    }

    /// Writes the new content. It only makes system calls, so that a signal handler can call it: see signal-safety(7).
    ///
    /// # Errors
    /// If the file cannot be written or renamed. The old content then remains.
    pub fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let create =
            || rustix::fs::openat(&self.dir, &*self.temporary, flags, Mode::RUSR | Mode::WUSR);
        let fd = match create() {
            Err(Errno::EXIST) => {
                // A process with the same PID left the file when it was killed.
                rustix::fs::unlinkat(&self.dir, &*self.temporary, AtFlags::empty())?;
                create()?
            }
            created => created?,
        };
        let written = File::from(fd).write_all(bytes);
        let done = written.and_then(|()| {
            Ok(rustix::fs::renameat(
                &self.dir,
                &*self.temporary,
                &self.dir,
                &*self.name,
            )?)
        });
        if done.is_err() {
            rustix::fs::unlinkat(&self.dir, &*self.temporary, AtFlags::empty()).ok();
        }
        done
    }
}

/// Returns the path of the run-time directory, for messages.
///
/// # Errors
/// The errors of [`ns::in_user_namespace`], and NotFound if the user has no id outside of the namespace.
pub fn path() -> io::Result<PathBuf> {
    Ok(base()?.0.join(NAME))
}

/// Returns the path of root's run-time directory, which only root can read.
#[must_use]
pub fn path_of_root() -> PathBuf {
    Path::new("/run").join(NAME)
}

/// Returns the parent of the run-time directory, and the user of this process. Root in a user namespace is the user who created it, and
/// cannot write to `/run`.
fn base() -> io::Result<(PathBuf, u32)> {
    let us = rustix::process::geteuid().as_raw();
    if us == 0 && !ns::in_user_namespace()? {
        return Ok((PathBuf::from("/run"), us));
    }
    let outside = ns::uid_outside(us)?.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    Ok((PathBuf::from(format!("/run/user/{outside}")), us))
}

fn make_dir(parent: impl AsFd, name: &Path, us: u32) -> io::Result<RunDir> {
    match open_dir(parent.as_fd(), name, us) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => return close_to_others(other?),
    }
    match rustix::fs::mkdirat(&parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => close_to_others(open_dir(parent, name, us)?),
        Err(error) => Err(error.into()),
    }
}

/// Removes the access of other users to a directory that they can read. The bits of the group are also the mask of an ACL (acl(5)).
fn close_to_others((dir, stat): (RunDir, Stat)) -> io::Result<RunDir> {
    if stat.st_mode & 0o077 != 0 {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::fchmod(
            rustix::fs::openat(&dir.fd, ".", flags, Mode::empty())?,
            Mode::RWXU,
        )?;
    }
    Ok(dir)
}

fn open_dir(parent: impl AsFd, name: &Path, us: u32) -> io::Result<(RunDir, Stat)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    let stat =
        check_ours(fd.as_fd(), FileType::Directory, us).map_err(|error| named(name, &error))?;
    Ok((
        RunDir {
            fd: Arc::new(fd),
            us,
            size: stat.st_size,
        },
        stat,
    ))
}

/// Returns the error with the name of the directory, because it ends commands such as `why`.
fn named(dir: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("the directory {dir:?}: {error}"))
}

/// Checks that no user other than `us` can have written a file, and returns its state. A file with several hard links is rejected,
/// because it is also in another directory.
fn check_ours(fd: impl AsFd, kind: FileType, us: u32) -> io::Result<Stat> {
    let stat = rustix::fs::fstat(fd)?;
    let is_ours = stat.st_uid == us && stat.st_mode & 0o022 == 0;
    let has_one_name = kind == FileType::Directory || stat.st_nlink == 1;
    if FileType::from_raw_mode(stat.st_mode) == kind && is_ours && has_one_name {
        return Ok(stat);
    }
    let (uid, mode) = (stat.st_uid, stat.st_mode & 0o7777);
    Err(io::Error::other(format!(
        "another user may have written it (owner {uid}, mode {mode:04o})"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn run_dir() -> (tempfile::TempDir, RunDir) {
        let base = tempfile::tempdir().unwrap();
        let dir = RunDir::open_in(base.path()).unwrap();
        (base, dir)
    }

    #[test]
    fn files_are_written_and_read() {
        let (base, dir) = run_dir();
        assert_eq!(dir.read("a", 10).unwrap(), None);
        dir.replace("a", b"old").unwrap();
        dir.replace("a", b"new").unwrap();
        assert_eq!(dir.read("a", 3).unwrap().unwrap(), b"new");
        assert!(dir.read("a", 2).is_err(), "too large");
        let below = dir.below("b").unwrap();
        below.replace("c", b"").unwrap();
        let mut names = dir.names().unwrap();
        names.sort();
        assert_eq!(names, ["a", "b"]);
        dir.remove("a").unwrap();
        dir.remove("a").unwrap();
        assert_eq!(dir.names().unwrap(), ["b"]);
        let mode = |path: &str| {
            base.path()
                .join(path)
                .metadata()
                .unwrap()
                .permissions()
                .mode()
                & 0o7777
        };
        assert_eq!(
            (
                mode(NAME),
                mode("oci-nvidia-hook/b"),
                mode("oci-nvidia-hook/b/c")
            ),
            (0o700, 0o700, 0o600)
        );
    }

    #[test]
    fn files_of_others_are_neither_read_nor_written() {
        let (base, dir) = run_dir();
        let path = |name: &str| base.path().join(NAME).join(name);
        std::fs::write(base.path().join("secret"), "secret").unwrap();
        symlink("../secret", path("link")).unwrap();
        std::fs::hard_link(base.path().join("secret"), path("hard")).unwrap();
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        std::fs::write(path("open"), "x").unwrap();
        std::fs::set_permissions(path("open"), PermissionsExt::from_mode(0o622)).unwrap();
        std::fs::create_dir(path("dir")).unwrap();
        for name in ["link", "hard", "fifo", "open", "dir"] {
            assert!(dir.read(name, 100).is_err(), "{name}");
        }
        for name in ["link", "hard", "fifo", "open"] {
            dir.replace(name, b"ours").unwrap();
            assert_eq!(dir.read(name, 100).unwrap().unwrap(), b"ours", "{name}");
        }
        assert_eq!(
            std::fs::read_to_string(base.path().join("secret")).unwrap(),
            "secret"
        );
        symlink("../secret", path("lock")).unwrap();
        assert!(dir.lock("lock", Duration::ZERO).is_err());
        std::fs::set_permissions(path("dir"), PermissionsExt::from_mode(0o777)).unwrap();
        assert!(dir.below("dir").is_err() && dir.existing_below("dir").is_err());
        symlink("dir", path("dirlink")).unwrap();
        assert!(dir.below("dirlink").is_err());
    }

    #[test]
    fn a_directory_of_others_is_rejected() {
        let base = tempfile::tempdir().unwrap();
        symlink("/tmp", base.path().join(NAME)).unwrap();
        assert!(RunDir::open_in(base.path()).is_err());
        std::fs::remove_file(base.path().join(NAME)).unwrap();
        std::fs::create_dir(base.path().join(NAME)).unwrap();
        std::fs::set_permissions(base.path().join(NAME), PermissionsExt::from_mode(0o777)).unwrap();
        assert!(RunDir::open_in(base.path()).is_err());
    }

    #[test]
    fn a_directory_that_others_can_read_is_closed_to_them() {
        let (base, dir) = run_dir();
        let below = dir.below("b").unwrap();
        for path in [NAME, "oci-nvidia-hook/b"] {
            let path = base.path().join(path);
            for mode in [0o755, 0o750, 0o711, 0o704] {
                std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
                RunDir::open_in(base.path()).unwrap().below("b").unwrap();
                assert_eq!(
                    path.metadata().unwrap().permissions().mode() & 0o7777,
                    0o700,
                    "{path:?} {mode:o}"
                );
            }
        }
        below.replace("a", b"x").unwrap();
    }

    #[test]
    fn one_process_holds_the_lock() {
        let (_base, dir) = run_dir();
        let lock = dir.lock("lock", Duration::ZERO).unwrap().unwrap();
        let started = Instant::now();
        assert!(
            dir.lock("lock", Duration::from_millis(20))
                .unwrap()
                .is_none()
        );
        assert!(started.elapsed() >= Duration::from_millis(20));
        drop(lock);
        assert!(dir.lock("lock", Duration::ZERO).unwrap().is_some());
    }
}
