//! The directories of a kubelet.

use std::path::{Path, PathBuf};

/// The directory of the device plugins' sockets, which the option `--root-dir` of the kubelet does not move
/// (`DevicePluginPath` in k8s.io/kubelet).
pub const PLUGIN_DIR: &str = "/var/lib/kubelet/device-plugins";

/// Returns the directories in which a kubelet with this root directory (`--root-dir`) can have the sockets of device plugins, at least one.
/// Its socket shows which one it is.
#[must_use]
pub fn plugin_dirs(root: &Path) -> Vec<PathBuf> {
    let mut dirs = Vec::new();
    let below_root = root.join("device-plugins");
    if below_root != Path::new(PLUGIN_DIR) {
        dirs.push(below_root);
    }
    dirs.push(PLUGIN_DIR.into());
    dirs
}
