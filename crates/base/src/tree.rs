//! A directory of the host that is used as `/`: symbolic links below it are followed, but never out of it. `/` itself on most
//! hosts, `/run/nvidia/driver` where the driver lives in a container, a directory of a test.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use nix::errno::Errno;
use rustix::fs::{AtFlags, FileType, OFlags, Stat};

use crate::paths::HostPath;
use crate::report::{Finding, catalog, errno_text};
use crate::sys::in_root::{Root, real_path};

/// Files read whole from the host: ld.so.cache of a large system has 1 MB.
const MAX_FILE: usize = 64 << 20;

/// An open directory that is used as `/`. Clones share what was opened and what could not be looked at.
#[derive(Clone, Debug)]
pub struct Tree(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    root: Root,
    /// The real path of the directory on the host.
    prefix: PathBuf,
    /// The directories that files were looked for in, by the path that was given: most of the files are in a few of them,
    /// and to look in an open directory costs a third of finding the way anew.
    dirs: Mutex<Vec<(PathBuf, Arc<OpenDir>)>>,
    /// Paths at which something exists, or may exist, that could not be examined. Most callers treat that as missing, but it
    /// has to be reported.
    troubles: Mutex<BTreeMap<PathBuf, io::Error>>,
}

/// A file below the tree, all symlinks followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Its path below the tree, with a leading slash.
    pub path: PathBuf,
    /// Its path on the host.
    pub host: HostPath,
    /// Its type: a regular file, a directory, a device.
    pub kind: FileType,
    /// For a device node: major and minor.
    pub device: (u32, u32),
    /// The user that owns it.
    pub uid: u32,
    /// The group that owns it.
    pub gid: u32,
    /// Its permissions: 0o660.
    pub mode: u32,
}

impl Tree {
    /// Opens this directory of the host.
    ///
    /// # Errors
    /// If it does not exist or is not a directory.
    pub fn open(path: &HostPath) -> io::Result<Self> {
        let root = Root::open(path.as_path())?;
        let prefix = match path.as_path() {
            path if path == Path::new("/") => path.to_owned(),
            _ => real_path(root.as_fd())?,
        };
        Ok(Self(Arc::new(Opened { root, prefix, dirs: Mutex::default(), troubles: Mutex::default() })))
    }

    /// What `path` leads to, all symbolic links followed.
    ///
    /// # Errors
    /// If nothing exists there, or a link leads out of the tree.
    pub fn locate(&self, path: &Path) -> io::Result<Located> {
        self.noted(path, self.look_at(path))
    }

