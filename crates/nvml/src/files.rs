//! Lists the files that NVML opens, for the process that calls it.
//!
//! The library opens the device nodes for reading and writing, reads `/proc` and `/sys`, and reads the files of the dynamic loader. It
//! also tries to create missing nodes and to start nvidia-modprobe, and continues if it cannot. Of driver 535, all of this is known: the
//! functions and the paths that the library refers to. Nothing that this program asks needs the sockets of nvidia-persistenced and of the
//! fabric manager, to which the library connects only to get or set the persistence mode, and to change the MIG mode.
//!
//! A permission belongs to a file and not to its name. A process that runs for a long time must therefore be replaced when nodes are
//! created, see [`nvidia_host::host::HostState`]. A directory's permission covers nodes that are created in it later.

use std::path::{Path, PathBuf};

use rustix::fs::{FileType, OFlags};

use base::sys::confine::{Access, Files};
use base::tree::Tree;
use nvidia_host::driver::wsl;

/// Devices of the kernel that programs and the C library use.
const DEVICES: [&str; 4] = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"];

/// What the library and the dynamic loader read, if the process may own other files. The first ones are the usual places of libraries.
const READ: [&str; 15] = [
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/gnu/store",
    "/etc/ld.so.cache",
    "/etc/nvidia",
    "/proc",
    "/sys/bus",
    "/sys/class",
    "/sys/devices",
    "/sys/firmware/dmi",
    "/sys/kernel/mm",
    "/sys/module",
];

/// Returns the files for a process in the directory `root`. `watched` are other directories whose `/dev`, `/proc` and `/sys` the process
/// reads. If the process may own files, reading is limited too: root's files include disks and keys.
pub(crate) fn of_nvml(root: &Tree, library: &Path, watched: &[Tree], may_own_files: bool) -> Files {
    let mut files = Files {
        allowed: Vec::new(),
        limits_reading: may_own_files,
    };
    let mut allow = |tree: &Tree, path: &Path, access| {
        // A missing file needs no permission.
        if let Ok(place) = tree.as_root().open_at(path, OFlags::PATH) {
            files.allowed.push((place, access));
        }
    };
    for path in nodes(root) {
        allow(root, &path, Access::Use);
    }
    for path in DEVICES {
        allow(root, Path::new(path), Access::Use);
    }
    if may_own_files {
        let dir = library.parent().into_iter();
        for path in dir.chain(READ.map(Path::new)) {
            allow(root, path, Access::Read);
        }
        allow(root, Path::new("/dev"), Access::List);
        for tree in watched {
            for path in READ.map(Path::new) {
                allow(tree, path, Access::Read);
            }
            allow(tree, Path::new("/dev"), Access::List);
        }
    }
    files
}

/// Returns the driver's nodes in `/dev`, and the directories of its other nodes. A node may be a link to a place outside of `/dev`.
fn nodes(root: &Tree) -> Vec<PathBuf> {
    let mut nodes = Vec::new();
    for name in root.names(Path::new("/dev")) {
        let path = Path::new("/dev").join(&name);
        if (name.as_encoded_bytes().starts_with(b"nvidia") || name == wsl::NODE)
            && is_node(root, &path)
        {
            nodes.push(path);
        }
    }
    nodes
}

fn is_node(root: &Tree, path: &Path) -> bool {
    match root.locate(path) {
        Ok(found) if found.kind == FileType::Directory => found.path == path,
        found => found.is_ok_and(|found| found.kind == FileType::CharacterDevice),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::fs::symlink;

    use base::paths::HostPath;
    use base::sys::in_root::real_path;

    use super::*;

    #[test]
    fn a_process_that_may_own_files_reads_only_what_it_needs() {
        let dir = tempfile::tempdir().unwrap();
        for path in [
            "dev/nvidia-caps",
            "opt/nvidia/lib",
            "usr/lib",
            "proc",
            "sys/module",
            "etc/nvidia",
            "root/.ssh",
        ] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        fs::write(dir.path().join("dev/nvidia.log"), "").unwrap();
        symlink("/root", dir.path().join("dev/nvidia-link")).unwrap();
        symlink("usr/lib", dir.path().join("lib64")).unwrap();
        let tree = Tree::open(&HostPath::new(dir.path())).unwrap();
        let names = |may_own_files| {
            let files = of_nvml(
                &tree,
                Path::new("/opt/nvidia/lib/libnvidia-ml.so.1"),
                &[],
                may_own_files,
            );
            assert_eq!(files.limits_reading, may_own_files);
            let name = |(place, access): &(std::os::fd::OwnedFd, Access)| {
                format!(
                    "{access:?} {}",
                    real_path(place.as_fd())
                        .unwrap()
                        .strip_prefix(dir.path())
                        .unwrap()
                        .display()
                )
            };
            files.allowed.iter().map(name).collect::<Vec<_>>()
        };
        let used = ["Use dev/nvidia-caps"];
        assert_eq!(names(false), used);
        let read = [
            "Read opt/nvidia/lib",
            "Read usr",
            "Read usr/lib",
            "Read etc/nvidia",
            "Read proc",
            "Read sys/module",
            "List dev",
        ];
        assert_eq!(names(true), [&used[..], &read[..]].concat());
    }
}
