//! Waits for changes in directories with inotify(7).

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::unix::AsyncFd;
use tokio::time::sleep_until;

/// The events of directories: files that are created, written, moved or removed. None if the kernel provides no instance of inotify.
#[derive(Debug)]
pub(crate) struct DirEvents(Option<AsyncFd<OwnedFd>>);

impl DirEvents {
    pub(crate) fn new() -> Self {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        #[allow(
            deprecated,
            reason = "sound for an OwnedFd, and its replacement is unsafe"
        )]
        Self(fd.and_then(|fd| AsyncFd::new(fd).ok()))
    }

    /// Watches a directory, and reports whether that is possible. The kernel keeps one watch for a directory, however often it is added:
    /// inotify_add_watch(2) modifies the watch of the inode.
    pub(crate) fn add(&self, dir: &Path) -> bool {
        let Some(fd) = &self.0 else { return false };
        let flags = WatchFlags::CREATE
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ATTRIB
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        inotify::add_watch(fd, dir, flags).is_ok()
    }

    /// Watches a directory, or, if it is missing, that it is created.
    pub(crate) fn add_or_expect(&self, dir: &Path) {
        let (Some(fd), false) = (&self.0, self.add(dir)) else {
            return;
        };
        // The parent may be watched for other events as well.
        let flags =
            WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR | WatchFlags::MASK_ADD;
        let mut parents = dir.ancestors().skip(1);
        parents.find(|parent| inotify::add_watch(fd, *parent, flags).is_ok());
    }

    /// Waits for events, but not before this time.
    pub(crate) async fn next_after(&self, time: Instant) {
        if Instant::now() < time {
            sleep_until(time.into()).await;
        }
        self.next().await;
    }

    /// Waits for events, and takes all of them.
    pub(crate) async fn next(&self) {
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
