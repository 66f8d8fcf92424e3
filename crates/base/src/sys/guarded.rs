//! Opening a path of the host's without going where another user of the host leads.
//!
//! A socket below `/run` belongs to a daemon's own user, and `/tmp` to everybody. Whoever can create a name in a directory on
//! the way decides what the path means: with a symbolic link, or with a FUSE file system, which can show any owner and mode.
//! The sysctl `fs.protected_symlinks` does not help: it is off on some hosts, and allows a link that root of a container
//! made in a volume. So the path is walked one name at a time, from directory to open directory, and each of them is asked
//! who may create names in it.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::in_root::Root;
use super::proc_file;

/// The kernel's own limit (MAXSYMLINKS).
const MAX_LINKS: u32 = 40;

/// Who, beside root and the user of this process, can put something else at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chooser {
    /// No other user: the path keeps its meaning
    NoOther,
    /// The owner of this directory on the way
    Owner(PathBuf, u32),
    /// More users than one, by this directory on the way
    Others(PathBuf),
}

/// What is at a path.
#[derive(Debug)]
pub struct Guarded {
    /// The open file, with `O_PATH`
    pub fd: OwnedFd,
    /// What it is
    pub stat: Stat,
    /// Its path below the root, with a leading slash, after root's links
    pub path: PathBuf,
    /// Who else decides what that path means
    pub chooser: Chooser,
}

/// Why it was not opened.
#[derive(Debug)]
pub enum Refused {
    /// The system call failed, `NotFound` included
    Io(io::Error),
    /// This is a link, and another user may have made it
    Link(PathBuf),
    /// This is a mount point, and another user may have mounted it
    Mount(PathBuf),
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Whether a user is root or ourselves. In a user namespace the host's root is one of many that have no number there, so only
/// the user whose namespace it is remains.
#[must_use]
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Opens `path` below `root`, which is taken to be root's own.
///
/// # Errors
/// If it is missing, or the way leads through something that another user may have made.
pub fn open(root: &Root, path: &Path) -> Result<Guarded, Refused> {
    let mut walk = Walk { root: root.as_fd(), held: Vec::new(), chooser: Chooser::NoOther };
    let mut left: Vec<Option<OsString>> = Vec::new();
    push(&mut left, path);
    let mut links = 0;
    while let Some(name) = left.pop() {
        let Some(name) = name else {
            walk.held.clear();
            continue;
        };
        if name == ".." {
            walk.held.pop();
            continue;
        }
        let (fd, stat) = walk.step(&name)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            links += 1;
            if links > MAX_LINKS {
                return Err(Errno::LOOP.into());
            }
            let text = rustix::fs::readlinkat(&fd, c"", Vec::new())?;
            push(&mut left, Path::new(&OsString::from_vec(text.into_bytes())));
        } else {
            walk.held.push((name, fd, stat));
        }
    }
    let path = walk.path();
    let (_, fd, stat) = walk.held.pop().ok_or(Errno::ISDIR)?;
    Ok(Guarded { fd, stat, path, chooser: walk.chooser })
}

struct Walk<'r> {
    root: BorrowedFd<'r>,
    /// The directories on the way, and what was opened last
    held: Vec<(OsString, OwnedFd, Stat)>,
    chooser: Chooser,
}

