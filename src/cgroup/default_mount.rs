//! Queries the cgroup mount at its usual path with statmount(2), instead of reading the whole mount table.

use std::path::{Path, PathBuf};

use base::sys::mount::statmount::{MountFacts, facts_at};

use super::Hierarchy;

/// `CGROUP_SUPER_MAGIC`
const V1: u64 = 0x0027_e0eb;
/// `CGROUP2_SUPER_MAGIC`
const V2: u64 = 0x6367_7270;
const UNIFIED: &str = "/sys/fs/cgroup";
const DEVICES: &str = "/sys/fs/cgroup/devices";

/// Returns the mounted hierarchy; `None` if it is not at the usual path, or the kernel lacks statmount(2). Like the runtimes, takes
/// `/sys/fs/cgroup` if it is cgroup2, and otherwise the `devices` hierarchy below it.
pub(super) fn hierarchy() -> Option<Hierarchy> {
    let above = facts_at(Path::new(UNIFIED))?;
    if above.magic != V1 {
        return of(UNIFIED, &above).or_else(|| of(DEVICES, &facts_at(Path::new(DEVICES))?));
    }
    // If /sys/fs/cgroup is a hierarchy of cgroup v1, "devices" in it is a cgroup, not a mount.
    None
}

fn of(point: &str, facts: &MountFacts) -> Option<Hierarchy> {
    let is_v2 = match (point, facts.magic) {
        (UNIFIED, V2) => true,
        (DEVICES, V1) => false,
        _ => return None,
    };
    // statmount(2) reports no path that is not UTF-8. The whole table has it.
    let root = PathBuf::from(&facts.root);
    if !root.is_absolute() {
        return None;
    }
    Some(Hierarchy {
        is_v2,
        root,
        point: point.into(),
        is_read_only: facts.is_read_only,
    })
}

#[cfg(test)]
mod tests {
    use super::super::locate::hierarchies;
    use super::super::{DeviceCgroup, locate};
    use super::*;
    use base::paths::HostPath;

    #[test]
    fn the_usual_places() {
        let facts = |magic, root: &str| MountFacts {
            is_shared: false,
            is_read_only: false,
            magic,
            root: root.to_owned(),
            parent: 0,
        };
        let cgroup = "5:devices:/a/b\n0::/a/c\n";
        let v2 = of(UNIFIED, &facts(V2, "/a")).unwrap();
        let path = |path: &str| HostPath::new(path);
        assert_eq!(
            locate(&[v2], cgroup).unwrap(),
            DeviceCgroup::V2 {
                mount: path(UNIFIED),
                path: path("/sys/fs/cgroup/c")
            }
        );
        let v1 = of(DEVICES, &facts(V1, "/")).unwrap();
        assert_eq!(
            locate(&[v1], cgroup).unwrap(),
            DeviceCgroup::V1(path("/sys/fs/cgroup/devices/a/b"))
        );
        let others = [
            (UNIFIED, facts(V1, "/")),
            (DEVICES, facts(V2, "/")),
            (UNIFIED, facts(V2, "")),
        ];
        for (point, facts) in others {
            assert_eq!(of(point, &facts), None, "{facts:?}");
        }
    }

    /// Compares the hierarchy with this machine's mount table.
    #[test]
    fn it_leads_to_the_same_cgroup() {
        let cgroup = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let Some(hierarchy) = hierarchy() else {
            let is_usual =
                |line: &str| line.contains(" /sys/fs/cgroup ") && line.contains(" - cgroup2 ");
            assert!(
                facts_at(Path::new("/")).is_none() || !table.lines().any(is_usual),
                "the kernel has statmount(2)"
            );
            return;
        };
        let of_table = hierarchies(table.as_bytes());
        assert_eq!(
            locate(&[hierarchy], &cgroup).unwrap(),
            locate(&of_table, &cgroup).unwrap()
        );
    }
}
