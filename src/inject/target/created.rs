//! What is written down of the names that were created, for poststop; see [`leftovers`].
//!
//! Names in volumes and in layers of tmpfs are among them: at poststop they do not exist, as nothing is mounted there then.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Stat};

use base::paths::ContainerPath;
use base::sys::in_root::Created;

use super::{Target, stale};
use crate::inject::leftovers;

impl Target {
    /// The name at the end of this path was created in this directory. To be called before something is mounted on it.
    pub(super) fn note_created(&mut self, path: &Path, dir: &OwnedFd) {
        let stat = path.file_name().and_then(|name| rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok());
        self.created.extend(stat.and_then(|stat| leftovers::entry(Path::new("/").join(path), &stat)));
    }

    /// Directories were made, the last of which `path` leads to.
    pub(super) fn note_directories(&mut self, path: &Path, created: &[Created]) {
        let made: Vec<_> = path.ancestors().zip(created.iter().rev()).collect();
        for (path, created) in made.into_iter().rev() {
            self.note_created(path, &created.dir);
        }
    }

    /// Something to mount on was found. An empty file with a library's name of the driver's was left by an earlier start.
    pub(super) fn note_left(&mut self, path: &ContainerPath, stat: &Stat) {
        let is_empty = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_size == 0;
        if is_empty && stale::is_library_of_a_driver(path.file_name()) {
            self.created.extend(leftovers::entry(path.absolute(), stat));
        }
    }
}
