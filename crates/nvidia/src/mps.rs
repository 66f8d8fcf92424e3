//! The GPUs that config.toml shares with MPS, and the daemons that `oci-nvidia-mps` runs for them.
//!
//! [`Sharing`] decides which GPUs are shared, whatever happened to their daemons. Each daemon has a directory
//! `/run/oci-nvidia-mps/GPU-UUID`, which belongs to root:
//!
//! | name | what it is |
//! |---|---|
//! | `pipe` | the directory with the sockets of the driver's daemon; containers have it mounted, so it is never replaced |
//! | `log` | the daemon's log files |
//! | `state` | a [`State`] as JSON. The supervisor has locked it since before it had this name, so nobody else can lock it first |

mod entry;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::Result;
use base::debug;
use base::json;
use base::paths::HostPath;
use base::report::failure;
use base::sys::guarded;
use base::tree::{Tree, is_missing};
use findings::catalog;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde::{Deserialize, Serialize};

pub use self::entry::Entry;
use crate::config::Sharing;
use crate::driver::file_table::MPS_DIRECTORY;
use crate::driver::ipc::{Channel, Expected, Ipc};
use crate::inventory::Gpu;
use crate::inventory::limits::is_shared;

/// The directory that has a directory for each GPU that is shared.
pub const DIRECTORY: &str = "/run/oci-nvidia-mps";
/// The name of the directory with the daemon's sockets.
pub const PIPE: &str = "pipe";
/// The name of the directory with the daemon's log files.
pub const LOG: &str = "log";
/// The name of the file with the [`State`].
pub const STATE: &str = "state";
/// The path of the daemon's directory in containers. CUDA searches there without a variable.
pub const CONTAINER_DIRECTORY: &str = MPS_DIRECTORY.0;
/// The unit that starts the daemons of the GPUs that config.toml shares.
pub const UNIT: &str = "oci-nvidia-mps";

/// The format of [`State`]. A program ignores a state with another one.
pub const FORMAT: u32 = 2;
/// A state has about 400 bytes. The reason of a failure is one line.
pub const MAX_STATE: u64 = 16 << 10;

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
    /// The driver root with which the daemon was started, for the case that config.toml becomes invalid
    #[serde(default)]
    pub driver_root: Option<PathBuf>,
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
    /// Returns the state of a daemon that nobody has started.
    #[must_use]
    pub fn new(gpu: &str, state: Phase) -> Self {
        Self {
            format: FORMAT,
            gpu: gpu.to_owned(),
            state,
            why: None,
            memory_limit_mib: None,
            active_thread_percentage: None,
            multi_user: false,
            driver_root: None,
            clients: 0,
            supervisor: None,
            daemon: None,
            server: None,
        }
    }

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
    /// It was not started
    Missing,
}

/// The daemon of a GPU that config.toml shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Daemon {
    /// NVML's index of the GPU
    pub index: u32,
    /// What its supervisor wrote
    pub state: State,
    /// Whether containers can use it
    pub status: Status,
    /// The directory with its sockets; it exists if the daemon is ready
    pub ipc: Option<Ipc>,
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
            Status::Missing => Some("it was not started".to_owned()),
        }
    }

    /// Returns the command that makes it ready, or shows why it is not.
    #[must_use]
    pub fn fix(&self) -> String {
        match self.status {
            Status::Missing => format!("run \"systemctl enable --now {UNIT}\""),
            _ => format!("run \"systemctl status {}\"", unit_of(&self.state.gpu)),
        }
    }
}

/// Returns the unit that supervises the daemon of the GPU with this UUID. [`UNIT`] starts it.
#[must_use]
pub fn unit_of(uuid: &str) -> String {
    format!("{UNIT}@{uuid}")
}

/// Returns the daemon of the GPU with this UUID.
#[must_use]
pub fn of_gpu<'d>(daemons: &'d [Daemon], uuid: &str) -> Option<&'d Daemon> {
    daemons.iter().find(|daemon| daemon.state.gpu == uuid)
}

/// Returns the daemon of a container that gets the GPUs with these UUIDs, which may occur more than once; `None` if none of them is shared. A
/// program connects to one daemon, and then sees its GPU only. So a container has either one GPU that is shared, or others.
///
/// # Errors
/// If the daemon is not ready, or the container gets other GPUs too.
pub fn of_container<'d>(daemons: &'d [Daemon], uuids: &[&str]) -> Result<Option<&'d Daemon>> {
    let Some(daemon) = daemons
        .iter()
        .find(|daemon| uuids.contains(&daemon.state.gpu.as_str()))
    else {
        return Ok(None);
    };
    let index = daemon.index;
    let mut others = uuids.to_vec();
    others.sort_unstable();
    others.dedup();
    if others.len() > 1 {
        let what = format!(
            "GPU {index} is shared through MPS, and the container requests {} GPUs",
            others.len()
        );
        let fix = "request only this GPU, or only GPUs that are not shared; for monitoring, set NVIDIA_DRIVER_CAPABILITIES=utility";
        return Err(failure(&catalog::MPS_SEVERAL, what, fix));
    }
    match daemon.problem() {
        None => Ok(Some(daemon)),
        Some(why) => {
            let what = format!("the MPS daemon of GPU {index} is not ready: {why}");
            let fix = format!("{} on the host", daemon.fix());
            Err(failure(&catalog::MPS_NOT_READY, what, fix))
        }
    }
}

