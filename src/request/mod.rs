//! What the container asks for: the variables of NVIDIA's image convention, read from config.json.
//!
//! <https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html>

pub mod capabilities;
pub mod devices;

use anyhow::Result;

use crate::config::Config;
use crate::oci::SpecView;
pub use capabilities::{Capabilities, Capability};
pub use devices::{DeviceId, VisibleDevices};

/// Which GPUs.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Which parts of the driver.
pub const DRIVER_CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// A container that wants the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuRequest {
    /// Which GPUs; may be none at all: driver files without a GPU.
    pub devices: VisibleDevices,
    /// Which parts of the driver.
    pub capabilities: Capabilities,
}

/// Whether the container asks for anything: decided from config.json alone, so that a container without GPUs costs
/// nothing, and a mistake in config.toml cannot stop it.
#[must_use]
pub fn visible_devices(spec: &SpecView) -> Option<VisibleDevices> {
    spec.env.get(VISIBLE_DEVICES).and_then(|value| devices::parse(value))
}

/// Completes the request under the administrator's rules. `Ok(Err(reason))`: it asks, but may not; then
/// nothing is injected and the container starts, as with NVIDIA's stack.
///
/// # Errors
/// If it asks for something that does not exist or is not supported here.
pub fn from_spec(devices: VisibleDevices, spec: &SpecView, config: &Config) -> Result<Result<GpuRequest, String>> {
    if !spec.privileged && !config.accept_envvar_when_unprivileged {
        return Ok(Err(format!(
            "{VISIBLE_DEVICES} is ignored: the container is not privileged and \
             accept-nvidia-visible-devices-envvar-when-unprivileged is false"
        )));
    }
    let asked = spec.env.get(DRIVER_CAPABILITIES).map(String::as_str);
    let capabilities = capabilities::parse(asked, config.supported_driver_capabilities)?;
    Ok(Ok(GpuRequest { devices, capabilities }))
}
