//! Opens a path of the host that another user of the host cannot redirect.
//!
//! Some directories of daemons belong to a user other than root, and every user can write to `/tmp`. A user who can create names in
//! a directory on the path decides where the path leads, with a symbolic link or with a FUSE file system, which can show any owner
//! and mode. The sysctl `fs.protected_symlinks` is not sufficient: it is off on some hosts, and permits links that root of a
//! container created in a volume. Therefore the path is walked one name at a time, and each directory is checked for users who can
//! create names in it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::in_root::{MAX_LINKS, Root, push};
use super::mount::statmount::reused_id;

/// The users, other than root and the user of this process, who can replace the file at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chooser {
    /// No other user
    NoOther,
    /// The owner of this directory on the path
    Owner(PathBuf, u32),
    /// Several users, because they can write to this directory on the path
    Others(PathBuf),
}

/// An opened path.
#[derive(Debug)]
pub struct Guarded {
    /// The open file, with `O_PATH`
    pub fd: OwnedFd,
    /// The state of the file
    pub stat: Stat,
    /// The path below the root, with a leading slash, after symbolic links
    pub path: PathBuf,
    /// The other users who can replace the file
    pub chooser: Chooser,
}

/// Why a path was not opened.
#[derive(Debug)]
pub enum Refused {
    /// A system call failed, for example because the path is missing
    Io(io::Error),
    /// A symbolic link that another user may have created
    Link(PathBuf),
    /// A mount point in a directory to which another user can write
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

/// Whether a user is root or the user of this process. In a user namespace the host's root appears as the overflow user, like all
/// users that are not mapped, so it is not trusted there.
#[must_use]
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Opens `path` below `root`. The directory `root` itself is trusted.
///
/// # Errors
/// If the path is missing, or leads through a link or a mount that another user may have created.
pub fn open(root: &Root, path: &Path) -> Result<Guarded, Refused> {
    // Most hosts lack most of the daemons. The walk takes several calls to find that out.
    if root.lacks(path) {
        return Err(Errno::NOENT.into());
    }
    let mut walk = Walk {
        root: root.as_fd(),
        held: Vec::new(),
        chooser: Chooser::NoOther,
    };
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
    Ok(Guarded {
        fd,
        stat,
        path,
        chooser: walk.chooser,
    })
}

/// Opens a regular file for reading at a path that a process, a container or a record names. The file must belong to root or to the user
/// of this process, and no other user may be able to replace it. It must be stored on a disk or a tmpfs: a read of /proc/kmsg removes
/// kernel messages from syslog, and a FUSE server can block the reader. Opening it does not wait.
///
/// In a user namespace, this process has only the rights of the user who names the file, so the owner is not compared.
///
/// # Errors
/// If the path leads through a link or a mount of another user, or the file is not such a file.
pub fn open_file(path: &Path) -> io::Result<(File, Stat)> {
    let root = Root::open(Path::new("/"))?;
    let found = match open(&root, path) {
        Ok(found) => found,
        Err(Refused::Io(error)) => return Err(error),
        Err(Refused::Link(at)) => return Err(denied(&format!("{at:?} is a link of another user"))),
        Err(Refused::Mount(at)) => {
            return Err(denied(&format!("{at:?} is a mount of another user")));
        }
    };
    let is_of_others = !is_trusted(found.stat.st_uid) || found.chooser != Chooser::NoOther;
    if is_of_others && !super::ns::in_user_namespace()? {
        return Err(denied("another user can replace it"));
    }
    root.open_stored_known(found.fd)
}

fn denied(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why.to_owned())
}

