//! The sockets in the kubelet's directory: their names, their identity, and how ours is created.

use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{fs, io};

use anyhow::{Context, Result};
use base::report::failure;
use base::sys::file_id::Inode;
use findings::catalog;
use plugin_api::kubelet_dirs::{PLUGIN_DIR, plugin_dirs};
use rustix::fs::Mode;
use tokio::net::{UnixListener, UnixSocket};

/// The longest path that the address of a Unix socket can have, in bytes. The kernel's limit of 108 includes the zero byte at the end
/// (unix(7)).
pub const MAX_PATH: usize = 107;

/// Connections that wait to be accepted. The kubelet has one or two, but if the queue is full, a connect that does not block fails with
/// `EAGAIN` (connect(2)), so a burst of other connections must not fill it.
const BACKLOG: u32 = 1024;

/// What our sockets for resources have in common.
const PREFIX: &str = "oci-nvidia-";
const SUFFIX: &str = ".sock";

/// Distinguishes a socket file from its successors at the same path: file systems reuse inode numbers. The times in a
/// [`base::sys::file_id::FileId`] change with touch(1), chmod(1) and restorecon(8), the birth of a file does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketId {
    file: Inode,
    /// `None` if the file system does not record it
    born: Option<SystemTime>,
}

impl SocketId {
    /// Identifies the socket at this path, if there is one.
    #[must_use]
    pub fn at(path: &Path) -> Option<Self> {
        let file = fs::symlink_metadata(path)
            .ok()
            .filter(|file| file.file_type().is_socket())?;
        Some(Self {
            file: Inode::from(&file),
            born: file.created().ok(),
        })
    }

    /// Returns a text that no other socket has, without colons and spaces.
    #[must_use]
    pub fn name(&self) -> String {
        let Self {
            file: Inode { device, number },
            born,
        } = self;
        let born = born.and_then(|born| born.duration_since(SystemTime::UNIX_EPOCH).ok());
        let nanoseconds = born.map(|born| born.as_nanos()).unwrap_or_default();
        format!("{device:x}-{number:x}-{nanoseconds:x}")
    }
}

/// Where a kubelet has its sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeletDirs {
    /// Where the sockets of the device plugins can be, at least one directory. The kubelet's socket shows which one it is.
    pub plugins: Vec<PathBuf>,
    /// The socket for pod resources
    pub pod_resources: PathBuf,
}

impl KubeletDirs {
    /// Returns the directories of the kubelet with this root directory.
    #[must_use]
    pub fn of(root: &Path) -> Self {
        Self {
            plugins: plugin_dirs(root),
            pod_resources: root.join("pod-resources/kubelet.sock"),
        }
    }

    /// Returns the directory of the plugins' sockets: the one with the kubelet's socket, before the kubelet runs the first one that exists,
    /// and without one the last one.
    #[must_use]
    pub fn plugin_dir(&self) -> &Path {
        for dir in &self.plugins {
            if SocketId::at(&kubelet(dir)).is_some() {
                return dir;
            }
        }
        for dir in &self.plugins {
            if dir.is_dir() {
                return dir;
            }
        }
        match self.plugins.last() {
            Some(dir) => dir,
            None => Path::new(PLUGIN_DIR),
        }
    }

    /// Returns what is missing while the kubelet does not answer; `None` if it has its sockets.
    #[must_use]
    pub fn missing(&self) -> Option<String> {
        let hint =
            "the kubelet does not run, or \"kubelet-dir\" is not its root directory (`--root-dir`)";
        let dir = self.plugin_dir();
        if SocketId::at(&kubelet(dir)).is_none() {
            let mut sockets = Vec::new();
            for dir in &self.plugins {
                sockets.push(format!("{:?}", kubelet(dir)));
            }
            let verb = if sockets.len() == 1 { "does" } else { "do" };
            let sockets = sockets.join(" and ");
            return Some(format!("{sockets} {verb} not exist: {hint}"));
        }
        if SocketId::at(&self.pod_resources).is_none() {
            let socket = &self.pod_resources;
            return Some(format!("{socket:?} does not exist: {hint}"));
        }
        None
    }
}

/// Returns the directory in which the kubelet searches for drivers for claims.
#[must_use]
pub fn plugin_registry(kubelet_dir: &Path) -> PathBuf {
    kubelet_dir.join("plugins_registry")
}

/// Returns the kubelet's socket in the directory of the plugins.
#[must_use]
pub fn kubelet(dir: &Path) -> PathBuf {
    dir.join("kubelet.sock")
}

/// Reports whether our sockets for resources have names like this one.
#[must_use]
pub fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// Returns the file name of our socket for a resource, which has the name of the resource without its prefix.
#[must_use]
pub fn file_name(resource: &str) -> String {
    let name = resource.rsplit('/').next().unwrap_or(resource);
    format!(
        "{PREFIX}{}{SUFFIX}",
        name.chars().map(safe).collect::<String>()
    )
}

const fn safe(c: char) -> char {
    if c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_') {
        c
    } else {
        '_'
    }
}

