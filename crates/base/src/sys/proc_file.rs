//! Files of proc(5), read at once: std begins with 32 bytes, and a kernel that is asked for a mount table piece by piece looks
//! for the place again each time.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Longer than most.
const USUAL: usize = 4 << 10;

/// The content of one.
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    // Of a file std asks for the size, of what is taken of one it does not: here it is 0 anyway.
    read_whole(File::open(path)?.take(u64::MAX), 0)
}

/// The same as text; what is no UTF-8 is replaced.
pub fn read_text(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&read(path)?).into_owned())
}

/// The parent of a process, in the pid namespace of /proc; `None` if it is in another one, or not to be known.
pub fn parent(pid: &str) -> Option<i32> {
    parent_of(&read_text(format!("/proc/{pid}/status")).ok()?)
}

/// `PPid:` of /proc/PID/status; see proc_pid_status(5).
fn parent_of(status: &str) -> Option<i32> {
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
    (parent > 0).then_some(parent)
}

/// All of it, which is probably of this size. What is short is read to the stack first: to get and give back large blocks of
/// memory takes longer than to copy a few hundred bytes.
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
    // One more, to see the end without growing.
    let mut bytes = Vec::with_capacity(size.saturating_add(1).max(4 * USUAL));
    bytes.extend_from_slice(read);
    input.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives a few bytes at a time.
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
