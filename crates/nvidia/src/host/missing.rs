//! Which device nodes a request needs that the host could have and lacks: what the hook makes before it looks again.

use super::Host;
use crate::capability::Capability;
use crate::driver::nodes::{self, IMEX_CHANNELS};
use crate::edits::Wanted;
use crate::inventory::cap_files;

impl Host {
    /// Whether a node is missing that the request needs. Without a GPU nothing is.
    #[must_use]
    pub fn lacks_nodes(&self, wanted: &Wanted) -> bool {
        if !wanted.gpus {
            return false;
        }
        let lacks = |name: &str| matches!(nodes::optional(&self.dev, name), Ok(None));
        let of_capability = [
            ("nvidia-uvm", [Capability::Compute, Capability::Video]),
            ("nvidia-modeset", [Capability::Graphics, Capability::Display]),
        ];
        // Without the node of a GPU, NVML does not count it: the indices of the others are wrong, too.
        self.inventory.failed.iter().any(|gpu| gpu.node_missing)
            || of_capability.iter().any(|(name, capabilities)| wanted.capabilities.any(capabilities) && lacks(name))
            || wanted.imex_channels.iter().any(|channel| lacks(&format!("{IMEX_CHANNELS}/channel{channel}")))
            || self.lacks_mig_nodes(wanted)
    }

    /// NVML lists the MIG devices whose capability nodes exist. The kernel module has a file for each of them in any case.
    fn lacks_mig_nodes(&self, wanted: &Wanted) -> bool {
        let concerned =
            wanted.mig_config || wanted.mig_monitor || self.inventory.gpus.iter().any(|gpu| gpu.mig_enabled);
        concerned
            && self.mig_minors().is_some()
            && cap_files::existing(&self.proc).iter().any(|cap| cap.is_missing_below(&self.dev))
    }
}
