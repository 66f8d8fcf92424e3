//! Implements `openat2(RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)` for kernels without it, one component at a time.
//!
//! Every directory on the way stays open, and `..` returns to the open parent. If the kernel resolved `..`, a directory that is
//! moved during the walk could lead out of the root. Every component is opened with `O_NOFOLLOW`, and the text of a link is
//! walked like any other path. Therefore the kernel follows no link, and the text of a magic link is only a path below the root.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// The limit of the kernel for symbolic links in one lookup (MAXSYMLINKS).
pub(crate) const MAX_LINKS: u32 = 40;
/// The limit in bytes for the rest of the path, including the text of links (PATH_MAX).
const MAX_LEFT: usize = 4096;

/// Opens `path` below `root`.
pub(super) fn open(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let mut held: Vec<OwnedFd> = Vec::new();
    // The remaining components, the next one last. `None` returns to the root.
    let mut left = Vec::new();
    push(&mut left, path);
    let mut links = 0;
    while let Some(component) = left.pop() {
        let Some(name) = component else {
            held.clear();
            continue;
        };
        if name == ".." {
            held.pop();
            continue;
        }
        let dir = held.last().map_or(root, AsFd::as_fd);
        let last = left.is_empty();
        let how = if last { flags } else { OFlags::PATH };
        match open_component(dir, &name, how)? {
            OpenedComponent::Link(_) if last && flags.contains(OFlags::NOFOLLOW) => {
                // Like openat2(2): with O_PATH this opens the link itself, without it the call fails with ELOOP.
                return Ok(rustix::fs::openat(
                    dir,
                    &name,
                    flags | OFlags::CLOEXEC,
                    Mode::empty(),
                )?);
            }
            OpenedComponent::Link(text) => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Errno::LOOP.into());
                }
                push(&mut left, Path::new(&text));
                if left
                    .iter()
                    .flatten()
                    .map(|name| name.len() + 1)
                    .sum::<usize>()
                    > MAX_LEFT
                {
                    return Err(Errno::NAMETOOLONG.into());
                }
            }
            OpenedComponent::File(file) if last => return Ok(file),
            OpenedComponent::File(dir) => held.push(dir),
        }
    }
    // The path ends in a directory that is open already: "/", "a/..".
    let dir = held.last().map_or(root, AsFd::as_fd);
    Ok(rustix::fs::openat(
        dir,
        c".",
        flags | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

enum OpenedComponent {
    Link(OsString),
    File(OwnedFd),
}

/// Opens one name in one directory.
fn open_component(dir: BorrowedFd<'_>, name: &OsStr, flags: OFlags) -> io::Result<OpenedComponent> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let error = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
        Ok(file) if !flags.contains(OFlags::PATH) => return Ok(OpenedComponent::File(file)),
        Ok(file) => {
            if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::Symlink {
                return Ok(OpenedComponent::File(file));
            }
            // With an empty path, readlinkat(2) reads the link that the descriptor refers to (Linux 2.6.39).
            let text = rustix::fs::readlinkat(&file, c"", Vec::new())?;
            return Ok(OpenedComponent::Link(OsString::from_vec(text.into_bytes())));
        }
        Err(errno) => errno,
    };
    // A symbolic link fails with ENOTDIR if O_DIRECTORY is set, and with ELOOP if O_PATH is not.
    if !matches!(error, Errno::LOOP | Errno::NOTDIR) {
        return Err(error.into());
    }
    match rustix::fs::readlinkat(dir, name, Vec::new()) {
        Ok(text) => Ok(OpenedComponent::Link(OsString::from_vec(text.into_bytes()))),
        Err(_) => Err(error.into()),
    }
}

/// Adds the components of a path to the remaining ones, the next one last. `None` returns to the root.
pub(crate) fn push(left: &mut Vec<Option<OsString>>, path: &Path) {
    let bytes = path.as_os_str().as_bytes();
    let parts = bytes
        .split(|byte| *byte == b'/')
        .filter(|part| !matches!(*part, b"" | b"."));
    left.extend(
        parts
            .rev()
            .map(|part| Some(OsString::from_vec(part.to_vec()))),
    );
    if bytes.starts_with(b"/") {
        left.push(None);
    }
}
