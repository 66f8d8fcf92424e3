//! Opens files below a directory that a path cannot leave: a container's rootfs or the driver root.
//!
//! It uses `openat2(RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)`: the kernel resolves symbolic links, including absolute ones, in one
//! step and as if the directory were `/`. Therefore no path is checked first and used later, which was the mistake behind
//! CVE-2024-0132, CVE-2025-23359 and CVE-2026-24260. openat2(2) exists since Linux 5.6. On earlier kernels, or if a seccomp filter
//! denies the call, the module `walk` does the same one component at a time.

mod walk;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{CWD, FileType, FsWord, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

pub(super) use walk::{MAX_LINKS, push};

/// How often a lookup is repeated if a rename or a mount disturbed it (EAGAIN). A container that renames in a loop can only cause
/// the fallback to the walk.
const TRIES: u32 = 128;

/// An open directory. The paths that are given to its methods cannot leave it.
#[derive(Debug)]
pub struct Root {
    fd: OwnedFd,
}

/// A directory entry that the hook created, with its open directory, so that it can be removed again.
#[derive(Debug)]
pub struct Created {
    /// The directory that the file is in
    pub dir: Rc<OwnedFd>,
    /// The name of the file in `dir`
    pub name: PathBuf,
    /// Whether it is a directory itself
    pub is_dir: bool,
}

/// A directory that [`Root::create_dir_all`] opened.
#[derive(Debug)]
pub struct OpenedDir {
    /// The directory
    pub dir: Rc<OwnedFd>,
    /// If it was created, the existing directory below which it was. Both are on the same mount.
    pub created_below: Option<Rc<OwnedFd>>,
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Root {
    /// Opens `dir`, a path on the host that no container chose.
    ///
    /// # Errors
    /// If `dir` cannot be opened or is not a directory.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            fd: rustix::fs::openat(CWD, dir, flags, Mode::empty())?,
        })
    }

    /// Opens `path` below this root with `O_PATH`, whatever `flags` are. A leading slash stands for the root.
    ///
    /// The content of the file cannot be read through the descriptor: a container chooses where its paths lead. Only
    /// [`Self::open_stored`] and [`Self::open_stored_dir`] open a container's file for reading.
    ///
    /// # Errors
    /// NotFound if nothing exists at `path`, ELOOP for too many links, and the other errors of openat2(2).
    pub fn open_at(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        resolve(&self.fd, path, flags | OFlags::PATH)
    }

    /// Opens `path` for reading, on any file system. Only for a directory of the host that no container can change.
    ///
    /// # Errors
    /// The errors of [`Self::open_at`], and the errors of open(2).
    pub(crate) fn open_on_host(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        resolve(&self.fd, path, flags)
    }

    /// Like [`Self::open_at`], but returns `None` if nothing exists at `path`.
    ///
    /// # Errors
    /// The errors of [`Self::open_at`] except ENOENT.
    pub fn open_existing(&self, path: &Path, flags: OFlags) -> io::Result<Option<OwnedFd>> {
        or_missing(self.open_at(path, flags))
    }

    /// Opens the directory `path` if no component is a symbolic link, so that `path` is its real path. Returns `None` if a
    /// component is one, or if that is unknown.
    pub(crate) fn open_plain_dir(&self, path: &Path) -> io::Result<Option<OwnedFd>> {
        if !path
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        {
            return Ok(None);
        }
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat2(&self.fd, path, flags, Mode::empty(), how) {
            Ok(fd) => Ok(Some(fd)),
            Err(errno @ (Errno::NOENT | Errno::NOTDIR)) => Err(errno.into()),
            // ELOOP: a component is a symbolic link (RESOLVE_NO_SYMLINKS in openat2(2)). ENOSYS and EPERM: the call is denied.
            Err(_) => Ok(None),
        }
    }

    /// Whether nothing exists at `path`, and no component before the missing one is a symbolic link. Returns false if that is unknown.
    pub(super) fn lacks(&self, path: &Path) -> bool {
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        matches!(
            rustix::fs::openat2(&self.fd, path, flags, Mode::empty(), how),
            Err(Errno::NOENT)
        )
    }

    /// Opens the directory `path` below this root as a root.
    ///
    /// # Errors
    /// The errors of [`Self::open_at`], and ENOTDIR if `path` is not a directory.
    pub fn open_root(&self, path: &Path) -> io::Result<Self> {
        Ok(Self {
            fd: self.open_at(path, OFlags::PATH | OFlags::DIRECTORY)?,
        })
    }

    /// Creates missing directories with mode 0755, as `mkdir -p` does, and returns the open directory. Each new directory is
    /// appended to `created`. `may_create` is called before with the existing directory that will contain it. It is not called with a
    /// directory that was created here, which is on the mount of its parent and belongs to the same user.
    ///
    /// The kernel resolves the longest existing part in one step. From there on, every directory is created and opened in its
    /// open parent, and a symbolic link that appears in the meantime is rejected.
    ///
    /// # Errors
    /// If a directory cannot be opened or created, if a link or a file is in place of one, or if `may_create` returns an error. The
    /// directories that were created until then are in `created`.
    pub fn create_dir_all(
        &self,
        path: &Path,
        created: &mut Vec<Created>,
        mut may_create: impl FnMut(&Rc<OwnedFd>) -> io::Result<()>,
    ) -> io::Result<OpenedDir> {
        let mut missing: Vec<&OsStr> = Vec::new();
        let mut existing = path;
        let mut dir = loop {
            match self.open_at(existing, OFlags::PATH | OFlags::DIRECTORY) {
                Ok(dir) => break Rc::new(dir),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let (Some(name), Some(parent)) = (existing.file_name(), existing.parent())
                    else {
                        return Err(error);
                    };
                    missing.push(name);
                    existing = parent;
                }
                Err(error) => return Err(error),
            }
        };
        let mut created_below = None;
        for name in missing.into_iter().rev() {
            if created_below.is_none() {
                may_create(&dir)?;
            }
            let made = Created {
                dir: Rc::clone(&dir),
                name: name.into(),
                is_dir: true,
            };
            match rustix::fs::mkdirat(&*dir, name, Mode::from_raw_mode(0o755)) {
                Ok(()) => {
                    if created_below.is_none() {
                        created_below = Some(Rc::clone(&dir));
                    }
                    created.push(made);
                }
                // A dangling symbolic link, or another process created it: the open below decides.
                Err(Errno::EXIST) => created_below = None,
                Err(errno) => return Err(errno.into()),
            }
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            dir = rustix::fs::openat(&*dir, name, flags, Mode::empty())?.into();
        }
        Ok(OpenedDir { dir, created_below })
    }

    /// Reopens a regular file for reading that was opened below this root with `O_PATH`. Other files are rejected before they are
    /// opened, because opening a device node can have effects: a watchdog resets the host. Files on virtual file systems are
    /// rejected too. An image could replace the file with a link to /proc/kmsg, which has the mode of a regular file: a read of it
    /// waits for the next kernel message, and removes that message from syslog.
    ///
    /// Any file system is accepted if the root is on it too, because the engine mounted it. It may use FUSE (fuse-overlayfs).
    ///
    /// # Errors
    /// If `file` is not a regular file, is on a file system that does not store files, or cannot be opened for reading.
    pub fn open_stored(&self, file: OwnedFd) -> io::Result<File> {
        self.open_stored_known(file).map(|(file, _)| file)
    }

    /// Like [`Self::open_stored`], with the state of the file.
    ///
    /// # Errors
    /// The errors of [`Self::open_stored`].
    pub fn open_stored_known(&self, file: OwnedFd) -> io::Result<(File, Stat)> {
        let stat = regular(&file)?;
        self.check_stored(&file, &stat)?;
        Ok((reopen(&file, OFlags::NONBLOCK | OFlags::NOCTTY)?, stat))
    }

    /// Like [`Self::open_stored`], for a directory.
    ///
    /// # Errors
    /// If `dir` is on a file system that does not store files, or cannot be opened for reading.
    pub fn open_stored_dir(&self, dir: OwnedFd) -> io::Result<OwnedFd> {
        self.check_stored(&dir, &rustix::fs::fstat(&dir)?)?;
        reopen(&dir, OFlags::DIRECTORY).map(Into::into)
    }

    fn check_stored(&self, file: &OwnedFd, stat: &Stat) -> io::Result<()> {
        if keeps_files(file)? || rustix::fs::fstat(&self.fd)?.st_dev == stat.st_dev {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is on a file system that does not store files",
        ))
    }

    /// Returns the longest leading part of `path` that is an existing directory.
    #[must_use]
    pub fn existing_part<'a>(&self, path: &'a Path) -> &'a Path {
        let exists = |part: &&Path| self.open_at(part, OFlags::PATH | OFlags::DIRECTORY).is_ok();
        path.ancestors()
            .find(exists)
            .unwrap_or_else(|| Path::new("/"))
    }
}

