//! Uses a directory of the host as `/`: symbolic links below it are followed, but never out of it.
//!
//! The directory is `/` on most hosts, `/run/nvidia/driver` if a container contains the driver, and a temporary directory in
//! tests.

mod basis;
mod listing;
mod open_dir;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, FileType, OFlags, Stat, statat};
use rustix::io::Errno;

use crate::paths::HostPath;
use crate::report::errno_text;
use crate::sys::in_root::{Root, real_path};
use crate::sys::proc_file::read_short;
pub use basis::Basis;
use basis::Lookups;
pub use open_dir::OpenDir;
use open_dir::{Look, Seen};

/// The size limit of [`Tree::read`] in bytes. The ld.so.cache of a large system has 1 MB.
const MAX_FILE: usize = 64 << 20;

/// An open directory that is used as `/`. Clones share the directories that were opened and the paths that could not be examined.
#[derive(Clone, Debug)]
pub struct Tree(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    root: Arc<Root>,
    /// The real path of the directory on the host.
    prefix: PathBuf,
    /// The directories that were opened, with the path that the caller gave. Most files are in a few directories, and a lookup
    /// in an open directory takes a third of the time that a path lookup takes.
    dirs: Mutex<Vec<(PathBuf, Arc<OpenDir>)>>,
    /// Paths that could not be examined although something may exist there. Most callers treat these as missing, so
    /// [`Tree::troubles`] reports them.
    troubles: Mutex<BTreeMap<PathBuf, io::Error>>,
    /// The lookups, if the tree records them
    lookups: Option<Mutex<Lookups>>,
}

/// A regular file below the tree, after all symbolic links. Its owner, size and times are not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegularFile {
    /// The path below the tree, with a leading slash.
    pub path: PathBuf,
    /// The path on the host.
    pub host: HostPath,
}

/// A file below the tree, after all symbolic links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedFile {
    /// The path below the tree, with a leading slash.
    pub path: PathBuf,
    /// The path on the host.
    pub host: HostPath,
    /// The type: a regular file, a directory, a device.
    pub kind: FileType,
    /// The major and minor number of a device node.
    pub device: (u32, u32),
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The permission bits, such as 0o660.
    pub mode: u32,
}

impl Tree {
    /// Opens a directory of the host.
    ///
    /// # Errors
    /// If it does not exist or is not a directory.
    pub fn open(path: &HostPath) -> io::Result<Self> {
        let root = Arc::new(Root::open(path.as_path())?);
        let prefix = match path.as_path() {
            path if path == Path::new("/") => path.to_owned(),
            _ => real_path(root.as_fd())?,
        };
        Ok(Self(Arc::new(Opened {
            root,
            prefix,
            dirs: Mutex::default(),
            troubles: Mutex::default(),
            lookups: None,
        })))
    }

    /// Returns the same tree without the directories that were opened, and without findings. A program that runs for a long time needs
    /// it, because a directory can be removed and created again.
    #[must_use]
    pub fn afresh(&self) -> Self {
        self.anew(None)
    }

    fn anew(&self, lookups: Option<Lookups>) -> Self {
        let Opened { root, prefix, .. } = &*self.0;
        let (root, prefix) = (Arc::clone(root), prefix.clone());
        Self(Arc::new(Opened {
            root,
            prefix,
            dirs: Mutex::default(),
            troubles: Mutex::default(),
            lookups: lookups.map(Mutex::new),
        }))
    }

