//! Removes what the setup of a container left in its file system: empty files that were mount points, links, and directories.
//! Otherwise `podman commit` would store them in an image. The hook records the names it creates, and removes them at poststop.
//!
//! The container has run since then and may have replaced any of them. A name is removed only if it is in the container's own
//! file system and still the same inode, and if it is a link, an empty file, an unchanged copy or an empty directory. Nothing is
//! removed from a root file system that another container uses, see [`sharing`](crate::inject::remove::rootfs_users).

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{FileType, OFlags, Stat};

use base::paths::ContainerPath;
use base::sys::in_root::Root;
use nvidia_host::driver::{file_table, is_version, ldcache, ldconf};

use crate::inject::container::linker_cache;
use crate::inject::files::directory::{create_file, is_unchanged};
use crate::inject::files::source::open_in;
use crate::inject::remove::hidden::{Hidden, remove_unless_shared};
use crate::inject::remove::rootfs_users::RootfsMount;
use crate::oci::spec_view::SpecView;
use crate::record::storage;
use records::created::Entry;

const OVERLAYFS_MAGIC: i64 = 0x794c_7630;

/// Reports whether the engine made the root file system for this container: on overlayfs, each container usually has its own upper
/// layer; otherwise, containers/storage lists the layer for this container. `path` is `root.path` of config.json.
///
/// Another container can use it nevertheless, if it was started with `--rootfs`.
pub(crate) fn is_own(rootfs: &Root, id: &str, bundle: Option<&Path>, path: &Path) -> bool {
    rustix::fs::fstatfs(rootfs).is_ok_and(|fs| fs.f_type == OVERLAYFS_MAGIC)
        || bundle.is_some_and(|bundle| storage::has_layer(id, bundle, path))
}

/// Returns the record entry of a created name; `None` if its path is not UTF-8.
pub(in crate::inject) fn entry(path: PathBuf, stat: &Stat) -> Option<Entry> {
    path.to_str()?;
    Some(Entry {
        path,
        inode: stat.st_ino,
    })
}

/// Returns the mount points of driver files that the runtime created for mounts in config.json. After the container has ended,
/// they are empty files. An image does not contain empty files at these paths.
pub(crate) fn mount_points(rootfs: &Root, spec: &SpecView) -> Vec<Entry> {
    let Ok(root) = rustix::fs::fstat(rootfs) else {
        return Vec::new();
    };
    let mounts = spec.mounts.iter().filter(|mount| mount.is_bind());
    let paths = mounts.filter_map(|mount| ContainerPath::new(&mount.destination));
    paths
        .filter(is_of_a_driver)
        .filter_map(|path| empty_file(rootfs, &root, &path))
        .collect()
}

/// Reports whether this is the name of a driver library with its version, like `libcuda.so.535.183.01`.
pub(in crate::inject) fn is_library_of_a_driver(name: impl AsRef<Path>) -> bool {
    let Some(name) = name.as_ref().to_str() else {
        return false;
    };
    let Some((library, version)) = name.split_once(".so.") else {
        return false;
    };
    is_version(version) && file_table::LIBRARIES.iter().any(|row| row.name == library)
}

fn is_of_a_driver(path: &ContainerPath) -> bool {
    is_library_of_a_driver(path.file_name())
        || path
            .relative()
            .to_str()
            .is_some_and(|text| text.contains("nvidia"))
}

fn empty_file(rootfs: &Root, root: &Stat, path: &ContainerPath) -> Option<Entry> {
    let dir = open_own_dir(rootfs, root, path.relative().parent()?)?;
    let stat = rustix::fs::fstat(open_in(&dir, path.file_name()).ok()?).ok()?;
    let is_empty =
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_size == 0;
    if is_empty {
        entry(path.absolute(), &stat)
    } else {
        None
    }
}

/// Removes created names that have not changed since, and their entries in the linker cache. Removes nothing if another container
/// uses the root file system.
pub(crate) fn remove(rootfs: &Root, created: &[Entry]) {
    let (Ok(root), Some(place)) = (rustix::fs::fstat(rootfs), RootfsMount::find(rootfs, false))
    else {
        return;
    };
    if created.is_empty() {
        return;
    }
    let mut paths = Vec::new();
    let mut cache = None;
    let removed = remove_unless_shared(&place, || {
        let mut names = Vec::new();
        // In reverse order, because a directory is listed before the names in it.
        for entry in created.iter().rev() {
            if let Some(name) = put_aside(rootfs, &root, entry) {
                names.push(name);
                paths.push(entry.path.clone());
            }
        }
        cache = LinkerCache::read(rootfs, &root).filter(|_| !names.is_empty());
        names.extend(cache.as_ref().and_then(LinkerCache::put_aside));
        names
    });
    let is_cache_gone = removed.len() > paths.len() && removed.last() == Some(&true);
    let removed = paths
        .into_iter()
        .zip(removed)
        .filter_map(|(path, is_removed)| is_removed.then_some(path))
        .collect();
    if let (Some(cache), true) = (cache, is_cache_gone) {
        cache.write_without(&removed);
    }
}

fn put_aside(rootfs: &Root, root: &Stat, entry: &Entry) -> Option<Hidden> {
    let path = ContainerPath::new(&entry.path)?;
    let dir = Rc::new(open_own_dir(rootfs, root, path.relative().parent()?)?);
    let stat = rustix::fs::fstat(open_in(&*dir, path.file_name()).ok()?).ok()?;
    if stat.st_ino != entry.inode {
        return None;
    }
    let is_dir = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => true,
        FileType::Symlink => false,
        FileType::RegularFile if stat.st_nlink == 1 && (is_unchanged(&stat) || is_list(&path)) => {
            false
        }
        _ => return None,
    };
    Hidden::hide(&dir, Path::new(path.file_name()), is_dir)
}

