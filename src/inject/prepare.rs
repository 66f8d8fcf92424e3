//! The host's side of each step: every source opened, checked and cloned into a detached mount.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, FileType, Mode, OFlags};

use crate::edits::ProcMask;
use crate::lower::live::{CacheEntry, Step};
use crate::paths::{ContainerPath, HostPath};
use crate::sys::mount::{self, MountAttrs};

/// A step with all that it needs of the host.
#[derive(Debug)]
pub enum Prepared<'a> {
    /// A detached mount of one file.
    Mount {
        /// the mount
        mount: OwnedFd,
        /// where it goes
        target: &'a ContainerPath,
        /// for a device node, its numbers
        device: Option<(u32, u32)>,
    },
    /// A detached mount of a directory.
    MountDirectory {
        /// the mount
        mount: OwnedFd,
        /// where it goes
        target: &'a ContainerPath,
    },
    /// As in [`Step::Link`].
    Link {
        /// the link
        link: &'a ContainerPath,
        /// its text
        text: &'a Path,
        /// the mounted file it leads to
        file: &'a ContainerPath,
    },
    /// A detached tmpfs with the files in it, and the mounts for its directories.
    MaskProc {
        /// the tmpfs
        tmpfs: OwnedFd,
        /// (path in the tmpfs, mount)
        mounts: Vec<(std::path::PathBuf, OwnedFd)>,
    },
    /// As in [`Step::UpdateLinkerCache`].
    UpdateLinkerCache(&'a [CacheEntry]),
}

/// Does everything of a step that can fail without the container.
///
/// # Errors
/// If a source is missing or not what it is said to be, or cannot be mounted.
pub fn prepare(step: &Step) -> Result<Prepared<'_>> {
    Ok(match step {
        Step::MountFile { source, target, .. } => Prepared::Mount { mount: clone_file(source)?, target, device: None },
        Step::MountIpc { source, target } => clone_ipc(source, target)?,
        Step::MountNode { source, target, device } => {
            Prepared::Mount { mount: clone_node(source, *device)?, target, device: Some(*device) }
        }
        Step::Link { link, text, file, .. } => Prepared::Link { link, text: Path::new(text), file },
        Step::MountFiles { target, files } => {
            let mount = mount::new_tmpfs(c"0555").context("make a tmpfs")?;
            for (name, content) in files {
                write_file(&mount, OsStr::new(name), content.as_bytes())?;
            }
            mount::restrict(&mount, MountAttrs::PROC_FILE).context("mount_setattr")?;
            Prepared::MountDirectory { mount, target }
        }
        Step::MaskProc(mask) => prepare_mask(mask)?,
        Step::UpdateLinkerCache(entries) => Prepared::UpdateLinkerCache(entries),
    })
}

/// The path is a real path: a symlink as its last component appeared since, and is refused.
fn open_source(source: &HostPath) -> Result<(OwnedFd, rustix::fs::Stat)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd =
        rustix::fs::openat(CWD, source.as_path(), flags, Mode::empty()).with_context(|| format!("open {source}"))?;
    let stat = rustix::fs::fstat(&fd)?;
    Ok((fd, stat))
}

fn clone_restricted(source: impl AsFd, attrs: MountAttrs) -> Result<OwnedFd> {
    let tree = mount::clone_tree(source).context("open_tree")?;
    mount::restrict(&tree, attrs).context("mount_setattr")?;
    Ok(tree)
}

fn clone_file(source: &HostPath) -> Result<OwnedFd> {
    let (fd, stat) = open_source(source)?;
    ensure!(FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile, "{source} is no regular file any more");
    clone_restricted(fd, MountAttrs::DRIVER_FILE)
}

fn clone_node(source: &HostPath, device: (u32, u32)) -> Result<OwnedFd> {
    let (fd, stat) = open_source(source)?;
    ensure!(
        FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
            && (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)) == device,
        "{source} is another device now"
    );
    clone_restricted(fd, MountAttrs::DEVICE_NODE)
}

fn clone_ipc<'a>(source: &HostPath, target: &'a ContainerPath) -> Result<Prepared<'a>> {
    let (fd, stat) = open_source(source)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    ensure!(matches!(kind, FileType::Socket | FileType::Directory), "{source} is no socket and no directory any more");
    let mount = clone_restricted(fd, MountAttrs::IPC)?;
    Ok(match kind {
        FileType::Directory => Prepared::MountDirectory { mount, target },
        _ => Prepared::Mount { mount, target, device: None },
    })
}

fn prepare_mask(mask: &ProcMask) -> Result<Prepared<'static>> {
    let tmpfs = mount::new_tmpfs(c"0555").context("make a tmpfs")?;
    for (name, content) in &mask.files {
        write_file(&tmpfs, name, content)?;
    }
    let mut mounts = Vec::new();
    for (path, source) in &mask.mounts {
        let (fd, stat) = open_source(source)?;
        make_point(&tmpfs, path, FileType::from_raw_mode(stat.st_mode))?;
        mounts.push((path.clone(), clone_restricted(fd, MountAttrs::PROC_FILE)?));
    }
    Ok(Prepared::MaskProc { tmpfs, mounts })
}

fn write_file(tmpfs: &OwnedFd, name: &OsStr, content: &[u8]) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(tmpfs, name, flags, Mode::from_raw_mode(0o444))?;
    Ok(File::from(file).write_all(content)?)
}

/// A mount point in a tmpfs of our own, which nobody else can see yet.
fn make_point(tmpfs: &OwnedFd, path: &Path, kind: FileType) -> Result<()> {
    let dirs: Vec<_> = path.ancestors().skip(if kind == FileType::Directory { 0 } else { 1 }).collect();
    for dir in dirs.into_iter().rev().filter(|dir| !dir.as_os_str().is_empty()) {
        match rustix::fs::mkdirat(tmpfs, dir, Mode::from_raw_mode(0o555)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    match kind {
        FileType::Directory => {}
        FileType::RegularFile => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
            rustix::fs::openat(tmpfs, path, flags, Mode::from_raw_mode(0o444))?;
        }
        _ => bail!("{path:?} is no file and no directory"),
    }
    Ok(())
}