    /// Returns the list in which lookups are recorded, if they are.
    fn lookups(&self) -> Option<MutexGuard<'_, Lookups>> {
        self.0.lookups.as_ref().map(lock)
    }

    /// Records that an answer depends on the content of a file that the caller has opened; see [`Self::basis`].
    pub fn note_content(&self, path: &Path, stat: &Stat) {
        if let Some(mut lookups) = self.lookups() {
            lookups.found(path, stat);
        }
    }

    /// Records that an answer depends on something that [`Self::basis`] cannot contain.
    pub fn note_unrecorded(&self) {
        if let Some(mut lookups) = self.lookups() {
            lookups.unrecorded();
        }
    }

    fn note_failure(&self, path: &Path, error: &io::Error) {
        if let Some(mut lookups) = self.lookups() {
            lookups.failed(path, error);
        }
    }

    /// Returns the file at `path` after all symbolic links.
    ///
    /// # Errors
    /// If nothing exists there, which includes a link out of the tree, or the path cannot be examined.
    pub fn locate(&self, path: &Path) -> io::Result<ResolvedFile> {
        self.noted(path, self.locate_by_name(path))
    }

    fn locate_by_name(&self, path: &Path) -> io::Result<ResolvedFile> {
        match self.follow(path, Look::Completely)? {
            Some((path, Seen::Stat(stat))) => {
                self.note_content(&path, &stat);
                Ok(self.located(path, &stat))
            }
            _ => self.resolve(path),
        }
    }

    /// Returns the regular file at `path` after all symbolic links, or `None` if another file is there. Only its name and its type are
    /// read: a program that uses the file opens and checks it.
    ///
    /// # Errors
    /// The errors of [`Self::locate`].
    pub fn regular_file(&self, path: &Path) -> io::Result<Option<RegularFile>> {
        self.regular(path, Look::Type)
    }

    /// Like [`Self::regular_file`], for a path that is probably a symbolic link.
    ///
    /// # Errors
    /// The errors of [`Self::locate`].
    pub fn linked_file(&self, path: &Path) -> io::Result<Option<RegularFile>> {
        self.regular(path, Look::Link)
    }

    fn regular(&self, path: &Path, look: Look) -> io::Result<Option<RegularFile>> {
        let found = self.noted(
            path,
            self.follow(path, look).and_then(|found| match found {
                Some((path, seen)) => Ok((path, seen.kind())),
                None => self
                    .resolve(path)
                    .map(|located| (located.path, located.kind)),
            }),
        );
        let (path, kind) = found?;
        Ok((kind == FileType::RegularFile).then(|| RegularFile {
            host: HostPath::new(self.on_host(&path)),
            path,
        }))
    }

    /// Looks a name up in its directory, which is probably open already, and follows links as the kernel does. Returns the real path,
    /// or `None` if the kernel has to follow the links.
    fn follow(&self, path: &Path, look: Look) -> io::Result<Option<(PathBuf, Seen)>> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Ok(None);
        };
        let (mut dir, mut name, mut look) = (self.dir(parent)?, name.to_owned(), look);
        // Debian's alternatives use four links: `libcuda.so.1`, one in /etc/alternatives, `current/libcuda.so.1`, `libcuda.so.535`. The
        // kernel follows a longer chain.
        for _ in 0..6 {
            let text = match dir.look(&name, look)? {
                Seen::Link(text) => text,
                seen => return Ok(Some((dir.path.join(name), seen))),
            };
            let target = Path::new(&text);
            match target.components().collect::<Vec<_>>().as_slice() {
                [Component::Normal(next)] if *next == text => {
                    name = text;
                    look = look.after_link();
                }
                _ if dir.path.starts_with("/proc") || names_a_directory(&text) => return Ok(None), // magic links have a text, too
                _ => {
                    let target = dir.path.join(target);
                    let (Some(parent), Some(next)) = (target.parent(), target.file_name()) else {
                        return Ok(None);
                    };
                    name = next.to_owned();
                    dir = self.dir(parent)?;
                }
            }
        }
        Ok(None)
    }

    /// Has the kernel follow all links.
    fn resolve(&self, path: &Path) -> io::Result<ResolvedFile> {
        self.note_unrecorded();
        let fd = self.0.root.open_at(path, OFlags::PATH)?;
        Ok(self.located(self.path_of(&fd)?, &rustix::fs::fstat(&fd)?))
    }

    fn located(&self, path: PathBuf, stat: &Stat) -> ResolvedFile {
        ResolvedFile {
            kind: FileType::from_raw_mode(stat.st_mode),
            device: (
                rustix::fs::major(stat.st_rdev),
                rustix::fs::minor(stat.st_rdev),
            ),
            uid: stat.st_uid,
            gid: stat.st_gid,
            mode: stat.st_mode & 0o7777,
            host: HostPath::new(self.on_host(&path)),
            path,
        }
    }

    /// Returns the path on the host of a path below this directory. Symbolic links are not followed.
    #[must_use]
    pub fn on_host(&self, path: &Path) -> PathBuf {
        self.0.prefix.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the path below this directory of an open file.
    fn path_of(&self, fd: &OwnedFd) -> io::Result<PathBuf> {
        let real = real_path(fd.as_fd())?;
        let below = real
            .strip_prefix(&self.0.prefix)
            .map_err(|_| io::Error::from(io::ErrorKind::NotFound))?;
        Ok(Path::new("/").join(below))
    }

    fn dir(&self, path: &Path) -> io::Result<Arc<OpenDir>> {
        if let Some((_, dir)) = lock(&self.0.dirs)
            .iter()
            .find(|(known, _)| known.as_os_str() == path.as_os_str())
        {
            return Ok(Arc::clone(dir));
        }
        let opened = self.open_here(path);
        let dir = Arc::new(opened.inspect_err(|error| self.note_failure(path, error))?);
        if let Some(mut lookups) = self.lookups() {
            let stat = rustix::fs::fstat(&dir.fd)?;
            // A link on the path can change, and so can the directory to which it leads.
            lookups.found(path, &stat);
            lookups.found(&dir.path, &stat);
        }
        lock(&self.0.dirs).push((path.to_owned(), Arc::clone(&dir)));
        Ok(dir)
    }

    fn open_here(&self, path: &Path) -> io::Result<OpenDir> {
        let root = &self.0.root;
        if let Some(fd) = root.open_plain_dir(path)? {
            return Ok(OpenDir::new(fd, path.components().collect()));
        }
        let fd = root.open_at(path, OFlags::PATH | OFlags::DIRECTORY)?;
        let path = self.path_of(&fd)?;
        Ok(OpenDir::new(fd, path))
    }

    /// Opens a regular file for reading.
    ///
    /// # Errors
    /// If it is missing or not a regular file.
    pub fn open_file(&self, path: &Path) -> Result<File> {
        self.open_known(path).map(|(file, _)| file)
    }

    fn open_to_read(&self, path: &Path) -> io::Result<File> {
        // Without O_NONBLOCK, opening a fifo in its place would block the start of the container.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let opened = self.0.root.open_on_host(path, flags);
        let opened = opened.inspect_err(|error| self.note_failure(path, error));
        Ok(File::from(self.noted(path, opened)?))
    }

    fn open_known(&self, path: &Path) -> Result<(File, Stat)> {
        let file = self.open_to_read(path)?;
        let stat = rustix::fs::fstat(&file)?;
        self.note_content(path, &stat);
        anyhow::ensure!(
            FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
            "not a regular file"
        );
        Ok((file, stat))
    }

    /// Reads a regular file.
    ///
    /// # Errors
    /// If it is missing, not a regular file, or larger than 64 MiB.
    pub fn read(&self, path: &Path) -> Result<Vec<u8>> {
        let (file, stat) = self.open_known(path)?;
        crate::read::read_known(&file, &stat, MAX_FILE)
    }

    /// Reads a file as text.
    ///
    /// # Errors
    /// The errors of [`Self::read`].
    pub fn read_text(&self, path: &Path) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.read(path)?).into_owned())
    }

    /// Reads a file of the kernel below /proc or /sys, which has no long records.
    ///
    /// # Errors
    /// If it is missing or cannot be read.
    pub fn read_kernel_file(&self, path: &Path) -> io::Result<Vec<u8>> {
        let content = self
            .open_to_read(path)
            .map(|file| file.take(MAX_FILE as u64));
        let content = content.and_then(read_short)?;
        if let Some(mut lookups) = self.lookups() {
            lookups.kernel_file(path, &content);
        }
        Ok(content)
    }

    /// Like [`Self::read_kernel_file`], as text.
    ///
    /// # Errors
    /// The errors of [`Self::read_kernel_file`].
    pub fn read_kernel_text(&self, path: &Path) -> io::Result<String> {
        Ok(String::from_utf8_lossy(&self.read_kernel_file(path)?).into_owned())
    }

    /// Reads the first bytes of a file of the kernel.
    #[must_use]
    pub fn kernel_bytes<const N: usize>(&self, path: &Path) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.open_to_read(path).ok()?.read_exact(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Reads the first bytes of a file, which show its format.
    #[must_use]
    pub fn header<const N: usize>(&self, path: &Path) -> Option<[u8; N]> {
        let mut header = [0; N];
        self.open_file(path).ok()?.read_exact(&mut header).ok()?;
        Some(header)
    }

    /// Returns the sorted names in a directory, or none if it cannot be read.
    #[must_use]
    pub fn names(&self, dir: &Path) -> Vec<OsString> {
        match self.listed(dir) {
            Some((names, _)) => names,
            None => Vec::new(),
        }
    }

    /// Returns the sorted names in a directory that begin with a prefix, each with its state without following links, or none if the
    /// directory cannot be read. It is opened and read again by each call.
    #[must_use]
    pub fn entries(&self, dir: &Path, prefix: &str) -> Vec<(OsString, Option<Stat>)> {
        let mut entries = Vec::new();
        let Some((names, opened)) = self.listed(dir) else {
            return entries;
        };
        for name in names {
            if !name.as_bytes().starts_with(prefix.as_bytes()) {
                continue;
            }
            let fd = opened.fd().ok();
            let stat = fd.and_then(|fd| statat(fd, &name, AtFlags::SYMLINK_NOFOLLOW).ok());
            entries.push((name, stat));
        }
        entries
    }

    fn listed(&self, dir: &Path) -> Option<(Vec<OsString>, rustix::fs::Dir)> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let opened = self.noted(dir, self.0.root.open_on_host(dir, flags));
        let opened = opened.inspect_err(|error| self.note_failure(dir, error));
        let opened = opened.ok()?;
        if let Some(mut lookups) = self.lookups() {
            lookups.found(dir, &rustix::fs::fstat(&opened).ok()?);
        }
        let mut opened = rustix::fs::Dir::new(opened).ok()?;
        let mut names = Vec::new();
        for entry in opened.by_ref().flatten() {
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(OsString::from_vec(name.to_vec()));
            }
        }
        names.sort();
        Some((names, opened))
    }

    /// Opens a directory, to examine many files in it.
    ///
    /// # Errors
    /// If it is missing or not a directory.
    pub fn open_dir(&self, path: &Path) -> io::Result<Arc<OpenDir>> {
        self.noted(path, self.dir(path))
    }

    /// Whether a directory does not exist. Returns false if that is unknown.
    #[must_use]
    pub fn lacks_dir(&self, path: &Path) -> bool {
        matches!(self.dir(path), Err(error) if is_missing(&error))
    }

    /// Announces that many names are looked up in a directory.
    pub fn expect_lookups(&self, dir: &Path) {
        if let Ok(dir) = self.dir(dir) {
            dir.expect_lookups();
        }
    }

    /// Returns the directories that exist or cannot be examined, each once: on many distributions, `/bin` is a link to `/usr/bin`.
    #[must_use]
    pub fn existing(&self, dirs: &'static [&str]) -> Vec<&'static Path> {
        let mut seen: Vec<Arc<OpenDir>> = Vec::new();
        let mut existing = Vec::new();
        for path in dirs.iter().map(Path::new) {
            match self.dir(path) {
                Ok(dir)
                    if seen
                        .iter()
                        .any(|other| other.path.as_os_str() == dir.path.as_os_str()) =>
                {
                    continue;
                }
                Ok(dir) => seen.push(dir),
                Err(error) if is_missing(&error) => continue,
                Err(_) => {} // a lookup of a file in this directory reports the error
            }
            existing.push(path);
        }
        existing
    }

    /// Returns the tree that contains `path`, a file or a directory below /dev, /proc or /sys: this one if it exists here, because a driver
    /// container mounts these file systems, otherwise the host's `/`.
    ///
    /// # Errors
    /// If `/` cannot be opened, or the path cannot be examined.
    pub fn owner_of(&self, path: &str) -> Result<Self> {
        self.owner_on(None, path)
    }

    /// Like [`Self::owner_of`], on a host that is a directory.
    ///
    /// # Errors
    /// The errors of [`Self::owner_of`].
    pub fn owner_on(&self, host: Option<&Self>, path: &str) -> Result<Self> {
        // A directory stays open, because files in it are looked up next.
        let path = Path::new(path);
        let found = match path.starts_with("/dev") {
            true => self.locate_by_name(path).map(drop),
            false => match self.dir(path) {
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                    self.locate_by_name(path).map(drop)
                }
                dir => dir.map(drop),
            },
        };
        let here = match found {
            Ok(()) => true,
            Err(error) if is_missing(&error) => false,
            Err(error) => {
                return Err(anyhow::Error::new(error).context(format!("cannot examine {path:?}")));
            }
        };
        match host {
            _ if here => Ok(self.clone()),
            Some(host) => Ok(host.clone()),
            None => Ok(Self::open(&HostPath::new("/"))?),
        }
    }

    /// Returns each path that could not be examined so far, and why. A path at which nothing exists is not one of them.
    #[must_use]
    pub fn troubles(&self) -> Vec<(PathBuf, String)> {
        let troubles = lock(&self.0.troubles);
        troubles
            .iter()
            .map(|(path, error)| (self.on_host(path), text_of(error)))
            .collect()
    }

    /// Returns the open directory.
    pub fn as_root(&self) -> &Root {
        &self.0.root
    }

    /// Stores an error for [`Self::troubles`], unless it means that nothing exists at `path`.
    ///
    /// # Errors
    /// The error of `result`.
    pub fn noted<T>(&self, path: &Path, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            if !is_missing(error) {
                let error = io::Error::from_raw_os_error(error.raw_os_error().unwrap_or_default());
                lock(&self.0.troubles).insert(path.to_owned(), error);
            }
        })
    }

    /// Returns the path below this directory, with a leading slash, of a file on the host.
    ///
    /// # Errors
    /// If the file is not below this directory.
    pub fn inside(&self, file: &HostPath) -> Result<PathBuf> {
        let below = file
            .as_path()
            .strip_prefix(&self.0.prefix)
            .with_context(|| format!("{file} is not below {}", self.path()))?;
        Ok(Path::new("/").join(below))
    }

    /// Whether both are clones of one tree, with the same [`Self::troubles`].
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns the real path of the directory on the host.
    #[must_use]
    pub fn path(&self) -> HostPath {
        HostPath::new(&self.0.prefix)
    }
}

