//! The messages at the control socket of a running plugin, and the client.
//!
//! A connection carries one line in each direction, and only root can connect. Only the running plugin knows which devices it offers to
//! the kubelet and with which health: it has seen the errors of a GPU, and decides when a GPU is offered again. A program that asks the
//! driver may find that the same GPU works.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::json;
use base::sys::unix_socket;
use serde::{Deserialize, Serialize};

/// The directory of the socket: the runtime directory of the plugin's unit.
pub const DIR: &str = "/run/oci-nvidia-kubelet-plugin";
/// How long the plugin may take.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// The longest request in bytes, and the longest answer to [`Request::Clear`].
pub const MAX_LINE: usize = 256;
/// The longest list of devices in bytes. 16 GPUs with 7 MIG devices and 100 replicas each have 11,200 devices.
const MAX_DEVICES: usize = 16 << 20;

const DEVICES: &str = "devices";
const CLEAR: &str = "clear ";

/// A request to the plugin: one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Send the devices and their health, as [`Offered`].
    Devices,
    /// Forget the errors of the GPU with this UUID, and send [`cleared`].
    Clear(&'a str),
}

impl<'a> Request<'a> {
    /// Parses a line without its end.
    #[must_use]
    pub fn parse(line: &'a str) -> Option<Self> {
        if line == DEVICES {
            return Some(Self::Devices);
        }
        line.strip_prefix(CLEAR).map(Self::Clear)
    }
}

impl fmt::Display for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Devices => f.write_str(DEVICES),
            Self::Clear(gpu) => write!(f, "{CLEAR}{gpu}"),
        }
    }
}

/// Returns the answer to [`Request::Clear`], without the end of its line: whether the GPU had errors.
#[must_use]
pub const fn cleared(had_errors: bool) -> &'static str {
    if had_errors {
        "cleared"
    } else {
        "nothing to clear"
    }
}

/// What the plugin offers to the kubelet: its answer to [`Request::Devices`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offered {
    /// The resources in the order of their names
    pub resources: Vec<OfferedResource>,
    /// The driver for claims; `None` if the kubelet gets the resources
    #[serde(default)]
    pub driver: Option<OfferedDriver>,
    /// The CDI spec in which engines find the devices; `None` if containers get no CDI devices
    #[serde(default)]
    pub spec: Option<PathBuf>,
}

/// A driver for claims (Dynamic Resource Allocation).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedDriver {
    /// The name, such as `gpu.nvidia.com`
    pub name: String,
    /// Whether the kubelet has accepted it
    pub is_registered: bool,
    /// Why claims can have no device now
    pub problem: Option<String>,
    /// Why the API server does not have the devices as they are
    pub unpublished: Option<String>,
}

/// A resource, such as `nvidia.com/gpu`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedResource {
    /// The name with its prefix
    pub name: String,
    /// Whether the kubelet has an open stream with the list of devices
    pub is_live: bool,
    /// The devices
    pub devices: Vec<OfferedDevice>,
}

/// A device of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedDevice {
    /// Its id for the kubelet
    pub id: String,
    /// The UUID of the GPU
    pub gpu: String,
    /// Why the kubelet gives it to no pod; `None` if it is healthy
    pub unhealthy: Option<Unhealthy>,
}

/// Why a device is unhealthy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unhealthy {
    /// The reason, such as `XID 79`
    pub why: String,
    /// When it became unhealthy, as in RFC 3339; `None` if the plugin does not know it
    pub since: Option<String>,
}

impl fmt::Display for Unhealthy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)?;
        if let Some(since) = &self.since {
            write!(f, " (since {since})")?;
        }
        Ok(())
    }
}

/// The reason for a missing answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// No process listens.
    NotRunning,
    /// Only root may connect.
    Denied,
    /// The plugin does not answer, or its answer is invalid.
    Failed(String),
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRunning => f.write_str("the kubelet plugin does not run on this host"),
            Self::Denied => f.write_str("only root can query the running kubelet plugin"),
            Self::Failed(why) => write!(
                f,
                "the running kubelet plugin does not report its devices: {why}"
            ),
        }
    }
}

