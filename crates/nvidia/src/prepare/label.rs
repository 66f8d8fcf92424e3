//! The SELinux label of the driver's device nodes. The kernel gives a new node the label of `/dev`; policies have another one
//! for it, by its path, which udev gives to nodes that the kernel makes, and nobody to others.

use std::path::Path;

use rustix::fs::XattrFlags;

const ATTRIBUTE: &str = "security.selinux";
/// What `/dev/nvidia.*` has in the policies of SUSE, Fedora and Debian; their booleans for containers go by it.
const TYPE: &str = "xserver_misc_device_t";

/// Gives a new node its label, where there are labels. A policy that does not know it, or does not let us, keeps the old one.
pub(super) fn give(path: &Path) {
    let mut buffer = [0; 256];
    let Ok(length) = rustix::fs::lgetxattr(path, ATTRIBUTE, &mut buffer) else { return };
    let old = buffer.get(..length).and_then(|old| std::str::from_utf8(old).ok());
    if let Some(label) = old.and_then(of_node) {
        rustix::fs::lsetxattr(path, ATTRIBUTE, label.as_bytes(), XattrFlags::empty()).ok();
    }
}

/// Of a node with this one; `None` if somebody has given it a label already. Of `user:role:type:level` the type changes.
fn of_node(label: &str) -> Option<String> {
    let (before, rest) = label.split_once(":device_t")?;
    let is_type = before.matches(':').count() == 1 && matches!(rest.as_bytes().first(), None | Some(b':' | 0));
    is_type.then(|| format!("{before}:{TYPE}{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directorys_type_becomes_the_nodes() {
        for (old, new) in [
            ("system_u:object_r:device_t:s0\0", Some("system_u:object_r:xserver_misc_device_t:s0\0")),
            ("unconfined_u:object_r:device_t:s0:c1,c2", Some("unconfined_u:object_r:xserver_misc_device_t:s0:c1,c2")),
            ("user_u:object_r:device_t", Some("user_u:object_r:xserver_misc_device_t")),
            ("system_u:object_r:xserver_misc_device_t:s0\0", None),
            ("system_u:object_r:device_type:s0", None),
            ("a:b:c:device_t", None),
            ("", None),
        ] {
            assert_eq!(of_node(old).as_deref(), new, "{old}");
        }
    }
}
