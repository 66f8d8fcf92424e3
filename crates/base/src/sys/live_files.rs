//! Searches a directory for files through which a reader reaches a program or a device of the host.
//!
//! A read-only mount does not protect them: connect(2) and open(2) of a FIFO or of a device node need no write access to the file system.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir};

/// The most names that are examined. The database of udev has one for each device: ten thousand on a host with a thousand disks.
const MAX_NAMES: usize = 100_000;
/// The deepest directory that is examined.
const MAX_DEPTH: usize = 16;

/// Returns the path below `dir` of the first socket, FIFO or device node. Links are not followed, because a container resolves them in
/// its root file system.
///
/// # Errors
/// If a directory cannot be read, or there are more names or levels than are examined.
pub fn first(dir: impl AsFd) -> io::Result<Option<PathBuf>> {
    let mut left = vec![(reopen(dir, c".")?, PathBuf::new())];
    let mut names = 0;
    let mut buffer = Vec::with_capacity(32 << 10);
    while let Some((dir, path)) = left.pop() {
        let mut entries = RawDir::new(&dir, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            names += 1;
            let below = path.join(OsStr::from_bytes(name.to_bytes()));
            match kind(&dir, name, entry.file_type())? {
                FileType::RegularFile | FileType::Symlink => {}
                FileType::Directory => left.push((reopen(&dir, name)?, below)),
                _ => return Ok(Some(below)),
            }
        }
        if names > MAX_NAMES || depth(&left) > MAX_DEPTH {
            return Err(io::Error::other("it contains too many names"));
        }
    }
    Ok(None)
}

fn depth(left: &[(OwnedFd, PathBuf)]) -> usize {
    let depths = left.iter().map(|(_, path)| levels(path));
    depths.max().unwrap_or(0)
}

fn levels(path: &Path) -> usize {
    path.components().count()
}

/// Returns the type of a name. Some file systems do not store it in the directory.
fn kind(dir: &OwnedFd, name: &std::ffi::CStr, listed: FileType) -> io::Result<FileType> {
    if listed != FileType::Unknown {
        return Ok(listed);
    }
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

fn reopen(dir: impl AsFd, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, name, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn first_of(dir: &Path) -> Option<PathBuf> {
        first(std::fs::File::open(dir).unwrap()).unwrap()
    }

    #[test]
    fn sockets_and_fifos_at_any_level() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(path("a/b")).unwrap();
        std::fs::write(path("a/file"), "x").unwrap();
        std::os::unix::fs::symlink("/dev/null", path("a/link")).unwrap();
        assert_eq!(first_of(dir.path()), None);
        let listener = UnixListener::bind(path("a/b/socket")).unwrap();
        assert_eq!(first_of(dir.path()), Some("a/b/socket".into()));
        std::fs::remove_file(path("a/b/socket")).unwrap();
        drop(listener);
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert_eq!(first_of(dir.path()), Some("fifo".into()));
    }

    #[test]
    fn a_directory_without_an_end_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let deep = "d/".repeat(MAX_DEPTH + 2);
        std::fs::create_dir_all(dir.path().join(deep)).unwrap();
        first(std::fs::File::open(dir.path()).unwrap()).unwrap_err();
    }
}
