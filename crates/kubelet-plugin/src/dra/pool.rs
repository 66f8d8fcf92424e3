//! What the node has for claims at one time.

use std::sync::Arc;

use super::devices::Device;

/// The devices of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// Whether the driver has answered, or had the time to. Before, the slices of an earlier run stay as they are.
    pub is_ready: bool,
    /// The devices, in the order of the PCI bus
    pub devices: Arc<Vec<Device>>,
    /// Why no container can have a device now
    pub problem: Option<String>,
}