/// Reports whether this is the hook's drop-in file in `/etc/ld.so.conf.d`, which is not empty.
fn is_list(path: &ContainerPath) -> bool {
    path.relative() == Path::new(ldconf::DROP_INS).join(ldconf::DROP_IN)
}

/// Opens a directory, unless it is on another file system that is mounted in the root file system.
fn open_own_dir(rootfs: &Root, root: &Stat, path: &Path) -> Option<OwnedFd> {
    let dir = rootfs
        .open_at(path, OFlags::PATH | OFlags::DIRECTORY)
        .ok()?;
    (rustix::fs::fstat(&dir).ok()?.st_dev == root.st_dev).then_some(dir)
}

/// The linker cache of a container that has ended. The loader skips entries of missing files, but `ldconfig -p` would list them.
struct LinkerCache {
    etc: Rc<OwnedFd>,
    content: Vec<u8>,
}

impl LinkerCache {
    const NAME: &str = "ld.so.cache";

    fn read(rootfs: &Root, root: &Stat) -> Option<Self> {
        let etc = open_own_dir(rootfs, root, Path::new("etc"))?;
        let found = open_in(&etc, OsStr::new(Self::NAME)).ok()?;
        let stat = rustix::fs::fstat(&found).ok()?;
        // The file that replaces it belongs to us: in a container with a user namespace that is another user.
        if stat.st_dev != root.st_dev || stat.st_uid != rustix::process::geteuid().as_raw() {
            return None;
        }
        let content =
            base::read::read_file_limited(&rootfs.open_stored(found).ok()?, linker_cache::MAX_SIZE)
                .ok()?;
        Some(Self {
            etc: Rc::new(etc),
            content,
        })
    }

    /// Renames the file: to replace it would detach mounts on it, like its removal.
    fn put_aside(&self) -> Option<Hidden> {
        Hidden::hide(&self.etc, Path::new(Self::NAME), false)
    }

    /// Writes the file again, without the entries of removed files.
    fn write_without(&self, removed: &BTreeSet<PathBuf>) {
        let new = ldcache::update(&self.content, &[], removed).ok().flatten();
        let content = new.as_deref().unwrap_or(&self.content);
        create_file(&self.etc, Path::new(Self::NAME), content).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn created(root: &Path, name: &str) -> Entry {
        let stat = rustix::fs::lstat(root.join(name)).unwrap();
        entry(Path::new("/").join(name), &stat).unwrap()
    }

    #[test]
    fn only_what_is_still_the_same_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(path("usr/lib")).unwrap();
        std::fs::create_dir_all(path("ours/kept")).unwrap();
        std::fs::create_dir_all(path("ours/gone")).unwrap();
        for name in ["empty", "filled", "replaced", "linked"] {
            std::fs::write(path("usr/lib").join(name), "").unwrap();
        }
        symlink("empty", path("usr/lib/link")).unwrap();
        symlink("empty", path("usr/lib/changed")).unwrap();
        let names = ["ours", "ours/kept", "ours/gone"].into_iter().chain(
            ["empty", "filled", "replaced", "linked", "link", "changed"].map(|name| match name {
                "empty" => "usr/lib/empty",
                "filled" => "usr/lib/filled",
                "replaced" => "usr/lib/replaced",
                "linked" => "usr/lib/linked",
                "link" => "usr/lib/link",
                _ => "usr/lib/changed",
            }),
        );
        let entries: Vec<_> = names.map(|name| created(dir.path(), name)).collect();
        std::fs::write(path("usr/lib/filled"), "x").unwrap();
        std::fs::write(path("usr/lib/new"), "").unwrap();
        std::fs::rename(path("usr/lib/new"), path("usr/lib/replaced")).unwrap();
        std::fs::hard_link(path("usr/lib/linked"), path("usr/lib/other")).unwrap();
        // The old inode stays in use: a new link could have its number otherwise.
        std::fs::rename(path("usr/lib/changed"), path("usr/lib/aside")).unwrap();
        symlink("other", path("usr/lib/changed")).unwrap();
        std::fs::write(path("ours/kept/file"), "").unwrap();
        remove(&Root::open(dir.path()).unwrap(), &entries);
        let listed = |name: &str| {
            let mut names: Vec<_> = std::fs::read_dir(path(name))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        assert_eq!(
            listed("usr/lib"),
            ["aside", "changed", "filled", "linked", "other", "replaced"]
        );
        assert_eq!(listed("ours"), ["kept"]);
    }

    /// The container's processes can put links in the place of directories before they end.
    #[test]
    fn a_link_leads_nowhere_outside() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(outside.path().join("libcuda.so.1"), "").unwrap();
        std::fs::create_dir(dir.path().join("lib")).unwrap();
        std::fs::hard_link(
            outside.path().join("libcuda.so.1"),
            dir.path().join("lib/libcuda.so.1"),
        )
        .unwrap();
        let entry = created(dir.path(), "lib/libcuda.so.1");
        std::fs::remove_dir_all(dir.path().join("lib")).unwrap();
        symlink(outside.path(), dir.path().join("lib")).unwrap();
        // The naive way follows it.
        assert!(
            dir.path()
                .join(entry.path.strip_prefix("/").unwrap())
                .metadata()
                .is_ok()
        );
        let root = Root::open(dir.path()).unwrap();
        remove(
            &root,
            &[
                entry.clone(),
                Entry {
                    path: "/../libcuda.so.1".into(),
                    ..entry
                },
            ],
        );
        assert!(outside.path().join("libcuda.so.1").metadata().is_ok());
    }

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
