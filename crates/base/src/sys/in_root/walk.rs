//! The same as `openat2(RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)` for kernels without it, component by component.
//!
//! Every directory on the way is held open, and `..` goes back to the one that is held: never up from where a
//! directory happens to lie by then, which is how a rename under a walk escapes. Every component is opened with
//! `O_NOFOLLOW`, and the text of a link is walked like any other path. So the kernel never follows anything for us, magic
//! links included: their text, too, is only a path below the root.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// The kernel's own limit (MAXSYMLINKS).
const MAX_LINKS: u32 = 40;
/// The kernel's limit for a path (PATH_MAX), here for what is left to walk, link texts included.
const MAX_LEFT: usize = 4096;

/// Opens what `path` means below `root`.
pub(super) fn open(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let mut held: Vec<OwnedFd> = Vec::new();
    // Components that are left, the next one last; `None` leads back to the root.
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
            Opened::Link(_) if last && flags.contains(OFlags::NOFOLLOW) => {
                // As openat2 does: the link itself with O_PATH, an error else.
                return Ok(rustix::fs::openat(dir, &name, flags | OFlags::CLOEXEC, Mode::empty())?);
            }
            Opened::Link(text) => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Errno::LOOP.into());
                }
                push(&mut left, Path::new(&text));
                if left.iter().flatten().map(|name| name.len() + 1).sum::<usize>() > MAX_LEFT {
                    return Err(Errno::NAMETOOLONG.into());
                }
            }
            Opened::File(file) if last => return Ok(file),
            Opened::File(dir) => held.push(dir),
        }
    }
    // The path ends in a directory that is held: "/", "a/..".
    let dir = held.last().map_or(root, AsFd::as_fd);
    Ok(rustix::fs::openat(dir, c".", flags | OFlags::CLOEXEC, Mode::empty())?)
}

enum Opened {
    Link(OsString),
    File(OwnedFd),
}

/// A component is never a path: the kernel resolves one name in one directory.
fn open_component(dir: BorrowedFd<'_>, name: &OsStr, flags: OFlags) -> io::Result<Opened> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let error = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
        Ok(file) if !flags.contains(OFlags::PATH) => return Ok(Opened::File(file)),
        Ok(file) => {
            if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::Symlink {
                return Ok(Opened::File(file));
            }
            let text = rustix::fs::readlinkat(&file, c"", Vec::new())?;
            return Ok(Opened::Link(OsString::from_vec(text.into_bytes())));
        }
        Err(errno) => errno,
    };
    // With O_DIRECTORY a link is ENOTDIR, without O_PATH it is ELOOP.
    if !matches!(error, Errno::LOOP | Errno::NOTDIR) {
        return Err(error.into());
    }
    match rustix::fs::readlinkat(dir, name, Vec::new()) {
        Ok(text) => Ok(Opened::Link(OsString::from_vec(text.into_bytes()))),
        Err(_) => Err(error.into()),
    }
}

fn push(left: &mut Vec<Option<OsString>>, path: &Path) {
    let bytes = path.as_os_str().as_bytes();
    let parts = bytes.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."));
    left.extend(parts.rev().map(|part| Some(OsString::from_vec(part.to_vec()))));
    if bytes.starts_with(b"/") {
        left.push(None);
    }
}