fn resolve(root: impl AsFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    // openat2(2) rejects an empty path, which is what remains of "/" without its slash.
    let path = if path.as_os_str().is_empty() {
        Path::new("/")
    } else {
        path
    };
    let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..TRIES {
        match rustix::fs::openat2(&root, path, flags | OFlags::CLOEXEC, Mode::empty(), how) {
            // The kernel returns EAGAIN for a path with ".." if a rename or a mount anywhere on the host could have moved the
            // directory out of the root in the meantime; see openat2(2).
            Err(Errno::AGAIN | Errno::INTR) => {}
            // The seccomp profiles of older engines answer unknown calls with EPERM.
            Err(Errno::NOSYS | Errno::PERM) => break,
            result => return Ok(result?),
        }
    }
    walk::open(root.as_fd(), path, flags)
}

pub(super) fn or_missing<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the path of an open file, as seen from the root directory of this process. Only for files of the host: a path in a
/// container would have to be resolved again.
///
/// # Errors
/// If /proc cannot be read.
pub fn real_path(fd: BorrowedFd<'_>) -> io::Result<PathBuf> {
    // The kernel appends " (deleted)" to the path of a removed file; see proc_pid_fd(5).
    let target = rustix::fs::readlinkat(CWD, fd_path(fd), Vec::new())?;
    Ok(PathBuf::from(OsStr::from_bytes(target.as_bytes())))
}

