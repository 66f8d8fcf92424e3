//! The MPS daemons of this host that `oci-nvidia-hook mps` runs, one for each GPU that is shared.
//!
//! Each of them has a directory `/run/oci-nvidia-mps/GPU-UUID`, which belongs to root:
//!
//! | name | what it is |
//! |---|---|
//! | `pipe` | the directory with the sockets of the driver's daemon; containers have it mounted, so it is never replaced |
//! | `log` | the daemon's log files |
//! | `state` | a [`State`] as JSON; it exists while the GPU is shared, even if the daemon has failed |
//! | `lock` | locked by the program that supervises the daemon, for as long as it runs |

mod entry;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use base::debug;
use base::json;
use base::paths::HostPath;
use base::sys::guarded;
use base::tree::{Tree, is_missing};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde::{Deserialize, Serialize};

pub use self::entry::Entry;
use crate::config::Config;
use crate::driver::file_table::MPS_DIRECTORY;
use crate::driver::ipc::{Channel, Expected, Ipc};

/// The directory that has a directory for each GPU that is shared.
pub const DIRECTORY: &str = "/run/oci-nvidia-mps";
/// The name of the directory with the daemon's sockets.
pub const PIPE: &str = "pipe";
/// The name of the directory with the daemon's log files.
pub const LOG: &str = "log";
/// The name of the file with the [`State`].
pub const STATE: &str = "state";
/// The name of the file that is locked while a daemon is supervised.
pub const LOCK: &str = "lock";
/// The path of the daemon's directory in containers. CUDA searches there without a variable.
pub const CONTAINER_DIRECTORY: &str = MPS_DIRECTORY.0;

/// The format of [`State`]. A program ignores a state with another one.
pub const FORMAT: u32 = 1;
/// A state has about 400 bytes. The reason of a failure is one line.
const MAX_STATE: u64 = 16 << 10;

/// What the supervisor of a daemon does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The daemon does not accept clients yet
    Starting,
    /// The daemon and its server answer, and the limits are set
    Ready,
    /// The daemon was asked to end
    Stopping,
    /// The daemon or its server does not work
    Failed,
}

/// What the supervisor of a daemon writes about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The format, [`FORMAT`]
    pub format: u32,
    /// The UUID of the GPU
    pub gpu: String,
    /// The GPU as the administrator named it: the instance of the supervisor's unit
    #[serde(default)]
    pub name: Option<String>,
    /// What the supervisor does
    pub state: Phase,
    /// Why the daemon does not work, in one line
    #[serde(default)]
    pub why: Option<String>,
    /// The GPU memory that each client may allocate, in MiB; `None` for all of it
    #[serde(default)]
    pub memory_limit_mib: Option<u64>,
    /// The percentage of the multiprocessors that each client may use; `None` for all of them
    #[serde(default)]
    pub active_thread_percentage: Option<u8>,
    /// Whether clients of several users can use the GPU at the same time
    #[serde(default)]
    pub multi_user: bool,
    /// The compute mode of the GPU before it was shared, as NVML's number
    #[serde(default)]
    pub compute_mode_before: u32,
    /// The number of clients
    #[serde(default)]
    pub clients: u32,
    /// The process that supervises the daemon
    #[serde(default)]
    pub supervisor: Option<i32>,
    /// The driver's daemon
    #[serde(default)]
    pub daemon: Option<i32>,
    /// The daemon's server
    #[serde(default)]
    pub server: Option<i32>,
}

impl State {
    /// Parses a state. Returns `None` if it is not complete, or has another format.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let state: Self = json::from_bytes(text).ok()?;
        if state.format == FORMAT {
            Some(state)
        } else {
            None
        }
    }

    /// Returns the systemd unit of the supervisor, with the name by which the administrator shares the GPU.
    #[must_use]
    pub fn unit(&self) -> String {
        format!(
            "oci-nvidia-mps@{}",
            self.name.as_deref().unwrap_or(&self.gpu)
        )
    }
}

