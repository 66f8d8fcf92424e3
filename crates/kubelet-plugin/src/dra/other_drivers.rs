//! Searches for other programs that have the GPUs of this node: another driver for claims of the name, or a device plugin. Two of them would
//! give the same GPU to two pods.

use std::collections::BTreeSet;
use std::path::Path;

use base::report::Finding;
use findings::catalog;

use super::devices::ClaimDevice;
use crate::kubelet::other_plugins::{device_plugins, driver_for_claims, resource_with_gpus};
use crate::kubelet::socket::{self, KubeletDirs, SocketId};

/// Returns what else has the GPUs. `ours` are our sockets. Device plugins are found by the names of their sockets and, because those are
/// free, by the resources that the kubelet can assign.
pub(super) async fn conflict(
    root: &Path,
    driver: &str,
    ours: &[SocketId],
    devices: &[ClaimDevice],
) -> Option<Finding> {
    let uuids: BTreeSet<&str> = devices
        .iter()
        .flat_map(|device| [device.uuid.as_str(), device.gpu.as_str()])
        .collect();
    let dirs = KubeletDirs::of(root);
    let what =
        if let Some(path) = driver_for_claims(&socket::plugin_registry(root), driver, ours).await {
            format!("another driver {driver:?} answers at {path:?}")
        } else if let Some(socket) = device_plugins(dirs.plugin_dir()).await.first() {
            format!("a device plugin answers at {socket:?} in the kubelet's directory")
        } else {
            let resource = resource_with_gpus(&dirs.pod_resources, &uuids).await?;
            format!("a device plugin has registered the resource {resource:?}")
        };
    Some(Finding::new(
        &catalog::OTHER_DRIVER,
        format!("cannot register the driver {driver:?}: {what}"),
        "delete the DaemonSet of the other driver, or stop `oci-nvidia-kubelet-plugin.service`",
    ))
}