/// Returns the state of a regular file, and an error for any other file.
fn regular(path: &OwnedFd) -> io::Result<Stat> {
    let stat = rustix::fs::fstat(path)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(stat),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        )),
    }
}

/// Opens the magic link of a file descriptor, which leads to the open file even if its name has been replaced.
fn reopen(path: &OwnedFd, flags: OFlags) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | flags;
    Ok(rustix::fs::openat(CWD, fd_path(path.as_fd()), flags, Mode::empty())?.into())
}

/// `TMPFS_MAGIC`
const TMPFS: FsWord = 0x0102_1994;

/// Whether a file system stores files. The kernel generates the files of proc, sysfs, cgroups, debugfs and others when they are
/// read: a read may wait for an event or have side effects. These file systems answer statfs(2) with the kernel's `simple_statfs`,
/// which reports 0 blocks. A tmpfs without a size limit does that too, so it is recognized by its magic number.
///
/// A process generates the files of a FUSE file system and can block a reader forever.
fn keeps_files(file: &OwnedFd) -> io::Result<bool> {
    const FUSE: FsWord = 0x6573_5546;
    let fs = rustix::fs::fstatfs(file)?;
    Ok(fs.f_type == TMPFS || (fs.f_blocks > 0 && fs.f_type != FUSE))
}

