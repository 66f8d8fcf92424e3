//! Reads files of proc(5) with few large reads. std starts with 32 bytes, and the kernel walks the mount table from its start for
//! each read of mountinfo.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The size in bytes of the first read. Most files are shorter.
const USUAL: usize = 4 << 10;

/// Reads a file of proc(5).
///
/// # Errors
/// If the file cannot be opened or read. For a process that has ended, the error is NotFound or ESRCH.
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    // `take` keeps std from calling statx(2) for the size, which is 0 for these files.
    read_whole(File::open(path)?.take(u64::MAX), 0)
}

/// Reads a file of proc(5) as text. Bytes that are not UTF-8 are replaced.
///
/// # Errors
/// Those of [`read`].
pub fn read_text(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&read(path)?).into_owned())
}

/// Returns the parent of a process, in the PID namespace of /proc. Returns `None` if the parent is in another PID namespace or
/// cannot be read.
pub fn parent(pid: &str) -> Option<i32> {
    parent_of(&read_text(format!("/proc/{pid}/status")).ok()?)
}

/// Parses `PPid:` of /proc/PID/status, see proc_pid_status(5). It is 0 for a parent in another PID namespace.
fn parent_of(status: &str) -> Option<i32> {
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
    (parent > 0).then_some(parent)
}

/// Reads `input` to its end. `size` is the expected length in bytes. The first 4 KiB are read to the stack, because allocating
/// and freeing a large buffer takes longer than copying a few hundred bytes.
pub(crate) fn read_whole(mut input: impl Read, size: usize) -> io::Result<Vec<u8>> {
    let mut room = [0; USUAL];
    let mut filled = 0;
    while let Some(rest) = room.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let read = room.get(..filled).unwrap_or_default();
    if filled < USUAL {
        return Ok(read.to_vec());
    }
    // One byte more, so that the read that returns 0 does not make the buffer grow.
    let mut bytes = Vec::with_capacity(size.saturating_add(1).max(4 * USUAL));
    bytes.extend_from_slice(read);
    input.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns at most 1000 bytes from each read.
    struct Slow<'a>(&'a [u8]);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.by_ref().take(1000).read(buffer)
        }
    }

    #[test]
    fn a_parent_in_another_pid_namespace_is_none() {
        assert_eq!(parent_of("Name:\tx\nPid:\t7\nPPid:\t3\nTracerPid:\t0\n"), Some(3));
        assert_eq!(parent_of("Name:\tx\nPPid:\t0\n"), None);
        assert_eq!(parent_of(""), None);
    }

    #[test]
    fn all_of_it_is_read() {
        for length in [0, 1, 999, USUAL - 1, USUAL, USUAL + 1, 9 * USUAL] {
            let bytes: Vec<u8> = (0..length).map(|n| u8::try_from(n % 251).unwrap()).collect();
            assert_eq!(read_whole(bytes.as_slice(), length).unwrap(), bytes, "{length}");
            assert_eq!(read_whole(Slow(&bytes), 0).unwrap(), bytes, "{length}");
        }
    }
}
