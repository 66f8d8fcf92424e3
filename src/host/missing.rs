//! Which device nodes a request needs that the host could have and lacks: what the hook makes before it looks again.

use super::{Host, imex_channel};
use crate::config::Config;
use crate::driver::cap_files;
use crate::driver::nodes::{self, IMEX_CHANNELS};
use crate::request::{Capability, GpuRequest, VisibleDevices};

impl Host {
    /// Whether a node is missing that the request needs. Without a GPU nothing is.
    #[must_use]
    pub fn lacks_nodes(&self, request: &GpuRequest) -> bool {
        if request.devices == VisibleDevices::None {
            return false;
        }
        let lacks = |name: &str| matches!(nodes::optional(&self.dev, name), Ok(None));
        let of_capability = [
            ("nvidia-uvm", [Capability::Compute, Capability::Video]),
            ("nvidia-modeset", [Capability::Graphics, Capability::Display]),
        ];
        // Without the node of a GPU, NVML does not count it: the indices of the others are wrong, too.
        self.inventory.failed.iter().any(|gpu| gpu.node_missing)
            || of_capability.iter().any(|(name, capabilities)| request.capabilities.any(capabilities) && lacks(name))
            || channels(request).iter().any(|channel| lacks(&format!("{IMEX_CHANNELS}/channel{channel}")))
            || self.lacks_mig_nodes(request)
    }

    /// NVML lists the MIG devices whose capability nodes exist. The kernel module has a file for each of them in any case.
    fn lacks_mig_nodes(&self, request: &GpuRequest) -> bool {
        let concerned = request.mig_config.is_some()
            || request.mig_monitor.is_some()
            || self.inventory.gpus.iter().any(|gpu| gpu.mig_enabled);
        concerned
            && self.mig_minors().is_some()
            && cap_files::existing(&self.proc).iter().any(|cap| cap.is_missing_below(&self.dev))
    }
}

/// The numbers of the IMEX channels that are asked for; what is no number is reported where the channel is given.
fn channels(request: &GpuRequest) -> Vec<u32> {
    request.imex_channels.iter().filter_map(|channel| imex_channel(channel).ok()).collect()
}

/// Those that may be made for a container.
#[must_use]
pub fn channels_to_make(request: &GpuRequest, config: &Config) -> Vec<u32> {
    if config.make_imex_channels { channels(request) } else { Vec::new() }
}
