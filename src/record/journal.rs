//! Sends entries to the systemd journal with its native protocol: one datagram of fields for each entry.
//! <https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>

use std::io;
use std::os::unix::net::UnixDatagram;

use base::report::Severity;

const SOCKET: &str = "/run/systemd/journal/socket";

/// A connected socket, which still works after the container's mount namespace was entered.
#[derive(Debug)]
pub(crate) struct Journal(UnixDatagram);

impl Journal {
    /// Connects to the host's journal. Fails if it does not run.
    pub(crate) fn connect() -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(SOCKET)?;
        // If the journal does not read, entries are lost: no container must wait for it.
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }

    /// Sends an entry. Errors are ignored.
    pub(crate) fn send(&self, fields: &[(&str, &str)]) {
        self.0.send(&encode(fields)).ok();
    }
}

/// Returns the priority of syslog(3).
pub(crate) const fn priority(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "3",
        Severity::Warning => "4",
        Severity::Note => "6",
    }
}

/// Encodes an entry without its empty fields. A value with line breaks is preceded by its length, so that it cannot add a
/// field.
pub fn encode(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_empty()) {
        bytes.extend_from_slice(name.as_bytes());
        if value.contains('\n') {
            bytes.push(b'\n');
            bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
        } else {
            bytes.push(b'=');
        }
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(b'\n');
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_one_field() {
        assert_eq!(
            encode(&[("A", "b=c"), ("EMPTY", ""), ("D", "é")]),
            "A=b=c\nD=é\n".as_bytes()
        );
        assert_eq!(
            encode(&[("A", "b\nPRIORITY=0")]),
            b"A\n\x0c\0\0\0\0\0\0\0b\nPRIORITY=0\n"
        );
    }
}
