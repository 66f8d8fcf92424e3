//! The container's side of each step. From here on there are only fds of the rootfs and names below it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, StatVfsMountFlags};
use rustix::io::Errno;

use super::container::is_missing;
use super::linker_cache;
use super::prepare::Prepared;
use crate::finding::Finding;
use crate::lower::live::CacheEntry;
use crate::paths::ContainerPath;
use crate::sys::in_root::{Created, Root};
use crate::sys::mount::{self, MountAttrs};

/// A container whose mount namespace we are in, and what we did to it.
#[derive(Debug)]
pub struct Target {
    rootfs: Root,
    done: Vec<Done>,
    /// Files mounted so far
    mounts: BTreeMap<ContainerPath, OwnedFd>,
    findings: Vec<Finding>,
}

/// What undoing has to take back, newest last.
#[derive(Debug)]
enum Done {
    Created(Created),
    Mounted(OwnedFd),
    /// A symlink of the image's that ours replaced
    Replaced {
        dir: OwnedFd,
        name: PathBuf,
        text: PathBuf,
    },
}

/// What is at a name in a directory.
enum Present {
    Nothing,
    Link(PathBuf),
    Other(OwnedFd, Stat),
}

impl Target {
    /// `rootfs` must have been opened in the mount namespace that we are in now.
    #[must_use]
    pub const fn new(rootfs: Root) -> Self {
        Self { rootfs, done: Vec::new(), mounts: BTreeMap::new(), findings: Vec::new() }
    }

    /// What there is to say about the container.
    #[must_use]
    pub fn findings(self) -> Vec<Finding> {
        self.findings
    }

    /// Takes one step, or takes back what it got done of it.
    ///
    /// # Errors
    /// If the container's file system is in the way.
    pub fn apply(&mut self, step: Prepared<'_>) -> Result<()> {
        let before = self.done.len();
        let result = match step {
            Prepared::Mount { mount, target, device } => self.mount(mount, target, device),
            Prepared::MountDirectory { mount, target } => self.mount_directory(&mount, target),
            Prepared::Link { link, text, file } => self.link(link, text, file),
            Prepared::MaskProc { tmpfs, mounts } => self.mask_proc(tmpfs, mounts),
            Prepared::UpdateLinkerCache(entries) => self.update_linker_cache(entries),
        };
        if result.is_err() {
            take_back(self.done.split_off(before));
        }
        result
    }

