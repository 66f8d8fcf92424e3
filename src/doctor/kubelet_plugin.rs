//! Checks the device plugin for Kubernetes.

use findings::catalog;

use super::{Check, Facts};
use engines::kubelet_plugin::Idle;

pub(super) fn check(facts: &Facts) -> Check {
    let Some(plugin) = &facts.kubelet_plugin else {
        return Check::skipped("the device plugin for Kubernetes is not installed");
    };
    let Some(idle) = plugin.idle() else {
        let names = plugin.sockets.iter().filter_map(|path| path.file_name()).map(|name| name.display().to_string());
        return Check::ok(format!("the device plugin serves {}", names.collect::<Vec<_>>().join(", ")));
    };
    match idle {
        Idle::Hidden => Check::skipped(idle.to_string()),
        Idle::NoKubelet => Check::skipped(format!("the device plugin is installed, and {idle}")),
        Idle::Other(_) => Check::of(&catalog::OTHER_PLUGIN, format!("{idle}, and ours does not run"), idle.fix()),
        Idle::NotRunning => {
            Check::of(&catalog::PLUGIN_NOT_RUNNING, format!("the device plugin is installed, but {idle}"), idle.fix())
        }
    }
}
