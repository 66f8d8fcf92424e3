//! Detects missing device nodes. The hook creates them and then takes the inventory again.

use std::path::Path;

use super::{Host, Roots};
use crate::driver::DriverKind;
use crate::driver::nodes::{NodeState, imex_channel};
use crate::edits::{Wanted, decide};
use crate::inventory::cap_files;
use crate::inventory::caps::MIG_MINORS;

impl Host {
    /// Whether NVML could not open the node of a GPU, because it is missing or has the wrong owner or mode.
    #[must_use]
    pub fn has_closed_gpus(&self) -> bool {
        let mut failed = self.inventory.failed.iter();
        failed.any(|gpu| gpu.node_missing || gpu.node_shut)
    }

    /// Whether a node is missing that the request requires, or NVML could not open it. A request without GPUs requires none.
    #[must_use]
    pub fn lacks_nodes(&self, wanted: &Wanted) -> bool {
        // On WSL 2, another kernel module creates the node at boot.
        if !wanted.gpus || self.roots().kind == DriverKind::Wsl {
            return false;
        }
        // NVML does not count a GPU without its node, so the indices of the others are wrong too.
        self.has_closed_gpus()
            || decide::reported_node_names(wanted).any(|name| self.lacks(name))
            || wanted
                .imex_channels
                .iter()
                .any(|channel| self.lacks(&imex_channel(*channel)))
            || self.lacks_mig_nodes(wanted)
    }

    fn lacks(&self, name: &str) -> bool {
        let node = NodeState::inspect(&self.roots().dev, name);
        matches!(node, NodeState::Missing | NodeState::NotADevice(_))
    }

    /// Whether nodes of MIG capabilities of the examined GPUs are missing. NVML lists only MIG devices with existing nodes, but the kernel module has files for
    /// all of them.
    fn lacks_mig_nodes(&self, wanted: &Wanted) -> bool {
        let mut examined = self.inventory.gpus.iter();
        let concerned = wanted.mig_config
            || wanted.mig_monitor
            || examined.any(|gpu| gpu.mig_enabled && self.view.scope.has(gpu.minor));
        let Roots { dev, proc, .. } = self.roots();
        if !concerned || proc.locate(Path::new(MIG_MINORS)).is_err() {
            return false;
        }
        if !self.view.caps.is_empty() {
            return !self.view.missing_caps.is_empty();
        }
        let read = cap_files::existing(proc);
        read.iter().any(|file| file.node().is_missing_below(dev))
    }
}