/// Opens a regular file of the host for reading, in a directory that only root can change. `O_NONBLOCK` keeps a fifo from
/// blocking the start of a container.
///
/// # Errors
/// If the file cannot be opened, or is not a regular file.
pub fn open_host_file(path: &Path) -> io::Result<(File, Stat)> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    Ok((file.into(), stat))
}

/// Returns the working directory of this process.
///
/// # Errors
/// NotFound if the directory has been removed.
pub fn working_directory() -> io::Result<PathBuf> {
    std::env::current_dir()
}

/// Returns the magic link to an open file of this process.
pub fn fd_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::AtFlags;
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

    /// Both implementations, which must have the same results.
    type Open = fn(&Root, &str, OFlags) -> io::Result<OwnedFd>;
    const IMPLEMENTATIONS: [Open; 2] = [
        |root, path, flags| root.open_on_host(Path::new(path), flags),
        |root, path, flags| walk::open(root.as_fd(), Path::new(path), flags),
    ];

    #[test]
    fn symlinks_stay_inside() {
        let (dir, root) = tree();
        symlink("../lib/a", dir.path().join("usr/lib/up")).unwrap();
        symlink("/escape", dir.path().join("chain")).unwrap();
        for open in IMPLEMENTATIONS {
            for path in [
                "/lib/a",
                "lib/../lib/a",
                "usr/lib/up",
                "lib/up",
                "../../lib/./a",
                "usr//lib/a",
            ] {
                let file = open(&root, path, OFlags::PATH).unwrap();
                assert_eq!(
                    real_path(file.as_fd()).unwrap(),
                    dir.path().join("usr/lib/a"),
                    "{path}"
                );
            }
            for path in [
                "escape",
                "magic/passwd",
                "../etc/passwd",
                "/../../etc/passwd",
                "chain",
                "nowhere/x",
            ] {
                let error = open(&root, path, OFlags::PATH).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::NotFound, "{path}");
            }
            for path in ["/", "", ".", "..", "lib/../.."] {
                let file = open(&root, path, OFlags::PATH | OFlags::DIRECTORY).unwrap();
                assert_eq!(real_path(file.as_fd()).unwrap(), dir.path(), "{path}");
            }
            let errno = |path, flags| {
                open(&root, path, flags)
                    .unwrap_err()
                    .raw_os_error()
                    .unwrap()
            };
            assert_eq!(errno("loop", OFlags::PATH), Errno::LOOP.raw_os_error());
            assert_eq!(errno("lib/a/x", OFlags::PATH), Errno::NOTDIR.raw_os_error());
            assert_eq!(
                errno("lib/a", OFlags::PATH | OFlags::DIRECTORY),
                Errno::NOTDIR.raw_os_error()
            );
            assert_eq!(
                errno("escape", OFlags::RDONLY | OFlags::NOFOLLOW),
                Errno::LOOP.raw_os_error()
            );
        }
    }

    #[test]
    fn content_is_read_through_links() {
        use std::io::Read;
        let (_dir, root) = tree();
        for open in IMPLEMENTATIONS {
            let mut text = String::new();
            std::fs::File::from(open(&root, "lib/a", OFlags::RDONLY).unwrap())
                .read_to_string(&mut text)
                .unwrap();
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
            let escaped = IMPLEMENTATIONS
                .iter()
                .any(|open| (0..300).any(|_| open(&root, &long, OFlags::PATH).is_ok()));
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(!escaped);
        });
    }

    #[test]
    fn directories_are_made_below_what_exists() {
        let (dir, root) = tree();
        let mut created = Vec::new();
        root.create_dir_all(Path::new("lib/x/y"), &mut created, |_| Ok(()))
            .unwrap();
        assert!(dir.path().join("usr/lib/x/y").is_dir());
        assert_eq!(created.len(), 2);
        root.create_dir_all(Path::new("lib/x/y"), &mut created, |_| Ok(()))
            .unwrap();
        assert_eq!(created.len(), 2);
        for made in created.iter().rev() {
            rustix::fs::unlinkat(&*made.dir, &made.name, AtFlags::REMOVEDIR).unwrap();
        }
        assert!(!dir.path().join("usr/lib/x").try_exists().unwrap());
    }

    #[test]
    fn directories_are_made_only_where_they_may_be() {
        let (dir, root) = tree();
        let (mut created, mut asked) = (Vec::new(), Vec::new());
        let lib = dir.path().join("usr/lib");
        // Another process creates the first directory at the same time.
        let error = root.create_dir_all(Path::new("lib/x/y"), &mut created, |dir| {
            asked.push(real_path(dir.as_fd()).unwrap());
            if asked.len() == 2 {
                return Err(Errno::ROFS.into());
            }
            std::fs::create_dir(lib.join("x"))
        });
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(asked, [lib.clone(), lib.join("x")]);
        assert!(!lib.join("x/y").try_exists().unwrap());
        assert_eq!(created.len(), 0);
        let opened = root
            .create_dir_all(Path::new("lib/x"), &mut created, |_| panic!("it exists"))
            .unwrap();
        assert!(opened.created_below.is_none());
        asked.clear();
        let opened = root.create_dir_all(Path::new("lib/x/y/z"), &mut created, |dir| {
            asked.push(real_path(dir.as_fd()).unwrap());
            Ok(())
        });
        let below = opened.unwrap().created_below.unwrap();
        assert_eq!(real_path(below.as_fd()).unwrap(), lib.join("x"));
        assert_eq!(asked, [lib.join("x")], "what it creates may contain more");
    }

    #[test]
    fn what_stores_nothing_is_not_read() {
        let root = Root::open(Path::new("/")).unwrap();
        let open =
            |path: &str| root.open_stored(root.open_at(Path::new(path), OFlags::PATH).unwrap());
        // A regular file by its mode; reading it waits for the kernel's next message, and takes it from syslog.
        for path in ["/proc/kmsg", "/proc/version", "/sys/kernel/notes"] {
            assert!(
                open(path)
                    .unwrap_err()
                    .to_string()
                    .contains("does not store files"),
                "{path}"
            );
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        open(file.path().to_str().unwrap()).unwrap();
        assert!(open("/usr").is_err() && open("/dev/null").is_err());
        // Any file system is accepted if the root is on it too.
        let proc = Root::open(Path::new("/proc")).unwrap();
        proc.open_stored(proc.open_at(Path::new("version"), OFlags::PATH).unwrap())
            .unwrap();
    }

    #[test]
    fn a_path_is_never_opened_for_reading() {
        let (_dir, root) = tree();
        for flags in [OFlags::RDONLY, OFlags::empty(), OFlags::DIRECTORY] {
            let path = if flags.contains(OFlags::DIRECTORY) {
                "lib"
            } else {
                "lib/a"
            };
            let opened = root.open_at(Path::new(path), flags).unwrap();
            assert!(
                rustix::fs::fcntl_getfl(&opened)
                    .unwrap()
                    .contains(OFlags::PATH),
                "{flags:?}"
            );
            assert_eq!(
                rustix::io::read(&opened, &mut [0; 1]),
                Err(Errno::BADF),
                "{flags:?}"
            );
        }
    }

    #[test]
    fn a_dangling_symlink_in_the_way_is_refused() {
        let (dir, root) = tree();
        symlink("/nowhere", dir.path().join("usr/lib64")).unwrap();
        assert!(
            root.create_dir_all(Path::new("usr/lib64/x"), &mut Vec::new(), |_| Ok(()))
                .is_err()
        );
        assert!(!dir.path().join("nowhere").try_exists().unwrap());
        assert!(
            root.create_dir_all(Path::new("usr/lib/a/x"), &mut Vec::new(), |_| Ok(()))
                .is_err(),
            "a file in the way"
        );
    }
}
