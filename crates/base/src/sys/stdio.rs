//! Opens the standard streams if they are closed, and writes to them without a panic.
//!
//! `println!` and `eprintln!` panic if the stream is full or its reader has ended, and a panic ends the program. A hook that ends
//! stops the container, after the first mount even, only because a warning cannot be written. So no program of this project uses
//! them, and all output passes through this module.
#![allow(
    unsafe_code,
    reason = "the streams are opened before main, with calls that std makes only after this point"
)]

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::libc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::io::{Errno, ReadWriteFlags};
use rustix::stdio;

/// How long a message for an engine may wait for its reader, in total for all messages of a process. A reader that works
/// empties a pipe within this time; engines end a hook after seconds.
const PATIENCE: Duration = Duration::from_millis(200);
/// If poll(2) reports a pipe as writable, this many bytes fit in it (PIPE_BUF, see pipe(7)).
const AT_ONCE: usize = 4096;

/// Whether a message has used up the patience. Later messages do not wait.
static IS_STUCK: AtomicBool = AtomicBool::new(false);

/// The C library calls this function before `main`, and before the start-up code of Rust, which would open closed streams for
/// reading and writing.
// SAFETY: the C library calls each pointer in this section once, while the process has one thread. Arguments that the function
// does not take are ignored by the calling conventions of Linux.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = open_closed;

/// Opens each of stdin, stdout and stderr that is closed: otherwise, the first file that the program opens would become one of
/// them, and get its messages. Each is opened in the mode that fails when it is used, so that output that has no reader is an
/// error.
extern "C" fn open_closed() {
    let mut streams = [0, 1, 2].map(|fd| libc::pollfd {
        fd,
        events: 0,
        revents: 0,
    });
    // SAFETY: poll(2) reads and writes the three structs, which are alive, and keeps no pointer.
    let is_polled = unsafe { libc::poll(streams.as_mut_ptr(), 3, 0) } >= 0;
    for stream in streams {
        // poll(2) fails if the limit of open files is below 3.
        let is_closed = if is_polled {
            stream.revents & libc::POLLNVAL != 0
        } else {
            is_closed(stream.fd)
        };
        if is_closed {
            open_unusable(if stream.fd == 0 {
                libc::O_WRONLY
            } else {
                libc::O_RDONLY
            });
        }
    }
}

fn is_closed(fd: libc::c_int) -> bool {
    // SAFETY: F_GETFD takes a number and touches no memory.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    flags < 0
}

/// Opens /dev/null with the lowest free number; without it `/`, which can be neither read nor written with O_PATH.
fn open_unusable(mode: libc::c_int) {
    // SAFETY: open(2) only reads the string.
    if unsafe { libc::open(c"/dev/null".as_ptr(), mode) } < 0 {
        // SAFETY: as above.
        unsafe { libc::open(c"/".as_ptr(), libc::O_PATH) };
    }
}

/// Writes all bytes to stdout.
///
/// # Errors
/// If stdout is closed or full, or its reader has ended.
pub fn write_stdout(bytes: &[u8]) -> io::Result<()> {
    Ok(write(stdio::stdout(), bytes, None)?)
}

/// Prints the result of a command to stdout. Returns whether all of it was read: a reader that needs no more, such as head(1), ends
/// early, and a message about that would disturb its output.
///
/// # Errors
/// If stdout is closed or full.
pub fn print(text: &[u8]) -> io::Result<bool> {
    match write(stdio::stdout(), text, None) {
        Err(Errno::PIPE) => Ok(false),
        written => Ok(written.map(|()| true)?),
    }
}

/// Writes a message to stderr, for the user of a command. Errors are ignored, because there is no other place to report them.
pub fn print_stderr(text: &str) {
    write(stdio::stderr(), text.as_bytes(), None).ok();
}

/// Writes a message to stderr like [`print_stderr`], but drops it if the reader of a full pipe does not read. A container must not
/// wait for the reader, nor must a service.
///
/// O_NONBLOCK is not used: it belongs to the open file, which other processes share.
pub fn offer_stderr(text: &str) {
    let patience = if IS_STUCK.load(Ordering::Relaxed) {
        Duration::ZERO
    } else {
        PATIENCE
    };
    if write(
        stdio::stderr(),
        text.as_bytes(),
        Some(Instant::now() + patience),
    ) == Err(Errno::TIMEDOUT)
    {
        IS_STUCK.store(true, Ordering::Relaxed);
    }
}

