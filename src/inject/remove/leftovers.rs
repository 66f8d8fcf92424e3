//! Removes what the setup of a container left in its file system: empty files that were mount points, links, and directories.
//! Otherwise `podman commit` would store them in an image. The hook records the names it creates, and removes them at poststop.
//!
//! The container has run since then and may have replaced any of them. A name is removed only if it is in the container's own
//! file system and a link, an empty file, an unchanged copy or an empty directory, and if it is the created one:
//!
//! - The change time of a file or link is in the setup. Programs cannot set this time (inode(7)), and the container's process starts after
//!   the setup. So nothing has written, replaced, linked or renamed it since then. The inode number proves less, because file systems
//!   give the number of a removed file to the next one.
//! - The modification time is in the setup too, or is the time of copies. Files of the image keep the times from its archive, even if the
//!   engine unpacked them a moment before.
//! - A directory changes with the names in it. It was modified in the setup or later, so it is not a directory that only the image has,
//!   which a layer or a tmpfs covered. The worst case is a program that removes the directory, creates it again and leaves it empty.
//!
//! Nothing is removed from a root file system that another container uses, see [`sharing`](crate::inject::remove::rootfs_users).

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{FileType, OFlags, Stat};

use base::paths::ContainerPath;
use base::sys::file_id::{FileId, FileTime};
use base::sys::in_root::Root;
use nvidia_host::driver::{file_table, is_version, ldcache, ldconf};

use crate::inject::container::linker_cache;
use crate::inject::files::directory::{create_file, is_copy, is_unchanged};
use crate::inject::files::source::open_in;
use crate::inject::remove::hidden::{Hidden, remove_unless_shared};
use crate::inject::remove::rootfs_users::RootfsMount;
use crate::oci::spec_view::SpecView;
use crate::record::storage;
use records::created::{Entry, Mark};

const OVERLAYFS_MAGIC: i64 = 0x794c_7630;

/// The longest time from the creation of a name to the end of the setup, in milliseconds. The deadline ends a setup earlier, and some file
/// systems store times in units of two seconds.
const LONGEST_SETUP: u64 = 60_000;

/// Reports whether the engine made the root file system for this container: on overlayfs, each container usually has its own upper
/// layer; otherwise, containers/storage lists the layer for this container. `path` is `root.path` of config.json.
///
/// Another container can use it nevertheless, if it was started with `--rootfs`.
pub(crate) fn is_own(rootfs: &Root, id: &str, bundle: Option<&Path>, path: &Path) -> bool {
    rustix::fs::fstatfs(rootfs).is_ok_and(|fs| fs.f_type == OVERLAYFS_MAGIC)
        || bundle.is_some_and(|bundle| storage::has_layer(id, bundle, path))
}

/// Returns the record entry of a created name; `None` if its path is not UTF-8.
pub(in crate::inject) fn entry(path: PathBuf, mark: Mark) -> Option<Entry> {
    path.to_str()?;
    Some(Entry { path, mark })
}

/// Reports whether this is the file of a created name.
pub(in crate::inject) fn is_created(entry: &Entry, stat: &Stat) -> bool {
    let end = match entry.mark {
        Mark::Inode(inode) => return stat.st_ino == inode,
        Mark::SetUp(end) => end,
    };
    let begin = end.saturating_sub(LONGEST_SETUP);
    let FileId {
        modified, changed, ..
    } = FileId::from(stat);
    let modified = milliseconds(modified);
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        return modified.is_some_and(|time| time >= begin);
    }
    let is_in_setup = |time: Option<u64>| time.is_some_and(|time| begin <= time && time <= end);
    is_in_setup(milliseconds(changed)) && (is_in_setup(modified) || is_copy(stat))
}

