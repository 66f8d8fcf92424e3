//! Removes what another driver version left in a container that is started again: the empty mount points of its libraries, and
//! links to them. A program that loads a library that the new driver lacks would fail with "file too short".
//!
//! This is done only in a root file system that the engine made for this container, and that no other container uses, see
//! [`rootfs_users`](crate::inject::remove::rootfs_users). It removes only empty regular files with the versioned name of a driver library,
//! and links to them in the same directory.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{AtFlags, FileType, OFlags};

use base::paths::ContainerPath;
use base::report::Finding;
use base::sys::in_root::{Created, Root};
use findings::catalog;
use nvidia_host::driver::{file_table, is_version};

use super::Applier;
use crate::inject::files::tmpfs::is_read_only;
use crate::inject::remove::hidden::{self, Hidden};
use crate::inject::remove::rootfs_users::RootfsMount;
use crate::plan::step::CacheEntry;
use crate::record::storage;

/// Upper limit for the directories to search; driver libraries are in one or two.
const MAX_DIRECTORIES: usize = 8;
/// Upper limit for the names of all these directories; distributions have thousands.
const MAX_NAMES: usize = 50_000;

const OVERLAYFS_MAGIC: i64 = 0x794c_7630;

/// Reports whether the engine made the root file system for this container: on overlayfs, each container usually has its own upper
/// layer; otherwise, containers/storage lists the layer for this container. `path` is `root.path` of config.json.
///
/// Another container can use it nevertheless, if it was started with `--rootfs`.
pub(in crate::inject) fn is_own(
    rootfs: &Root,
    id: &str,
    bundle: Option<&Path>,
    path: &Path,
) -> bool {
    rustix::fs::fstatfs(rootfs).is_ok_and(|fs| fs.f_type == OVERLAYFS_MAGIC)
        || bundle.is_some_and(|bundle| storage::has_layer(id, bundle, path))
}

/// Reports whether this is the name of a driver library with its version, like `libcuda.so.535.183.01`.
pub(super) fn is_library_of_a_driver(name: impl AsRef<Path>) -> bool {
    let Some(name) = name.as_ref().to_str() else {
        return false;
    };
    let Some((library, version)) = name.split_once(".so.") else {
        return false;
    };
    is_version(version) && file_table::LIBRARIES.iter().any(|row| row.name == library)
}

impl Applier {
    /// Searches the directories of these libraries, and the directories of links that led to another driver version: with CDI, the
    /// engine mounts libraries at the host's paths. Returns the paths of the files for the linker cache; empty if
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
        let (mut paths, mut left) = (BTreeSet::new(), MAX_NAMES);
        for dir in dirs {
            self.find_stale_in(&dir, &mut left, &mut paths);
        }
        if paths.is_empty() || self.unshared().is_some() {
            return paths;
        }
        self.stale.clear();
        self.layout.done.findings.extend(left_behind(&paths));
        BTreeSet::new()
    }

    /// Returns the root file system if the engine made it for this container, and no other one uses it.
    fn unshared(&self) -> Option<RootfsMount> {
        if !self.is_own {
            return None;
        }
        let place = RootfsMount::find(&self.layout.rootfs)?;
        (!place.is_used_elsewhere()).then_some(place)
    }

    /// Removes the files, unless another container has started with the same root file system.
    pub(super) fn remove_stale(&mut self) {
        let stale = std::mem::take(&mut self.stale);
        if stale.is_empty() {
            return;
        }
        // A container that runs must not miss the names even for a moment.
        let Some(place) = self.unshared() else {
            return;
        };
        let mut names = Vec::new();
        for left in &stale {
            names.extend(Hidden::hide(&left.dir, &left.name, left.is_dir));
        }
        hidden::finish(&place, &names);
    }

    fn find_stale_in(
        &mut self,
        path: &ContainerPath,
        left: &mut usize,
        found: &mut BTreeSet<PathBuf>,
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
            found.insert(path.absolute().join(name));
            self.stale.push(Created {
                dir: Rc::clone(&dir),
                name: name.into(),
                is_dir: false,
            });
        }
        Some(())
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_driver_libraries() {
        for (name, is) in [
            ("libcuda.so.535.183.01", true),
            ("libnvidia-ml.so.550.54", true),
            ("libcuda.so.1", false),
            ("libcuda.so", false),
            ("libcuda.so.535.183.01.bak", false),
            ("libcudart.so.12.2", false),
            ("libc.so.6.1", false),
        ] {
            assert_eq!(is_library_of_a_driver(name), is, "{name}");
        }
    }
}
