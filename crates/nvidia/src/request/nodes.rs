//! Requests by device node: config.json lists nodes of GPUs in `linux.devices`, because of a device plugin or `--device`. A pod
//! cannot add them itself without `hostPath` or privilege. The runtime creates the nodes, and the hook adds the driver files
//! for these GPUs.

use std::path::Path;

use crate::device_id::Nodes;
use crate::driver::node_name::NodeName;
use crate::driver::nodes::NVIDIA_MAJOR;

/// The origin of such a request, for messages.
pub const ORIGIN: &str = "a device node in config.json";

/// A character device node of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node<'a> {
    /// Its path in the container
    pub path: &'a Path,
    /// The major number, if it is valid
    pub major: Option<u32>,
    /// The minor number, if it is valid
    pub minor: Option<u32>,
}

impl Node<'_> {
    /// Returns which of the driver's nodes it is. The kernel decides by the number, so the path of a node with the driver's major number
    /// does not matter. The major number of MIG capabilities and of `/dev/dxg` is dynamic: their paths identify them.
    #[must_use]
    pub fn name(&self) -> Option<NodeName> {
        if self.major == Some(NVIDIA_MAJOR) {
            return NodeName::of_minor(self.minor?);
        }
        match NodeName::of_path(self.path)? {
            NodeName::Cap(_) => Some(NodeName::Cap(self.minor?)),
            NodeName::Dxg => Some(NodeName::Dxg),
            NodeName::Gpu(_) | NodeName::Control => None,
        }
    }
}

/// Returns the GPU nodes among the nodes of a container; `None` if it has no node of a single GPU.
#[must_use]
pub fn granted(nodes: &[Node<'_>]) -> Option<Nodes> {
    let mut granted = Nodes::default();
    for node in nodes {
        match node.name() {
            Some(NodeName::Gpu(minor)) => granted.gpus.insert(minor),
            Some(NodeName::Cap(minor)) => granted.caps.insert(minor),
            _ => continue,
        };
    }
    (!granted.gpus.is_empty()).then_some(granted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::node_name::LAST_GPU;

    fn node(path: &str, major: u32, minor: u32) -> Node<'_> {
        Node {
            path: Path::new(path),
            major: Some(major),
            minor: Some(minor),
        }
    }

    #[test]
    fn nodes_of_gpus_count() {
        let ctl = node("/dev/nvidiactl", 195, 255);
        let cap = node("/dev/nvidia-caps/nvidia-cap12", 510, 12);
        let others = [
            ctl,
            node("/dev/nvidia-modeset", 195, 254),
            node("/dev/nvidia-uvm", 511, 0),
            cap,
        ];
        assert_eq!(granted(&others), None);
        let (last, next) = (
            node("/dev/nvidia247", 195, LAST_GPU),
            node("/dev/nvidia248", 195, LAST_GPU + 1),
        );
        let of_gpus = [
            ctl,
            cap,
            // The path in the container may have any name.
            node("/dev/x", 195, 3),
            node("/dev/nvidia0", 195, 0),
            last,
            next,
            node("/dev/nvidia-caps-imex-channels/channel0", 509, 0),
            node("/dev/nvidia-caps/other1", 509, 1),
            node("/dev/nvidia-cap2", 509, 2),
            Node {
                minor: None,
                ..node("/dev/nvidia1", 195, 1)
            },
            Node {
                major: None,
                ..node("/dev/nvidia2", 195, 2)
            },
        ];
        let expected = [
            "/dev/nvidia0",
            "/dev/nvidia3",
            "/dev/nvidia247",
            "/dev/nvidia-caps/nvidia-cap12",
        ];
        assert_eq!(granted(&of_gpus).unwrap().names(), expected);
    }
}
