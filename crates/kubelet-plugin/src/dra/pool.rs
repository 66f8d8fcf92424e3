//! What the node has for claims at one time.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::devices::ClaimDevice;

/// The devices of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// Whether the driver has answered or failed. Before, the slices of an earlier run stay as they are.
    pub is_ready: bool,
    /// The devices, in the order of the PCI bus
    pub devices: Arc<Vec<ClaimDevice>>,
    /// Why no container can have a device now
    pub problem: Option<String>,
    /// NVML has not answered since the plugin started, with this reason: the node may have more devices.
    pub unanswered: Option<String>,
    /// The UUIDs of the devices in the CDI spec
    pub in_spec: Arc<BTreeSet<String>>,
}
