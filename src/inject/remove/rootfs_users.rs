//! Determines whether another mount namespace uses the root file system of a container.
//!
//! Containers can share one, with `--rootfs`. The removal of a name detaches all mounts on it, in all mount namespaces
//! (`detach_mounts` in the kernel), and the kernel reports neither that nor whether another namespace has such a mount. So the
//! mount tables of the other namespaces are read. The engine's own mount of the root file system is in most of them, because
//! mounts of the host propagate to services and to containers that show the host's files. A namespace uses the root file system
//! if it has more than that:
//!
//! - a mount in it;
//! - a mount of it, or of a directory in it, at another place. A runtime mounts it before it starts hooks, and a container has it
//!   as `/`.
//!
//! A namespace that cannot be examined may use it.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use base::mountinfo::{MountEntry, escaped, mounts};
use base::sys::child;
use base::sys::in_root::{Root, real_path};
use base::sys::mount::statmount::reused_id;
use base::sys::ns::{Limits, other_mount_tables};

use crate::inject::container::mounts::read_table;

/// How long the examination may take. A node with a thousand containers needs a second.
const PATIENCE: Duration = Duration::from_secs(5);
/// Limits for the mount tables. A container can have 100,000 mounts (`fs.mount-max`).
const LIMITS: Limits = Limits {
    namespaces: 10_000,
    bytes: 64 << 20,
};

/// A root file system, as mount tables describe it. Paths are escaped as in mount tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::inject) struct RootfsMount {
    /// The number of the file system
    device: u64,
    /// Its directory in the file system
    root: Vec<u8>,
    /// Its path on the host
    point: Vec<u8>,
    /// Whether the engine mounted it at that path. Otherwise, it is a directory of another mount.
    is_mounted: bool,
}

impl RootfsMount {
    /// Returns the place of a root file system. This process has entered the mount namespace of a container, in which the runtime has
    /// mounted the root file system on itself. `None` if the place cannot be determined.
    pub(in crate::inject) fn find(rootfs: &Root) -> Option<Self> {
        let (id, path) = (reused_id(rootfs).ok()?, real_path(rootfs.as_fd()).ok()?);
        Self::from_table(&read_table().ok()?, id, &path)
    }

    fn from_table(table: &[u8], id: u64, path: &Path) -> Option<Self> {
        let lines: BTreeMap<u64, MountEntry<'_>> =
            mounts(table).map(|line| (line.id, line)).collect();
        let (mount, point) = (lines.get(&id)?, escaped(path));
        let below = relative(&point, mount.point)?;
        let mut root = mount.root.to_vec();
        if !below.is_empty() {
            root = joined(&root, below);
        }
        let is_on_itself = |under: &MountEntry<'_>| is_same(under, mount);
        let is_mounted = below.is_empty() && lines.get(&mount.parent).is_some_and(is_on_itself);
        Some(Self {
            device: mount.device,
            root,
            point,
            is_mounted,
        })
    }

    /// Reports whether the mount namespace with this mount table uses the root file system.
    fn is_used_in(&self, table: &[u8]) -> bool {
        let lines: Vec<MountEntry<'_>> = mounts(table).collect();
        let on_device: BTreeMap<u64, &MountEntry<'_>> = lines
            .iter()
            .filter(|line| line.device == self.device)
            .map(|line| (line.id, line))
            .collect();
        // The path of the root file system in each mount that shows it.
        let mut shown: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for line in on_device.values() {
            if relative(line.root, &self.root).is_some() {
                let is_repeated = on_device
                    .get(&line.parent)
                    .is_some_and(|under| is_same(under, line));
                let is_engines =
                    self.is_mounted && line.root == self.root && line.point.ends_with(&self.point);
                if !is_engines || is_repeated {
                    return true;
                }
                shown.insert(line.id, line.point.to_vec());
            } else if let Some(below) = relative(&self.root, line.root) {
                shown.insert(line.id, joined(line.point, below));
            }
        }
        let is_in = |line: &MountEntry<'_>| {
            let at = shown
                .get(&line.parent)
                .and_then(|path| relative(line.point, path));
            at.is_some_and(|below| !below.is_empty())
        };
        lines.iter().any(is_in)
    }

    /// Reports whether another mount namespace uses the root file system, or may use it.
    pub(in crate::inject) fn is_used_elsewhere(&self) -> bool {
        // A process cannot return from a mount namespace, so a child enters them.
        let spawned = child::spawn(|pipe| {
            let mut is_used = false;
            let read = other_mount_tables(LIMITS, |table| {
                is_used |= self.is_used_in(table);
                !is_used
            });
            if read.is_ok() && !is_used {
                child::report(pipe, b"no\n");
            }
        });
        let answer = spawned
            .ok()
            .and_then(|mut child| child.line(Instant::now() + PATIENCE).ok());
        answer.is_none_or(|answer| answer != b"no")
    }
}

/// Reports whether a mount shows the same directory at the same path as the mount below it.
fn is_same(under: &MountEntry<'_>, mount: &MountEntry<'_>) -> bool {
    under.device == mount.device && under.root == mount.root && under.point == mount.point
}

/// Returns the rest of `path` below `dir`, without a leading slash; empty if they are the same, `None` if `path` is elsewhere.
fn relative<'p>(path: &'p [u8], dir: &[u8]) -> Option<&'p [u8]> {
    let rest = path.strip_prefix(dir.strip_suffix(b"/").unwrap_or(dir))?;
    if rest.is_empty() {
        Some(rest)
    } else {
        rest.strip_prefix(b"/")
    }
}

