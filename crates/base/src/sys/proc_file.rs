//! Reads files of proc(5) with few large reads. std starts with 32 bytes, and the kernel walks the mount table from its start for
//! each read of mountinfo.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::OnceLock;

/// The size in bytes of the first read. Most files are shorter.
const USUAL: usize = 4 << 10;

/// The largest record in bytes of the files that [`read_short`] reads.
const RECORD: usize = USUAL / 2;

/// Reads a file of proc(5), except for mount tables, which [`read_table`] reads.
///
/// # Errors
/// If the file cannot be opened or read. For a process that has ended, the error is NotFound or ESRCH.
#[expect(clippy::disallowed_methods, reason = "opens files of proc(5)")]
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    read_short(File::open(path)?)
}

/// Returns the id of this boot, or `None` if it cannot be read.
#[must_use]
pub fn boot_id() -> Option<&'static str> {
    static BOOT: OnceLock<Option<String>> = OnceLock::new();
    let read = || {
        let text = read_text("/proc/sys/kernel/random/boot_id").ok()?;
        Some(text.trim().to_owned())
    };
    BOOT.get_or_init(read).as_deref()
}

/// Reads a file of proc(5) that can have long records, such as the options of an overlay in mountinfo.
///
/// # Errors
/// The errors of [`read`].
#[expect(clippy::disallowed_methods, reason = "opens files of proc(5)")]
pub fn read_table(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    // `take` keeps std from calling statx(2) for the size, which is 0 for these files.
    read_whole(File::open(path)?.take(u64::MAX), Length::Unknown)
}

/// Reads an open file of a kernel module or of proc(5) whose records have at most 2 KiB. A read that leaves more room than a record needs
/// was the last one: the kernel adds records as long as they fit into the buffer (`seq_read_iter` in fs/seq_file.c).
///
/// # Errors
/// The errors of read(2).
pub fn read_short(file: impl Read) -> io::Result<Vec<u8>> {
    read_whole(file.take(u64::MAX), Length::ShortRecords)
}

/// Reads a file of proc(5) as text. Bytes that are not UTF-8 are replaced.
///
/// # Errors
/// The errors of [`read`].
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
    let parent = status
        .lines()
        .find_map(|line| line.strip_prefix("PPid:"))?
        .trim()
        .parse()
        .ok()?;
    (parent > 0).then_some(parent)
}

/// What is known about the length of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    /// Nothing: only a read of 0 bytes is the end.
    Unknown,
    /// The kernel generates it, with records of at most [`RECORD`] bytes.
    ShortRecords,
    /// The size in bytes according to fstat(2), at least 1. The file may have become longer since.
    Known(usize),
}

impl Length {
    /// Whether a read of `read` bytes into a buffer of `room` bytes was the last one.
    const fn is_end(self, filled: usize, read: usize, room: usize) -> bool {
        match self {
            Self::Unknown => read == 0,
            Self::ShortRecords => read == 0 || room - read > RECORD,
            Self::Known(size) => read == 0 || filled >= size,
        }
    }
}

/// Reads `input` to its end. The first 4 KiB are read to the stack, because allocating and freeing a large buffer takes longer than
/// copying a few hundred bytes.
pub(crate) fn read_whole(mut input: impl Read, length: Length) -> io::Result<Vec<u8>> {
    let size = if let Length::Known(size) = length {
        size
    } else {
        0
    };
    let mut bytes = Vec::new();
    if size <= USUAL {
        let mut room = [0; USUAL];
        let (filled, is_end) = fill(&mut input, &mut room, length)?;
        let read = room.get(..filled).unwrap_or_default();
        if is_end {
            return Ok(read.to_vec());
        }
        bytes.reserve_exact(4 * USUAL);
        bytes.extend_from_slice(read);
    } else {
        // calloc(3) gets zeroed pages. Optimized for size, `resize` would write one byte at a time.
        bytes = vec![0; size];
        let (filled, is_end) = fill(&mut input, &mut bytes, length)?;
        bytes.truncate(filled);
        if is_end {
            return Ok(bytes);
        }
    }
    input.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads until `room` is full or the end is reached. Returns the number of bytes, and whether the end is reached.
fn fill(input: &mut impl Read, room: &mut [u8], length: Length) -> io::Result<(usize, bool)> {
    let mut filled = 0;
    while let Some(rest) = room.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(read) => {
                filled += read;
                if length.is_end(filled, read, rest.len()) {
                    return Ok((filled, true));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok((filled, false))
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
        assert_eq!(
            parent_of("Name:\tx\nPid:\t7\nPPid:\t3\nTracerPid:\t0\n"),
            Some(3)
        );
        assert_eq!(parent_of("Name:\tx\nPPid:\t0\n"), None);
        assert_eq!(parent_of(""), None);
    }

    #[test]
    fn all_of_it_is_read() {
        for length in [1, 999, USUAL - 1, USUAL, USUAL + 1, 9 * USUAL] {
            let bytes: Vec<u8> = (0..length)
                .map(|n| u8::try_from(n % 251).unwrap())
                .collect();
            for size in [
                Length::Unknown,
                Length::Known(length),
                Length::Known(length + 7),
                Length::ShortRecords,
            ] {
                assert_eq!(
                    read_whole(bytes.as_slice(), size).unwrap(),
                    bytes,
                    "{length} {size:?}"
                );
            }
            for size in [Length::Unknown, Length::Known(length)] {
                assert_eq!(
                    read_whole(Slow(&bytes), size).unwrap(),
                    bytes,
                    "{length} {size:?}"
                );
            }
        }
        for size in [Length::Unknown, Length::ShortRecords, Length::Known(3)] {
            assert!(read_whole(&[][..], size).unwrap().is_empty());
        }
    }

    /// Counts reads.
    struct Counted<'a>(&'a [u8], usize);

    impl Read for Counted<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.1 += 1;
            self.0.read(buffer)
        }
    }

    #[test]
    fn a_read_that_can_only_return_nothing_is_left_out() {
        let reads = |length: usize, size| {
            let bytes = vec![7; length];
            let mut counted = Counted(&bytes, 0);
            assert_eq!(read_whole(&mut counted, size).unwrap(), bytes);
            counted.1
        };
        for (length, size, expected) in [
            (100, Length::Unknown, 2),
            (100, Length::ShortRecords, 1),
            (100, Length::Known(100), 1),
            (9 * USUAL, Length::Known(9 * USUAL), 1),
            // The next record may have been too long for the rest of the buffer.
            (USUAL - RECORD, Length::ShortRecords, 2),
            // The size was read earlier, and the file has grown since.
            (100, Length::Known(101), 2),
        ] {
            assert_eq!(reads(length, size), expected, "{length} {size:?}");
        }
        let mut longer = Counted(&[7; 100], 0);
        assert_eq!(
            read_whole(&mut longer, Length::Known(90)).unwrap().len(),
            100,
            "it has become longer"
        );
    }

    #[test]
    fn files_of_the_kernel() {
        for path in [
            "/proc/self/status",
            "/proc/self/cmdline",
            "/proc/self/cgroup",
            "/proc/self/uid_map",
        ] {
            assert_eq!(
                read(path).unwrap().len(),
                std::fs::read(path).unwrap().len(),
                "{path}"
            );
        }
        assert!(read_table("/proc/self/mountinfo").unwrap().ends_with(b"\n"));
    }
}
