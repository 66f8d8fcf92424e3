//! Detects GPUs that the engine gave to a container without the hook, from CDI or with `--device`.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use base::report::one_line;
use cdi_spec::name::is_nvidia;

use super::other_setup;
use crate::oci::{SpecView, gpu_nodes};

/// The GPUs of such a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineDevices {
    /// Paths of their nodes in the container; empty if only annotations name devices
    pub nodes: BTreeSet<PathBuf>,
    /// Names of CDI devices. Kubernetes writes them into annotations, Podman does not store them
    pub names: Vec<String>,
    /// Another sign of a CDI spec in config.json: a hook or a mount
    pub trace: Option<String>,
}

impl EngineDevices {
    /// Returns the GPUs as records have them. If annotations name CDI devices, and config.json has no nodes, only their names are
    /// known.
    pub(crate) fn devices(&self) -> Vec<records::RecordedDevice> {
        if !self.nodes.is_empty() {
            return self.nodes.iter().map(|path| node_device(path)).collect();
        }
        let mut devices = Vec::new();
        for name in self.names.iter().filter(|name| is_nvidia(name)) {
            devices.push(records::RecordedDevice {
                name: one_line(name),
                ..records::RecordedDevice::default()
            });
        }
        devices
    }
}

/// Returns the GPU of which only the path in the container is known, for the record.
pub(crate) fn node_device(path: &Path) -> records::RecordedDevice {
    records::RecordedDevice::of_node(one_line(&path.display().to_string()))
}

/// Returns the GPUs that the engine gave to the container. They are not a request, and are used only in messages.
pub(crate) fn find(spec: &SpecView) -> Option<EngineDevices> {
    let trace = other_setup::trace_of_cdi_spec(spec);
    let names = &spec.cdi_devices;
    let given = gpu_nodes(spec);
    let mut nodes = BTreeSet::new();
    // If config.json lists all nodes of the host, nodes alone prove nothing.
    if !given.all_of_host || trace.is_some() || !names.is_empty() {
        nodes.extend(given.gpus().map(|node| node.path.to_owned()));
    }
    // Devices of another vendor say nothing about GPUs.
    if nodes.is_empty() && !names.iter().any(|name| is_nvidia(name)) {
        return None;
    }
    Some(EngineDevices {
        nodes,
        names: names.clone(),
        trace,
    })
}

impl fmt::Display for EngineDevices {
    /// `the engine gave the container /dev/nvidia0 by CDI (nvidia.com/gpu=0)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<_> = self
            .nodes
            .iter()
            .map(|path| one_line(&path.display().to_string()))
            .collect();
        let names = self.names.join(", ");
        if nodes.is_empty() {
            return write!(f, "its annotations name the CDI devices {names}");
        }
        write!(f, "the engine gave the container {}", nodes.join(", "))?;
        match (names.is_empty(), &self.trace) {
            (false, _) => write!(f, " by CDI ({names})"),
            (true, Some(trace)) => write!(f, " by CDI: config.json has {trace}"),
            (true, None) => write!(f, ", and no driver files with it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::spec_view::parse;

    #[test]
    fn config_json_shows_it() {
        let node = r#"{"path":"/dev/nvidia0","type":"c","major":195,"minor":0},{"path":"/dev/nvidiactl","type":"c","major":195,"minor":255}"#;
        let library = r#"{"type":"bind","source":"/l","destination":"/usr/lib/libcuda.so.5"}"#;
        let own =
            r#""hooks":{"createRuntime":[{"path":"/h","args":["oci-nvidia-hook","rootfs"]}]}"#;
        let annotations = r#""annotations":{"cdi.k8s.io/plugin":"nvidia.com/gpu=0,nvidia.com/gpu=1","other":"x"}"#;
        let net = r#""annotations":{"cdi.k8s.io/n":"example.com/net=eth0"}"#;
        let linux = |nodes: &str| format!(r#""linux":{{"devices":[{nodes}]}}"#);
        let gives = "the engine gave the container /dev/nvidia0";
        for (parts, says) in [
            (vec![], String::new()),
            (vec![linux(node)], format!("{gives}, and no driver files with it")),
            (vec![linux(node), own.to_owned()], format!("{gives} by CDI: config.json has the hook \"/h\"")),
            (
                vec![linux(node), r#""hooks":{"createContainer":[{"path":"/usr/bin/nvidia-cdi-hook"}]}"#.to_owned()],
                format!("{gives} by CDI: config.json has the hook \"/usr/bin/nvidia-cdi-hook\""),
            ),
            (
                vec![linux(node), format!(r#""mounts":[{library}]"#)],
                format!(
                    "{gives} by CDI: config.json has the mount of \"/usr/lib/libcuda.so.5\" and \"/dev/nvidiactl\""
                ),
            ),
            (vec![linux(node), annotations.to_owned()], format!("{gives} by CDI (nvidia.com/gpu=0, nvidia.com/gpu=1)")),
            (
                vec![annotations.to_owned()],
                "its annotations name the CDI devices nvidia.com/gpu=0, nvidia.com/gpu=1".to_owned(),
            ),
            (vec![net.to_owned()], String::new()),
            (vec![own.to_owned()], String::new()),
            (
                vec![
                    own.to_owned(),
                    r#""mounts":[{"type":"bind","source":"/dev/nvidia1","destination":"/dev/nvidia1"}]"#.to_owned(),
                ],
                "the engine gave the container /dev/nvidia1 by CDI: config.json has the hook \"/h\"".to_owned(),
            ),
            (
                vec![linux(node), r#""process":{"capabilities":{"bounding":["CAP_SYS_ADMIN"]}}"#.to_owned()],
                String::new(),
            ),
        ] {
            let process = r#""process":{"env":["NVIDIA_VISIBLE_DEVICES=void"]}"#.to_owned();
            let process = (!parts.iter().any(|part| part.contains("process"))).then_some(process);
            let parts: Vec<_> = parts.into_iter().chain(process).collect();
            let text = format!(r#"{{"root":{{"path":"/r"}},{}}}"#, parts.join(","));
            let spec = parse(text.as_bytes(), Path::new("/b")).unwrap();
            assert_eq!(find(&spec).map(|given| given.to_string()).unwrap_or_default(), says, "{text}");
        }
    }
}