    fn look_at(&self, path: &Path) -> io::Result<Located> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return self.resolve(path) };
        let dir = self.dir(parent)?;
        match dir.look_at(name)? {
            Some((name, stat)) => Ok(self.located(dir.path.join(name), &stat)),
            None => self.resolve(path),
        }
    }

    /// For a path with a link to another directory in it: the kernel follows all of them.
    fn resolve(&self, path: &Path) -> io::Result<Located> {
        let fd = self.0.root.open_at(path, OFlags::PATH)?;
        Ok(self.located(self.path_of(&fd)?, &rustix::fs::fstat(&fd)?))
    }

    fn located(&self, path: PathBuf, stat: &Stat) -> Located {
        Located {
            kind: FileType::from_raw_mode(stat.st_mode),
            device: (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)),
            uid: stat.st_uid,
            gid: stat.st_gid,
            mode: stat.st_mode & 0o7777,
            host: HostPath::new(self.on_host(&path)),
            path,
        }
    }

    /// The path on the host of a path below this directory; symbolic links are not followed.
    #[must_use]
    pub fn on_host(&self, path: &Path) -> PathBuf {
        self.0.prefix.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The path below this root of something open.
    fn path_of(&self, fd: &OwnedFd) -> io::Result<PathBuf> {
        let real = real_path(fd.as_fd())?;
        let below = real.strip_prefix(&self.0.prefix).map_err(|_| io::Error::from(io::ErrorKind::NotFound))?;
        Ok(Path::new("/").join(below))
    }

    fn dir(&self, path: &Path) -> io::Result<Arc<OpenDir>> {
        if let Some((_, dir)) = lock(&self.0.dirs).iter().find(|(known, _)| known.as_os_str() == path.as_os_str()) {
            return Ok(Arc::clone(dir));
        }
        let dir = match self.0.root.open_plain_dir(path)? {
            Some(fd) => OpenDir { fd, path: path.components().collect() },
            None => {
                let fd = self.0.root.open_at(path, OFlags::PATH | OFlags::DIRECTORY)?;
                OpenDir { path: self.path_of(&fd)?, fd }
            }
        };
        let dir = Arc::new(dir);
        lock(&self.0.dirs).push((path.to_owned(), Arc::clone(&dir)));
        Ok(dir)
    }

    /// Opens a regular file for reading.
    ///
    /// # Errors
    /// If it is missing or not a regular file.
    pub fn open_file(&self, path: &Path) -> Result<File> {
        // Non-blocking: a fifo in its place must not stop the container start.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(self.noted(path, self.0.root.open_at(path, flags))?);
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
        anyhow::ensure!(kind == FileType::RegularFile, "not a regular file");
        Ok(file)
    }

    /// Reads a regular file.
    ///
    /// # Errors
    /// If it is missing, not a regular file, or larger than 64 MiB.
    pub fn read(&self, path: &Path) -> Result<Vec<u8>> {
        crate::read::read_file_limited(&self.open_file(path)?, MAX_FILE)
    }

    /// The start of a file, where it says what it is.
    #[must_use]
    pub fn header<const N: usize>(&self, path: &Path) -> Option<[u8; N]> {
        let mut header = [0; N];
        self.open_file(path).ok()?.read_exact(&mut header).ok()?;
        Some(header)
    }

    /// The names in a directory, sorted; none if it cannot be read.
    #[must_use]
    pub fn names(&self, dir: &Path) -> Vec<OsString> {
        let opened = self.noted(dir, self.0.root.open_at(dir, OFlags::RDONLY | OFlags::DIRECTORY));
        let Ok(fd) = opened else { return Vec::new() };
        let Ok(entries) = rustix::fs::Dir::new(fd) else { return Vec::new() };
        let names = entries
            .filter_map(|entry| Some(OsString::from_vec(entry.ok()?.file_name().to_bytes().to_vec())))
            .filter(|name| name != "." && name != "..");
        let mut names: Vec<OsString> = names.collect();
        names.sort();
        names
    }

    /// Opens a directory, to examine many files in it.
    ///
    /// # Errors
    /// If it is missing or not a directory.
    pub fn open_dir(&self, path: &Path) -> io::Result<Arc<OpenDir>> {
        self.noted(path, self.dir(path))
    }

    /// Those of these directories that there are or may be, each once: distributions make `/bin` a link to `/usr/bin`.
    #[must_use]
    pub fn existing(&self, dirs: &'static [&str]) -> Vec<&'static Path> {
        let mut seen: Vec<Arc<OpenDir>> = Vec::new();
        let is_another = |path: &&Path| match self.dir(path) {
            Ok(dir) if seen.iter().any(|other| other.path.as_os_str() == dir.path.as_os_str()) => false,
            Ok(dir) => {
                seen.push(dir);
                true
            }
            // Who looks for a file in it will say what is wrong.
            Err(error) => !is_missing(&error),
        };
        dirs.iter().map(Path::new).filter(is_another).collect()
    }

    /// Where the device nodes and /proc are that belong to this root: the root itself if it has them (a driver
    /// container binds them), else the host's `/`.
    ///
    /// # Errors
    /// If `/` cannot be opened, or whether the root has them cannot be examined.
    pub fn owner_of(&self, path: &str) -> Result<Self> {
        let here = match self.0.root.open_at(Path::new(path), OFlags::PATH) {
            Ok(_) => true,
            Err(error) if is_missing(&error) => false,
            Err(error) => return Err(anyhow::Error::new(error).context(format!("cannot look at {path:?}"))),
        };
        if here { Ok(self.clone()) } else { Ok(Self::open(&HostPath::new("/"))?) }
    }

    /// A finding for each path that could not be examined so far, for a reason other than that nothing exists there.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        let troubles = lock(&self.0.troubles);
        let finding = |(path, error): (&PathBuf, &io::Error)| {
            let what = error.raw_os_error().map_or_else(|| error.to_string(), |code| errno_text(Errno::from_raw(code)));
            let path = self.on_host(path);
            Finding::of(
                &catalog::UNREADABLE,
                format!("cannot look at {path:?}: {what}"),
                format!("run \"stat {}\" as root", path.display()),
            )
        };
        troubles.iter().map(finding).collect()
    }

    /// The open directory itself.
    pub fn as_root(&self) -> &Root {
        &self.0.root
    }

    /// Keeps an error for [`Self::findings`], unless it means that nothing is at `path`.
    pub fn noted<T>(&self, path: &Path, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            if !is_missing(error) {
                let error = io::Error::from_raw_os_error(error.raw_os_error().unwrap_or_default());
                lock(&self.0.troubles).insert(path.to_owned(), error);
            }
        })
    }

    /// The path below this root, with a leading slash, of a file that was located in it.
    ///
    /// # Errors
    /// If it is not below it.
    pub fn inside(&self, file: &HostPath) -> Result<PathBuf> {
        let below = file.as_path().strip_prefix(&self.0.prefix).with_context(|| format!("{file} is outside"))?;
        Ok(Path::new("/").join(below))
    }

    /// Whether both are clones of one tree, which share [`Self::findings`].
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The real path of the directory on the host.
    #[must_use]
    pub fn path(&self) -> HostPath {
        HostPath::new(&self.0.prefix)
    }
}