    /// Adds to what there is to say about the container.
    pub fn note(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    /// Takes back what was done, as far as it goes: the container will not start anyway.
    pub fn undo(self) {
        // Open mounts keep their mount points busy.
        drop(self.mounts);
        take_back(self.done);
    }

    /// The open directory in which `path` lies, made if necessary.
    fn parent(&mut self, path: &ContainerPath) -> Result<OwnedFd> {
        let dir = path.parent();
        let dir = dir.as_ref().map_or_else(|| Path::new("/"), ContainerPath::relative);
        let mut created = Vec::new();
        let opened = self.rootfs.create_dir_all(dir, &mut created);
        self.done.extend(created.into_iter().map(Done::Created));
        opened.with_context(|| format!("open its directory {:?}", Path::new("/").join(dir)))
    }

    fn mount(&mut self, mount: OwnedFd, target: &ContainerPath, device: Option<(u32, u32)>) -> Result<()> {
        let dir = self.parent(target)?;
        let name = target.file_name();
        let point = match present(&dir, name)? {
            Present::Other(_, stat) if is_device(&stat, device) => return Ok(()), // the engine made it already
            Present::Other(point, stat) => {
                ensure!(
                    FileType::from_raw_mode(stat.st_mode) != FileType::Directory,
                    "the image has a directory in its place"
                );
                if same_file(&stat, &rustix::fs::fstat(&mount)?) {
                    return Ok(()); // a second run
                }
                point
            }
            Present::Link(text) => {
                // Followed, it would mount or create wherever the image likes (CVE-2024-0133).
                rustix::fs::unlinkat(&dir, name, AtFlags::empty())?;
                self.done.push(Done::Replaced { dir: dir.try_clone()?, name: name.into(), text });
                self.create(&dir, name)?
            }
            Present::Nothing => self.create(&dir, name)?,
        };
        mount::attach(&mount, point).context("move_mount")?;
        self.done.push(Done::Mounted(mount.try_clone()?));
        self.mounts.insert(target.clone(), mount);
        Ok(())
    }

    /// An empty file as a mount point.
    fn create(&mut self, dir: &OwnedFd, name: &OsStr) -> Result<OwnedFd> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file =
            rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o644)).context("create its mount point")?;
        self.done.push(Done::Created(Created { dir: dir.try_clone()?, name: name.into(), is_dir: false }));
        Ok(file)
    }

    fn link(&mut self, link: &ContainerPath, text: &Path, file: &ContainerPath) -> Result<()> {
        let dir = self.parent(link)?;
        let name = link.file_name();
        match present(&dir, name)? {
            Present::Link(old) if old == text => {}
            Present::Link(old) => {
                replace_link(&dir, Path::new(name), text)?;
                self.done.push(Done::Replaced { dir, name: name.into(), text: old });
            }
            Present::Nothing => {
                rustix::fs::symlinkat(text, &dir, name)?;
                self.done.push(Done::Created(Created { dir, name: name.into(), is_dir: false }));
            }
            Present::Other(point, stat) => {
                ensure!(
                    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
                    "the image has something else than a file in its place"
                );
                self.mount_over(point, &stat, link, file)?;
            }
        }
        Ok(())
    }

    /// The image ships a file of its own under a name of the driver's: it stays in the image, and ours hides it.
    fn mount_over(&mut self, point: OwnedFd, stat: &Stat, link: &ContainerPath, file: &ContainerPath) -> Result<()> {
        let mounted = match self.mounts.get(file) {
            Some(mounted) => mounted.try_clone()?,
            // Mounted by the engine, where it does that.
            None => match self.rootfs.open_at(file.relative(), OFlags::PATH | OFlags::NOFOLLOW) {
                Ok(mounted) => mounted,
                Err(error) if is_missing(&error) => return Ok(()),
                Err(error) => return Err(error.into()),
            },
        };
        let mounted_stat = rustix::fs::fstat(&mounted)?;
        let is_file = FileType::from_raw_mode(mounted_stat.st_mode) == FileType::RegularFile;
        if same_file(stat, &mounted_stat) || !is_file {
            return Ok(());
        }
        let copy = mount::clone_tree(mounted).context("open_tree")?;
        mount::restrict(&copy, MountAttrs::DRIVER_FILE).context("mount_setattr")?;
        mount::attach(&copy, point).context("move_mount")?;
        self.done.push(Done::Mounted(copy));
        self.findings.push(Finding::note("ONH-301", format!("the image's own {link} is hidden by the driver's")));
        Ok(())
    }

    fn mask_proc(&mut self, tmpfs: OwnedFd, mounts: Vec<(PathBuf, OwnedFd)>) -> Result<()> {
        let point = match self.rootfs.open_at(Path::new("proc/driver/nvidia"), OFlags::PATH | OFlags::DIRECTORY) {
            Ok(point) => point,
            // A container without /proc, or a driver that is not in this kernel (its root has a /proc of its own).
            Err(error) if is_missing(&error) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if is_ours(&point) {
            return Ok(());
        }
        mount::attach(&tmpfs, point).context("move_mount")?;
        self.done.push(Done::Mounted(tmpfs.try_clone()?));
        for (path, mount) in mounts {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let point = rustix::fs::openat(&tmpfs, &path, flags, Mode::empty())?;
            mount::attach(&mount, point).with_context(|| format!("move_mount {path:?}"))?;
            self.done.push(Done::Mounted(mount));
        }
        mount::restrict(&tmpfs, MountAttrs::PROC_FILE).context("mount_setattr")
    }

    fn mount_directory(&mut self, mount: &OwnedFd, target: &ContainerPath) -> Result<()> {
        let mut created = Vec::new();
        let point = self.rootfs.create_dir_all(target.relative(), &mut created);
        self.done.extend(created.into_iter().map(Done::Created));
        let point = point?;
        if same_file(&rustix::fs::fstat(&point)?, &rustix::fs::fstat(mount)?) || is_ours(&point) {
            return Ok(());
        }
        mount::attach(mount, point).context("move_mount")?;
        self.done.push(Done::Mounted(mount.try_clone()?));
        Ok(())
    }

    fn update_linker_cache(&mut self, entries: &[CacheEntry]) -> Result<()> {
        let etc = match self.rootfs.open_at(Path::new("etc"), OFlags::PATH | OFlags::DIRECTORY) {
            Ok(etc) => etc,
            Err(error) if is_missing(&error) => return Ok(()), // ld.so has its built-in directories
            Err(error) => return Err(error.into()),
        };
        let old = self.read_linker_cache()?;
        let Some(new) = linker_cache::merge(old.as_deref(), entries, &mut self.findings) else { return Ok(()) };
        write_beside(&etc, Path::new("ld.so.cache"), &new).context("write it")
    }

    /// Its bytes; `None` if there is none. Read where it leads to, also if the image made it a link.
    fn read_linker_cache(&self) -> Result<Option<Vec<u8>>> {
        // Non-blocking: the image may have put a fifo there.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = match self.rootfs.open_at(Path::new("etc/ld.so.cache"), flags) {
            Ok(file) => File::from(file),
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(anyhow::Error::new(error).context("read it")),
        };
        if !file.metadata()?.is_file() {
            bail!("the image has something else than a file in its place");
        }
        crate::oci::read_limited(file, linker_cache::MAX_SIZE).map(Some)
    }
}

