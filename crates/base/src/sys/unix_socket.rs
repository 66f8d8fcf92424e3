//! Asks a local server one question, within a time limit and a size limit.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

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
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                format!("the answer is longer than {limit} bytes"),
            ));
        }
    }
}

/// Whether a process has the socket at this path, of any type, even if it does not accept a connection within `patience`.
///
/// Without such a process, the error is ECONNREFUSED. If the socket has another type, it is EPROTOTYPE (unix_find_bsd() in
/// net/unix/af_unix.c).
#[must_use]
pub fn is_served(path: &Path, patience: Duration) -> bool {
    let none = [
        ErrorKind::NotFound,
        ErrorKind::ConnectionRefused,
        ErrorKind::PermissionDenied,
    ];
    match connect(path, patience) {
        Ok(_) => true,
        Err(error) => !none.contains(&error.kind()),
    }
}

/// Connects to the server at this path. A server that accepts no connections blocks connect(2) when its backlog is full, for as long as
/// `SO_SNDTIMEO` permits (unix_stream_connect() in net/unix/af_unix.c). std connects before the option can be set.
fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let socket = net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    net::connect(&socket, &SocketAddrUnix::new(path)?).map_err(|errno| in_words(errno.into()))?;
    Ok(socket.into())
}

/// The kernel reports a time limit of a socket as EAGAIN (socket(7)), which reads "resource temporarily unavailable".
fn in_words(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock {
        ErrorKind::TimedOut.into()
    } else {
        error
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    const BRIEFLY: Duration = Duration::from_millis(200);

    #[test]
    fn a_socket_of_any_type_is_served() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let is_served = || super::is_served(&path, BRIEFLY);
        assert!(!is_served());
        let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        assert!(is_served());
        drop(socket);
        assert!(!is_served(), "the file stays");
    }

    #[test]
    fn an_answer_within_the_limits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        assert_eq!(
            ask(&path, b"?", 10, BRIEFLY).unwrap_err().kind(),
            ErrorKind::NotFound
        );
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
            assert_eq!(
                ask(&path, b"?", 9, slowly).unwrap_err().to_string(),
                "the answer is longer than 9 bytes"
            );
            assert_eq!(
                ask(&path, b"?", 10, BRIEFLY).unwrap_err().kind(),
                ErrorKind::TimedOut
            );
        });
        assert_eq!(
            ask(&path, b"?", 10, BRIEFLY).unwrap_err().kind(),
            ErrorKind::TimedOut
        );
        drop(listener);
        // A process that another test starts has a copy of the listener until execve(2) closes it, which resets the connection.
        let kind = ask(&path, b"?", 10, BRIEFLY).unwrap_err().kind();
        assert!(
            matches!(
                kind,
                ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
            ),
            "{kind}"
        );
    }

    #[test]
    fn a_full_backlog_and_a_long_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        // A backlog of 0 leaves room for one peer.
        net::listen(&listener, 0).unwrap();
        let _first = UnixStream::connect(&path).unwrap();
        assert_eq!(
            ask(&path, b"?", 10, BRIEFLY).unwrap_err().kind(),
            ErrorKind::TimedOut
        );
        let long = dir.path().join("x".repeat(200));
        assert_eq!(
            ask(&long, b"?", 10, BRIEFLY).unwrap_err().kind(),
            ErrorKind::InvalidFilename
        );
    }
}