impl From<io::Error> for Unanswered {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // A process that was killed leaves its socket behind. The kernel resets the connections that it had not accepted.
            ErrorKind::NotFound
            | ErrorKind::ConnectionRefused
            | ErrorKind::ConnectionReset
            | ErrorKind::BrokenPipe => Self::NotRunning,
            ErrorKind::PermissionDenied => Self::Denied,
            ErrorKind::TimedOut => {
                Self::Failed(format!("no answer within {} s", PATIENCE.as_secs()))
            }
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// Returns the socket of a plugin with this runtime directory.
#[must_use]
pub fn socket(dir: &Path) -> PathBuf {
    dir.join("control.sock")
}

/// Asks the plugin with this runtime directory for its devices.
///
/// # Errors
/// If no plugin runs, or it does not answer.
pub fn devices(dir: &Path) -> Result<Offered, Unanswered> {
    let answer = ask(dir, Request::Devices, MAX_DEVICES)?;
    json::from_bytes(&answer).map_err(|_| invalid())
}

/// Makes the plugin forget the errors of a GPU, by its UUID. Returns whether the GPU had any.
///
/// # Errors
/// If no plugin runs, or it does not answer.
pub fn clear(dir: &Path, gpu: &str) -> Result<bool, Unanswered> {
    let answer = ask(dir, Request::Clear(gpu), MAX_LINE)?;
    for had_errors in [true, false] {
        if answer.trim_ascii_end() == cleared(had_errors).as_bytes() {
            return Ok(had_errors);
        }
    }
    Err(invalid())
}

fn ask(dir: &Path, request: Request<'_>, limit: usize) -> Result<Vec<u8>, Unanswered> {
    let line = format!("{request}\n");
    Ok(unix_socket::ask(
        &socket(dir),
        line.as_bytes(),
        limit,
        PATIENCE,
    )?)
}

fn invalid() -> Unanswered {
    Unanswered::Failed("its answer is invalid".to_owned())
}

impl Offered {
    /// Returns all devices.
    pub fn devices(&self) -> impl Iterator<Item = &OfferedDevice> {
        self.resources.iter().flat_map(|resource| &resource.devices)
    }

    /// Returns why a GPU is unhealthy, by its UUID: all of its devices are, or none.
    #[must_use]
    pub fn unhealthy(&self, gpu: &str) -> Option<&Unhealthy> {
        let mut devices = self.devices().filter(|device| device.gpu == gpu);
        devices.find_map(|device| device.unhealthy.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::thread;

    use rustix::event::{PollFd, PollFlags};

    use super::*;

    #[test]
    fn an_answer_and_none() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(devices(dir.path()), Err(Unanswered::NotRunning));
        let listener = UnixListener::bind(socket(dir.path())).unwrap();
        let why = Unhealthy {
            why: "XID 79".to_owned(),
            since: Some("2026-01-02T03:04:05Z".to_owned()),
        };
        let device = |gpu: &str, unhealthy| OfferedDevice {
            id: format!("{gpu}::0"),
            gpu: gpu.to_owned(),
            unhealthy,
        };
        let list = vec![device("GPU-0", None), device("GPU-1", Some(why.clone()))];
        let resource = OfferedResource {
            name: "nvidia.com/gpu".to_owned(),
            is_live: true,
            devices: list,
        };
        let offered = Offered {
            resources: vec![resource],
            ..Offered::default()
        };
        let answers = [
            serde_json::to_string(&offered).unwrap() + "\n",
            "unknown command\n".to_owned(),
        ];
        thread::scope(|scope| {
            scope.spawn(move || {
                for answer in answers {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut question = [0; DEVICES.len() + 1];
                    stream.read_exact(&mut question).unwrap();
                    assert_eq!(question, *b"devices\n");
                    stream.write_all(answer.as_bytes()).unwrap();
                }
            });
            assert_eq!(devices(dir.path()), Ok(offered.clone()));
            assert_eq!(
                devices(dir.path()),
                Err(Unanswered::Failed("its answer is invalid".to_owned()))
            );
        });
        assert_eq!(
            devices(dir.path()),
            Err(Unanswered::NotRunning),
            "only the file of the socket is left"
        );
        assert_eq!(
            (offered.unhealthy("GPU-0"), offered.unhealthy("GPU-1")),
            (None, Some(&why))
        );
        assert_eq!(why.to_string(), "XID 79 (since 2026-01-02T03:04:05Z)");
    }

    #[test]
    fn requests() {
        for (line, request) in [
            ("devices", Some(Request::Devices)),
            ("clear GPU-0", Some(Request::Clear("GPU-0"))),
            ("clear", None),
            ("devices ", None),
            ("", None),
        ] {
            assert_eq!(Request::parse(line), request, "{line:?}");
            if let Some(request) = request {
                assert_eq!(request.to_string(), line);
            }
        }
    }

    #[test]
    fn a_plugin_that_ends_before_it_accepts_the_connection() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(socket(dir.path())).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                rustix::event::poll(&mut [PollFd::new(&listener, PollFlags::IN)], None).unwrap();
                drop(listener);
            });
            assert_eq!(devices(dir.path()), Err(Unanswered::NotRunning));
        });
    }
}
