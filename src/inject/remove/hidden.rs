//! Removes names from a root file system that containers can share.
//!
//! The removal of a name detaches all mounts on it, and a rename does not. A container may start at any time and mount files on
//! these names. So they are renamed first: then no container finds them any more. A container that found them earlier already has
//! the root file system mounted, and is seen by the examination that follows. Only if there is none, the names are removed.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{AtFlags, RenameFlags};

use crate::inject::files::directory::temporary_name;
use crate::inject::remove::rootfs_users::RootfsMount;

/// A name in a directory that has been renamed.
#[derive(Debug)]
pub(in crate::inject) struct Hidden {
    dir: Rc<OwnedFd>,
    name: PathBuf,
    temporary: PathBuf,
    is_dir: bool,
}

impl Hidden {
    /// Renames a name. `None` if the file system cannot do that without replacing another file.
    pub(in crate::inject) fn hide(dir: &Rc<OwnedFd>, name: &Path, is_dir: bool) -> Option<Self> {
        let temporary = aside_name(name);
        // EINVAL from a file system that does not implement the flag; see renameat2(2).
        rustix::fs::renameat_with(&**dir, name, &**dir, &temporary, RenameFlags::NOREPLACE).ok()?;
        Some(Self {
            dir: Rc::clone(dir),
            name: name.to_owned(),
            temporary,
            is_dir,
        })
    }

    /// Gives the file its name back, unless another file has it now.
    fn restore(&self) {
        rustix::fs::renameat_with(
            &*self.dir,
            &self.temporary,
            &*self.dir,
            &self.name,
            RenameFlags::NOREPLACE,
        )
        .ok();
    }

    /// Removes the file, or a directory if it is empty. Otherwise it gets its name back.
    fn remove(&self) {
        let flags = if self.is_dir {
            AtFlags::REMOVEDIR
        } else {
            AtFlags::empty()
        };
        if rustix::fs::unlinkat(&*self.dir, &self.temporary, flags).is_err() {
            self.restore();
        }
    }
}

/// Differs from the temporary name with which a file is replaced: undo gives a link of the image its name back while the hook's file,
/// which had that name, is aside.
fn aside_name(name: &Path) -> PathBuf {
    let mut aside = temporary_name(name).into_os_string();
    aside.push("-old");
    aside.into()
}

/// Removes the names that were renamed while no other container used the root file system. If one has started to use it since then,
/// they get their names back.
pub(in crate::inject) fn finish(place: &RootfsMount, names: &[Hidden]) {
    if place.is_used_elsewhere() {
        names.iter().rev().for_each(Hidden::restore);
    } else {
        names.iter().for_each(Hidden::remove);
    }
}