/// Newest first.
fn take_back(done: Vec<Done>) {
    for done in done.into_iter().rev() {
        match done {
            Done::Created(created) => created.remove().ok(),
            Done::Mounted(mount) => mount::detach(mount.as_fd()).ok(),
            Done::Replaced { dir, name, text } => replace_link(&dir, &name, &text).ok(),
        };
    }
}

fn present(dir: &OwnedFd, name: &OsStr) -> Result<Present> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
        Ok(fd) => fd,
        Err(Errno::NOENT) => return Ok(Present::Nothing),
        Err(errno) => return Err(errno.into()),
    };
    let stat = rustix::fs::fstat(&fd)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
        use std::os::unix::ffi::OsStringExt;
        let text = rustix::fs::readlinkat(&fd, c"", Vec::new())?;
        return Ok(Present::Link(std::ffi::OsString::from_vec(text.into_bytes()).into()));
    }
    Ok(Present::Other(fd, stat))
}

fn is_device(stat: &Stat, device: Option<(u32, u32)>) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && device == Some((rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)))
}

/// Whether a directory is a tmpfs that nobody can write: what we mounted there in a run before this one. An image cannot
/// mount, and runtimes mask paths after the hooks.
fn is_ours(point: &OwnedFd) -> bool {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    let read_only = rustix::fs::fstatvfs(point).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::RDONLY));
    read_only && rustix::fs::fstatfs(point).is_ok_and(|fs| fs.f_type == TMPFS_MAGIC)
}

const fn same_file(a: &Stat, b: &Stat) -> bool {
    a.st_dev == b.st_dev && a.st_ino == b.st_ino
}

/// `ln -sfn`, at once: a process in the container never finds the name missing.
fn replace_link(dir: &OwnedFd, name: &Path, text: &Path) -> Result<()> {
    let temporary = temporary_name(name);
    rustix::fs::symlinkat(text, dir, &temporary)?;
    rename_or_remove(dir, &temporary, name)
}

/// A file with this content in place of whatever has its name, at once. Never through a link (CVE-2025-23267).
fn write_beside(dir: &OwnedFd, name: &Path, content: &[u8]) -> Result<()> {
    let temporary = temporary_name(name);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, &temporary, flags, Mode::from_raw_mode(0o644))?;
    if let Err(error) = File::from(file).write_all(content) {
        rustix::fs::unlinkat(dir, &temporary, AtFlags::empty()).ok();
        return Err(error.into());
    }
    rename_or_remove(dir, &temporary, name)
}

fn rename_or_remove(dir: &OwnedFd, temporary: &Path, name: &Path) -> Result<()> {
    rustix::fs::renameat(dir, temporary, dir, name).map_err(|errno| {
        rustix::fs::unlinkat(dir, temporary, AtFlags::empty()).ok();
        errno.into()
    })
}

/// Not secret: a name that the image took already only makes O_EXCL fail.
fn temporary_name(name: &Path) -> PathBuf {
    PathBuf::from(format!(".{}.oci-nvidia-hook-{}", name.display(), std::process::id()))
}
