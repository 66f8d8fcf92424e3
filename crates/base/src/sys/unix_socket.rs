//! Asks a local server one question, within a time limit and a size limit.
#![allow(
    unsafe_code,
    reason = "connect(2) with a time limit: neither std nor the features of rustix and nix that are used have it"
)]

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::libc;

/// Sends a question to the server at this path, and returns its answer: all bytes until it closes the connection.
///
/// # Errors
/// If no server listens, or the answer takes longer than `patience` or has more than `limit` bytes.
pub fn ask(path: &Path, question: &[u8], limit: usize, patience: Duration) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + patience;
    let mut stream = connect(path, patience)?;
    stream.write_all(question).map_err(in_words)?;
    let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        // A server that sends one byte at a time must not extend the limit.
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let count = match stream.read(&mut buffer) {
            Ok(0) => return Ok(answer),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(in_words(error)),
        };
        answer.extend_from_slice(buffer.get(..count).unwrap_or_default());
        if answer.len() > limit {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("the answer is longer than {limit} bytes")));
        }
    }
}

/// Connects to the server at this path. A server that accepts no connections blocks connect(2) when its backlog is full, for as long as
/// `SO_SNDTIMEO` permits (unix_stream_connect() in net/unix/af_unix.c). std connects before the option can be set.
fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    // SAFETY: all-zero bytes are a valid value of the struct, which consists of integers.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX).map_err(io::Error::other)?;
    let name = path.as_os_str().as_bytes();
    // The byte after the path stays zero (unix(7)).
    if name.len() >= address.sun_path.len() {
        return Err(ErrorKind::InvalidFilename.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(name) {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    // SAFETY: socket(2) takes no pointers.
    let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: socket(2) has just returned the descriptor, and no other value owns it.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(socket) });
    stream.set_write_timeout(Some(patience))?;
    let size = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
    // SAFETY: connect(2) reads `size` bytes of the address, which is alive and as long, and keeps no pointer.
    match unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), size) } {
        0 => Ok(stream),
        _ => Err(in_words(io::Error::last_os_error())),
    }
}

/// The kernel reports a time limit of a socket as EAGAIN (socket(7)), which reads "resource temporarily unavailable".
fn in_words(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { ErrorKind::TimedOut.into() } else { error }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    const BRIEFLY: Duration = Duration::from_millis(200);

    #[test]
    fn an_answer_within_the_limits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        assert_eq!(ask(&path, b"?", 10, BRIEFLY).unwrap_err().kind(), ErrorKind::NotFound);
        let listener = UnixListener::bind(&path).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                // The third peer gets its bytes too slowly.
                for pause in [Duration::ZERO, Duration::ZERO, BRIEFLY / 4] {
                    let (mut stream, _) = listener.accept().unwrap();
                    stream.read_exact(&mut [0]).unwrap();
                    for byte in *b"0123456789" {
                        thread::sleep(pause);
                        stream.write_all(&[byte]).ok();
                    }
                }
            });
            let slowly = Duration::from_secs(10);
            assert_eq!(ask(&path, b"?", 10, slowly).unwrap(), b"0123456789");
            assert_eq!(ask(&path, b"?", 9, slowly).unwrap_err().to_string(), "the answer is longer than 9 bytes");
            assert_eq!(ask(&path, b"?", 10, BRIEFLY).unwrap_err().kind(), ErrorKind::TimedOut);
        });
        assert_eq!(ask(&path, b"?", 10, BRIEFLY).unwrap_err().kind(), ErrorKind::TimedOut);
        drop(listener);
        assert_eq!(ask(&path, b"?", 10, BRIEFLY).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_full_backlog_and_a_long_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        // SAFETY: listen(2) takes no pointers. A backlog of 0 leaves room for one peer.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let _first = UnixStream::connect(&path).unwrap();
        assert_eq!(ask(&path, b"?", 10, BRIEFLY).unwrap_err().kind(), ErrorKind::TimedOut);
        let long = dir.path().join("x".repeat(200));
        assert_eq!(ask(&long, b"?", 10, BRIEFLY).unwrap_err().kind(), ErrorKind::InvalidFilename);
    }
}
