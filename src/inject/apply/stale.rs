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
use base::report::Finding;
use base::sys::in_root::Created;
use findings::catalog;

use super::Applier;
use crate::inject::files::tmpfs::is_read_only;
use crate::inject::remove::hidden::{Hidden, remove_unless_shared};
use crate::inject::remove::leftovers::{is_created, is_library_of_a_driver};
use crate::inject::remove::rootfs_users::RootfsMount;
use crate::plan::step::CacheEntry;

/// Upper limit for the directories to search; driver libraries are in one or two.
const MAX_DIRECTORIES: usize = 8;
/// Upper limit for the names of all these directories; distributions have thousands.
const MAX_NAMES: usize = 50_000;

impl Applier {
    /// Searches the directories of these libraries, and the directories of links that led to another driver version: with CDI and
    /// precreate, the engine mounts libraries at the host's paths. Returns the paths of the files for the linker cache; empty if
    /// there was no such link. The files are removed after the last step.
    pub(super) fn find_stale(&mut self, entries: &[CacheEntry]) -> BTreeSet<PathBuf> {
        let of_links = std::mem::take(&mut self.of_other_driver);
        if of_links.is_empty() {
            return BTreeSet::new();
        }
        let mut dirs: Vec<ContainerPath> = Vec::new();
        let of_entries = entries.iter().filter_map(|entry| entry.path.parent());
        for dir in of_links.into_iter().chain(of_entries) {
            if !dirs.contains(&dir) && dirs.len() < MAX_DIRECTORIES {
                dirs.push(dir);
            }
        }
        let (mut stale, mut left) = (Stale::default(), MAX_NAMES);
        for dir in dirs {
            self.find_stale_in(&dir, &mut left, &mut stale);
        }
        let Stale {
            mut paths,
            mut kept,
        } = stale;
        if !paths.is_empty() && self.place().is_none_or(|place| place.is_used_elsewhere()) {
            self.stale.clear();
            kept.append(&mut paths);
        }
        self.layout.done.findings.extend(left_behind(&kept));
        paths
    }

    fn place(&self) -> Option<RootfsMount> {
        RootfsMount::find(&self.layout.rootfs, true)
    }

    /// Removes the files, unless another container has started with the same root file system.
    pub(super) fn remove_stale(&mut self) {
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
        found: &mut Stale,
    ) -> Option<()> {
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
        for name in stale_names(&dir, &names) {
            let file = path.absolute().join(name);
            if !self.may_remove(path, &dir, name) {
                found.kept.insert(file);
                continue;
            }
            found.paths.insert(file);
            self.stale.push(Created {
                dir: Rc::clone(&dir),
                name: name.into(),
                is_dir: false,
            });
        }
        Some(())
    }
}

/// What another driver version left.
#[derive(Debug, Default)]
struct Stale {
    /// What is removed
    paths: BTreeSet<PathBuf>,
    /// What may belong to another container, and stays
    kept: BTreeSet<PathBuf>,
}

/// Returns the names of a directory that are empty files of a driver, and the links to them.
fn stale_names<'a>(dir: &OwnedFd, names: &'a [OsString]) -> BTreeSet<&'a OsString> {
    let mut stale = BTreeSet::new();
    let mut links = Vec::new();
    for name in names {
        if is_library_of_a_driver(name) && is_empty_file(dir, name) {
            stale.insert(name);
        } else if name.as_bytes().starts_with(b"lib")
            && let Some(text) = link_text(dir, name)
        {
            links.push((name, text));
        }
    }
    // libx.so.1 -> libx.so.535.1, and libx.so -> libx.so.1
    for _ in 0..2 {
        for (name, text) in &links {
            if stale.contains(text) {
                stale.insert(name);
            }
        }
    }
    stale
}

/// The finding for files that stay; `None` if there are none.
fn left_behind(kept: &BTreeSet<PathBuf>) -> Option<Finding> {
    let first = kept.first()?;
    let more = match kept.len() {
        1 => String::new(),
        count => format!(" and {} more", count - 1),
    };
    Some(Finding::new(
        &catalog::LEFT_BEHIND,
        format!("another driver version left the empty file {first:?}{more} in the container"),
        "create the container again from its image, or remove these files and links in it",
    ))
}

impl Applier {
    /// Reports whether a name may be removed: the root file system was made for this container, or its record lists this file. Other
    /// root file systems (`--rootfs`, engines whose lists the hook does not read) may be shared.
    fn may_remove(&self, path: &ContainerPath, dir: &OwnedFd, name: &OsStr) -> bool {
        let is_recorded = |stat: Stat| {
            let path = path.absolute().join(name);
            self.earlier
                .iter()
                .any(|entry| entry.path == path && is_created(entry, &stat))
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
