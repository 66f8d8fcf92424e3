//! Sockets that stay open while the service restarts: the service manager stores their descriptors (sd_notify(3), `FDSTORE=1`).
//!
//! The kubelet forgets a driver whose socket disappears, and takes a second to register it again. A pod that starts in that second fails, and
//! its next attempt comes a minute later. The file of a stored socket stays, so that the kubelet sees no change, and a call waits in the
//! queue of the socket until the next process answers it.
//!
//! If the service ends for good, the manager closes the descriptors, but does not remove the files. Another unit, which ends with the
//! service but not when it restarts, removes what the links in its directory name. Without that directory, nothing is stored.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{env, fs};

use anyhow::{Context, Result};
use base::sys::listen_fds;
use rustix::net::{SocketAddrUnix, sockopt};
use sd_notify::NotifyState;
use tokio::net::UnixListener;

use super::socket::{self, Bound, SocketId};

/// The directory with a link to each socket that outlives the process: the runtime directory of `oci-nvidia-kubelet-plugin-sockets.service`.
const DIR: &str = "/run/oci-nvidia-kubelet-plugin-sockets";

/// Stores sockets with the service manager, and has those that an earlier process stored.
#[derive(Debug, Default)]
pub struct Keeper {
    /// The directory with the links; `None` if no service manager stores sockets for this process
    links: Option<PathBuf>,
    received: Mutex<Vec<Received>>,
}

/// A socket that an earlier process has stored.
#[derive(Debug)]
struct Received {
    /// The name of its descriptor, which identifies the file
    name: String,
    path: PathBuf,
    listener: StdListener,
}

impl Keeper {
    /// Uses the service manager of this process, and takes what it has passed.
    #[must_use]
    #[allow(
        clippy::disallowed_methods,
        reason = "the protocol of the service manager"
    )]
    pub fn of_process() -> Self {
        let dir = PathBuf::from(DIR);
        let has_manager = env::var_os("NOTIFY_SOCKET").is_some() && dir.is_dir();
        Self::new(has_manager.then_some(dir), listen_fds::take())
    }

    /// Takes these descriptors, by name. `links` is the directory that gets a link to each socket which the service manager stores; `None`
    /// if it stores none.
    #[must_use]
    pub fn new(links: Option<PathBuf>, passed: Vec<(String, OwnedFd)>) -> Self {
        let mut received = Vec::new();
        for (name, fd) in passed {
            if let Some(path) = path_of(&fd) {
                received.push(Received {
                    name,
                    path,
                    listener: fd.into(),
                });
            }
        }
        Self {
            links,
            received: Mutex::new(received),
        }
    }

    /// Returns the identities of the sockets that an earlier process has stored, and no process serves yet.
    #[must_use]
    pub fn waiting(&self) -> Vec<SocketId> {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ids = Vec::new();
        for socket in received.iter() {
            ids.extend(socket.id());
        }
        ids
    }

    /// Removes the sockets of an earlier process that this one does not serve, for example because the settings are other ones.
    pub fn discard(&self) {
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        for socket in received.drain(..) {
            if socket.id().is_some() {
                let _ = fs::remove_file(&socket.path);
            }
            self.forget(&socket.name);
        }
    }

    /// Takes the socket with this path, if its file is still the one that an earlier process has created.
    fn take(&self, path: &Path) -> Option<Received> {
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |socket: &Received| socket.path == path && socket.id().is_some();
        let number = received.iter().position(is_it)?;
        Some(received.swap_remove(number))
    }

    fn store(&self, name: &str, path: &Path, socket: BorrowedFd<'_>) -> io::Result<()> {
        let Some(links) = &self.links else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        match symlink(path, links.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // The manager ignores a descriptor that it has.
        let state = [NotifyState::FdStore, NotifyState::FdName(name)];
        sd_notify::notify_with_fds(&state, &[socket])
    }

    fn forget(&self, name: &str) {
        if let Some(links) = &self.links {
            // At worst, the next process gets a socket without a file, and closes it.
            let state = [NotifyState::FdStoreRemove, NotifyState::FdName(name)];
            let _ = sd_notify::notify(&state);
            let _ = fs::remove_file(links.join(name));
        }
    }
}

impl Received {
    /// Returns the identity of the file, if it is still the file of this socket.
    fn id(&self) -> Option<SocketId> {
        let id = SocketId::at(&self.path)?;
        (id.name() == self.name).then_some(id)
    }
}

/// Returns the path of a Unix socket that listens.
fn path_of(fd: &OwnedFd) -> Option<PathBuf> {
    if !sockopt::socket_acceptconn(fd).ok()? {
        return None;
    }
    let address = SocketAddrUnix::try_from(rustix::net::getsockname(fd).ok()?).ok()?;
    let path = address.path_bytes()?;
    Some(PathBuf::from(std::str::from_utf8(path).ok()?))
}

/// A socket of ours. Its file is removed when this value is dropped, unless the socket is stored.
#[derive(Debug)]
pub(crate) struct KeptSocket {
    bound: Bound,
    path: PathBuf,
    name: String,
    /// What is stored: a duplicate
    descriptor: OwnedFd,
    keeper: Arc<Keeper>,
    /// An earlier process has created it.
    pub(crate) is_received: bool,
    is_stored: bool,
}

impl KeptSocket {
    /// Takes the socket of an earlier process, or creates one.
    ///
    /// # Errors
    /// See [`socket::bind`].
    pub(crate) fn open(keeper: &Arc<Keeper>, path: &Path) -> Result<(Self, UnixListener)> {
        let received = keeper.take(path);
        let is_received = received.is_some();
        let (bound, listener) = match received {
            Some(received) => adopt(received),
            None => socket::bind(path),
        }?;
        let descriptor = listener.as_fd().try_clone_to_owned();
        let kept = Self {
            path: path.to_owned(),
            name: bound.id().name(),
            bound,
            descriptor: descriptor.with_context(|| format!("cannot duplicate {path:?}"))?,
            keeper: Arc::clone(keeper),
            is_received,
            is_stored: is_received && keeper.links.is_some(),
        };
        Ok((kept, listener))
    }

    /// Stores the socket: it stays open, and its file stays, when this process ends.
    ///
    /// # Errors
    /// If no service manager stores descriptors for this process.
    pub(crate) fn store(&mut self) -> io::Result<()> {
        self.keeper
            .store(&self.name, &self.path, self.descriptor.as_fd())?;
        self.is_stored = true;
        Ok(())
    }

    /// Ends the effect of [`KeptSocket::store`].
    pub(crate) fn withdraw(&mut self) {
        if std::mem::take(&mut self.is_stored) {
            self.keeper.forget(&self.name);
        }
    }

    /// Reports whether the file still exists and is ours.
    pub(crate) fn exists(&self) -> bool {
        self.bound.exists()
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the identity of the file.
    pub(crate) const fn id(&self) -> SocketId {
        self.bound.id()
    }
}

impl Drop for KeptSocket {
    fn drop(&mut self) {
        if self.is_stored {
            self.bound.leave();
        }
    }
}

fn adopt(received: Received) -> Result<(Bound, UnixListener)> {
    let Received { path, listener, .. } = received;
    let use_it = || {
        listener.set_nonblocking(true)?;
        let bound = Bound::of(&path)?;
        Ok((bound, UnixListener::from_std(listener)?))
    };
    use_it().map_err(|error: io::Error| {
        anyhow::Error::from(error).context(format!("cannot use the socket {path:?}"))
    })
}
