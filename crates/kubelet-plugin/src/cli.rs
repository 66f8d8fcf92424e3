//! Defines the command line. The doc comments of these types are the help texts.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};

use base::report::{catalog, failure};
use nvidia_host::config::kubelet_plugin::{KubeletPlugin, ResourceRow};

use crate::nri::engine;
use crate::nri::session::Identity;
use crate::{cdi_keeper, compat, control};

/// Offers the NVIDIA GPUs of this node to Kubernetes
///
/// The kubelet's device plugin for nvidia.com/gpu. It reports the GPUs, MIG devices and their health, and answers the kubelet's requests
/// so that the engine creates the device nodes and oci-nvidia-hook adds the driver's files, or so that the engine adds both with CDI. run
/// and check also accept the options, variables and configuration file of NVIDIA's device plugin.
#[derive(Debug, Parser)]
#[command(name = "oci-nvidia-kubelet-plugin", version, propagate_version = true, max_term_width = 80)]
pub struct Cli {
    /// The command to run
    #[command(subcommand)]
    pub command: Command,
}

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Register with the kubelet and serve until the process is stopped
    ///
    /// SIGUSR1 ends the use of the driver, so that it can be replaced; SIGUSR2 resumes it.
    Run {
        /// The settings
        #[command(flatten)]
        settings: Settings,
        /// Keep a CDI spec of the devices in this directory [default: /var/run/cdi, if containers get CDI devices]
        #[arg(long, value_name = "DIR")]
        cdi_dir: Option<PathBuf>,
        /// The hook, which the CDI spec starts in containers
        #[arg(long, value_name = "FILE", default_value = cdi_keeper::HOOK)]
        hook_path: PathBuf,
        /// The directory for the socket of the clear command
        #[arg(long, value_name = "DIR", default_value = control::RUN_DIR)]
        run_dir: PathBuf,
        /// Also do what the nri command does, with this socket [default of FILE: /var/run/nri/nri.sock, and of --cdi-dir: /var/run/cdi]
        #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = engine::SOCKET)]
        nri: Option<PathBuf>,
    },
    /// Give GPUs to containers that request them with a variable, as an NRI plugin of the engine
    ///
    /// The engine asks about each container that it creates. A container whose variables or mounts request GPUs gets them as CDI devices,
    /// by the rules of oci-nvidia-hook. A running "run --nri" makes this command unnecessary.
    Nri {
        /// Read this configuration file [default: /etc/nvidia-container-runtime/config.toml, if it exists]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The engine
        #[command(flatten)]
        engine: Engine,
        /// Keep the CDI spec of the devices in this directory, which the engine must read
        #[arg(long, value_name = "DIR", default_value = cdi_keeper::DIR)]
        cdi_dir: PathBuf,
        /// The hook, which the CDI spec starts in containers
        #[arg(long, value_name = "FILE", default_value = cdi_keeper::HOOK)]
        hook_path: PathBuf,
    },
    /// Show what the plugin would offer, without a kubelet
    ///
    /// Exit status: 0 if all devices can be allocated, 1 if one cannot or a setting has no effect, 3 if the node has GPUs and none can
    /// be allocated.
    Check {
        /// The settings
        #[command(flatten)]
        settings: Settings,
        /// Print a JSON document
        #[arg(long)]
        json: bool,
    },
    /// Forget the errors of a GPU that stays unhealthy because it failed again and again
    Clear {
        /// The UUID of the GPU
        uuid: String,
        /// The directory of the socket, as for run
        #[arg(long, value_name = "DIR", default_value = control::RUN_DIR)]
        run_dir: PathBuf,
    },
    /// Print a completion script
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Ask NVML and print what changes. The plugin starts it.
    #[command(hide = true)]
    Monitor {
        /// The configuration file
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The driver root, which an option may have changed
        #[arg(long, value_name = "DIR")]
        driver_root: Option<PathBuf>,
        /// The directory with the device nodes
        #[arg(long, value_name = "DIR")]
        dev_root: Option<PathBuf>,
        /// GPUs that are not asked, by NVML's index
        #[arg(long, value_name = "INDEX")]
        skip: Vec<u32>,
        /// Print the values for metrics as well
        #[arg(long)]
        measure: bool,
    },
}

/// The options that describe how to register with an engine.
#[derive(Args, Debug)]
pub struct Engine {
    /// The NRI socket of the engine
    #[arg(long, value_name = "FILE", default_value = engine::SOCKET)]
    socket: PathBuf,
    /// The name of the plugin in the engine's log
    #[arg(long, value_name = "NAME", default_value = PLUGIN_NAME, value_parser = parse_name)]
    name: String,
    /// The place among the plugins of the engine, two digits
    #[arg(long, value_name = "NN", default_value = PLUGIN_INDEX, value_parser = parse_index)]
    index: String,
}

/// The name of the NRI plugin.
const PLUGIN_NAME: &str = "oci-nvidia";
/// The place of the NRI plugin: early, so that others see its devices.
const PLUGIN_INDEX: &str = "10";

impl Engine {
    /// Returns the options for this socket.
    #[must_use]
    pub fn at(socket: PathBuf) -> Self {
        Self { socket, name: PLUGIN_NAME.to_owned(), index: PLUGIN_INDEX.to_owned() }
    }

    /// Returns the options of the plugin.
    #[must_use]
    pub fn options(self) -> engine::Options {
        engine::Options { socket: self.socket, identity: Identity { name: self.name, index: self.index } }
    }
}

/// Engines accept only such names.
fn parse_name(text: &str) -> Result<String, String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    match !text.is_empty() && text.bytes().all(is_allowed) {
        true => Ok(text.to_owned()),
        false => Err("it must consist of letters, digits and \"-_.\"".to_owned()),
    }
}

fn parse_index(text: &str) -> Result<String, String> {
    match text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => Ok(text.to_owned()),
        false => Err("it must be two digits, such as 10".to_owned()),
    }
}

/// A shell with completion scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// Bash
    Bash,
    /// Z shell
    Zsh,
    /// fish
    Fish,
}

/// The options that replace keys of `[kubelet-plugin]` in config.toml.
#[derive(Args, Debug, Default)]
pub struct Settings {
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
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = compat::truth)]
    pass_device_specs: Option<bool>,
    /// The directory that host-path mounts at /usr/local/nvidia
    #[arg(long, value_name = "DIR")]
    host_path: Option<PathBuf>,
    /// GKE's configuration file, for host-path
    #[arg(long, value_name = "FILE")]
    gpu_config: Option<PathBuf>,
    /// The options of NVIDIA's plugin
    #[command(flatten)]
    pub others: compat::Flags,
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

impl Settings {
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
