//! Searches for other programs that have the GPUs of this node: another driver for claims of the name, or a device plugin. Two of them would
//! give the same GPU to two pods.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::report::Finding;
use findings::catalog;
use tokio::time::timeout;

use super::service::KIND;
use crate::kubelet::dial::dial;
use crate::kubelet::foreign::device_plugins;
use crate::kubelet::socket::{self, SocketId};
use crate::proto::pluginregistration::{InfoRequest, registration_client::RegistrationClient};

/// How long a program has to answer. The kubelet waits as long for it.
const DEADLINE: Duration = Duration::from_secs(1);
/// How many sockets are asked at most. A node has a few.
const MAX_SOCKETS: usize = 64;

/// Returns what else has the GPUs. `ours` are our sockets.
pub(super) async fn conflict(kubelet_dir: &Path, driver: &str, ours: &[SocketId]) -> Option<Finding> {
    let what = match other_driver(&super::sockets::registry(kubelet_dir), driver, ours).await {
        Some(path) => format!("another driver {driver:?} answers at {path:?}"),
        None => {
            let plugins = device_plugins(&socket::plugin_dir(kubelet_dir)).await;
            format!("a device plugin answers at {:?} in the kubelet's directory", plugins.first()?)
        }
    };
    Some(Finding::new(
        &catalog::OTHER_DRIVER,
        format!("cannot register the driver {driver:?}: {what}"),
        "delete the DaemonSet of the other one, or stop `oci-nvidia-kubelet-plugin.service`",
    ))
}

async fn other_driver(registry: &Path, driver: &str, ours: &[SocketId]) -> Option<PathBuf> {
    let files = fs::read_dir(registry).ok()?.flatten().map(|file| file.path()).take(MAX_SOCKETS);
    for path in files {
        let Some(id) = SocketId::at(&path) else { continue };
        if !ours.contains(&id) && is_driver(&path, driver).await {
            return Some(path);
        }
    }
    None
}

async fn is_driver(path: &Path, driver: &str) -> bool {
    let ask = async {
        let mut plugin = RegistrationClient::new(dial(path).await?);
        anyhow::Ok(plugin.get_info(InfoRequest {}).await?.into_inner())
    };
    matches!(timeout(DEADLINE, ask).await, Ok(Ok(info)) if info.r#type == KIND && info.name == driver)
}
