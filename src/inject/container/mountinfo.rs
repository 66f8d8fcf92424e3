//! Questions about a mount table.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use base::mountinfo::{escaped, mounts, unescaped};

/// Returns where something is mounted below a directory, not on it: paths below that directory, each once.
pub(in crate::inject) fn points_below(table: &[u8], dir: &Path) -> BTreeSet<PathBuf> {
    let mut prefix = escaped(dir);
    prefix.push(b'/');
    mounts(table)
        .filter_map(|mount| mount.point.strip_prefix(&*prefix))
        .map(unescaped)
        .collect()
}

/// Reports whether a file system is mounted anywhere.
pub(in crate::inject) fn has_device(table: &[u8], device: u64) -> bool {
    mounts(table).any(|mount| mount.device == device)
}

/// Reports whether a file system is mounted at a place that is neither the directory `dir` nor below it.
pub(in crate::inject) fn has_device_outside(table: &[u8], device: u64, dir: &Path) -> bool {
    let dir = escaped(dir);
    let is_outside = |point: &[u8]| {
        point
            .strip_prefix(&*dir)
            .is_none_or(|rest| !matches!(rest.first(), None | Some(b'/')))
    };
    mounts(table).any(|mount| mount.device == device && is_outside(mount.point))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"21 1 8:1 / / rw shared:1 - ext4 /dev/a rw\n\
        22 21 0:5 / /dev rw,nosuid master:2 - devtmpfs x rw\n\
        23 21 0:6 / /a\\040b/c rw,nosuid shared:4 master:1 - tmpfs shared:9 rw\n\
        24 21 0:6 / /x rw - tmpfs shared:9 rw\n";

    #[test]
    fn mounts_below() {
        let below = |dir| {
            points_below(TEXT, Path::new(dir))
                .into_iter()
                .collect::<Vec<_>>()
        };
        for dir in ["/a b/c", "/a", "/de", "/dev"] {
            assert!(below(dir).is_empty(), "{dir}");
        }
        assert_eq!(below("/a b"), [Path::new("c")]);
        let twice = b"1 0 0:7 / /m rw - a b c\n2 1 0:8 / /m/a\\040b rw - a b c\n3 2 0:8 / /m/a\\040b rw - a b c\n";
        assert_eq!(
            points_below(twice, Path::new("/m"))
                .into_iter()
                .collect::<Vec<_>>(),
            [Path::new("a b")]
        );
    }

    #[test]
    fn file_systems() {
        let outside = |table, dir| -> Vec<u32> {
            (5..10)
                .filter(|minor| {
                    has_device_outside(table, rustix::fs::makedev(0, *minor), Path::new(dir))
                })
                .collect()
        };
        for (dir, minors) in [
            ("/dev", &[6][..]),
            ("/a b", &[5, 6]),
            ("/de", &[5, 6]),
            ("/x", &[5, 6]),
        ] {
            assert_eq!(outside(TEXT, dir), minors, "{dir}");
            assert!(has_device_outside(
                TEXT,
                rustix::fs::makedev(8, 1),
                Path::new(dir)
            ));
        }
        let twice = b"1 0 0:7 / /m/rootfs rw - overlay o rw\n2 1 0:8 / /m/rootfs/dev rw - tmpfs t rw\n3 0 0:9 / /m rw - a b c\n";
        assert_eq!(outside(twice, "/m/rootfs"), [9]);
        assert!(
            has_device(TEXT, rustix::fs::makedev(0, 5))
                && !has_device(TEXT, rustix::fs::makedev(0, 7))
        );
    }
}
