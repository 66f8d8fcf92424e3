//! The directory for what outlives one call of the hook, until the next boot: `/run/oci-nvidia-hook` of root,
//! `/run/user/UID/oci-nvidia-hook` of a user whose containers are rootless.
//!
//! Everything below it is ours alone (0700, 0600). Whatever else is found there is not read, and not written to: a link, a
//! fifo, a file or directory of somebody else's or that somebody else may write (CWE-377, CWE-59).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::fcntl::{Flock, FlockArg};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;

use super::ns;

const NAME: &str = "oci-nvidia-hook";
/// How often a lock is tried again.
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// It, open: its files stay in reach after the container's mount namespace was entered.
#[derive(Debug)]
pub struct RunDir {
    fd: OwnedFd,
}

/// A lock, held until it is dropped or the process ends.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<File>,
}

impl RunDir {
    /// Opens ours; makes it if it is missing.
    pub fn open() -> io::Result<Self> {
        Self::open_in(&base()?)
    }

    /// Opens ours, if it is there.
    pub fn existing() -> io::Result<Option<Self>> {
        or_missing(open_dir(CWD, &base()?.join(NAME)))
    }

    /// The one in `base`, which has to exist.
    pub fn open_in(base: &Path) -> io::Result<Self> {
        let base = rustix::fs::openat(CWD, base, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        make_dir(base.as_fd(), Path::new(NAME))
    }

    /// A directory in it; made if it is missing.
    pub fn below(&self, name: &str) -> io::Result<Self> {
        make_dir(self.fd.as_fd(), Path::new(name))
    }

    /// A directory in it, if it is there.
    pub fn existing_below(&self, name: &str) -> io::Result<Option<Self>> {
        or_missing(open_dir(self.fd.as_fd(), Path::new(name)))
    }

    /// The content of a file of ours, of at most `limit` bytes; `None` if there is none.
    pub fn read(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Some(fd) = or_missing(rustix::fs::openat(&self.fd, name, flags, Mode::empty()).map_err(Into::into))? else {
            return Ok(None);
        };
        let size = check_ours(fd.as_fd(), FileType::RegularFile)?;
        // One more, to see the end: without room to begin with, the first reads are of 32 bytes.
        let mut bytes = Vec::with_capacity(size.min(limit).saturating_add(1).try_into().unwrap_or_default());
        File::from(fd).take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
        if u64::try_from(bytes.len()).is_ok_and(|read| read > limit) {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        Ok(Some(bytes))
    }

    /// Writes a file at once: who reads it meanwhile reads the old one. Whatever has its name is replaced.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = format!(".{name}.{}", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let create = || rustix::fs::openat(&self.fd, &temporary, flags, Mode::RUSR | Mode::WUSR);
        let fd = match create() {
            Err(Errno::EXIST) => {
                // Of a dead process with our number.
                rustix::fs::unlinkat(&self.fd, &temporary, AtFlags::empty())?;
                create()?
            }
            created => created?,
        };
        let written = File::from(fd).write_all(bytes);
        let done = written.and_then(|()| Ok(rustix::fs::renameat(&self.fd, &temporary, &self.fd, name)?));
        if done.is_err() {
            rustix::fs::unlinkat(&self.fd, &temporary, AtFlags::empty()).ok();
        }
        done
    }

    /// Removes a file; one that is not there is no error.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The names in it that are text and do not begin with a dot, in no order.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = self.all_names()?;
        names.retain(|name| !name.starts_with('.'));
        Ok(names)
    }

    /// The same with those of temporary files.
    pub fn all_names(&self) -> io::Result<Vec<String>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(&self.fd, ".", flags, Mode::empty())?;
        let mut buffer = Vec::with_capacity(8192);
        let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
        let mut names = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry?;
            names
                .extend(entry.file_name().to_str().ok().filter(|name| !matches!(*name, "." | "..")).map(str::to_owned));
        }
        Ok(names)
    }

    /// How long ago a file was written; `None` if that is not known.
    #[must_use]
    pub fn age(&self, name: &str) -> Option<Duration> {
        let stat = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let written = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(stat.st_mtime).ok()?);
        SystemTime::now().duration_since(written).ok()
    }

    /// Takes the lock of this name; `None` if somebody else holds it all the time.
    pub fn lock(&self, name: &str, patience: Duration) -> io::Result<Option<Lock>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)?;
        check_ours(fd.as_fd(), FileType::RegularFile)?;
        let mut file = File::from(fd);
        let until = Instant::now() + patience;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => return Ok(Some(Lock { _file: file })),
                Err((_, nix::errno::Errno::EWOULDBLOCK)) if Instant::now() >= until => return Ok(None),
                Err((back, nix::errno::Errno::EWOULDBLOCK | nix::errno::Errno::EINTR)) => file = back,
                Err((_, error)) => return Err(error.into()),
            }
            std::thread::sleep(LOCK_PAUSE);
        }
    }
}

