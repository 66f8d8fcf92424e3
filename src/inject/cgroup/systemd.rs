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

use super::DeviceRule;
use super::dbus::{self, Answer};

/// systemd's private socket, for root of the host: no bus daemon is in the way, nor has to run.
const SOCKET: &str = "/run/systemd/private";
/// It answers in a millisecond; while it reloads, that can take as long as reloading does.
const PATIENCE: Duration = Duration::from_secs(5);
/// An answer comes after a few signals at most.
const MAX_MESSAGES: usize = 1000;

/// `systemctl set-property --runtime UNIT DeviceAllow=…` for each rule.
///
/// # Errors
/// If there is no systemd, or it refuses, or does not answer within five seconds.
pub(super) fn allow(unit: &str, rules: &[DeviceRule]) -> Result<()> {
    let told = || -> Result<()> {
        let mut socket = UnixStream::connect(Path::new(SOCKET)).with_context(|| format!("connect to {SOCKET:?}"))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        // We are who the socket says that we are: EXTERNAL takes our user id, 0, in hexadecimal digits of its text.
        socket.write_all(b"\0AUTH EXTERNAL 30\r\nBEGIN\r\n")?;
        let line = read_line(&mut socket)?;
        ensure!(line.starts_with(b"OK "), "it answers {:?}", String::from_utf8_lossy(&line));
        socket.write_all(&dbus::set_device_allow(unit, rules))?;
        for _ in 0..MAX_MESSAGES {
            match read_message(&mut socket)? {
                Answer::Other => {}
                Answer::Done => return Ok(()),
                Answer::Refused(name) => bail!("it answers {name}"),
            }
        }
        bail!("it does not answer")
    };
    told().with_context(|| format!("cannot tell systemd about the devices of {unit:?}"))
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

fn read_message(socket: &mut UnixStream) -> Result<Answer> {
    let mut head = [0; dbus::HEAD];
    socket.read_exact(&mut head)?;
    let length = dbus::message_length(&head).context("it does not speak D-Bus")?;
    let mut message = head.to_vec();
    message.resize(length, 0);
    socket.read_exact(message.get_mut(dbus::HEAD..).unwrap_or_default())?;
    dbus::answer(&message).context("its answer is no D-Bus message")
}
