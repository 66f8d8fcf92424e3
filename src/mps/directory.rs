//! The directory of an MPS daemon below `/run`. Root owns it and all users can read it: containers get its directory `pipe`.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nvidia_host::mps::{self, LOCK, LOG, PIPE, STATE, State};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

const MAX_STATE: u64 = 1 << 16;
/// The size in bytes from which a log is cut. /run is in memory.
const MAX_LOG: u64 = 1 << 20;
/// The bytes of a log that are kept when it is cut
const KEPT_LOG: u64 = 1 << 16;

/// The open directory of a GPU.
#[derive(Debug)]
pub(super) struct GpuDir {
    dir: OwnedFd,
    path: PathBuf,
}

/// The lock that a supervisor holds until it ends.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl GpuDir {
    /// Opens the directory, and creates it and what it contains if it is missing.
    ///
    /// # Errors
    /// If it cannot be created, or another user can write to it.
    pub(super) fn create(base: &Path, uuid: &str) -> io::Result<Self> {
        check_name(uuid)?;
        let parent = make_dir(CWD, base)?;
        let dir = make_dir(parent.as_fd(), Path::new(uuid))?;
        // `pipe` must stay the same directory: containers have it mounted.
        make_dir(dir.as_fd(), Path::new(PIPE))?;
        make_dir(dir.as_fd(), Path::new(LOG))?;
        let path = base.join(uuid);
        Ok(Self { dir, path })
    }

    /// Opens all directories of GPUs.
    ///
    /// # Errors
    /// If one cannot be opened, or another user can write to it.
    pub(super) fn all(base: &Path) -> io::Result<Vec<Self>> {
        let names = match std::fs::read_dir(base) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            names => names?,
        };
        let parent = open_dir(CWD, base)?;
        let mut found = Vec::new();
        for name in names {
            let name = name?.file_name();
            let dir = open_dir(parent.as_fd(), Path::new(&name))?;
            let path = base.join(name);
            found.push(Self { dir, path });
        }
        Ok(found)
    }

    pub(super) fn pipe(&self) -> PathBuf {
        self.path.join(PIPE)
    }

    pub(super) fn log(&self) -> PathBuf {
        self.path.join(LOG)
    }

    /// Takes the lock. Returns `None` if a supervisor holds it.
    ///
    /// # Errors
    /// If the file cannot be opened or locked.
    pub(super) fn lock(&self) -> io::Result<Option<Lock>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&self.dir, LOCK, flags, READABLE)?);
        match mps::lock(&file) {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the file `state`. Returns `None` if it is missing, or is not the file of this version of the program.
    pub(super) fn state(&self) -> Option<State> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, STATE, flags, Mode::empty()).ok()?;
        let mut bytes = Vec::new();
        let mut file = File::from(file).take(MAX_STATE);
        file.read_to_end(&mut bytes).ok()?;
        State::parse(&bytes)
    }

    /// Replaces the file `state` atomically.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn publish(&self, state: &State) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(state)?;
        bytes.push(b'\n');
        let new = ".state.new";
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&self.dir, new, flags | OFlags::CLOEXEC, READABLE)?;
        // Whatever the umask is, other users can read it.
        rustix::fs::fchmod(&file, READABLE)?;
        File::from(file).write_all(&bytes)?;
        rustix::fs::renameat(&self.dir, new, &self.dir, STATE)?;
        Ok(())
    }

    /// Removes the file `state`.
    ///
    /// # Errors
    /// If it exists and cannot be removed.
    pub(super) fn remove_state(&self) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.dir, STATE, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Opens the log for the output of the daemon.
    ///
    /// # Errors
    /// If it cannot be created.
    pub(super) fn output(&self) -> io::Result<File> {
        let log = open_dir(self.dir.as_fd(), Path::new(LOG))?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&log, "daemon.log", flags | OFlags::CLOEXEC, READABLE)?;
        Ok(file.into())
    }

    /// Cuts the logs that have become too long. The daemon writes lines to its log for each command and for each client.
    ///
    /// # Errors
    /// If a log cannot be read or written.
    pub(super) fn cut_logs(&self) -> io::Result<()> {
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

/// The mode of the files, which all users can read.
const READABLE: Mode = Mode::from_raw_mode(0o644);

/// The UUID comes from NVML, and becomes a file name.
fn check_name(uuid: &str) -> io::Result<()> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if uuid.starts_with("GPU-") && uuid.chars().all(is_name) {
        return Ok(());
    }
    let error = format!("{uuid:?} is not the UUID of a GPU");
    Err(io::Error::new(io::ErrorKind::InvalidInput, error))
}

fn make_dir(parent: BorrowedFd<'_>, name: &Path) -> io::Result<OwnedFd> {
    match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    let dir = open_dir(parent, name)?;
    rustix::fs::fchmod(&dir, Mode::from_raw_mode(0o755))?;
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
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_directory_stays_and_its_state_is_replaced() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().join("mps");
        let dir = GpuDir::create(&base, "GPU-1").unwrap();
        let mode = |name: &str| {
            let metadata = std::fs::metadata(base.join("GPU-1").join(name)).unwrap();
            metadata.permissions().mode() & 0o777
        };
        assert_eq!([mode("pipe"), mode("log"), mode("")], [0o755; 3]);
        assert_eq!(dir.state(), None);
        let state = super::super::tests::state();
        dir.publish(&state).unwrap();
        dir.publish(&state).unwrap();
        assert_eq!(mode("state"), 0o644);
        let again = GpuDir::create(&base, "GPU-1").unwrap();
        assert_eq!(again.state(), Some(state));
        assert_eq!(GpuDir::all(&base).unwrap().len(), 1);
        again.remove_state().unwrap();
        again.remove_state().unwrap();
        assert_eq!(dir.state(), None);
        assert!(GpuDir::all(&base.join("missing")).unwrap().is_empty());
    }

    #[test]
    fn one_supervisor_has_the_lock() {
        let base = tempfile::tempdir().unwrap();
        let first = GpuDir::create(base.path(), "GPU-1").unwrap();
        let second = GpuDir::create(base.path(), "GPU-1").unwrap();
        let lock = first.lock().unwrap();
        assert!(lock.is_some() && second.lock().unwrap().is_none());
        drop(lock);
        assert!(second.lock().unwrap().is_some());
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