/// Where ours is, for messages.
pub fn path() -> io::Result<PathBuf> {
    Ok(base()?.join(NAME))
}

/// Where root's is, which only root can read.
#[must_use]
pub fn path_of_root() -> PathBuf {
    Path::new("/run").join(NAME)
}

/// Where ours is. In a user namespace, root is the user who made it: `/run` belongs to somebody else.
fn base() -> io::Result<PathBuf> {
    let us = rustix::process::geteuid().as_raw();
    if us == 0 && !ns::in_user_namespace()? {
        return Ok(PathBuf::from("/run"));
    }
    let outside = ns::uid_outside(us)?.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    Ok(PathBuf::from(format!("/run/user/{outside}")))
}

fn make_dir(parent: impl AsFd, name: &Path) -> io::Result<RunDir> {
    match open_dir(parent.as_fd(), name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    match rustix::fs::mkdirat(&parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => open_dir(parent, name),
        Err(error) => Err(error.into()),
    }
}

fn open_dir(parent: impl AsFd, name: &Path) -> io::Result<RunDir> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    check_ours(fd.as_fd(), FileType::Directory)?;
    Ok(RunDir { fd })
}

/// Whether only we can have written it; its size. With one name only: a hard link is a file of somebody else's directory too.
fn check_ours(fd: impl AsFd, kind: FileType) -> io::Result<u64> {
    let stat = rustix::fs::fstat(fd)?;
    let ours = stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o022 == 0;
    let alone = kind == FileType::Directory || stat.st_nlink == 1;
    if FileType::from_raw_mode(stat.st_mode) == kind && ours && alone {
        return Ok(stat.st_size.try_into().unwrap_or_default());
    }
    Err(io::Error::other("it is not this hook's own"))
}

fn or_missing<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
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
    fn what_is_written_is_read() {
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
        let mode = |path: &str| base.path().join(path).metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(NAME), mode("oci-nvidia-hook/b"), mode("oci-nvidia-hook/b/c")), (0o700, 0o700, 0o600));
    }

    #[test]
    fn what_is_not_ours_is_left_alone() {
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
        assert_eq!(std::fs::read_to_string(base.path().join("secret")).unwrap(), "secret");
        symlink("../secret", path("lock")).unwrap();
        assert!(dir.lock("lock", Duration::ZERO).is_err());
        std::fs::set_permissions(path("dir"), PermissionsExt::from_mode(0o777)).unwrap();
        assert!(dir.below("dir").is_err() && dir.existing_below("dir").is_err());
        symlink("dir", path("dirlink")).unwrap();
        assert!(dir.below("dirlink").is_err());
    }

    #[test]
    fn a_directory_of_others_is_not_taken() {
        let base = tempfile::tempdir().unwrap();
        symlink("/tmp", base.path().join(NAME)).unwrap();
        assert!(RunDir::open_in(base.path()).is_err());
        std::fs::remove_file(base.path().join(NAME)).unwrap();
        std::fs::create_dir(base.path().join(NAME)).unwrap();
        std::fs::set_permissions(base.path().join(NAME), PermissionsExt::from_mode(0o777)).unwrap();
        assert!(RunDir::open_in(base.path()).is_err());
    }

    #[test]
    fn one_holds_the_lock() {
        let (_base, dir) = run_dir();
        let lock = dir.lock("lock", Duration::ZERO).unwrap().unwrap();
        let started = Instant::now();
        assert!(dir.lock("lock", Duration::from_millis(20)).unwrap().is_none());
        assert!(started.elapsed() >= Duration::from_millis(20));
        drop(lock);
        assert!(dir.lock("lock", Duration::ZERO).unwrap().is_some());
    }
}
