//! The directory of an MPS daemon below `/run`. Root owns it and all users can read it, except for the logs: containers get its directory
//! `pipe`.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nvidia_host::mps::{self, LOG, MAX_STATE, PIPE, STATE, State};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

/// The size in bytes from which a log is cut. /run is in memory.
const MAX_LOG: u64 = 1 << 20;
/// The bytes of a log that are kept when it is cut
const KEPT_LOG: u64 = 1 << 16;
/// The files of the driver's daemon that only root has a reason to open, in the directory that containers get
const PRIVATE: [&str; 2] = ["control_lock", "nvidia-cuda-mps-control.pid"];

/// The open directory of a GPU.
#[derive(Debug)]
pub(crate) struct GpuDir {
    dir: OwnedFd,
    path: PathBuf,
}

impl GpuDir {
    /// Opens the directory, and creates it and what it contains if it is missing.
    ///
    /// # Errors
    /// If it cannot be created, or another user can write to it.
    pub(crate) fn create(base: &Path, uuid: &str) -> io::Result<Self> {
        check_name(uuid)?;
        let parent = make_dir(CWD, base, 0o755)?;
        let dir = make_dir(parent.as_fd(), Path::new(uuid), 0o755)?;
        // `pipe` must stay the same directory: containers have it mounted.
        make_dir(dir.as_fd(), Path::new(PIPE), 0o755)?;
        make_dir(dir.as_fd(), Path::new(LOG), 0o700)?;
        let path = base.join(uuid);
        Ok(Self { dir, path })
    }

    pub(crate) fn pipe(&self) -> PathBuf {
        self.path.join(PIPE)
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.path.join(LOG)
    }

    /// Reads the file `state`. Returns `None` if it is missing, or is not the file of this version of the program.
    pub(crate) fn state(&self) -> Option<State> {
        let mut bytes = Vec::new();
        let mut file = self.open_state(OFlags::RDONLY).ok()?.take(MAX_STATE);
        file.read_to_end(&mut bytes).ok()?;
        State::parse(&bytes)
    }

    /// Whether a supervisor holds the lock of the file `state`.
    pub(crate) fn is_supervised(&self) -> bool {
        let file = self.open_state(OFlags::RDWR);
        file.is_ok_and(|file| mps::lock(&file).is_err())
    }

