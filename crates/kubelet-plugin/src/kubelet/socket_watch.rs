//! Watches the directory of the plugins' sockets.
//!
//! The events of inotify show each change of a directory. A directory that cannot be watched, for example because it does not exist, is
//! inspected every second instead.

use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::socket::{self, KubeletDirs, SocketId};
use crate::dir_events::DirEvents;

/// How often a directory is inspected that cannot be watched.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often a directory is inspected that is watched: a file system over it causes no event.
const LONG_INTERVAL: Duration = Duration::from_secs(60);

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
    /// How many of them followed an event
    pub(super) events: u64,
}

/// Inspects the directory until the kubelet has its socket in another one of its directories.
pub(super) async fn watch(dir: &Path, dirs: &KubeletDirs, sockets: &watch::Sender<SocketState>) {
    let events = DirEvents::new();
    let socket = socket::kubelet(dir);
    let mut events_seen = 0;
    loop {
        // The watch is added before the inspection, so that no change is missed. It belongs to the inode (inotify(7)), so a directory
        // that was replaced needs a new one.
        let mut are_watched = true;
        for other in &dirs.plugins {
            are_watched &= events.add(other);
        }
        let kubelet = SocketId::at(&socket);
        if kubelet.is_none() && SocketId::at(&socket::kubelet(dirs.plugin_dir())).is_some() {
            return;
        }
        sockets.send_modify(|seen| {
            let is_other = seen.inspections > 0 && kubelet.is_some() && kubelet != seen.kubelet;
            let is_new = is_other || (seen.is_new && kubelet.is_some());
            *seen = SocketState {
                kubelet,
                is_new,
                inspections: seen.inspections + 1,
                events: events_seen,
            };
        });
        let interval = if are_watched || (kubelet.is_some() && events.add(dir)) {
            LONG_INTERVAL
        } else {
            INTERVAL
        };
        if timeout(interval, events.next()).await.is_ok() {
            events_seen += 1;
            sleep(PAUSE).await;
        }
    }
}
