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

use crate::inject::files::source::open_in;

/// What is at a path.
#[derive(Clone, Copy, Debug)]
pub(in crate::inject) enum Seen<'a> {
    Nothing,
    /// A symlink, with its text
    Link(&'a Path),
    Other(&'a Stat),
}

/// The kind of file at a name in a directory.
pub(in crate::inject) enum Present {
    Nothing,
    /// A symlink, with its target
    Link(PathBuf),
    Other(OwnedFd, Stat),
}

impl Present {
    /// Returns what decisions depend on.
    pub(in crate::inject) fn seen(&self) -> Seen<'_> {
        match self {
            Self::Nothing => Seen::Nothing,
            Self::Link(text) => Seen::Link(text),
            Self::Other(_, stat) => Seen::Other(stat),
        }
    }
}

/// Opens what is at a name, without following a link. An unused name is not an error.
pub(in crate::inject) fn find_present(dir: &OwnedFd, name: &OsStr) -> Result<Present> {
    let fd = match open_in(dir, name) {
        Ok(fd) => fd,
        Err(Errno::NOENT) => return Ok(Present::Nothing),
        Err(errno) => return Err(errno.into()),
    };
    let stat = rustix::fs::fstat(&fd)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
        // With an empty path, readlinkat(2) reads the link that the descriptor refers to (Linux 2.6.39), and not another one that
        // has taken its name in the meantime.
        let text = rustix::fs::readlinkat(&fd, c"", Vec::new())?;
        return Ok(Present::Link(OsString::from_vec(text.into_bytes()).into()));
    }
    Ok(Present::Other(fd, stat))
}

/// Creates an empty file as a mount point. mknod(2) fails if the name exists, so it never follows a link (CVE-2024-0133). It
/// does not open the file, which on overlayfs would open the file of the upper layer as well.
pub(in crate::inject) fn make_file(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
    rustix::fs::mknodat(
        dir,
        name,
        FileType::RegularFile,
        Mode::from_raw_mode(0o644),
        0,
    )
}

/// The modification time of copies. A write to the file changes it. Images of some build tools have files of time 0, but without
/// nanoseconds.
const TIME_OF_COPIES: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1,
};

/// Reports whether a file is as the hook creates files: an empty mount point, or a copy to which nobody has written.
pub(in crate::inject) fn is_unchanged(stat: &Stat) -> bool {
    let Timespec { tv_sec, tv_nsec } = TIME_OF_COPIES;
    let is_copy = stat.st_mtime == tv_sec && i64::try_from(stat.st_mtime_nsec) == Ok(tv_nsec);
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    is_file && (stat.st_size == 0 || is_copy)
}

/// Creates a file with this content. O_EXCL fails if the name exists, and never follows a link.
pub(in crate::inject) fn make_copy(
    dir: &OwnedFd,
    name: &OsStr,
    content: &[u8],
) -> rustix::io::Result<()> {
    let file = File::from(create(dir, name)?);
    let last_access = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_OMIT,
    };
    let times = Timestamps {
        last_access,
        last_modification: TIME_OF_COPIES,
    };
    let written = (&file)
        .write_all(content)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
    written
        .and_then(|()| rustix::fs::futimens(&file, &times))
        .inspect_err(|_| {
            rustix::fs::unlinkat(dir, name, AtFlags::empty()).ok();
        })
}

/// Replaces a file with a copy, atomically.
pub(in crate::inject) fn replace_with_copy(
    dir: &OwnedFd,
    name: &Path,
    content: &[u8],
) -> Result<()> {
    let temporary = temporary_name(name);
    make_copy(dir, temporary.as_os_str(), content)?;
    rename_or_remove(dir, &temporary, name)
}

fn create(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o644))
}

/// `ln -sfn`, atomically: processes in the container never see the name missing.
pub(in crate::inject) fn replace_link(dir: &OwnedFd, name: &Path, text: &Path) -> Result<()> {
    let temporary = temporary_name(name);
    rustix::fs::symlinkat(text, dir, &temporary)?;
    rename_or_remove(dir, &temporary, name)
}

/// Replaces a file atomically. Never writes through a symlink (CVE-2025-23267).
pub(in crate::inject) fn replace_file(dir: &OwnedFd, name: &Path, content: &[u8]) -> Result<()> {
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
pub(in crate::inject) fn temporary_name(name: &Path) -> PathBuf {
    PathBuf::from(format!(
        ".{}.oci-nvidia-hook-{}",
        name.display(),
        std::process::id()
    ))
}
