//! Operations on a name in an open directory of a container. No operation follows a symlink.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;

use super::source::open_in;

/// The kind of file at a name in a directory.
pub(super) enum Present {
    Nothing,
    /// A symlink, with its target
    Link(PathBuf),
    Other(OwnedFd, Stat),
}

/// Opens what is at a name, without following a link. An unused name is not an error.
pub(super) fn find_present(dir: &OwnedFd, name: &OsStr) -> Result<Present> {
    let fd = match open_in(dir, name) {
        Ok(fd) => fd,
        Err(Errno::NOENT) => return Ok(Present::Nothing),
        Err(errno) => return Err(errno.into()),
    };
    let stat = rustix::fs::fstat(&fd)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
        let text = rustix::fs::readlinkat(&fd, c"", Vec::new())?;
        return Ok(Present::Link(OsString::from_vec(text.into_bytes()).into()));
    }
    Ok(Present::Other(fd, stat))
}

/// Creates an empty file as a mount point. mknod(2) fails if the name exists, so it never follows a link (CVE-2024-0133). It
/// does not open the file, which on overlayfs would open the file of the upper layer as well.
pub(super) fn make_file(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
    rustix::fs::mknodat(dir, name, FileType::RegularFile, Mode::from_raw_mode(0o644), 0)
}

/// The modification time of copies, in seconds since 1970, by which they are recognized until somebody writes to them.
pub(super) const TIME_OF_COPIES: i64 = 0;

/// Creates a file with this content. O_EXCL fails if the name exists, and never follows a link.
pub(super) fn make_copy(dir: &OwnedFd, name: &OsStr, content: &[u8]) -> rustix::io::Result<()> {
    let file = File::from(create(dir, name)?);
    let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    let times = Timestamps { last_access: time(0, UTIME_OMIT), last_modification: time(TIME_OF_COPIES, 0) };
    let written = (&file).write_all(content).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
    written.and_then(|()| rustix::fs::futimens(&file, &times)).inspect_err(|_| {
        rustix::fs::unlinkat(dir, name, AtFlags::empty()).ok();
    })
}

fn create(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o644))
}

/// `ln -sfn`, atomically: processes in the container never see the name missing.
pub(super) fn replace_link(dir: &OwnedFd, name: &Path, text: &Path) -> Result<()> {
    let temporary = temporary_name(name);
    rustix::fs::symlinkat(text, dir, &temporary)?;
    rename_or_remove(dir, &temporary, name)
}

/// Replaces a file atomically. Never writes through a symlink (CVE-2025-23267).
pub(super) fn replace_file(dir: &OwnedFd, name: &Path, content: &[u8]) -> Result<()> {
    let temporary = temporary_name(name);
    let mut file = File::from(create(dir, temporary.as_os_str())?);
    if let Err(error) = file.write_all(content) {
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

/// The name need not be secret: if the image has a file of this name, O_EXCL fails.
fn temporary_name(name: &Path) -> PathBuf {
    PathBuf::from(format!(".{}.oci-nvidia-hook-{}", name.display(), std::process::id()))
}