/// An open directory below a tree.
#[derive(Debug)]
pub struct OpenDir {
    fd: OwnedFd,
    /// Its path below the tree, with a leading slash, after all symlinks
    path: PathBuf,
}

impl OpenDir {
    /// What is at `name` in it, links not followed; `None` if nothing is, or it cannot be looked at.
    #[must_use]
    pub fn stat(&self, name: &str) -> Option<Stat> {
        rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).ok()
    }

    /// What `name` leads to, and its name, if that is in this directory too, as libraries and their links are.
    fn look_at(&self, name: &OsStr) -> io::Result<Option<(OsString, Stat)>> {
        let mut name = name.to_owned();
        // As many as are in use: `libcuda.so` → `libcuda.so.1` → `libcuda.so.535`. The kernel judges a longer chain.
        for _ in 0..4 {
            let stat = rustix::fs::statat(&self.fd, &name, AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
                return Ok(Some((name, stat)));
            }
            let text = OsString::from_vec(rustix::fs::readlinkat(&self.fd, &name, Vec::new())?.into_bytes());
            match Path::new(&text).components().collect::<Vec<_>>().as_slice() {
                [Component::Normal(next)] if *next == text => name = text,
                _ => return Ok(None),
            }
        }
        Ok(None)
    }
}

/// A panic elsewhere leaves both lists as they were: each is changed in one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file where a directory would have to be is as good as nothing.
pub fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn symlinks_are_followed_inside_only() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("usr/lib64")).unwrap();
        std::fs::write(dir.path().join("usr/lib64/libcuda.so.535"), "elf").unwrap();
        symlink("libcuda.so.535", dir.path().join("usr/lib64/libcuda.so.1")).unwrap();
        symlink("/usr/lib64", dir.path().join("lib64")).unwrap();
        symlink("/etc/hostname", dir.path().join("usr/lib64/outside")).unwrap();
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        let located = root.locate(Path::new("/lib64/libcuda.so.1")).unwrap();
        assert_eq!(located.path, Path::new("/usr/lib64/libcuda.so.535"));
        assert_eq!(located.host.as_path(), dir.path().join("usr/lib64/libcuda.so.535"));
        assert!(root.locate(Path::new("/lib64/outside")).is_err());
        assert_eq!(root.names(Path::new("/lib64")), ["libcuda.so.1", "libcuda.so.535", "outside"]);
        assert_eq!(root.read(Path::new("/lib64/libcuda.so.1")).unwrap(), b"elf");
    }

    #[test]
    fn what_cannot_be_looked_at_is_said() {
        let dir = tempfile::tempdir().unwrap();
        symlink("loop", dir.path().join("loop")).unwrap();
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        assert!(root.locate(Path::new("/nothing/x")).is_err() && root.findings().is_empty());
        assert!(root.locate(Path::new("/loop")).is_err());
        assert!(root.findings()[0].what.ends_with("/loop\": too many symbolic links encountered (ELOOP)"));
        assert!(root.owner_of("/loop").is_err() && root.owner_of("/nothing").is_ok());
    }
}
