//! Opening below a directory that a path cannot leave: a container's rootfs or the driver root.
//!
//! All of it rests on `openat2(RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)`: the kernel resolves symlinks, absolute
//! ones too, as if the directory were `/`, in one step, so there is no string to check and then use
//! (CVE-2024-0132, CVE-2025-23359, CVE-2026-24260 were such strings). See openat2(2). Linux 5.6; before, or where a seccomp
//! filter refuses the call, [`walk`] does the same one component at a time.

mod walk;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// How often a resolution is tried again when a rename or a mount elsewhere disturbed it (EAGAIN).
/// A container that renames in a loop can make it fall back to the walk, not escape.
const TRIES: u32 = 128;

/// A directory, open, that no path given to its methods can leave.
#[derive(Debug)]
pub struct Root {
    fd: OwnedFd,
}

/// A directory entry that we made, with the open directory it lies in: what undoing needs.
#[derive(Debug)]
pub struct Created {
    /// Its directory
    pub dir: Rc<OwnedFd>,
    /// Its name there
    pub name: PathBuf,
    /// Whether it is a directory itself
    pub is_dir: bool,
}

impl Created {
    /// Removes it again, if it is still there and (a directory) empty.
    pub fn remove(&self) -> io::Result<()> {
        let flags = if self.is_dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        Ok(rustix::fs::unlinkat(&*self.dir, &self.name, flags)?)
    }
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Root {
    /// Opens `dir`, a path chosen by us, the administrator or the engine.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { fd: rustix::fs::openat(CWD, dir, flags, Mode::empty())? })
    }

    /// Opens what `path` means below this root; a leading slash is the root.
    pub fn open_at(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        resolve(&self.fd, path, flags)
    }

    /// Opens the directory `path` if there is no link on the way: then the path is what it says. `None` if there is one, or it
    /// cannot be told.
    pub fn open_plain_dir(&self, path: &Path) -> io::Result<Option<OwnedFd>> {
        if !path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_))) {
            return Ok(None);
        }
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat2(&self.fd, path, flags, Mode::empty(), how) {
            Ok(fd) => Ok(Some(fd)),
            Err(errno @ (Errno::NOENT | Errno::NOTDIR)) => Err(errno.into()),
            Err(_) => Ok(None),
        }
    }

    /// A smaller root: the directory `path` below this one.
    pub fn open_root(&self, path: &Path) -> io::Result<Self> {
        Ok(Self { fd: self.open_at(path, OFlags::PATH | OFlags::DIRECTORY)? })
    }

    /// `mkdir -p`, mode 0755, and the open directory. Each one made is pushed to `created`.
    ///
    /// The longest existing part is resolved by the kernel, in one step; from there on every directory is made
    /// and opened by its parent's fd, and a symlink that appears there meanwhile is refused.
    pub fn create_dir_all(&self, path: &Path, created: &mut Vec<Created>) -> io::Result<Rc<OwnedFd>> {
        let mut missing: Vec<&OsStr> = Vec::new();
        let mut existing = path;
        let mut dir = loop {
            match self.open_at(existing, OFlags::PATH | OFlags::DIRECTORY) {
                Ok(dir) => break Rc::new(dir),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let (Some(name), Some(parent)) = (existing.file_name(), existing.parent()) else {
                        return Err(error);
                    };
                    missing.push(name);
                    existing = parent;
                }
                Err(error) => return Err(error),
            }
        };
        for name in missing.into_iter().rev() {
            let made = Created { dir: Rc::clone(&dir), name: name.into(), is_dir: true };
            match rustix::fs::mkdirat(&*dir, name, Mode::from_raw_mode(0o755)) {
                Ok(()) => created.push(made),
                Err(Errno::EXIST) => {} // a dangling symlink, or somebody was faster: the open below decides
                Err(errno) => return Err(errno.into()),
            }
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            dir = rustix::fs::openat(&*dir, name, flags, Mode::empty())?.into();
        }
        Ok(dir)
    }

    /// The longest part of `path` that is a directory; at worst the root.
    #[must_use]
    pub fn existing_part<'a>(&self, path: &'a Path) -> &'a Path {
        let exists = |part: &&Path| self.open_at(part, OFlags::PATH | OFlags::DIRECTORY).is_ok();
        path.ancestors().find(exists).unwrap_or_else(|| Path::new("/"))
    }
}

fn resolve(root: impl AsFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    // openat2 takes no empty path, and "" is what is left of "/" once the components are consumed.
    let path = if path.as_os_str().is_empty() { Path::new("/") } else { path };
    let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..TRIES {
        match rustix::fs::openat2(&root, path, flags | OFlags::CLOEXEC, Mode::empty(), how) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            // EPERM is what seccomp profiles of older engines answer to a call that they do not know.
            Err(Errno::NOSYS | Errno::PERM) => break,
            result => return Ok(result?),
        }
    }
    walk::open(root.as_fd(), path, flags)
}

/// Where an open file lies, as the kernel sees it from our root directory. For host files only: a container's
/// answer would be a string to resolve again.
pub fn real_path(fd: BorrowedFd<'_>) -> io::Result<PathBuf> {
    let target = rustix::fs::readlinkat(CWD, fd_path(fd), Vec::new())?;
    Ok(PathBuf::from(OsStr::from_bytes(target.as_bytes())))
}

/// Opens for reading what `path` was opened as with `O_PATH`, if it is a regular file. An image may have a device node
/// there, and opening one can be all that it takes: a watchdog resets the host.
pub fn open_regular(path: OwnedFd) -> io::Result<File> {
    let stat = rustix::fs::fstat(&path)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    // The magic link means the open file, not its name.
    File::open(fd_path(path.as_fd()))
}

