//! Records the changes of a container, so that a failed setup can be undone.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;

use base::report::Finding;
use base::sys::in_root::{Created, Root};
use base::sys::mount;

use crate::inject::files::directory::{replace_file, replace_link};
use crate::inject::remove::hidden::{self, Hidden};
use crate::inject::remove::rootfs_users::RootfsMount;

/// A change to the container that can be undone.
#[derive(Debug)]
pub(in crate::inject) enum Change {
    Created(Created),
    Mounted(Rc<OwnedFd>),
    /// A symlink of the image that the hook replaced
    Replaced {
        dir: Rc<OwnedFd>,
        name: PathBuf,
        text: PathBuf,
    },
    /// A file of an earlier start that the hook replaced or removed
    Rewritten {
        dir: Rc<OwnedFd>,
        name: PathBuf,
        old: Vec<u8>,
    },
}

impl Change {
    /// Undoes the change. A created name is renamed and returned, so that the caller removes it if no other container uses it. Errors
    /// are ignored: the container does not start anyway.
    fn undo(self, may_go: bool) -> Option<Hidden> {
        match self {
            Self::Created(created) if may_go => {
                return Hidden::hide(&created.dir, &created.name, created.is_dir);
            }
            Self::Created(_) => None,
            Self::Mounted(mount) => mount::detach(mount.as_fd()).ok(),
            Self::Replaced { dir, name, text } => replace_link(&dir, &name, &text).ok(),
            Self::Rewritten { dir, name, old } => replace_file(&dir, &name, &old).ok(),
        };
        None
    }
}

/// Undoes changes, the newest first. Another container with the same root file system that starts in the meantime finds the created
/// names and mounts its files on them, which their removal would detach. So they are removed only if there is none. Otherwise they
/// stay, and the next start uses them.
fn undo(changes: Vec<Change>, rootfs: &Root) {
    let has_names = changes
        .iter()
        .any(|change| matches!(change, Change::Created(_)));
    let place = if has_names {
        RootfsMount::find(rootfs)
    } else {
        None
    };
    let place = place.filter(|place| !place.is_used_elsewhere());
    let names: Vec<Hidden> = changes
        .into_iter()
        .rev()
        .filter_map(|change| change.undo(place.is_some()))
        .collect();
    if let Some(place) = place
        && !names.is_empty()
    {
        hidden::finish(&place, &names);
    }
}

/// Marks the error of a step whose mount could not be removed. The mount hides files of the image, so the container must not
/// start, even if the step was optional.
#[derive(Debug)]
pub(in crate::inject) struct StillMounted;

impl fmt::Display for StillMounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mount of the hook could not be removed")
    }
}

/// What has been done to a container.
#[derive(Debug, Default)]
pub(in crate::inject) struct Done {
    /// The changes, newest last
    changes: Vec<Change>,
    pub findings: Vec<Finding>,
}

/// A point to which [`Done::undo_since`] returns.
#[derive(Clone, Copy, Debug)]
pub(in crate::inject) struct Mark {
    changes: usize,
    findings: usize,
}

impl Done {
    pub(in crate::inject) fn add(&mut self, change: Change) {
        self.changes.push(change);
    }

    pub(in crate::inject) fn add_mounts(&mut self, mounts: impl IntoIterator<Item = Rc<OwnedFd>>) {
        self.changes.extend(mounts.into_iter().map(Change::Mounted));
    }

    pub(in crate::inject) const fn mark(&self) -> Mark {
        Mark {
            changes: self.changes.len(),
            findings: self.findings.len(),
        }
    }

    /// Undoes the changes after the mark, the newest first. A mount with open descriptors is busy: umount(2) would fail with EBUSY, so
    /// the caller has closed them.
    pub(in crate::inject) fn undo_since(
        &mut self,
        Mark { changes, findings }: Mark,
        rootfs: &Root,
    ) {
        self.findings.truncate(findings);
        undo(self.changes.split_off(changes), rootfs);
    }

    /// Undoes all changes, like [`Self::undo_since`].
    pub(in crate::inject) fn undo(self, rootfs: &Root) {
        undo(self.changes, rootfs);
    }

    /// Adds created directories.
    pub(in crate::inject) fn add_directories(&mut self, created: Vec<Created>) {
        self.changes
            .extend(created.into_iter().map(Change::Created));
    }
}