    fn open_state(&self, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, STATE, flags, Mode::empty())?;
        Ok(file.into())
    }

    /// Replaces the file `state` atomically. It is locked until the returned file is closed.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn publish(&self, state: &State) -> io::Result<File> {
        let mut bytes = serde_json::to_vec(state)?;
        bytes.push(b'\n');
        let new = ".state.new";
        // Another process can have opened the file of an earlier attempt.
        remove(self.dir.as_fd(), new)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let private = Mode::from_raw_mode(0o600);
        let mut file = File::from(rustix::fs::openat(&self.dir, new, flags, private)?);
        mps::lock(&file)?;
        file.write_all(&bytes)?;
        // Whatever the umask is, other users can read it. No other process can lock it earlier.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o644))?;
        rustix::fs::renameat(&self.dir, new, &self.dir, STATE)?;
        Ok(file)
    }

    /// Removes the file `state`.
    ///
    /// # Errors
    /// If it exists and cannot be removed.
    pub(crate) fn remove_state(&self) -> io::Result<()> {
        remove(self.dir.as_fd(), STATE)
    }

    /// Removes the sockets, the lock and the pipe of an earlier daemon: another process may have locked or opened them.
    ///
    /// # Errors
    /// If one cannot be removed.
    pub(crate) fn clear_pipe(&self) -> io::Result<()> {
        let pipe = open_dir(self.dir.as_fd(), Path::new(PIPE))?;
        for entry in std::fs::read_dir(self.pipe())? {
            let name = entry?.file_name();
            rustix::fs::unlinkat(&pipe, &name, AtFlags::empty())?;
        }
        Ok(())
    }

    /// Withdraws those files of a daemon from other users which only root has a reason to open.
    ///
    /// # Errors
    /// If the mode of one cannot be changed.
    pub(crate) fn protect_pipe(&self) -> io::Result<()> {
        let pipe = open_dir(self.dir.as_fd(), Path::new(PIPE))?;
        for name in PRIVATE {
            let mode = Mode::from_raw_mode(0o600);
            match rustix::fs::chmodat(&pipe, name, mode, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Opens the log for the output of the daemon.
    ///
    /// # Errors
    /// If it cannot be created.
    pub(crate) fn output(&self) -> io::Result<File> {
        let log = open_dir(self.dir.as_fd(), Path::new(LOG))?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW;
        let mode = Mode::from_raw_mode(0o600);
        let file = rustix::fs::openat(&log, "daemon.log", flags | OFlags::CLOEXEC, mode)?;
        Ok(file.into())
    }

    /// Cuts the logs that have become too long. The daemon writes lines to its log for each command and for each client.
    ///
    /// # Errors
    /// If a log cannot be read or written.
    pub(crate) fn cut_logs(&self) -> io::Result<()> {
        let log = open_dir(self.dir.as_fd(), Path::new(LOG))?;
        for entry in std::fs::read_dir(self.log())? {
            let name = entry?.file_name();
            let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let mut file = File::from(rustix::fs::openat(&log, &name, flags, Mode::empty())?);
            let metadata = file.metadata()?;
            if metadata.is_file() && metadata.len() > MAX_LOG {
                cut(&mut file)?;
            }
        }
        Ok(())
    }
}

/// Whether a GPU has been shared since this boot: its directory has a file `state`, which may be damaged.
pub(crate) fn has_state(base: &Path, uuid: &str) -> bool {
    std::fs::symlink_metadata(base.join(uuid).join(STATE)).is_ok()
}

/// Returns the UUIDs of the GPUs that have been shared since this boot.
///
/// # Errors
/// If the directory exists and cannot be read.
pub(crate) fn uuids(base: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(base) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut uuids = Vec::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if check_name(&name).is_ok() && has_state(base, &name) {
            uuids.push(name);
        }
    }
    uuids.sort_unstable();
    Ok(uuids)
}

/// Keeps the end of a file. What is written at the same time may be lost.
fn cut(file: &mut File) -> io::Result<()> {
    let kept = i64::try_from(KEPT_LOG).unwrap_or_default();
    let mut end = Vec::new();
    file.seek(SeekFrom::End(-kept))?;
    file.take(KEPT_LOG).read_to_end(&mut end)?;
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(&end)
}

fn remove(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// The UUID is the instance of a unit, and becomes a file name.
fn check_name(uuid: &str) -> io::Result<()> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if uuid.starts_with("GPU-") && uuid.chars().all(is_name) {
        return Ok(());
    }
    let error = format!("{uuid:?} is not the UUID of a GPU");
    Err(io::Error::new(io::ErrorKind::InvalidInput, error))
}

fn make_dir(parent: BorrowedFd<'_>, name: &Path, mode: u32) -> io::Result<OwnedFd> {
    let mode = Mode::from_raw_mode(mode);
    match rustix::fs::mkdirat(parent, name, mode) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    let dir = open_dir(parent, name)?;
    rustix::fs::fchmod(&dir, mode)?;
    Ok(dir)
}

/// Opens a directory to which only this user can write.
fn open_dir(parent: BorrowedFd<'_>, name: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&dir)?;
    let is_ours = stat.st_uid == rustix::process::geteuid().as_raw();
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory
        && is_ours
        && stat.st_mode & 0o022 == 0
    {
        return Ok(dir);
    }
    Err(io::Error::other(format!(
        "another user can write to the directory {name:?}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvidia_host::mps::Phase;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn the_directory_stays_and_its_state_is_replaced() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().join("mps");
        assert_eq!(uuids(&base).unwrap(), [""; 0]);
        let dir = GpuDir::create(&base, "GPU-1").unwrap();
        let of_gpu = base.join("GPU-1");
        let modes = ["pipe", "log", ""].map(|name| mode(&of_gpu.join(name)));
        assert_eq!(modes, [0o755, 0o700, 0o755]);
        assert_eq!(dir.state(), None);
        let state = State::new("GPU-1", Phase::Ready);
        let first = dir.publish(&state).unwrap();
        let second = dir.publish(&state).unwrap();
        drop(first);
        assert_eq!(mode(&of_gpu.join("state")), 0o644);
        let again = GpuDir::create(&base, "GPU-1").unwrap();
        assert_eq!((again.state(), again.is_supervised()), (Some(state), true));
        drop(second);
        assert!(!again.is_supervised());
        // Files of others in the directory do not count, also not a damaged one.
        std::fs::write(base.join("x"), "").unwrap();
        std::fs::create_dir(base.join("GPU-2")).unwrap();
        std::fs::write(of_gpu.join("state"), "{").unwrap();
        assert_eq!(uuids(&base).unwrap(), ["GPU-1"]);
        again.remove_state().unwrap();
        again.remove_state().unwrap();
        assert!(!has_state(&base, "GPU-1"));
    }

    /// A lock of another process on the file of an earlier supervisor does not keep this one from locking its own.
    #[test]
    fn a_state_is_locked_before_others_can_open_it() {
        let base = tempfile::tempdir().unwrap();
        let dir = GpuDir::create(base.path(), "GPU-1").unwrap();
        let state = State::new("GPU-1", Phase::Ready);
        for name in ["state", ".state.new"] {
            let path = base.path().join("GPU-1").join(name);
            std::fs::write(&path, "{").unwrap();
            let options = File::options().write(true).open(&path);
            let other = options.unwrap();
            mps::lock(&other).unwrap();
            let file = dir.publish(&state).unwrap();
            assert!(dir.is_supervised(), "{name}");
            drop((file, other));
            assert!(!dir.is_supervised(), "{name}");
        }
    }

    #[test]
    fn files_of_an_earlier_daemon_are_replaced() {
        let base = tempfile::tempdir().unwrap();
        let dir = GpuDir::create(base.path(), "GPU-1").unwrap();
        for name in PRIVATE {
            std::fs::write(dir.pipe().join(name), "").unwrap();
        }
        dir.protect_pipe().unwrap();
        assert_eq!(mode(&dir.pipe().join("control_lock")), 0o600);
        dir.clear_pipe().unwrap();
        assert_eq!(std::fs::read_dir(dir.pipe()).unwrap().count(), 0);
        dir.protect_pipe().unwrap();
    }

    #[test]
    fn names_and_directories_of_others_are_refused() {
        let base = tempfile::tempdir().unwrap();
        for uuid in ["", "..", "GPU-../x", "MIG-1", "GPU-1\n"] {
            assert!(GpuDir::create(base.path(), uuid).is_err(), "{uuid:?}");
        }
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::create_dir(base.path().join("GPU-2")).unwrap();
        std::fs::set_permissions(base.path().join("GPU-2"), open).unwrap();
        assert!(GpuDir::create(base.path(), "GPU-2").is_err());
    }

    #[test]
    fn a_long_log_keeps_its_end() {
        let base = tempfile::tempdir().unwrap();
        let dir = GpuDir::create(base.path(), "GPU-1").unwrap();
        let mut output = dir.output().unwrap();
        let long = "x".repeat(1 << 20) + "end\n";
        output.write_all(long.as_bytes()).unwrap();
        dir.cut_logs().unwrap();
        output.write_all(b"more\n").unwrap();
        let text = std::fs::read_to_string(dir.log().join("daemon.log")).unwrap();
        assert!(text.ends_with("xend\nmore\n") && text.len() < 1 << 17);
    }
}
