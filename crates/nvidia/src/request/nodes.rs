//! Requests by device node: config.json lists nodes of GPUs in `linux.devices`, because of a device plugin or `--device`. A pod
//! cannot add them itself without `hostPath` or privilege. The runtime creates the nodes, and the hook adds the driver files
//! for these GPUs.

use std::collections::BTreeSet;
use std::path::Path;

use crate::device_id::Nodes;
use crate::driver::nodes::{CAPS, NVIDIA_MAJOR};

/// The origin of such a request, for messages.
pub const ORIGIN: &str = "a device node in config.json";
/// The largest minor number of a GPU. Larger ones are nodes of the driver itself, such as `/dev/nvidiactl`
/// (`NV_MINOR_DEVICE_NUMBER_REGULAR_MAX`).
const LAST_GPU: u32 = 247;

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

/// Returns the GPU nodes among the nodes of a container; `None` if it has no GPU node.
#[must_use]
pub fn granted(nodes: &[Node<'_>]) -> Option<Nodes> {
    let gpus = nodes.iter().filter(|node| node.major == Some(NVIDIA_MAJOR));
    let gpus: BTreeSet<u32> = gpus
        .filter_map(|gpu| gpu.minor)
        .filter(|minor| *minor <= LAST_GPU)
        .collect();
    // The major number of MIG capabilities is dynamic, so they are identified by their directory.
    let caps = nodes
        .iter()
        .filter(|node| is_cap(node.path))
        .filter_map(|cap| cap.minor)
        .collect();
    (!gpus.is_empty()).then_some(Nodes { gpus, caps })
}

fn is_cap(path: &Path) -> bool {
    path.parent() == Some(Path::new(CAPS))
        && path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"nvidia-cap"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
