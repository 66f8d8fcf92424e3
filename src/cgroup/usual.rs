//! Queries the cgroup mount at its usual path with statmount(2), instead of reading the whole mount table.

use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};

use base::sys::mount::statmount::{MountFacts, facts};

/// `CGROUP_SUPER_MAGIC`
const V1: u64 = 0x0027_e0eb;
/// `CGROUP2_SUPER_MAGIC`
const V2: u64 = 0x6367_7270;
const UNIFIED: &str = "/sys/fs/cgroup";
const DEVICES: &str = "/sys/fs/cgroup/devices";

/// Returns the mount with the device cgroups as a line of /proc/self/mountinfo; `None` if it is not at the usual path, or the
/// kernel lacks statmount(2).
pub(super) fn line() -> Option<String> {
    let above = facts_of(UNIFIED)?;
    // If /sys/fs/cgroup is a cgroup v1 hierarchy, "devices" in it is a cgroup, not a mount.
    line_of(UNIFIED, &above).or_else(|| line_of(DEVICES, &facts_of(DEVICES).filter(|_| above.magic != V1)?))
}

fn facts_of(path: &str) -> Option<MountFacts> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(CWD, Path::new(path), flags, Mode::empty()).ok()?;
    facts(dir)
}

/// Formats the line. Like the runtimes, takes `/sys/fs/cgroup` if it is cgroup2, and otherwise the `devices` hierarchy below
/// it.
fn line_of(point: &str, facts: &MountFacts) -> Option<String> {
    let (kind, options) = match (point, facts.magic) {
        (UNIFIED, V2) => ("cgroup2", "rw"),
        (DEVICES, V1) => ("cgroup", "rw,devices"),
        _ => return None,
    };
    // mountinfo escapes other bytes. Such a path is left to the parser of the whole table.
    let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'\\';
    if !facts.root.starts_with('/') || !facts.root.bytes().all(is_plain) {
        return None;
    }
    let access = if facts.is_read_only { "ro" } else { "rw" };
    Some(format!("2 1 0:1 {} {point} {access} - {kind} cgroup {options}\n", facts.root))
}

#[cfg(test)]
mod tests {
    use super::super::{DeviceCgroup, locate};
    use super::*;
    use base::paths::HostPath;

    #[test]
    fn the_line_is_mountinfos() {
        let of = |magic, root: &str| MountFacts {
            is_shared: false,
            is_read_only: false,
            magic,
            root: root.to_owned(),
            parent: 0,
        };
        let cgroup = "5:devices:/a/b\n0::/a/c\n";
        let v2 = line_of(UNIFIED, &of(V2, "/a")).unwrap();
        let path = |path: &str| HostPath::new(path);
        assert_eq!(
            locate(&v2, cgroup).unwrap(),
            DeviceCgroup::V2 { mount: path(UNIFIED), path: path("/sys/fs/cgroup/c") }
        );
        let v1 = line_of(DEVICES, &of(V1, "/")).unwrap();
        assert_eq!(locate(&v1, cgroup).unwrap(), DeviceCgroup::V1(path("/sys/fs/cgroup/devices/a/b")));
        let others = [(UNIFIED, of(V1, "/")), (DEVICES, of(V2, "/")), (UNIFIED, of(V2, "/a b")), (UNIFIED, of(V2, ""))];
        for (point, facts) in others {
            assert_eq!(line_of(point, &facts), None, "{facts:?}");
        }
    }

    /// Compares the line with this machine's mount table.
    #[test]
    fn it_leads_to_the_same_cgroup() {
        let cgroup = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let Some(line) = line() else {
            let is_usual = |line: &str| line.contains(" /sys/fs/cgroup ") && line.contains(" - cgroup2 ");
            assert!(facts_of("/").is_none() || !table.lines().any(is_usual), "the kernel has statmount(2)");
            return;
        };
        assert_eq!(locate(&line, &cgroup).unwrap(), locate(&table, &cgroup).unwrap());
    }
}
