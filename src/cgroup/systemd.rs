//! Adds devices to the `DeviceAllow=` list of the container's systemd unit, and waits for systemd.
//!
//! If systemd manages the container's cgroup, it rewrites the device rules at any time, for example at `systemctl
//! daemon-reload`. Rules that it does not know are lost, and programs in the container fail with "Failed to initialize NVML:
//! Unknown Error".

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::dbus::{self, Body, Received};
use crate::oci::device_rules::DeviceRule;

/// systemd's private socket, which the host's root can use without a bus daemon.
const SOCKET: &str = "/run/systemd/private";
/// systemd replies within a millisecond, but not before the end of a reload.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The time between two attempts to connect
const PAUSE: Duration = Duration::from_millis(50);
/// The time after which the hook does not ask again, and reads no more messages; a reload on a host with thousands of units takes seconds
const LONGEST_RELOAD: Duration = Duration::from_secs(10);

/// `systemctl set-property --runtime UNIT DeviceAllow=…` for each rule, if systemd filters the unit's devices.
///
/// crun before 1.18 sets no device policy for its scope and attaches a BPF program of its own. A scope with the policy "auto"
/// and an empty list has no device filter of systemd. The first entry would create one, which denies all other devices, for
/// example the device of `--device /dev/fuse`.
///
/// # Errors
/// If systemd does not run, refuses, or does not reply within ten seconds.
pub(super) fn allow(unit: &str, rules: &[DeviceRule]) -> Result<()> {
    when_ready(|| extend_device_allow(unit, rules))
        .with_context(|| format!("cannot add the devices to the systemd unit {unit:?}"))
}

fn extend_device_allow(unit: &str, rules: &[DeviceRule]) -> Result<()> {
    let mut systemd = Connection::open()?;
    let policy = systemd.call(|serial| dbus::get_property(serial, unit, "DevicePolicy"))?;
    let list = systemd.call(|serial| dbus::get_property(serial, unit, "DeviceAllow"))?;
    let policy = dbus::text_property(&policy).context("it reports no device policy")?;
    let is_empty = dbus::is_empty_list(&list, "a(ss)").context("it reports no device list")?;
    if policy != "auto" || !is_empty {
        systemd.call(|serial| dbus::set_device_allow(serial, unit, rules))?;
    }
    Ok(())
}

/// Waits until systemd has ended a reload of its unit files, or a re-execution, that may be running.
///
/// # Errors
/// If systemd does not run, or does not reply within ten seconds.
pub(super) fn wait() -> Result<()> {
    when_ready(get_version).context("systemd does not reply")
}

/// Asks systemd again while it reloads or executes itself again.
fn when_ready(ask: impl Fn() -> Result<()>) -> Result<()> {
    let until = Instant::now() + LONGEST_RELOAD;
    loop {
        match ask() {
            // systemd closes its connections when it executes itself again, and opens the socket later.
            Err(error) if is_busy(&error) && Instant::now() < until => {
                std::thread::sleep(PAUSE);
            }
            other => return other,
        }
    }
}

fn get_version() -> Result<()> {
    let mut systemd = Connection::open()?;
    systemd.call(dbus::get_version)?;
    Ok(())
}

fn is_busy(error: &anyhow::Error) -> bool {
    let Some(error) = error.root_cause().downcast_ref::<io::Error>() else {
        return false;
    };
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::WouldBlock
    )
}

/// A connection to systemd's private socket.
struct Connection {
    socket: UnixStream,
    serial: u32,
    /// When to stop reading messages that are not the reply
    until: Instant,
}

impl Connection {
    fn open() -> Result<Self> {
        let mut socket = UnixStream::connect(Path::new(SOCKET))
            .with_context(|| format!("connect to {SOCKET:?}"))?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.set_write_timeout(Some(TIMEOUT))?;
        // SASL EXTERNAL: systemd checks the socket's credentials. 30 is the user id "0" in hexadecimal ASCII.
        socket.write_all(b"\0AUTH EXTERNAL 30\r\nBEGIN\r\n")?;
        let line = read_line(&mut socket)?;
        ensure!(
            line.starts_with(b"OK "),
            "it replies {:?}",
            String::from_utf8_lossy(&line)
        );
        Ok(Self::over(socket))
    }

    fn over(socket: UnixStream) -> Self {
        Self {
            socket,
            serial: 0,
            until: Instant::now() + LONGEST_RELOAD,
        }
    }

    fn call(&mut self, message: impl FnOnce(u32) -> Vec<u8>) -> Result<Body> {
        self.serial += 1;
        self.socket.write_all(&message(self.serial))?;
        // The private socket gets all signals: a reload sends several for each unit, which are thousands on some hosts.
        while Instant::now() < self.until {
            match read_message(&mut self.socket, self.serial)? {
                Received::Other => {}
                Received::Done(body) => return Ok(body),
                Received::Refused(name) => bail!("it replies {name}"),
            }
        }
        bail!("it does not reply")
    }
}

fn read_line(socket: &mut UnixStream) -> Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\r\n") {
        socket.read_exact(&mut byte)?;
        line.extend(byte);
        ensure!(line.len() < 1024, "its greeting is too long");
    }
    Ok(line)
}

fn read_message(socket: &mut UnixStream, serial: u32) -> Result<Received> {
    let mut head = [0; dbus::HEAD];
    socket.read_exact(&mut head)?;
    let length = dbus::message_length(&head).context("it does not speak D-Bus")?;
    let mut message = head.to_vec();
    message.resize(length, 0);
    socket.read_exact(message.get_mut(dbus::HEAD..).unwrap_or_default())?;
    dbus::answer(&message, serial).context("its reply is not a D-Bus message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_of_signals_precede_the_reply() {
        let (ours, mut systemds) = UnixStream::pair().unwrap();
        let header =
            |kind: u8, fields: u8| [b'l', kind, 1, 1, 0, 0, 0, 0, 7, 0, 0, 0, fields, 0, 0, 0];
        let reply_to_first = [5, 1, b'u', 0, 1, 0, 0, 0];
        let systemd = std::thread::spawn(move || {
            for _ in 0..5000 {
                systemds.write_all(&header(4, 0)).unwrap();
            }
            systemds.write_all(&header(2, 8)).unwrap();
            systemds.write_all(&reply_to_first).unwrap();
            systemds
        });
        Connection::over(ours).call(dbus::get_version).unwrap();
        systemd.join().unwrap();
    }
}