/// Returns the directory of the daemon of a GPU.
#[must_use]
pub fn directory_of(uuid: &str) -> PathBuf {
    Path::new(DIRECTORY).join(uuid)
}

/// Returns the daemons of those GPUs that config.toml shares, also if they do not run. They are below the driver root, or on the host. A file
/// that another user could have created is ignored.
#[must_use]
pub fn daemons<'g>(
    driver: &Tree,
    sharing: &Sharing,
    gpus: impl IntoIterator<Item = &'g Gpu>,
) -> Vec<Daemon> {
    let mut found = Vec::new();
    if sharing.mps_gpus.is_empty() {
        return found;
    }
    for gpu in gpus {
        if is_shared(sharing, gpu) {
            found.push(daemon(driver, gpu));
        }
    }
    found
}

/// Returns the UUIDs of the GPUs that have been shared since this boot and were not given back, whatever config.toml says now.
#[must_use]
pub fn gpus_with_a_state(root: &Tree) -> Vec<String> {
    let mut found = Vec::new();
    for name in root.names(Path::new(DIRECTORY)) {
        if let Some(uuid) = name.to_str()
            && root.locate(&directory_of(uuid).join(STATE)).is_ok()
        {
            found.push(uuid.to_owned());
        }
    }
    found
}

fn daemon(driver: &Tree, gpu: &Gpu) -> Daemon {
    let mut roots = vec![driver.afresh()];
    if driver.path().as_path() != Path::new("/") {
        roots.extend(Tree::open(&HostPath::new("/")).ok());
    }
    for root in &roots {
        match read(root, &gpu.uuid) {
            Ok((state, status)) => {
                return Daemon {
                    index: gpu.index,
                    state,
                    status,
                    ipc: pipe(root, &gpu.uuid),
                };
            }
            Err(error) if is_missing(&error) => {}
            Err(error) => debug::log(|| format!("MPS daemon of {:?}: {error}", gpu.uuid)),
        }
    }
    Daemon {
        index: gpu.index,
        state: State::new(&gpu.uuid, Phase::Failed),
        status: Status::Missing,
        ipc: None,
    }
}

/// Reads the state of a daemon.
fn read(root: &Tree, uuid: &str) -> io::Result<(State, Status)> {
    let path = directory_of(uuid).join(STATE);
    let (file, _) = guarded::open_file(&root.on_host(&path))?;
    let is_supervised = is_locked(&file)?;
    let mut text = Vec::new();
    file.take(MAX_STATE).read_to_end(&mut text)?;
    let state = State::parse(&text).filter(|state| state.gpu == uuid);
    let state = state.ok_or(io::ErrorKind::InvalidData)?;
    let status = match state.state {
        // A supervisor that ends because of a failure leaves the reason.
        Phase::Failed => Status::Failed(state.why.clone().unwrap_or_default()),
        _ if !is_supervised => Status::Dead,
        Phase::Ready if pipe(root, uuid).is_none() => {
            Status::Failed("the directory with its sockets is missing".to_owned())
        }
        Phase::Ready => Status::Ready,
        Phase::Starting | Phase::Stopping => Status::Starting,
    };
    Ok((state, status))
}

/// Returns the directory with the sockets, as a container gets it.
fn pipe(root: &Tree, uuid: &str) -> Option<Ipc> {
    let channel = Channel {
        root: root.path(),
        path: directory_of(uuid).join(PIPE),
        expected: Expected::MpsDirectory,
    };
    Ipc::open_at(root, channel, Path::new(CONTAINER_DIRECTORY))
}