/// Whether the text of a link ends in a way that only leads to directories, which the kernel checks.
fn names_a_directory(text: &OsStr) -> bool {
    let text = text.as_bytes();
    [&b"/"[..], b"/.", b"/.."]
        .iter()
        .any(|end| text.ends_with(end))
}

fn text_of(error: &io::Error) -> String {
    Errno::from_io_error(error).map_or_else(|| error.to_string(), errno_text)
}

/// Locks a list, even after a panic in another thread: each list is changed in one step, so it is never left inconsistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether an error means that nothing exists at the path. ENOTDIR means that too: a file is in place of a directory.
pub fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_directory_that_was_created_again_is_opened_afresh() {
        let dir = tempfile::tempdir().unwrap();
        let caps = dir.path().join("caps");
        let create = |name: &str| {
            std::fs::create_dir(&caps).unwrap();
            std::fs::write(caps.join(name), "").unwrap();
        };
        create("old");
        let tree = Tree::open(&HostPath::new(dir.path())).unwrap();
        assert!(tree.locate(Path::new("/caps/old")).is_ok());
        std::fs::remove_dir_all(&caps).unwrap();
        create("new");
        assert!(
            tree.locate(Path::new("/caps/new")).is_err(),
            "the old directory is open"
        );
        assert!(tree.afresh().locate(Path::new("/caps/new")).is_ok());
    }

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
        assert_eq!(
            located.host.as_path(),
            dir.path().join("usr/lib64/libcuda.so.535")
        );
        assert!(root.locate(Path::new("/lib64/outside")).is_err());
        assert_eq!(
            root.names(Path::new("/lib64")),
            ["libcuda.so.1", "libcuda.so.535", "outside"]
        );
        assert_eq!(root.read(Path::new("/lib64/libcuda.so.1")).unwrap(), b"elf");
    }

    /// Debian's alternatives, and links that only the kernel follows. The names are looked up before and after their directories are
    /// listed.
    #[test]
    fn links_lead_where_the_kernel_follows_them() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        for path in ["etc/alternatives", "usr/lib/nvidia/tesla", "usr/lib/empty"] {
            std::fs::create_dir_all(at(path)).unwrap();
        }
        std::fs::write(at("usr/lib/nvidia/tesla/libcuda.so.535"), "elf").unwrap();
        for (text, link) in [
            ("/etc/alternatives/libcuda", "usr/lib/libcuda.so.1"),
            (
                "../../usr/lib/nvidia/current/libcuda.so.1",
                "etc/alternatives/libcuda",
            ),
            ("tesla", "usr/lib/nvidia/current"),
            ("libcuda.so.535", "usr/lib/nvidia/tesla/libcuda.so.1"),
            ("../../../../../etc/alternatives/libcuda", "usr/lib/up"),
            ("nvidia/current/../current/libcuda.so.1", "usr/lib/around"),
            ("nvidia/current/libcuda.so.1/", "usr/lib/slash"),
            ("nvidia/current/.", "usr/lib/dot"),
            ("nvidia/current", "usr/lib/directory"),
            ("nvidia/missing/libcuda.so.1", "usr/lib/dangling"),
            ("/etc/hostname", "usr/lib/outside"),
            ("a1", "usr/lib/a0"),
            ("a0", "usr/lib/a1"),
        ] {
            symlink(text, at(link)).unwrap();
        }
        for number in 0..10 {
            symlink(
                format!("c{}", number + 1),
                at(&format!("usr/lib/c{number}")),
            )
            .unwrap();
        }
        std::fs::write(at("usr/lib/c10"), "").unwrap();
        let names = [
            "libcuda.so.1",
            "up",
            "around",
            "slash",
            "dot",
            "directory",
            "dangling",
            "outside",
            "a0",
            "c0",
            "no",
        ];
        let tree = Tree::open(&HostPath::new(dir.path())).unwrap();
        for _ in 0..2 {
            for path in names.map(|name| Path::new("/usr/lib").join(name)) {
                let by_kernel = tree.resolve(&path).map_err(|error| error.raw_os_error());
                let located = tree.locate(&path).map_err(|error| error.raw_os_error());
                assert_eq!(located, by_kernel, "{path:?}");
                let real =
                    by_kernel.map(|real| (real.kind == FileType::RegularFile).then_some(real.host));
                for found in [tree.regular_file(&path), tree.linked_file(&path)] {
                    let found = found
                        .map(|file| file.map(|file| file.host))
                        .map_err(|error| error.raw_os_error());
                    assert_eq!(found, real, "{path:?}");
                }
            }
        }
        let dirs = lock(&tree.0.dirs);
        let (_, listed) = dirs
            .iter()
            .find(|(path, _)| path == Path::new("/usr/lib"))
            .unwrap();
        assert!(
            listed.listing.get().is_some_and(Option::is_some),
            "it is small"
        );
    }

    #[test]
    fn magic_links_are_not_followed() {
        let tree = Tree::open(&HostPath::new("/")).unwrap();
        let file = std::fs::File::open("/etc/passwd").unwrap();
        let path = PathBuf::from(crate::sys::in_root::fd_path(file.as_fd()));
        assert!(tree.locate(&path).is_err() && tree.linked_file(&path).is_err());
        assert!(tree.locate(Path::new("/proc/self/status")).is_ok());
    }

    #[test]
    fn paths_that_cannot_be_examined_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        symlink("loop", dir.path().join("loop")).unwrap();
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        assert!(root.locate(Path::new("/nothing/x")).is_err() && root.troubles().is_empty());
        assert!(root.locate(Path::new("/loop")).is_err());
        let (path, why) = root.troubles().remove(0);
        assert_eq!(
            (path, &*why),
            (
                dir.path().join("loop"),
                "too many levels of symbolic links (ELOOP)"
            )
        );
        assert!(root.owner_of("/loop").is_err() && root.owner_of("/nothing").is_ok());
        std::fs::create_dir(dir.path().join("dev")).unwrap();
        for file in ["version", "dev/nvidiactl"] {
            std::fs::write(dir.path().join(file), "").unwrap();
        }
        for (path, is_here) in [
            ("/version", true),
            ("/dev", true),
            ("/dev/nvidiactl", true),
            ("/dev/no", false),
            ("/version/no", false),
        ] {
            assert_eq!(root.owner_of(path).unwrap().is(&root), is_here, "{path}");
        }
    }
}
