//! Removes what another driver version left in a container that is started again: the empty mount points of its libraries, and
//! links to them. A program that loads a library that the new driver lacks would fail with "file too short".
//!
//! The names belong to this container, by the engine's list of its layers or by the record of an earlier start.
//!
//! This is done only if no other container uses the root file system, see [`sharing`](crate::inject::remove::rootfs_users). It removes only empty
//! regular files with the versioned name of a driver library, and links to them in the same directory.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::rc::Rc;

use rustix::fs::{AtFlags, FileType, OFlags, Stat};

use base::paths::ContainerPath;
use base::sys::in_root::Created;

use super::Applier;
use crate::inject::files::tmpfs::is_read_only;
use crate::inject::remove::hidden::{Hidden, remove_unless_shared};
use crate::inject::remove::leftovers::is_library_of_a_driver;
use crate::inject::remove::rootfs_users::RootfsMount;
use crate::plan::step::CacheEntry;

/// Upper limit for the directories to search; driver libraries are in one or two.
const MAX_DIRECTORIES: usize = 8;
/// Upper limit for the names of all these directories; distributions have thousands.
const MAX_NAMES: usize = 50_000;

impl Applier {
    /// Searches the directories of these libraries, and returns the paths of the files for the linker cache. The files are
    /// removed after the last step.
    pub(in crate::inject) fn find_stale(&mut self, entries: &[CacheEntry]) -> BTreeSet<PathBuf> {
        if !self.is_own && self.earlier.is_empty() {
            return BTreeSet::new();
        }
        let mut dirs: Vec<ContainerPath> = Vec::new();
        for dir in entries.iter().filter_map(|entry| entry.path.parent()) {
            if !dirs.contains(&dir) && dirs.len() < MAX_DIRECTORIES {
                dirs.push(dir);
            }
        }
        let (mut paths, mut left) = (BTreeSet::new(), MAX_NAMES);
        for dir in dirs {
            for name in self.find_stale_in(&dir, &mut left).unwrap_or_default() {
                paths.insert(dir.absolute().join(&name));
            }
        }
        if !paths.is_empty() && self.place().is_none_or(|place| place.is_used_elsewhere()) {
            self.stale.clear();
            paths.clear();
        }
        paths
    }

    fn place(&self) -> Option<RootfsMount> {
        RootfsMount::find(&self.layout.rootfs, true)
    }

    /// Removes the files, unless another container has started with the same root file system.
    pub(in crate::inject) fn remove_stale(&mut self) {
        let stale = std::mem::take(&mut self.stale);
        if !stale.is_empty()
            && let Some(place) = self.place()
        {
            let put = || {
                stale
                    .iter()
                    .filter_map(|left| Hidden::hide(&left.dir, &left.name, left.is_dir))
                    .collect()
            };
            remove_unless_shared(&place, put);
        }
    }

    fn find_stale_in(
        &mut self,
        path: &ContainerPath,
        left: &mut usize,
    ) -> Option<BTreeSet<OsString>> {
        let dir = Rc::new(
            self.layout
                .rootfs
                .open_at(path.relative(), OFlags::PATH | OFlags::DIRECTORY)
                .ok()?,
        );
        if is_read_only(&*dir) || !self.layout.may_create(&dir, path.relative()).ok()? {
            return None;
        }
        let listed = self
            .layout
            .rootfs
            .open_stored_dir(dir.try_clone().ok()?)
            .ok()?;
        let entries = rustix::fs::Dir::new(listed).ok()?.take(*left).flatten();
        let names: Vec<_> = entries
            .map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned())
            .collect();
        *left = left.saturating_sub(names.len());
        let mut stale: BTreeSet<_> = names
            .iter()
            .filter(|name| is_library_of_a_driver(name) && is_empty_file(&dir, name))
            .cloned()
            .collect();
        stale.retain(|name| self.may_remove(path, &dir, name));
        let links: Vec<(&OsString, OsString)> = names
            .iter()
            .filter(|name| name.as_bytes().starts_with(b"lib"))
            .filter_map(|name| Some((name, link_text(&dir, name)?)))
            .collect();
        // libx.so.1 -> libx.so.535.1, and libx.so -> libx.so.1
        for _ in 0..2 {
            let found = links
                .iter()
                .filter(|(name, text)| stale.contains(text) && self.may_remove(path, &dir, name));
            let found: Vec<_> = found.map(|(name, _)| *name).collect();
            stale.extend(found.into_iter().cloned());
        }
        for name in &stale {
            self.stale.push(Created {
                dir: Rc::clone(&dir),
                name: name.into(),
                is_dir: false,
            });
        }
        Some(stale)
    }
}

impl Applier {
    /// Reports whether a name may be removed: the root file system was made for this container, or its record lists this inode. Other
    /// root file systems (`--rootfs`, engines whose lists the hook does not read) may be shared.
    fn may_remove(&self, path: &ContainerPath, dir: &OwnedFd, name: &OsStr) -> bool {
        let is_recorded = |stat: Stat| {
            let path = path.absolute().join(name);
            self.earlier
                .iter()
                .any(|entry| entry.inode == stat.st_ino && entry.path == path)
        };
        self.is_own
            || rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(is_recorded)
    }
}

fn is_empty_file(dir: &OwnedFd, name: &OsStr) -> bool {
    rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_size == 0
            && stat.st_nlink == 1
    })
}

fn link_text(dir: &OwnedFd, name: &OsStr) -> Option<OsString> {
    let text = rustix::fs::readlinkat(dir, name, Vec::new()).ok()?;
    Some(OsString::from_vec(text.into_bytes()))
}
