//! Defines the command line. The doc comments of these types are the help texts.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use command_line::terminal::Color;
use plugin_api::control as control_socket;

use crate::cdi_specs;
use crate::nri::engine;
use crate::nri::session::Identity;
use crate::settings::options::Options;

/// The heading of the options that all commands have, after the options of the command.
const GLOBAL: &str = "Global options";

/// Offers the NVIDIA GPUs of this node to Kubernetes
///
/// The kubelet plugin for nvidia.com/gpu. It reports the GPUs, MIG devices and their health, and answers the kubelet's requests
/// so the engine creates the device nodes and oci-nvidia-hook adds the driver's files, or, with CDI, the engine adds both. run and check
/// also accept the options, variables and configuration file of NVIDIA's device plugin.
#[derive(Debug, Parser)]
#[command(
    name = "oci-nvidia-kubelet-plugin",
    version,
    args_override_self = true,
    arg_required_else_help = false,
    max_term_width = 80,
    after_help = "Exit status:\n  \
                  0 success, 1 failure or a degraded node, 2 invalid command line,\n  \
                  3 check: the node has GPUs, and none can be allocated"
)]
pub struct Cli {
    /// Read this configuration file [default: /etc/nvidia-container-runtime/config.toml, if it exists]
    #[arg(long, global = true, value_name = "FILE", help_heading = GLOBAL)]
    pub config: Option<PathBuf>,
    /// Use colors: auto (on a terminal), always or never
    #[arg(
        long,
        global = true,
        help_heading = GLOBAL,
        value_name = "WHEN",
        value_enum,
        default_value_t,
        hide_possible_values = true
    )]
    pub color: Color,
    /// Log to stderr which files are read, each report of the driver, and each request of the kubelet
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub debug: bool,
    /// The command to run
    #[command(subcommand)]
    pub command: Command,
}

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Register with the kubelet and serve until the process is stopped
    ///
    /// On SIGUSR1 the plugin releases the driver, which can then be replaced. On SIGUSR2 it uses the driver again.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-kubelet-plugin run --replicas 4\n  \
                            oci-nvidia-kubelet-plugin run --interface dra\n  \
                            oci-nvidia-kubelet-plugin run --nri --metrics-address :2112")]
    Run {
        /// The settings
        #[command(flatten)]
        options: Options,
        /// Keep a CDI spec of the devices in this directory [default: /var/run/cdi, if containers get CDI devices]
        #[arg(long, value_name = "DIR")]
        cdi_dir: Option<PathBuf>,
        /// The hook, which the runtime starts on the host for containers with these CDI devices
        #[arg(long, value_name = "FILE", default_value = cdi_specs::HOOK)]
        hook_path: PathBuf,
        /// The directory for the socket of the check and clear commands
        #[arg(long, value_name = "DIR", default_value = control_socket::DIR)]
        run_dir: PathBuf,
        /// Also do what the nri command does, with this socket [default of FILE: /var/run/nri/nri.sock, and of --cdi-dir: /var/run/cdi]
        #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = engine::SOCKET)]
        nri: Option<PathBuf>,
    },
    /// Give GPUs to containers that request them with a variable, as an NRI plugin of the engine
    ///
    /// The engine calls it for each container that it creates. A container whose variables or mounts request GPUs gets them as CDI devices,
    /// by the rules of oci-nvidia-hook. This command is not needed if "run --nri" is running.
    #[command(after_help = "Example:\n  oci-nvidia-kubelet-plugin nri")]
    Nri {
        /// The engine
        #[command(flatten)]
        engine: EngineOptions,
        /// Keep the CDI spec of the devices in this directory, which the engine must read
        #[arg(long, value_name = "DIR", default_value = cdi_specs::DIR)]
        cdi_dir: PathBuf,
        /// The hook, which the runtime starts on the host for containers with these CDI devices
        #[arg(long, value_name = "FILE", default_value = cdi_specs::HOOK)]
        hook_path: PathBuf,
    },
    /// Show the GPUs, their health and the strategy, without a kubelet
    ///
    /// If the plugin runs, the health is the one that it reports to the kubelet. Exit status: 0 if all devices can be allocated, 1 if one
    /// cannot or a setting has no effect, 3 if the node has GPUs and none can be allocated.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-kubelet-plugin check\n  \
                            oci-nvidia-kubelet-plugin check --interface dra")]
    Check {
        /// The settings
        #[command(flatten)]
        options: Options,
        /// The directory of the running plugin's socket
        #[arg(long, value_name = "DIR", default_value = control_socket::DIR)]
        run_dir: PathBuf,
        /// Print a JSON document
        #[arg(long)]
        json: bool,
    },
    /// Offer a GPU again that was taken out of service after repeated failures
    Clear {
        /// The UUID of the GPU
        uuid: String,
        /// The directory of the running plugin's socket
        #[arg(long, value_name = "DIR", default_value = control_socket::DIR)]
        run_dir: PathBuf,
    },
    /// Print a completion script
    Completion {
        /// The shell
        shell: Shell,
    },
}

/// The options that describe how to register with an engine.
#[derive(Args, Debug)]
pub struct EngineOptions {
    /// The NRI socket of the engine
    #[arg(long, value_name = "FILE", default_value = engine::SOCKET)]
    socket: PathBuf,
    /// The name of the plugin in the engine's log
    #[arg(long, value_name = "NAME", default_value = PLUGIN_NAME, value_parser = parse_name)]
    name: String,
    /// Order among the engine's NRI plugins: two digits, lowest first
    #[arg(long, value_name = "NN", default_value = PLUGIN_INDEX, value_parser = parse_index)]
    index: String,
}

/// The name of the NRI plugin.
const PLUGIN_NAME: &str = "oci-nvidia";
/// The place of the NRI plugin: early, so that others see its devices.
const PLUGIN_INDEX: &str = "10";

impl EngineOptions {
    /// Returns the options for this socket.
    #[must_use]
    pub fn at(socket: PathBuf) -> Self {
        Self {
            socket,
            name: PLUGIN_NAME.to_owned(),
            index: PLUGIN_INDEX.to_owned(),
        }
    }

    /// Returns the options of the plugin.
    #[must_use]
    pub fn options(self) -> engine::NriOptions {
        engine::NriOptions {
            socket: self.socket,
            identity: Identity {
                name: self.name,
                index: self.index,
            },
        }
    }
}

/// Engines accept only such names.
fn parse_name(text: &str) -> Result<String, String> {
    let is_permitted = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if text.is_empty() || !text.bytes().all(is_permitted) {
        return Err("it must consist of letters, digits and \"-_.\"".to_owned());
    }
    Ok(text.to_owned())
}

fn parse_index(text: &str) -> Result<String, String> {
    if text.len() != 2 || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("it must be two digits, such as 10".to_owned());
    }
    Ok(text.to_owned())
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
