//! Sets the SELinux label of the driver's device nodes. A new node gets the default label of `/dev`. Policies define another label for its
//! path, but udev only sets it on nodes that the kernel creates.

use std::path::Path;

use rustix::fs::XattrFlags;

const ATTRIBUTE: &str = "security.selinux";
/// The type of `/dev/nvidia.*` in the policies of SUSE, Fedora and Debian, to which their booleans for containers apply.
const TYPE: &str = "xserver_misc_device_t";

/// Sets the label of a new node if SELinux is enabled. If the policy does not define the type or denies the change, the label stays.
pub(super) fn give(path: &Path) {
    let mut buffer = [0; 256];
    let Ok(length) = rustix::fs::lgetxattr(path, ATTRIBUTE, &mut buffer) else {
        return;
    };
    let old = buffer
        .get(..length)
        .and_then(|old| std::str::from_utf8(old).ok());
    if let Some(label) = old.and_then(node_label) {
        rustix::fs::lsetxattr(path, ATTRIBUTE, label.as_bytes(), XattrFlags::empty()).ok();
    }
}

/// Returns the label for a node with this default label: the type in `user:role:type:level` is replaced. Returns `None` if the node has
/// another label already.
fn node_label(label: &str) -> Option<String> {
    let (before, rest) = label.split_once(":device_t")?;
    let is_type = before.matches(':').count() == 1
        && matches!(rest.as_bytes().first(), None | Some(b':' | 0));
    is_type.then(|| format!("{before}:{TYPE}{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directorys_type_becomes_the_nodes() {
        for (old, new) in [
            (
                "system_u:object_r:device_t:s0\0",
                Some("system_u:object_r:xserver_misc_device_t:s0\0"),
            ),
            (
                "unconfined_u:object_r:device_t:s0:c1,c2",
                Some("unconfined_u:object_r:xserver_misc_device_t:s0:c1,c2"),
            ),
            (
                "user_u:object_r:device_t",
                Some("user_u:object_r:xserver_misc_device_t"),
            ),
            ("system_u:object_r:xserver_misc_device_t:s0\0", None),
            ("system_u:object_r:device_type:s0", None),
            ("a:b:c:device_t", None),
            ("", None),
        ] {
            assert_eq!(node_label(old).as_deref(), new, "{old}");
        }
    }
}