/// Opens a regular file of the host's for reading, where nobody else can put anything. A fifo there must not stop the
/// container start.
pub fn open_host_file(path: &Path) -> io::Result<(File, Stat)> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok((file.into(), stat))
}

/// Our working directory.
pub fn working_directory() -> io::Result<PathBuf> {
    std::env::current_dir()
}

/// The magic link to an open file of this process.
pub fn fd_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn tree() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("usr/lib")).unwrap();
        std::fs::write(dir.path().join("usr/lib/a"), "inside").unwrap();
        symlink("/usr/lib", dir.path().join("lib")).unwrap();
        symlink("../../../../../../etc/passwd", dir.path().join("escape")).unwrap();
        symlink("/proc/self/root/etc", dir.path().join("magic")).unwrap();
        symlink("loop", dir.path().join("loop")).unwrap();
        let root = Root::open(dir.path()).unwrap();
        (dir, root)
    }

    /// Both ways to resolve; what is true of one is true of the other.
    type Open = fn(&Root, &str, OFlags) -> io::Result<OwnedFd>;
    const WAYS: [Open; 2] = [
        |root, path, flags| root.open_at(Path::new(path), flags),
        |root, path, flags| walk::open(root.as_fd(), Path::new(path), flags),
    ];

    #[test]
    fn symlinks_stay_inside() {
        let (dir, root) = tree();
        symlink("../lib/a", dir.path().join("usr/lib/up")).unwrap();
        symlink("/escape", dir.path().join("chain")).unwrap();
        for open in WAYS {
            for path in ["/lib/a", "lib/../lib/a", "usr/lib/up", "lib/up", "../../lib/./a", "usr//lib/a"] {
                let file = open(&root, path, OFlags::PATH).unwrap();
                assert_eq!(real_path(file.as_fd()).unwrap(), dir.path().join("usr/lib/a"), "{path}");
            }
            for path in ["escape", "magic/passwd", "../etc/passwd", "/../../etc/passwd", "chain", "nowhere/x"] {
                let error = open(&root, path, OFlags::PATH).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::NotFound, "{path}");
            }
            for path in ["/", "", ".", "..", "lib/../.."] {
                let file = open(&root, path, OFlags::PATH | OFlags::DIRECTORY).unwrap();
                assert_eq!(real_path(file.as_fd()).unwrap(), dir.path(), "{path}");
            }
            let errno = |path, flags| open(&root, path, flags).unwrap_err().raw_os_error().unwrap();
            assert_eq!(errno("loop", OFlags::PATH), Errno::LOOP.raw_os_error());
            assert_eq!(errno("lib/a/x", OFlags::PATH), Errno::NOTDIR.raw_os_error());
            assert_eq!(errno("lib/a", OFlags::PATH | OFlags::DIRECTORY), Errno::NOTDIR.raw_os_error());
            assert_eq!(errno("escape", OFlags::RDONLY | OFlags::NOFOLLOW), Errno::LOOP.raw_os_error());
        }
    }

    #[test]
    fn content_is_read_through_links() {
        use std::io::Read;
        let (_dir, root) = tree();
        for open in WAYS {
            let mut text = String::new();
            std::fs::File::from(open(&root, "lib/a", OFlags::RDONLY).unwrap()).read_to_string(&mut text).unwrap();
            assert_eq!(text, "inside");
            open(&root, "lib", OFlags::RDONLY | OFlags::DIRECTORY).unwrap();
            open(&root, "escape", OFlags::PATH | OFlags::NOFOLLOW).unwrap();
        }
    }

    /// A directory that is moved out of the root while the walk is in it.
    #[test]
    fn dot_dot_goes_back_to_where_the_walk_came_from() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "").unwrap();
        let (dir, root) = tree();
        // Into it, a while inside of it, and up from it.
        let long = format!("usr/lib/x/{}../secret", "a/../".repeat(200));
        std::fs::create_dir_all(dir.path().join("usr/lib/x/a")).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (inside, moved) = (dir.path().join("usr/lib/x"), outside.path().join("x"));
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    std::fs::rename(&inside, &moved).unwrap();
                    std::fs::rename(&moved, &inside).unwrap();
                }
            });
            let escaped = WAYS.iter().any(|open| (0..300).any(|_| open(&root, &long, OFlags::PATH).is_ok()));
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(!escaped);
        });
    }

    #[test]
    fn directories_are_made_below_what_exists() {
        let (dir, root) = tree();
        let mut created = Vec::new();
        root.create_dir_all(Path::new("lib/x/y"), &mut created).unwrap();
        assert!(dir.path().join("usr/lib/x/y").is_dir());
        assert_eq!(created.len(), 2);
        root.create_dir_all(Path::new("lib/x/y"), &mut created).unwrap();
        assert_eq!(created.len(), 2);
        for made in created.iter().rev() {
            made.remove().unwrap();
        }
        assert!(!dir.path().join("usr/lib/x").try_exists().unwrap());
    }

    #[test]
    fn a_dangling_symlink_in_the_way_is_refused() {
        let (dir, root) = tree();
        symlink("/nowhere", dir.path().join("usr/lib64")).unwrap();
        assert!(root.create_dir_all(Path::new("usr/lib64/x"), &mut Vec::new()).is_err());
        assert!(!dir.path().join("nowhere").try_exists().unwrap());
        assert!(root.create_dir_all(Path::new("usr/lib/a/x"), &mut Vec::new()).is_err(), "a file in the way");
    }
}
