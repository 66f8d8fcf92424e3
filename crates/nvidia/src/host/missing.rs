//! Which device nodes are missing that the host could have: the hook creates them before it takes the inventory again.

use super::Host;
use crate::capability::Capability;
use crate::driver::nodes::NodeState;
use crate::edits::{Wanted, decide};
use crate::inventory::cap_files;

impl Host {
    /// Whether a node is missing that is needed for what is wanted. Without a GPU none is needed.
    #[must_use]
    pub fn lacks_nodes(&self, wanted: &Wanted) -> bool {
        if !wanted.gpus {
            return false;
        }
        let of_capability = [
            ("nvidia-uvm", [Capability::Compute, Capability::Video]),
            ("nvidia-modeset", [Capability::Graphics, Capability::Display]),
        ];
        // NVML does not count a GPU without its node, so the indices of the others are wrong, too.
        self.inventory.failed.iter().any(|gpu| gpu.node_missing)
            || of_capability
                .iter()
                .any(|(name, capabilities)| wanted.capabilities.any(capabilities) && self.lacks(name))
            || wanted.imex_channels.iter().any(|channel| self.lacks(&decide::imex_node_name(*channel)))
            || self.lacks_mig_nodes(wanted)
    }

    fn lacks(&self, name: &str) -> bool {
        NodeState::inspect(&self.roots.dev, name) == NodeState::Missing
    }

    /// NVML lists only the MIG devices whose capability nodes exist. The kernel module has a file for each of them in any case.
    fn lacks_mig_nodes(&self, wanted: &Wanted) -> bool {
        let concerned =
            wanted.mig_config || wanted.mig_monitor || self.inventory.gpus.iter().any(|gpu| gpu.mig_enabled);
        concerned
            && self.mig_minors_text().is_some()
            && cap_files::existing(&self.roots.proc).iter().any(|cap| cap.is_missing_below(&self.roots.dev))
    }
}
