//! Checks the device plugin for Kubernetes, which is a package of its own.

use std::path::{Path, PathBuf};

use base::report::catalog;
use base::tree::Tree;

use super::{Check, Facts};
use crate::engine::runtime;

const PROGRAM: &str = "oci-nvidia-kubelet-plugin";
/// The directories of the kubelet in Kubernetes, k0s and MicroK8s.
const KUBELETS: [&str; 3] = ["/var/lib/kubelet", "/var/lib/k0s/kubelet", "/var/snap/microk8s/common/var/lib/kubelet"];

/// The kubelet and the sockets of device plugins.
#[derive(Debug)]
pub struct KubeletPlugin {
    /// Whether a kubelet has its socket in one of the directories
    pub has_kubelet: bool,
    /// The sockets of our plugin, one for each resource
    pub sockets: Vec<PathBuf>,
    /// The sockets of NVIDIA's plugin and of GKE's
    pub others: Vec<PathBuf>,
}

impl KubeletPlugin {
    /// Returns `None` if the plugin is not installed.
    pub(super) fn inspect(host: &Tree) -> Option<Self> {
        runtime::program(host, PROGRAM)?;
        let dirs = KUBELETS.map(|dir| Path::new(dir).join("device-plugins"));
        let files = dirs.iter().flat_map(|dir| host.names(dir).into_iter().map(|name| dir.join(name)));
        let (mut sockets, mut others, mut has_kubelet) = (Vec::new(), Vec::new(), false);
        for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "sock")) {
            match file.file_name().and_then(|name| name.to_str()).unwrap_or_default() {
                "kubelet.sock" => has_kubelet = true,
                name if name.starts_with("oci-nvidia-") => sockets.push(file),
                name if name.starts_with("nvidia-") || name.starts_with("nvidiaGPU-") => others.push(file),
                _ => {}
            }
        }
        Some(Self { has_kubelet, sockets, others })
    }
}

pub(super) fn check(facts: &Facts) -> Check {
    let Some(plugin) = &facts.kubelet_plugin else {
        return Check::skipped("the device plugin for Kubernetes is not installed");
    };
    if facts.user.is_some() {
        return Check::skipped("only root can see the sockets of the kubelet");
    }
    match (plugin.sockets.as_slice(), plugin.others.first()) {
        ([], _) if !plugin.has_kubelet => Check::skipped("the device plugin is installed, and no kubelet runs"),
        ([], Some(other)) => Check::of(
            &catalog::OTHER_PLUGIN,
            format!("another device plugin serves {other:?}, and ours does not run"),
            "remove one of the two plugins",
        ),
        ([], None) => Check::of(
            &catalog::PLUGIN_NOT_RUNNING,
            "the device plugin is installed, but it serves no resource to the kubelet",
            format!("run \"{PROGRAM} check\" and \"systemctl enable --now {PROGRAM}\""),
        ),
        (sockets, _) => {
            let names = sockets.iter().filter_map(|path| path.file_name()).map(|name| name.display().to_string());
            Check::ok(format!("the device plugin serves {}", names.collect::<Vec<_>>().join(", ")))
        }
    }
}
