//! Reports the state of a service to the service manager: `sd_notify(3)`, without its library.

use std::ffi::OsString;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The socket of the service manager, which `NOTIFY_SOCKET` names. The variable is read before the environment is cleared.
#[derive(Clone, Debug, Default)]
pub struct NotifySocket(Option<OsString>);

impl NotifySocket {
    /// Reads `NOTIFY_SOCKET`.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this is where it is read")]
    pub fn read() -> Self {
        Self(std::env::var_os("NOTIFY_SOCKET"))
    }

    /// Sends assignments such as `READY=1`, one on each line. Without a service manager, or if it does not listen, nothing happens.
    pub fn send(&self, assignments: &str) {
        let Some(name) = &self.0 else {
            return;
        };
        let address = match name.as_bytes().split_first() {
            Some((b'@', name)) => SocketAddr::from_abstract_name(name),
            _ => SocketAddr::from_pathname(name),
        };
        if let Ok(address) = address
            && let Ok(socket) = UnixDatagram::unbound()
            && socket.set_nonblocking(true).is_ok()
        {
            socket.send_to_addr(assignments.as_bytes(), &address).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manager_gets_the_assignments() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let abstract_name = format!("onh-notify-{}", std::process::id());
        let by_name = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        for (socket, name) in [
            (UnixDatagram::bind(&path), path.clone().into_os_string()),
            (
                UnixDatagram::bind_addr(&by_name),
                format!("@{abstract_name}").into(),
            ),
        ] {
            let socket = socket.unwrap();
            NotifySocket(Some(name)).send("READY=1\nSTATUS=x");
            let mut buffer = [0; 64];
            let count = socket.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..count], b"READY=1\nSTATUS=x");
        }
        NotifySocket(None).send("READY=1");
        NotifySocket(Some("/nowhere/notify".into())).send("READY=1");
    }
}