/// Whether containers can use a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// They can
    Ready,
    /// Not yet, or no longer
    Starting,
    /// It does not work, for this reason
    Failed(String),
    /// Nothing supervises it: its supervisor was killed, and left no reason
    Dead,
}

/// The daemon of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Daemon {
    /// What its supervisor wrote
    pub state: State,
    /// Whether containers can use it
    pub status: Status,
    /// The directory with its sockets
    pub ipc: Ipc,
}

impl Daemon {
    /// Returns why containers cannot use it, or `None` if they can.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        match &self.status {
            Status::Ready => None,
            Status::Starting => Some("it is starting or stopping".to_owned()),
            Status::Failed(why) => Some(why.clone()),
            Status::Dead => Some("its supervisor has ended".to_owned()),
        }
    }
}

/// Returns the daemon of the GPU with this UUID.
#[must_use]
pub fn of_gpu<'d>(daemons: &'d [Daemon], uuid: &str) -> Option<&'d Daemon> {
    daemons.iter().find(|daemon| daemon.state.gpu == uuid)
}

/// Returns the daemons of the host that this configuration describes. If its driver root cannot be opened, which `doctor` reports, there
/// are none.
#[must_use]
pub fn of_host(config: &Config) -> Vec<Daemon> {
    match crate::driver::open_root(&config.driver_root) {
        Ok(driver) => daemons(&driver),
        Err(_) => Vec::new(),
    }
}

/// Returns the directory of the daemon of a GPU.
#[must_use]
pub fn directory_of(uuid: &str) -> PathBuf {
    Path::new(DIRECTORY).join(uuid)
}

/// Returns the daemons of this host, sorted by the UUIDs of their GPUs. `driver` is the driver root, which is the host's `/` unless it
/// has a directory of daemons itself. A directory that another user could have created is ignored.
#[must_use]
pub fn daemons(driver: &Tree) -> Vec<Daemon> {
    let names = driver.names(Path::new(DIRECTORY));
    if !names.is_empty() || driver.path().as_path() == Path::new("/") {
        return below(driver, &names);
    }
    let Ok(host) = Tree::open(&HostPath::new("/")) else {
        return Vec::new();
    };
    below(&host, &host.names(Path::new(DIRECTORY)))
}

fn below(root: &Tree, names: &[std::ffi::OsString]) -> Vec<Daemon> {
    let mut found = Vec::new();
    for name in names {
        let Some(uuid) = name.to_str() else {
            continue;
        };
        match read(root, uuid) {
            Ok(daemon) => found.extend(daemon),
            Err(error) if is_missing(&error) => {}
            Err(error) => debug::log(|| format!("MPS daemon of {uuid:?}: {error}")),
        }
    }
    found
}

/// Reads the state of a daemon. Returns `None` if it is invalid, or belongs to another GPU.
fn read(root: &Tree, uuid: &str) -> io::Result<Option<Daemon>> {
    let directory = directory_of(uuid);
    let (file, _) = guarded::open_file(&root.on_host(&directory.join(STATE)))?;
    let mut text = Vec::new();
    file.take(MAX_STATE).read_to_end(&mut text)?;
    let Some(state) = State::parse(&text) else {
        return Ok(None);
    };
    let Some(ipc) = pipe(root, &directory) else {
        return Ok(None);
    };
    if state.gpu != uuid {
        return Ok(None);
    }
    let is_supervised = match guarded::open_file(&root.on_host(&directory.join(LOCK))) {
        Ok((lock, _)) => is_locked(&lock)?,
        Err(error) if is_missing(&error) => false,
        Err(error) => return Err(error),
    };
    let status = match state.state {
        // A supervisor that ends because of a failure leaves the reason.
        Phase::Failed => Status::Failed(state.why.clone().unwrap_or_default()),
        _ if !is_supervised => Status::Dead,
        Phase::Ready => Status::Ready,
        Phase::Starting | Phase::Stopping => Status::Starting,
    };
    Ok(Some(Daemon { state, status, ipc }))
}

