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
    let gpus: BTreeSet<u32> = gpus.filter_map(|gpu| gpu.minor).filter(|minor| *minor <= LAST_GPU).collect();
    // The major number of MIG capabilities is dynamic, so they are identified by their directory.
    let caps = nodes.iter().filter(|node| is_cap(node.path)).filter_map(|cap| cap.minor).collect();
    (!gpus.is_empty()).then_some(Nodes { gpus, caps })
}

fn is_cap(path: &Path) -> bool {
    path.parent() == Some(Path::new(CAPS))
        && path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"nvidia-cap"))
}
