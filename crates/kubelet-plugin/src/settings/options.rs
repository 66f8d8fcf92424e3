//! The options of `run` and `check` that replace settings of config.toml. The doc comments are the help texts.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use base::report::{catalog, failure};
use nvidia_host::config::kubelet_plugin::{KubeletPlugin, ResourceRow};

use super::compat::{Flags, truth};

/// The options that replace keys of `[kubelet-plugin]` in config.toml.
#[derive(Args, Debug, Default)]
pub struct Options {
    /// Read this configuration file [default: /etc/nvidia-container-runtime/config.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The directory of the kubelet [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    pub kubelet_dir: Option<PathBuf>,
    /// How many containers may share a device
    #[arg(long, value_name = "N")]
    replicas: Option<u32>,
    /// A resource for GPUs of a model: name=NAME,model=PATTERN[,replicas=N]. May be repeated
    #[arg(long, value_name = "ROW", value_parser = ResourceRow::parse)]
    resources: Vec<ResourceRow>,
    /// The prefix of the resources that --resources does not name
    #[arg(long, value_name = "PREFIX")]
    resource_prefix: Option<String>,
    /// How MIG devices are offered: none, single or mixed
    #[arg(long, value_name = "STRATEGY")]
    mig_strategy: Option<String>,
    /// Which replicas containers get first: distributed or packed
    #[arg(long, value_name = "ORDER")]
    allocation: Option<String>,
    /// Seconds without an error after which a repaired GPU is offered again
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=600))]
    quiet_period: Option<u64>,
    /// XIDs that are errors of an application, separated by commas
    #[arg(long, value_name = "XIDS", value_delimiter = ',')]
    ignored_xids: Option<Vec<u32>>,
    /// Seconds to wait for one call of NVML
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=600))]
    nvml_timeout: Option<u64>,
    /// How containers get their devices: envvar, volume-mounts, cdi-cri, cdi-annotations, host-path, separated by commas
    #[arg(long, value_name = "STRATEGIES", value_delimiter = ',')]
    device_list_strategy: Option<Vec<String>>,
    /// How the devices are named for the hook: uuid or index
    #[arg(long, value_name = "STRATEGY")]
    device_id_strategy: Option<String>,
    /// Whether the engine creates the device nodes, with envvar and volume-mounts: true or false
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth)]
    pass_device_specs: Option<bool>,
    /// The directory that host-path mounts at /usr/local/nvidia
    #[arg(long, value_name = "DIR")]
    host_path: Option<PathBuf>,
    /// GKE's configuration file, for host-path
    #[arg(long, value_name = "FILE")]
    gpu_config: Option<PathBuf>,
    /// The options of NVIDIA's plugin
    #[command(flatten)]
    pub others: Flags,
    /// Serve metrics at this address, such as 127.0.0.1:2112 or :2112. An empty value has no effect
    #[arg(long, value_name = "ADDRESS", overrides_with = "metrics_address")]
    metrics_address: Option<String>,
    /// Whether labels for Node Feature Discovery are written: auto, true or false
    #[arg(long, value_name = "WHEN")]
    labels: Option<String>,
    /// The directory for the file with the labels
    #[arg(long, value_name = "DIR")]
    labels_dir: Option<String>,
}

impl Options {
    /// Replaces the settings of config.toml by the given options.
    ///
    /// # Errors
    /// If an option has an invalid value.
    pub fn apply(&self, settings: &mut KubeletPlugin) -> Result<()> {
        let invalid = |name: &str, allowed: String| {
            let what = format!("--{name} has an invalid value; it must be {allowed}");
            failure(&catalog::COMMAND_LINE, what, format!("correct --{name}"))
        };
        if let Some(value) = self.replicas {
            settings.set_replicas(value).map_err(|allowed| invalid("replicas", allowed))?;
        }
        if !self.resources.is_empty() {
            settings.set_resources(self.resources.clone()).map_err(|allowed| invalid("resources", allowed))?;
        }
        if let Some(value) = &self.resource_prefix {
            settings.set_resource_prefix(value).map_err(|allowed| invalid("resource-prefix", allowed))?;
        }
        if let Some(value) = &self.mig_strategy {
            settings.set_mig_strategy(value).map_err(|allowed| invalid("mig-strategy", allowed))?;
        }
        if let Some(value) = &self.allocation {
            settings.set_allocation(value).map_err(|allowed| invalid("allocation", allowed))?;
        }
        if let Some(seconds) = self.quiet_period {
            settings.quiet_period = Duration::from_secs(seconds);
        }
        if let Some(xids) = &self.ignored_xids {
            settings.ignored_xids.clone_from(xids);
        }
        if let Some(seconds) = self.nvml_timeout {
            settings.nvml_timeout = Duration::from_secs(seconds);
        }
        if let Some(names) = &self.device_list_strategy {
            // An empty value is an empty list.
            let names: Vec<_> = names.iter().filter(|name| !name.is_empty()).collect();
            let result = settings.set_device_list_strategy(&names);
            result.map_err(|allowed| invalid("device-list-strategy", allowed))?;
        }
        if let Some(value) = &self.device_id_strategy {
            settings.set_device_id_strategy(value).map_err(|allowed| invalid("device-id-strategy", allowed))?;
        }
        if let Some(value) = self.pass_device_specs {
            settings.pass_device_specs = value;
        }
        if let Some(path) = &self.host_path {
            settings.host_path.clone_from(path);
        }
        if let Some(path) = &self.gpu_config {
            settings.gpu_config.clone_from(path);
        }
        // The unit passes a variable, which may be empty.
        if let Some(value) = self.metrics_address.as_deref().filter(|value| !value.is_empty()) {
            settings.set_metrics_address(value).map_err(|allowed| invalid("metrics-address", allowed))?;
        }
        if let Some(value) = &self.labels {
            settings.set_labels(value).map_err(|allowed| invalid("labels", allowed))?;
        }
        if let Some(value) = &self.labels_dir {
            settings.set_labels_dir(value).map_err(|allowed| invalid("labels-dir", allowed))?;
        }
        Ok(())
    }
}