/// Returns the directory with the sockets, as a container gets it.
fn pipe(root: &Tree, directory: &Path) -> Option<Ipc> {
    let channel = Channel {
        root: root.path(),
        path: directory.join(PIPE),
        expected: Expected::MpsDirectory,
    };
    Ipc::open_at(root, channel, Path::new(CONTAINER_DIRECTORY))
}

/// Locks the file of a supervisor until it is closed. Another program cannot lock it then, and [`daemons`] finds the daemon alive.
///
/// # Errors
/// `WouldBlock` if another program has locked it.
pub fn lock(file: &File) -> io::Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_WRLCK)))
        .map(drop)
        .map_err(io::Error::from)
}

/// Whether a program has locked the file. The file is not locked for that: a supervisor that starts at the same time would fail.
fn is_locked(file: &File) -> io::Result<bool> {
    let mut lock = whole_file(libc::F_RDLCK);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock)).map_err(io::Error::from)?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Describes a lock of a whole file, see fcntl(2). `l_pid` must be 0 for locks of an open file description.
fn whole_file(kind: i32) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const UUID: &str = "GPU-0";

    fn host() -> (tempfile::TempDir, PathBuf, Tree) {
        let dir = tempfile::tempdir().unwrap();
        let of_gpu = dir
            .path()
            .join(directory_of(UUID).strip_prefix("/").unwrap());
        fs::create_dir_all(of_gpu.join(PIPE)).unwrap();
        fs::write(of_gpu.join(LOCK), "").unwrap();
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        (dir, of_gpu, root)
    }

    fn write(directory: &Path, phase: &str) {
        let state = serde_json::json!({"format": 1, "gpu": UUID, "state": phase, "why": "no answer", "memory_limit_mib": 2048});
        fs::write(directory.join(STATE), state.to_string()).unwrap();
    }

    #[test]
    fn a_daemon_without_a_supervisor_is_dead() {
        let (_dir, directory, root) = host();
        assert_eq!(daemons(&root), []);
        write(&directory, "ready");
        assert_eq!(daemons(&root)[0].status, Status::Dead);
        let file = File::options()
            .write(true)
            .open(directory.join(LOCK))
            .unwrap();
        lock(&file).unwrap();
        for (phase, status) in [
            ("ready", Status::Ready),
            ("starting", Status::Starting),
            ("stopping", Status::Starting),
            ("failed", Status::Failed("no answer".to_owned())),
        ] {
            write(&directory, phase);
            let found = daemons(&root.afresh());
            assert_eq!(found[0].status, status, "{phase}");
            assert_eq!(found[0].problem().is_none(), phase == "ready");
            assert_eq!(found[0].state.memory_limit_mib, Some(2048));
            assert_eq!(found[0].ipc.path.absolute(), Path::new(CONTAINER_DIRECTORY));
        }
        let other = File::options()
            .write(true)
            .open(directory.join(LOCK))
            .unwrap();
        assert_eq!(lock(&other).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(file);
        let failed = Status::Failed("no answer".to_owned());
        for (phase, status) in [
            ("failed", &failed),
            ("ready", &Status::Dead),
            ("starting", &Status::Dead),
        ] {
            write(&directory, phase);
            assert_eq!(daemons(&root.afresh())[0].status, *status, "{phase}");
        }
    }

    #[test]
    fn what_is_not_a_state_is_ignored() {
        let (_dir, directory, root) = host();
        for text in [
            "",
            "{}",
            r#"{"format": 2, "gpu": "GPU-0", "state": "ready"}"#,
            r#"{"format": 1, "gpu": "GPU-1", "state": "ready"}"#,
            r#"{"format": 1, "gpu": "GPU-0", "state": "other"}"#,
        ] {
            fs::write(directory.join(STATE), text).unwrap();
            assert_eq!(daemons(&root.afresh()), [], "{text}");
        }
        write(&directory, "ready");
        assert_eq!(daemons(&root.afresh()).len(), 1);
        fs::remove_dir(directory.join(PIPE)).unwrap();
        assert_eq!(daemons(&root.afresh()), [], "no directory for containers");
    }
}
