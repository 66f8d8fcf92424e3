//! `/proc/self/mountinfo`, an empty line, and `/proc/<pid>/cgroup`: which cgroup filters devices.

use std::path::{Component, Path};

use oci_nvidia_hook::testing::cgroup::{DeviceCgroup, hierarchies, locate};

use super::{check_error, text};

/// Locates the device cgroup.
pub fn run(data: &[u8]) {
    let text = text(data);
    let (mountinfo, cgroup) = text.split_once("\n\n").unwrap_or((&text, ""));
    let located = match locate(&hierarchies(mountinfo.as_bytes()), cgroup) {
        Ok(located) => located,
        Err(error) => return check_error(&error),
    };
    match &located {
        DeviceCgroup::None => {}
        DeviceCgroup::V1(path) => check_below(mountinfo, cgroup, path.as_path()),
        DeviceCgroup::V2 { mount, path } => {
            assert!(path.as_path().starts_with(mount.as_path()), "{located:?}");
            check_below(mountinfo, cgroup, path.as_path());
        }
    }
    let unrelated = format!("{mountinfo}\nthis is no mount\n");
    assert_eq!(
        locate(&hierarchies(unrelated.as_bytes()), cgroup).expect("a line that means nothing"),
        located
    );
}

/// The kernel writes mount points without `..`; the cgroup is then always below a mount.
fn check_below(mountinfo: &str, cgroup: &str, path: &Path) {
    assert!(mountinfo.contains(" - cgroup"), "{path:?} is no cgroup");
    assert!(cgroup.contains(":/"), "{path:?} is nobody's");
    let climbs = path.components().any(|part| part == Component::ParentDir);
    // ".." can be written in octal
    assert!(
        !climbs || mountinfo.contains("..") || mountinfo.contains("\\0"),
        "{path:?} climbs"
    );
}