struct Walk<'r> {
    root: BorrowedFd<'r>,
    /// The directories on the path, and the file that was opened last
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
        let fd = rustix::fs::openat(
            dir,
            name,
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let others_create = is_writable || !dir_is_trusted;
        // This check comes first, because fstat(2) on a FUSE file system waits for the program of the user who mounted it.
        if others_create && reused_id(&fd)? != reused_id(dir)? {
            return Err(Refused::Mount(self.path().join(name)));
        }
        let stat = rustix::fs::fstat(&fd)?;
        if others_create && FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            return Err(Refused::Link(self.path().join(name)));
        }
        // In a directory with the sticky bit, other users cannot rename or remove a file of root.
        let is_sticky = dir_is_trusted && facts.st_mode & 0o1000 != 0 && is_trusted(stat.st_uid);
        if is_writable && !is_sticky {
            self.chooser = Chooser::Others(self.path());
        } else if !dir_is_trusted && self.chooser == Chooser::NoOther {
            self.chooser = Chooser::Owner(self.path(), facts.st_uid);
        }
        Ok((fd, stat))
    }

    fn path(&self) -> PathBuf {
        let names = self.held.iter().map(|(name, ..)| name);
        std::iter::once(OsStr::new("/"))
            .chain(names.map(OsString::as_os_str))
            .collect()
    }
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
        for (name, mode) in [
            ("run/daemon", 0o755),
            ("tmp/mine", 0o755),
            ("open/mine", 0o755),
        ] {
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
    fn only_links_in_trusted_directories_are_followed() {
        let (dir, root) = tree();
        symlink("run", dir.path().join("var")).unwrap();
        symlink("../run/daemon", dir.path().join("tmp/link")).unwrap();
        symlink("mine", dir.path().join("open/link")).unwrap();
        symlink("/loop", dir.path().join("loop")).unwrap();
        symlink("../../../..", dir.path().join("run/up")).unwrap();
        for (path, is) in [
            ("/var/daemon", "/run/daemon"),
            ("run/up/tmp/mine", "/tmp/mine"),
            ("run/../run", "/run"),
        ] {
            assert_eq!(
                open(&root, Path::new(path)).unwrap().path,
                Path::new(is),
                "{path}"
            );
        }
        for (path, link) in [
            ("/tmp/link", "/tmp/link"),
            ("/tmp/link/x", "/tmp/link"),
            ("/open/link", "/open/link"),
        ] {
            match open(&root, Path::new(path)) {
                Err(Refused::Link(refused)) => assert_eq!(refused, Path::new(link)),
                other => panic!("{path}: {other:?}"),
            }
        }
        for (path, errno) in [
            ("/loop", Errno::LOOP),
            ("/none", Errno::NOENT),
            ("/", Errno::ISDIR),
        ] {
            match open(&root, Path::new(path)) {
                Err(Refused::Io(error)) => {
                    assert_eq!(error.raw_os_error(), Some(errno.raw_os_error()), "{path}")
                }
                other => panic!("{path}: {other:?}"),
            }
        }
    }

    #[test]
    fn users_who_can_replace_a_file_are_found() {
        let (_dir, root) = tree();
        let chooser = |path| open(&root, Path::new(path)).unwrap().chooser;
        assert_eq!(chooser("/run/daemon"), Chooser::NoOther);
        assert_eq!(chooser("/tmp/mine"), Chooser::NoOther, "the sticky bit");
        assert_eq!(chooser("/open/mine"), Chooser::Others("/open".into()));
    }

    #[test]
    fn files_that_others_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("config.json"), "{}").unwrap();
        open_file(&path("config.json")).unwrap();
        symlink("/proc/kmsg", path("kmsg")).unwrap();
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        for name in ["kmsg", "fifo", "."] {
            open_file(&path(name)).unwrap_err();
        }
        open_file(Path::new("/proc/version")).unwrap_err();
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(path("config.json"), Some(7), None).unwrap();
            assert_eq!(
                open_file(&path("config.json")).unwrap_err().kind(),
                io::ErrorKind::PermissionDenied
            );
            std::os::unix::fs::chown(path("config.json"), Some(0), None).unwrap();
            chmod(dir.path(), 0o777);
            open_file(&path("config.json")).unwrap_err();
        }
    }
}