/// Returns the path of our socket for a resource.
///
/// # Errors
/// If the address of a Unix socket cannot have the path.
pub fn path(dir: &Path, resource: &str) -> Result<PathBuf> {
    let path = dir.join(file_name(resource));
    checked(&path).with_context(|| format!("cannot offer {resource:?}"))?;
    Ok(path)
}

/// Returns the path.
///
/// # Errors
/// If the address of a Unix socket cannot have it.
pub fn checked(path: &Path) -> Result<&Path> {
    let length = path.as_os_str().as_bytes().len();
    if length > MAX_PATH {
        return Err(failure(
            &catalog::SYSTEM,
            format!("the path of the socket {path:?} has {length} bytes, the limit is {MAX_PATH}"),
            "select a kubelet directory with a shorter path with `--kubelet-dir`, for example a bind mount of it",
        ));
    }
    Ok(path)
}

/// Our socket file. It is removed when this value is dropped, unless another file has replaced it.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    id: SocketId,
    stays: bool,
}

impl Bound {
    /// Takes over a socket file.
    ///
    /// # Errors
    /// If it does not exist.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            id: SocketId::at(path).ok_or(ErrorKind::NotFound)?,
            stays: false,
        })
    }

    /// Returns the identity of the file.
    #[must_use]
    pub const fn id(&self) -> SocketId {
        self.id
    }

    /// The file is not removed when this value is dropped.
    pub(super) const fn leave(&mut self) {
        self.stays = true;
    }

    /// Reports whether the file still exists and is ours.
    #[must_use]
    pub fn exists(&self) -> bool {
        SocketId::at(&self.path) == Some(self.id)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if !self.stays && self.exists() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Creates our socket, which only our user can connect to. It replaces a socket that an earlier process left.
///
/// # Errors
/// If the directory does not exist or is not writable, or if a file that is not a socket has the name.
pub fn bind(path: &Path) -> Result<(Bound, UnixListener)> {
    create(path).with_context(|| format!("cannot create the socket {path:?}"))
}

fn create(path: &Path) -> io::Result<(Bound, UnixListener)> {
    // bind(2) fails with EADDRINUSE if the file exists, also if no process listens.
    remove_socket(path)?;
    let socket = UnixSocket::new_stream()?;
    // On Linux, bind(2) creates the file with the mode of the socket, less the umask (unix_bind() in net/unix/af_unix.c). A chmod after
    // it would leave a moment with another mode.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    socket.bind(path)?;
    let bound = Bound::of(path)?;
    Ok((bound, socket.listen(BACKLOG)?))
}

fn remove_socket(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(file) if file.file_type().is_socket() => fs::remove_file(path),
        _ => Ok(()), // bind reports a file that is in the way
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const LONG_AGO: rustix::fs::Timestamps = {
        let time = rustix::fs::Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        rustix::fs::Timestamps {
            last_access: time,
            last_modification: time,
        }
    };

    #[test]
    fn names_of_sockets() {
        assert_eq!(file_name("nvidia.com/gpu"), "oci-nvidia-gpu.sock");
        assert_eq!(
            file_name("nvidia.com/mig-1g.5gb"),
            "oci-nvidia-mig-1g.5gb.sock"
        );
        assert_eq!(file_name("gpu"), "oci-nvidia-gpu.sock");
        assert_eq!(file_name("a/../x y\0"), "oci-nvidia-x_y_.sock");
        assert_eq!(file_name("a/.."), "oci-nvidia-...sock");
    }

    #[test]
    fn a_path_has_107_bytes_at_most() {
        let name = file_name("nvidia.com/gpu").len();
        let dir = |length: usize| PathBuf::from(format!("/{}", "d".repeat(length - 1)));
        assert_eq!(
            path(&dir(106 - name), "nvidia.com/gpu")
                .unwrap()
                .as_os_str()
                .len(),
            107
        );
        let error = format!(
            "{:#}",
            path(&dir(107 - name), "nvidia.com/gpu").unwrap_err()
        );
        assert!(error.contains("has 108 bytes, the limit is 107"), "{error}");
    }

    #[tokio::test]
    async fn a_socket_replaces_a_stale_one_and_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let stale = SocketId::at(&path).unwrap();
        let (bound, _listener) = bind(&path).unwrap();
        assert_ne!(SocketId::at(&path).unwrap(), stale);
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert!(bound.exists());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        rustix::fs::utimensat(
            rustix::fs::CWD,
            &path,
            &LONG_AGO,
            rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
        )
        .unwrap();
        assert!(bound.exists(), "touch and chmod do not make another socket");

        // A file that replaced ours is not ours to remove.
        fs::remove_file(&path).unwrap();
        assert!(!bound.exists());
        let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(bound);
        assert!(SocketId::at(&path).is_some());

        let (bound, _listener) = bind(&path).unwrap();
        drop(bound);
        assert_eq!(SocketId::at(&path), None);
        assert!(bind(&dir.path().join("missing/a.sock")).is_err());
    }

    #[tokio::test]
    async fn other_files_are_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        fs::write(&path, "text").unwrap();
        let error = format!("{:#}", bind(&path).unwrap_err());
        assert!(
            error.contains("cannot create the socket") && error.contains("in use"),
            "{error}"
        );
        assert_eq!(fs::read(&path).unwrap(), b"text");
    }
}
