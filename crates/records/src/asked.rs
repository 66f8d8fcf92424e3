//! A request as `plan` prints it and records store it.

use serde::{Deserialize, Serialize};

use nvidia_host::capability::Capability;

use nvidia_host::request::GpuRequest;

/// The parts of a request. The field names are an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RecordedRequest {
    /// Indices, UUIDs and so on; or `all`, `none`
    pub visible_devices: Vec<String>,
    /// `compute`, `utility` and so on
    pub driver_capabilities: Vec<String>,
    /// As the image wrote them
    pub requirements: Vec<String>,
    /// `NVIDIA_MIG_CONFIG_DEVICES`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_config_devices: Option<String>,
    /// `NVIDIA_MIG_MONITOR_DEVICES`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_monitor_devices: Option<String>,
    /// Numbers of channels, or `all`
    pub imex_channels: Vec<String>,
    /// `gds`, `mofed`, `gdrcopy`, `nvswitch`
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
}

impl From<&GpuRequest> for RecordedRequest {
    fn from(request: &GpuRequest) -> Self {
        Self {
            visible_devices: request.devices.names(),
            driver_capabilities: request
                .capabilities
                .iter()
                .map(Capability::name)
                .map(str::to_owned)
                .collect(),
            requirements: request
                .requirements
                .iter()
                .map(|requirement| requirement.text.clone())
                .collect(),
            mig_config_devices: request.mig_config.clone(),
            mig_monitor_devices: request.mig_monitor.clone(),
            imex_channels: request.imex_channels.clone(),
            features: request.features.names(),
        }
    }
}