/// Locks the file with a state until it is closed: [`daemons`] then finds the daemon supervised.
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
    use crate::inventory::select::tests::inventory;

    const UUID: &str = "GPU-0";

    fn host() -> (tempfile::TempDir, PathBuf, Tree) {
        let dir = tempfile::tempdir().unwrap();
        let of_gpu = dir
            .path()
            .join(directory_of(UUID).strip_prefix("/").unwrap());
        fs::create_dir_all(of_gpu.join(PIPE)).unwrap();
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        (dir, of_gpu, root)
    }

    /// Returns the daemons of `GPU-0` with index 7, and of `GPU-1`, if these entries share them.
    fn found(root: &Tree, entries: &[&str]) -> Vec<Daemon> {
        let sharing = Sharing {
            mps_gpus: entries.iter().map(|entry| (*entry).to_owned()).collect(),
            ..Sharing::default()
        };
        let mut gpus = [inventory().gpus[0].clone(), inventory().gpus[0].clone()];
        for (gpu, (uuid, index)) in gpus.iter_mut().zip([(UUID, 7), ("GPU-1", 8)]) {
            (gpu.uuid, gpu.index, gpu.mig_enabled) = (uuid.to_owned(), index, false);
        }
        daemons(&root.afresh(), &sharing, &gpus)
    }

    fn status(root: &Tree) -> Status {
        found(root, &["7"]).remove(0).status
    }

    fn write(directory: &Path, phase: &str) -> File {
        let state = serde_json::json!({"format": FORMAT, "gpu": UUID, "state": phase, "why": "no answer", "memory_limit_mib": 2048});
        fs::write(directory.join(STATE), state.to_string()).unwrap();
        let options = File::options().write(true).open(directory.join(STATE));
        options.unwrap()
    }

    #[test]
    fn a_daemon_without_a_supervisor_is_dead() {
        let (_dir, directory, root) = host();
        let failed = Status::Failed("no answer".to_owned());
        for (phase, supervised, left) in [
            ("ready", Status::Ready, Status::Dead),
            ("starting", Status::Starting, Status::Dead),
            ("stopping", Status::Starting, Status::Dead),
            ("failed", failed.clone(), failed),
        ] {
            let file = write(&directory, phase);
            assert_eq!(status(&root), left, "{phase}");
            lock(&file).unwrap();
            let daemon = found(&root, &["7"]).remove(0);
            assert_eq!(daemon.status, supervised, "{phase}");
            assert_eq!(daemon.problem().is_none(), phase == "ready");
            assert_eq!(daemon.state.memory_limit_mib, Some(2048));
            let ipc = daemon.ipc.unwrap();
            assert_eq!(ipc.path.absolute(), Path::new(CONTAINER_DIRECTORY));
        }
    }

    /// A local user can open the file, and lock it for reading.
    #[test]
    fn a_lock_of_another_user_supervises_nothing() {
        let (_dir, directory, root) = host();
        write(&directory, "ready");
        let file = File::open(directory.join(STATE)).unwrap();
        fcntl(&file, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_RDLCK))).unwrap();
        assert_eq!(status(&root), Status::Dead);
    }

    #[test]
    fn the_configuration_decides_what_is_shared() {
        let (_dir, directory, root) = host();
        lock(&write(&directory, "ready")).unwrap();
        assert_eq!(
            found(&root, &[]),
            [],
            "the daemon of a GPU that is not shared"
        );
        assert_eq!(found(&root, &["0", "GPU-2*"]), []);
        for entries in [&["all"][..], &["8", UUID], &["GPU-*"]] {
            let daemons = found(&root, entries);
            let gpus = [0, 1].map(|at: usize| daemons[at].state.gpu.as_str());
            assert_eq!(gpus, [UUID, "GPU-1"], "{entries:?}");
            assert_eq!(daemons[1].status, Status::Missing);
        }
    }

    #[test]
    fn what_is_not_a_state_is_no_daemon() {
        let (_dir, directory, root) = host();
        for text in [
            "",
            "{}",
            r#"{"format": 1, "gpu": "GPU-0", "state": "ready"}"#,
            r#"{"format": 2, "gpu": "GPU-1", "state": "ready"}"#,
            r#"{"format": 2, "gpu": "GPU-0", "state": "other"}"#,
        ] {
            fs::write(directory.join(STATE), text).unwrap();
            assert_eq!(status(&root), Status::Missing, "{text}");
        }
        let file = write(&directory, "ready");
        lock(&file).unwrap();
        fs::remove_dir(directory.join(PIPE)).unwrap();
        assert!(matches!(status(&root), Status::Failed(_)), "no directory");
    }

    #[test]
    fn a_container_has_one_shared_gpu_or_others() {
        let (_dir, directory, root) = host();
        let file = write(&directory, "ready");
        lock(&file).unwrap();
        let daemons = found(&root, &["all"]);
        let ask = |uuids: &[&str]| match of_container(&daemons, uuids) {
            Ok(daemon) => daemon
                .map_or("none", |daemon| daemon.state.gpu.as_str())
                .to_owned(),
            Err(error) => error.to_string(),
        };
        for (uuids, expected) in [
            (&[][..], "none"),
            (&["GPU-2", "GPU-3"], "none"),
            (&[UUID], UUID),
            (&[UUID, UUID], UUID),
            (
                &["GPU-2", UUID, "GPU-2"],
                "GPU 7 is shared through MPS, and the container requests 2 GPUs",
            ),
            (
                &["GPU-1"],
                "the MPS daemon of GPU 8 is not ready: it was not started",
            ),
        ] {
            assert_eq!(ask(uuids), expected, "{uuids:?}");
        }
    }
}
