//! Watches the directory of the plugins' sockets.
//!
//! The directory is inspected every second. inotify only makes this faster: if it is unavailable, or if an event is lost, nothing
//! else changes.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::socket::{self, SocketId};

/// How often the directory is inspected.
const INTERVAL: Duration = Duration::from_secs(1);

/// Many events, for example when a kubelet deletes all sockets, are handled together.
const PAUSE: Duration = Duration::from_millis(5);

/// What is in the directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SocketState {
    /// The kubelet's socket
    pub(super) kubelet: Option<SocketId>,
    /// The socket was created after the first inspection, so the kubelet has just started.
    pub(super) is_new: bool,
    /// How many times the directory was inspected; each one wakes the tasks that wait for a change.
    pub(super) inspections: u64,
}

/// Inspects the directory forever.
pub(super) async fn watch(dir: &Path, sockets: &watch::Sender<SocketState>) {
    let events = Events::new();
    let socket = socket::kubelet(dir);
    loop {
        // The watch is added before the inspection, so that no change is missed. It belongs to the inode (inotify(7)), so a directory
        // that was replaced needs a new one.
        events.add(dir);
        let kubelet = SocketId::at(&socket);
        sockets.send_modify(|seen| {
            let is_other = seen.inspections > 0 && kubelet.is_some() && kubelet != seen.kubelet;
            let is_new = is_other || (seen.is_new && kubelet.is_some());
            *seen = SocketState {
                kubelet,
                is_new,
                inspections: seen.inspections + 1,
            };
        });
        if timeout(INTERVAL, events.next()).await.is_ok() {
            sleep(PAUSE).await;
        }
    }
}

/// The events of inotify; none if the kernel provides no instance.
struct Events(Option<AsyncFd<OwnedFd>>);

impl Events {
    fn new() -> Self {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        #[allow(
            deprecated,
            reason = "sound for an OwnedFd, and its replacement is unsafe"
        )]
        Self(fd.and_then(|fd| AsyncFd::new(fd).ok()))
    }

    /// The kernel keeps one watch for a directory, however often it is added: inotify_add_watch(2) modifies the watch of the inode.
    fn add(&self, dir: &Path) {
        if let Some(fd) = &self.0 {
            let flags = WatchFlags::CREATE
                | WatchFlags::MOVED_TO
                | WatchFlags::DELETE
                | WatchFlags::ONLYDIR;
            let _ = inotify::add_watch(fd, dir, flags);
        }
    }

    async fn next(&self) {
        let Some(fd) = &self.0 else {
            return std::future::pending().await;
        };
        if let Ok(mut guard) = fd.readable().await {
            let mut buffer = [0; 4096];
            // The content does not matter: the directory is inspected after any event.
            while rustix::io::read(fd, &mut buffer).is_ok_and(|length| length > 0) {}
            guard.clear_ready();
        }
    }
}
