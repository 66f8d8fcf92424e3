//! Records the created names for poststop; see [`leftovers`].
//!
//! These include names on volumes and layers, which are not mounted at poststop: there the names do not exist.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Stat};

use base::paths::ContainerPath;
use base::sys::in_root::Created;

use super::{Target, stale};
use crate::inject::leftovers;

impl Target {
    /// Records that the last component of `path` was created in `dir`. Must be called before something is mounted on it.
    pub(super) fn note_created(&mut self, path: &Path, dir: &OwnedFd) {
        let stat = path.file_name().and_then(|name| rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok());
        self.created.extend(stat.and_then(|stat| leftovers::entry(Path::new("/").join(path), &stat)));
    }

    /// Records created directories; `path` is the path of the last one.
    pub(super) fn note_directories(&mut self, path: &Path, created: &[Created]) {
        let made: Vec<_> = path.ancestors().zip(created.iter().rev()).collect();
        for (path, created) in made.into_iter().rev() {
            self.note_created(path, &created.dir);
        }
    }

    /// Records an existing mount point if it is an empty file with the name of a driver library: an earlier start left it.
    pub(super) fn note_left(&mut self, path: &ContainerPath, stat: &Stat) {
        let is_empty = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_size == 0;
        if is_empty && stale::is_library_of_a_driver(path.file_name()) {
            self.created.extend(leftovers::entry(path.absolute(), stat));
        }
    }
}
