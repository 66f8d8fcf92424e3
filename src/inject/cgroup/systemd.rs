//! systemd's own list of a container's devices. Effects.
//!
//! Where systemd manages the container's cgroup, it writes the device rules that it knows of again whenever it likes: at
//! `systemctl daemon-reload`, for one. What we added behind its back is gone then ("Failed to initialize NVML: Unknown
//! Error"), so it is told as well.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::dbus::{self, Answer, Body};
use crate::oci::device_rules::DeviceRule;

/// systemd's private socket, for root of the host: no bus daemon is in the way, nor has to run.
const SOCKET: &str = "/run/systemd/private";
/// It answers in a millisecond; while it reloads, that can take as long as reloading does.
const PATIENCE: Duration = Duration::from_secs(5);
/// An answer comes after a few signals at most.
const MAX_MESSAGES: usize = 1000;

/// `systemctl set-property --runtime UNIT DeviceAllow=…` for each rule, if systemd filters the unit's devices.
///
/// crun before 1.18 gives its scope no device policy: it attaches a program of its own. A scope with the policy "auto" and an
/// empty list has no filter of systemd's; the first entry would make one, which denies all devices that are not in the list,
/// and so the container's other devices (`--device /dev/fuse`).
///
/// # Errors
/// If there is no systemd, or it refuses, or does not answer within five seconds.
pub(super) fn allow(unit: &str, rules: &[DeviceRule]) -> Result<()> {
    extend_device_allow(unit, rules).with_context(|| format!("cannot tell systemd about the devices of {unit:?}"))
}

fn extend_device_allow(unit: &str, rules: &[DeviceRule]) -> Result<()> {
    let mut systemd = Connection::open()?;
    let policy = systemd.call(|serial| dbus::get_property(serial, unit, "DevicePolicy"))?;
    let list = systemd.call(|serial| dbus::get_property(serial, unit, "DeviceAllow"))?;
    let policy = dbus::text_property(&policy).context("it shows no device policy")?;
    let is_empty = dbus::is_empty_list(&list, "a(ss)").context("it shows no list of devices")?;
    if policy != "auto" || !is_empty {
        systemd.call(|serial| dbus::set_device_allow(serial, unit, rules))?;
    }
    Ok(())
}

/// A connection to systemd's private socket.
struct Connection {
    socket: UnixStream,
    serial: u32,
}

impl Connection {
    fn open() -> Result<Self> {
        let mut socket = UnixStream::connect(Path::new(SOCKET)).with_context(|| format!("connect to {SOCKET:?}"))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        // We are who the socket says that we are: EXTERNAL takes our user id, 0, in hexadecimal digits of its text.
        socket.write_all(b"\0AUTH EXTERNAL 30\r\nBEGIN\r\n")?;
        let line = read_line(&mut socket)?;
        ensure!(line.starts_with(b"OK "), "it answers {:?}", String::from_utf8_lossy(&line));
        Ok(Self { socket, serial: 0 })
    }

    fn call(&mut self, message: impl FnOnce(u32) -> Vec<u8>) -> Result<Body> {
        self.serial += 1;
        self.socket.write_all(&message(self.serial))?;
        for _ in 0..MAX_MESSAGES {
            match read_message(&mut self.socket, self.serial)? {
                Answer::Other => {}
                Answer::Done(body) => return Ok(body),
                Answer::Refused(name) => bail!("it answers {name}"),
            }
        }
        bail!("it does not answer")
    }
}

fn read_line(socket: &mut UnixStream) -> Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\r\n") {
        socket.read_exact(&mut byte)?;
        line.extend(byte);
        ensure!(line.len() < 1024, "its greeting has no end");
    }
    Ok(line)
}

fn read_message(socket: &mut UnixStream, serial: u32) -> Result<Answer> {
    let mut head = [0; dbus::HEAD];
    socket.read_exact(&mut head)?;
    let length = dbus::message_length(&head).context("it does not speak D-Bus")?;
    let mut message = head.to_vec();
    message.resize(length, 0);
    socket.read_exact(message.get_mut(dbus::HEAD..).unwrap_or_default())?;
    dbus::answer(&message, serial).context("its answer is no D-Bus message")
}