impl Walk<'_> {
    /// Opens a name in the directory that was opened last.
    fn step(&mut self, name: &OsStr) -> Result<(OwnedFd, Stat), Refused> {
        let (dir, facts) = match self.held.last() {
            Some((_, dir, stat)) => (dir.as_fd(), *stat),
            None => (self.root, rustix::fs::fstat(self.root)?),
        };
        let is_top = self.held.is_empty();
        let dir_is_trusted = is_top || is_trusted(facts.st_uid);
        let is_writable = facts.st_mode & 0o022 != 0;
        let fd = rustix::fs::openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let others_create = is_writable || !dir_is_trusted;
        // Asked first: fstat(2) of a FUSE file system waits for the program of the user who mounted it.
        if others_create && mount_id(fd.as_fd())? != mount_id(dir)? {
            return Err(Refused::Mount(self.path().join(name)));
        }
        let stat = rustix::fs::fstat(&fd)?;
        if others_create && FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            return Err(Refused::Link(self.path().join(name)));
        }
        // In a directory with the sticky bit nobody can rename or remove what is root's.
        let is_kept = dir_is_trusted && facts.st_mode & 0o1000 != 0 && is_trusted(stat.st_uid);
        if is_writable && !is_kept {
            self.chooser = Chooser::Others(self.path());
        } else if !dir_is_trusted && self.chooser == Chooser::NoOther {
            self.chooser = Chooser::Owner(self.path(), facts.st_uid);
        }
        Ok((fd, stat))
    }

    fn path(&self) -> PathBuf {
        let names = self.held.iter().map(|(name, ..)| name);
        std::iter::once(OsStr::new("/")).chain(names.map(OsString::as_os_str)).collect()
    }
}

/// Components that are left, the next one last; `None` leads back to the root.
fn push(left: &mut Vec<Option<OsString>>, path: &Path) {
    use std::path::Component::{Normal, ParentDir, Prefix, RootDir};
    for component in path.components().rev() {
        match component {
            Normal(name) => left.push(Some(name.to_owned())),
            ParentDir => left.push(Some("..".into())),
            RootDir => left.push(None),
            Prefix(_) | std::path::Component::CurDir => {}
        }
    }
}

/// The number of the mount that an open file lies in; see proc_pid_fdinfo(5). No question to its file system.
fn mount_id(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let text = proc_file::read_text(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    id.and_then(|id| id.trim().parse().ok())
        .ok_or_else(|| io::Error::other("the kernel does not show the mount of an open file"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn tree() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        for (name, mode) in [("run/daemon", 0o755), ("tmp/mine", 0o755), ("open/mine", 0o755)] {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
            chmod(&dir.path().join(name), mode);
        }
        chmod(&dir.path().join("run"), 0o755);
        chmod(&dir.path().join("tmp"), 0o1777);
        chmod(&dir.path().join("open"), 0o775);
        let root = Root::open(dir.path()).unwrap();
        (dir, root)
    }

    #[test]
    fn only_links_in_directories_that_are_ours_are_followed() {
        let (dir, root) = tree();
        symlink("run", dir.path().join("var")).unwrap();
        symlink("../run/daemon", dir.path().join("tmp/link")).unwrap();
        symlink("mine", dir.path().join("open/link")).unwrap();
        symlink("/loop", dir.path().join("loop")).unwrap();
        symlink("../../../..", dir.path().join("run/up")).unwrap();
        for (path, is) in [("/var/daemon", "/run/daemon"), ("run/up/tmp/mine", "/tmp/mine"), ("run/../run", "/run")] {
            assert_eq!(open(&root, Path::new(path)).unwrap().path, Path::new(is), "{path}");
        }
        for (path, link) in [("/tmp/link", "/tmp/link"), ("/tmp/link/x", "/tmp/link"), ("/open/link", "/open/link")] {
            match open(&root, Path::new(path)) {
                Err(Refused::Link(refused)) => assert_eq!(refused, Path::new(link)),
                other => panic!("{path}: {other:?}"),
            }
        }
        for (path, errno) in [("/loop", Errno::LOOP), ("/none", Errno::NOENT), ("/", Errno::ISDIR)] {
            match open(&root, Path::new(path)) {
                Err(Refused::Io(error)) => assert_eq!(error.raw_os_error(), Some(errno.raw_os_error()), "{path}"),
                other => panic!("{path}: {other:?}"),
            }
        }
    }

    #[test]
    fn who_else_decides_what_a_path_means() {
        let (_dir, root) = tree();
        let chooser = |path| open(&root, Path::new(path)).unwrap().chooser;
        assert_eq!(chooser("/run/daemon"), Chooser::NoOther);
        assert_eq!(chooser("/tmp/mine"), Chooser::NoOther, "the sticky bit");
        assert_eq!(chooser("/open/mine"), Chooser::Others("/open".into()));
    }
}