fn joined(dir: &[u8], below: &[u8]) -> Vec<u8> {
    [dir.strip_suffix(b"/").unwrap_or(dir), b"/", below].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Before pivot_root(2), the runtime's mount is on the engine's mount, or on the directory.
    const INSIDE: &str = "21 1 8:1 / / rw shared:1 - ext4 /dev/a rw\n\
        40 21 0:50 / /storage/x/merged rw - overlay overlay rw\n\
        60 40 0:50 / /storage/x/merged rw - overlay overlay rw\n\
        61 21 8:1 /storage/dir/y /storage/dir/y rw - ext4 /dev/a rw\n";

    fn overlay() -> RootfsMount {
        RootfsMount::from_table(INSIDE.as_bytes(), 60, Path::new("/storage/x/merged")).unwrap()
    }

    fn directory() -> RootfsMount {
        RootfsMount::from_table(INSIDE.as_bytes(), 61, Path::new("/storage/dir/y")).unwrap()
    }

    fn is_used(place: &RootfsMount, lines: &[&str]) -> bool {
        let table: String = lines
            .iter()
            .map(|line| format!("{line} rw - x y rw\n"))
            .collect();
        place.is_used_in(table.as_bytes())
    }

    #[test]
    fn the_place_of_a_root_file_system() {
        let place = |root: &str, point: &str, (major, minor), is_mounted| RootfsMount {
            device: rustix::fs::makedev(major, minor),
            root: root.into(),
            point: point.into(),
            is_mounted,
        };
        assert_eq!(overlay(), place("/", "/storage/x/merged", (0, 50), true));
        assert_eq!(
            directory(),
            place("/storage/dir/y", "/storage/dir/y", (8, 1), false)
        );
        let empty = RootfsMount::from_table(b"", 60, Path::new("/storage/x/merged"));
        assert_eq!(empty, None);
        let spaces = RootfsMount::from_table(
            b"7 1 0:9 /a\\040b /m\\040n rw - x y rw\n",
            7,
            Path::new("/m n/c d"),
        );
        assert_eq!(
            spaces,
            Some(place("/a\\040b/c\\040d", "/m\\040n/c\\040d", (0, 9), false))
        );
    }

    #[test]
    fn mounts_of_the_engine_are_no_use() {
        let host = "1 0 8:1 / /";
        for lines in [
            &[host][..],
            // A service, and a container that shows the files of the host.
            &[host, "2 1 0:50 / /storage/x/merged", "3 1 0:6 / /tmp"],
            &[
                "1 0 0:7 / /",
                "2 1 8:1 / /host",
                "3 2 0:50 / /host/storage/x/merged",
            ],
            // Another container, whose paths have the same beginning.
            &[
                host,
                "2 1 0:50 / /storage/x/merged",
                "3 1 0:60 / /storage/x/merged2",
                "4 3 0:7 / /storage/x/merged2/dev",
            ],
            &[
                "1 0 0:51 / /",
                "2 1 0:6 / /dev",
                "3 1 8:1 /usr/lib64/libcuda.so.1 /usr/lib64/libcuda.so.1",
            ],
            &["what is this", "", "1 0 0:50"],
        ] {
            assert!(
                !is_used(&overlay(), lines) && !is_used(&directory(), lines),
                "{lines:?}"
            );
        }
    }

    #[test]
    fn a_container_uses_it() {
        let host = "1 0 8:1 / /";
        for lines in [
            &["1 0 0:50 / /", "2 1 0:6 / /dev"][..],
            // Before pivot_root(2).
            &[
                host,
                "2 1 0:50 / /storage/x/merged",
                "3 2 0:50 / /storage/x/merged",
            ],
            &[
                host,
                "2 1 0:50 / /storage/x/merged",
                "3 2 8:1 /usr/lib64/libcuda.so.1 /storage/x/merged/usr/lib64/libcuda.so.1",
            ],
            &[host, "2 1 0:50 / /storage/x/merged", "3 1 0:50 /usr /mnt"],
            &[
                "1 0 0:7 / /",
                "2 1 0:50 /usr/bin/nvidia-smi /usr/bin/nvidia-smi",
            ],
        ] {
            assert!(
                is_used(&overlay(), lines) && !is_used(&directory(), lines),
                "{lines:?}"
            );
        }
        for lines in [
            &["1 0 8:1 /storage/dir/y /"][..],
            &[host, "2 1 8:1 /storage/dir/y /storage/dir/y"],
            &[host, "2 1 0:6 / /storage/dir/y/dev"],
            &[
                "1 0 0:7 / /",
                "2 1 8:1 /storage /s",
                "3 2 0:6 / /s/dir/y/usr/bin/nvidia-smi",
            ],
            &["1 0 0:7 / /", "2 1 8:1 /storage/dir/y/usr /usr"],
        ] {
            assert!(
                is_used(&directory(), lines) && !is_used(&overlay(), lines),
                "{lines:?}"
            );
        }
    }

    #[test]
    fn this_process_uses_no_other_root_file_system() {
        let dir = tempfile::tempdir().unwrap();
        let place = RootfsMount::find(&Root::open(dir.path()).unwrap()).unwrap();
        assert!(!place.is_used_elsewhere(), "{place:?}");
    }
}
