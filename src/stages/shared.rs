//! The MPS daemon of a container that has its GPUs from an engine: from a CDI spec, or from config.json.
//!
//! The hook entry asks for it at each start. A spec that was written earlier cannot know which GPUs are shared now, and whether the daemon is
//! ready.

use anyhow::Result;

use nvidia_host::capability::{self, Capability, DRIVER_CAPABILITIES};
use nvidia_host::config::Config;
use nvidia_host::driver::ipc::Ipc;
use nvidia_host::host::Host;
use nvidia_host::mps;

use super::limits;
use crate::oci::{SpecView, gpu_nodes};

/// Returns the directory of the daemon whose GPU the container has; `None` if no GPU of it is shared, or it does not use CUDA. The nodes of a
/// privileged container do not show which GPUs it was given, so it gets none.
///
/// # Errors
/// If the daemon is not ready, or the container has other GPUs too.
pub(super) fn daemon_of(spec: &SpecView, config: &Config) -> Result<Option<Ipc>> {
    if config.sharing.mps_gpus.is_empty()
        || !uses_cuda(spec, config)
        || limits::lists_all_nodes(spec)?
    {
        return Ok(None);
    }
    let Some(nodes) = gpu_nodes::granted(spec) else {
        return Ok(None);
    };
    let host = Host::inspect(config, &|| ())?;
    let (mut given, mut uuids) = (Vec::new(), Vec::new());
    for gpu in &host.inventory.gpus {
        if nodes.gpus.contains(&gpu.minor) {
            given.push(gpu);
            uuids.push(gpu.uuid.as_str());
        }
    }
    let daemons = host.mps_daemons_of(given);
    let daemon = mps::of_container(&daemons, &uuids)?;
    Ok(daemon.and_then(|daemon| daemon.ipc.clone()))
}

/// Whether the container uses CUDA. An engine gives it the driver's files in any case, but a container for monitoring says that it needs
/// NVML only.
fn uses_cuda(spec: &SpecView, config: &Config) -> bool {
    let value = spec.env.get(DRIVER_CAPABILITIES).map(String::as_str);
    let wanted = capability::parse(value, false, config.supported_driver_capabilities);
    wanted.map_or(true, |wanted| wanted.has(Capability::Compute))
}