/// Writes all bytes. Without an end, it waits as long as the reader takes.
fn write(fd: BorrowedFd<'_>, mut bytes: &[u8], end: Option<Instant>) -> Result<(), Errno> {
    let is_pipe = rustix::fs::fstat(fd)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo);
    while !bytes.is_empty() {
        let part = bytes.get(..AT_ONCE).unwrap_or(bytes);
        let written = match end {
            Some(end) => {
                wait(fd, Some(end))?;
                if is_pipe {
                    write_to_pipe(fd, part)
                } else {
                    rustix::io::write(fd, part)
                }
            }
            None => rustix::io::write(fd, part),
        };
        match written {
            // The process that started this one may have set O_NONBLOCK, or another one has filled the pipe.
            Err(Errno::AGAIN) => wait(fd, end)?,
            Err(Errno::INTR) => {}
            written => bytes = bytes.get(written?..).unwrap_or_default(),
        }
    }
    Ok(())
}

/// Writes to a pipe without waiting, which another process may have filled since it was polled. Before Linux 6.5 pipes do not support
/// this.
fn write_to_pipe(fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    // The offset -1 is the current position, as in write(2): pwritev2(2). A pipe has no other.
    match rustix::io::pwritev2(fd, &[IoSlice::new(bytes)], u64::MAX, ReadWriteFlags::NOWAIT) {
        Err(errno) if errno != Errno::AGAIN => rustix::io::write(fd, bytes),
        written => written,
    }
}

/// Waits until a write does not block.
fn wait(fd: impl AsFd, end: Option<Instant>) -> Result<(), Errno> {
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(&fd, PollFlags::OUT)], left.as_ref()) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Err(Errno::INTR) => {}
            polled => return polled.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{PipeReader, PipeWriter, Read, Write, pipe};

    fn full_pipe() -> (PipeReader, PipeWriter) {
        let (read, write) = pipe().unwrap();
        rustix::fs::fcntl_setfl(&write, rustix::fs::OFlags::NONBLOCK).unwrap();
        while (&write).write(&[b'x'; AT_ONCE]).is_ok() {}
        rustix::fs::fcntl_setfl(&write, rustix::fs::OFlags::empty()).unwrap();
        (read, write)
    }

    fn soon() -> Option<Instant> {
        Some(Instant::now() + Duration::from_millis(20))
    }

    #[test]
    fn a_pipe_that_nothing_reads_blocks_no_message() {
        let (mut read, filled) = full_pipe();
        assert_eq!(write(filled.as_fd(), b"y", soon()), Err(Errno::TIMEDOUT));
        let mut some = [0; AT_ONCE];
        read.read_exact(&mut some).unwrap();
        assert_eq!(write(filled.as_fd(), b"y", soon()), Ok(()));
        assert_eq!(
            write(filled.as_fd(), &[b'z'; 2 * AT_ONCE], soon()),
            Err(Errno::TIMEDOUT)
        );
    }

    #[test]
    fn another_process_that_fills_the_pipe_blocks_nothing() {
        let (_read, filled) = full_pipe();
        // As after poll(2), when another process was faster. Old kernels cannot do this.
        if rustix::io::pwritev2(
            &filled,
            &[IoSlice::new(b"y")],
            u64::MAX,
            ReadWriteFlags::NOWAIT,
        ) == Err(Errno::AGAIN)
        {
            assert_eq!(write_to_pipe(filled.as_fd(), b"y"), Err(Errno::AGAIN));
        }
    }

    #[test]
    fn all_is_written_to_a_reader_that_is_slow() {
        let (mut read, filled) = full_pipe();
        // The program was started with this flag: the write must wait nevertheless.
        rustix::fs::fcntl_setfl(&filled, rustix::fs::OFlags::NONBLOCK).unwrap();
        let (read, length) = std::thread::scope(|scope| {
            let reader = scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                let mut all = Vec::new();
                read.read_to_end(&mut all).unwrap();
                all
            });
            assert_eq!(write(filled.as_fd(), &[b'y'; 100_000], None), Ok(()));
            drop(filled);
            let all = reader.join().unwrap();
            (all.iter().filter(|byte| **byte == b'y').count(), all.len())
        });
        assert!(read == 100_000 && length > read);
    }

    #[test]
    fn what_cannot_be_written_is_an_error() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (read, closed) = pipe().unwrap();
        drop(read);
        let unwritable = File::open("/dev/null").unwrap();
        for end in [None, soon()] {
            assert_eq!(write(full.as_fd(), b"x", end), Err(Errno::NOSPC));
            assert_eq!(write(closed.as_fd(), b"x", end), Err(Errno::PIPE));
            assert_eq!(write(unwritable.as_fd(), b"x", end), Err(Errno::BADF));
        }
    }
}
