//! The kinds of the CDI specs that the kubelet plugin writes.
//!
//! "cdi generate" of the hook writes specs with the vendor `nvidia.com`, or with the vendor of its option `--vendor`. The plugin writes
//! specs with the vendors in [`VENDORS`], and only the plugin keeps them current: containers and claims store the names of their devices.

use crate::PROGRAM;
use crate::processes::PluginProcess;

/// A vendor in the kinds of the specs that the plugin writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecVendor(&'static str);

/// The devices of the device plugin and of NRI: `k8s.device-plugin.nvidia.com/gpu=GPU-…`.
pub const DEVICE_PLUGIN: SpecVendor = SpecVendor("k8s.device-plugin.nvidia.com");
/// The devices of claims: `k8s.gpu.nvidia.com/gpu=GPU-…`.
pub const CLAIMS: SpecVendor = SpecVendor("k8s.gpu.nvidia.com");

/// All vendors of the plugin.
pub const VENDORS: [SpecVendor; 2] = [DEVICE_PLUGIN, CLAIMS];

impl SpecVendor {
    /// Returns the vendor of a kind such as `k8s.gpu.nvidia.com/gpu`; `None` if the plugin does not write this kind.
    #[must_use]
    pub fn of_kind(kind: &str) -> Option<Self> {
        let (vendor, _) = kind.split_once('/')?;
        VENDORS.into_iter().find(|known| known.0 == vendor)
    }

    /// Returns the vendor as text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.0
    }

    /// Returns how the plugin with these processes writes its specs again.
    #[must_use]
    pub fn how_to_rewrite(self, processes: &[PluginProcess]) -> String {
        let for_kubelet = processes.iter().find(|process| process.for_kubelet);
        let for_engine = processes.iter().find(|process| process.for_engine);
        let writer = if self == CLAIMS {
            for_kubelet
        } else {
            for_kubelet.or(for_engine)
        };
        if writer.is_some_and(|process| process.in_pod) {
            return format!(
                "restart the pod of {PROGRAM} on this node with \"kubectl delete pod\": it writes the file"
            );
        }
        let unit = writer.map_or(PROGRAM, PluginProcess::unit);
        format!("run \"systemctl restart {unit}\", which writes the file")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vendors_of_the_plugin() {
        for (kind, expected) in [
            ("k8s.gpu.nvidia.com/gpu", Some(CLAIMS)),
            ("k8s.gpu.nvidia.com/gds", Some(CLAIMS)),
            ("k8s.device-plugin.nvidia.com/gpu", Some(DEVICE_PLUGIN)),
            ("nvidia.com/gpu", None),
            ("k8s.gpu.nvidia.com", None),
            ("x.k8s.gpu.nvidia.com/gpu", None),
        ] {
            assert_eq!(SpecVendor::of_kind(kind), expected, "{kind}");
        }
    }

    #[test]
    fn the_process_that_writes_a_spec() {
        let process = |for_kubelet, for_engine, in_pod| PluginProcess {
            for_kubelet,
            for_engine,
            in_pod,
            kubelet_dir: None,
        };
        let plugin = process(true, false, false);
        let nri = process(false, true, false);
        for (vendor, processes, part) in [
            (CLAIMS, &[][..], "restart oci-nvidia-kubelet-plugin\""),
            (
                CLAIMS,
                &[nri.clone(), plugin.clone()],
                "restart oci-nvidia-kubelet-plugin\"",
            ),
            (CLAIMS, &[process(true, true, true)], "kubectl delete pod"),
            (DEVICE_PLUGIN, &[nri], "restart oci-nvidia-nri\""),
            (
                DEVICE_PLUGIN,
                &[plugin],
                "restart oci-nvidia-kubelet-plugin\"",
            ),
        ] {
            let how = vendor.how_to_rewrite(processes);
            assert!(how.contains(part), "{how}");
        }
    }
}