/// Converts a time of a file to milliseconds since 1970; `None` for an earlier time.
fn milliseconds(time: FileTime) -> Option<u64> {
    let since = time.since_1970()?;
    u64::try_from(since.as_millis()).ok()
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
        entry(path.absolute(), Mark::Inode(stat.st_ino))
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
    if !is_created(entry, &stat) {
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
    use crate::inject::files::directory::make_copy;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::time::{Duration, SystemTime};

    fn created(root: &Path, name: &str) -> Entry {
        let stat = rustix::fs::lstat(root.join(name)).unwrap();
        marked(name, Mark::Inode(stat.st_ino))
    }

    fn marked(name: &str, mark: Mark) -> Entry {
        entry(Path::new("/").join(name), mark).unwrap()
    }

    /// Ends a setup. The times of files have the resolution of the kernel's tick, which is at most 10 ms.
    fn end_of_setup() -> Mark {
        let mark = Mark::set_up(SystemTime::now());
        std::thread::sleep(Duration::from_millis(30));
        mark
    }

    fn listed(path: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn only_what_is_still_the_same_is_removed() {
        still_the_same(created);
    }

    #[test]
    fn only_what_has_not_changed_since_the_setup_is_removed() {
        let end = std::cell::OnceCell::new();
        still_the_same(|_, name| marked(name, *end.get_or_init(end_of_setup)));
    }

    fn still_the_same(created: impl Fn(&Path, &str) -> Entry) {
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
        assert_eq!(
            listed(&path("usr/lib")),
            ["aside", "changed", "filled", "linked", "other", "replaced"]
        );
        assert_eq!(listed(&path("ours")), ["kept"]);
    }

    /// What programs and packages of the container make again is theirs, also if it is the same and has the same inode number. So is
    /// what only the image has, below a layer or a tmpfs on which the hook created the names.
    #[test]
    fn what_others_made_at_the_same_path_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let make = |name: &str| match name {
            "link" | "packaged" => symlink("libcuda.so.1", path(name)).unwrap(),
            "copy" | "rewritten" => {
                let opened = OwnedFd::from(std::fs::File::open(dir.path()).unwrap());
                make_copy(&opened, OsStr::new(name), b"x").unwrap();
            }
            "directory" | "of the image" => std::fs::create_dir(path(name)).unwrap(),
            _ => std::fs::write(path(name), "").unwrap(),
        };
        let ours = [
            "file",
            "link",
            "copy",
            "directory",
            "chmod",
            "touched",
            "packaged",
            "rewritten",
            "unpacked",
            "of the image",
        ];
        for name in ours {
            make(name);
        }
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_500_000_000);
        for name in ["unpacked", "of the image"] {
            let file = std::fs::File::open(path(name)).unwrap();
            file.set_modified(old).unwrap();
        }
        let end = end_of_setup();
        std::fs::set_permissions(path("chmod"), Permissions::from_mode(0o600)).unwrap();
        let touched = std::fs::File::open(path("touched")).unwrap();
        let modified = touched.metadata().unwrap().modified().unwrap();
        touched.set_modified(modified).unwrap();
        // rm and ln -s: ext4 and others give the link the same inode number.
        std::fs::remove_file(path("packaged")).unwrap();
        make("packaged");
        std::fs::write(path("rewritten"), "x").unwrap();
        let entries = ours.map(|name| marked(name, end));
        remove(&Root::open(dir.path()).unwrap(), &entries);
        assert_eq!(
            listed(dir.path()),
            [
                "chmod",
                "of the image",
                "packaged",
                "rewritten",
                "touched",
                "unpacked"
            ]
        );
    }

    /// A start that is later than a file did not create it.
    #[test]
    fn a_file_from_before_the_setup_stays() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("old"), "").unwrap();
        std::fs::create_dir(dir.path().join("directory")).unwrap();
        let later = SystemTime::now() + Duration::from_millis(LONGEST_SETUP + 1000);
        let entries = ["old", "directory"].map(|name| marked(name, Mark::set_up(later)));
        remove(&Root::open(dir.path()).unwrap(), &entries);
        assert_eq!(listed(dir.path()), ["directory", "old"]);
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
