//! Defines the command line of `nvidia-ctk`. Hidden options are options of NVIDIA's program that are not supported,
//! so that each has an error with the reason.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

use nvidia_host::programs;

/// oci-nvidia-hook, called with the name of NVIDIA's program
///
/// Environment variables have no effect. The exit status is 0 on success, 1 on failure, and 2 if the command line is invalid.
#[derive(Debug, Parser)]
#[command(
    name = programs::CTK,
    version,
    disable_help_subcommand = true,
    disable_version_flag = true,
    args_override_self = true,
    arg_required_else_help = false,
    max_term_width = 80
)]
pub(super) struct CtkCli {
    /// Ignored
    #[arg(short, long, global = true)]
    debug: bool,
    /// Ignored
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Print the version
    #[arg(short, short_alias = 'V', long, action = ArgAction::Version)]
    version: Option<bool>,
    /// The command to run
    #[command(subcommand)]
    pub(super) command: CtkCommand,
}

#[derive(Debug, Subcommand)]
pub(super) enum CtkCommand {
    /// Write, list and change CDI specs
    #[command(subcommand, arg_required_else_help = false)]
    Cdi(Cdi),
    /// Print the hook's config.toml, or change it
    Config(Config),
    /// Show the driver and the GPUs, like oci-nvidia-hook info
    Info,
    /// Configure a container engine
    #[command(subcommand, arg_required_else_help = false)]
    Runtime(Runtime),
    /// Create device nodes and links
    #[command(subcommand, arg_required_else_help = false)]
    System(System),
    /// Run a hook of a CDI spec; see nvidia-ctk hook --help
    Hook,
}

#[derive(Debug, Subcommand)]
pub(super) enum Cdi {
    /// Write a CDI spec, like oci-nvidia-hook cdi generate
    Generate(Box<Generate>),
    /// List the CDI devices that engines find
    List {
        /// Search this directory for specs [default: /etc/cdi, /var/run/cdi]
        #[arg(long = "spec-dir", value_name = "DIR")]
        spec_dirs: Vec<PathBuf>,
    },
    /// Change paths in a CDI spec
    #[command(subcommand, arg_required_else_help = false)]
    Transform(Transform),
}

#[derive(Args, Debug)]
pub(super) struct Generate {
    /// Write the spec to this file [default: stdout]
    #[arg(long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
    /// Format of the spec: yaml or json [default: the format of the file's extension, or yaml]
    #[arg(long, value_name = "FORMAT", value_parser = ["yaml", "json"])]
    pub(super) format: Option<String>,
    /// auto, nvml or wsl for GPUs, or gds, mofed, gdrcopy, nvswitch or imex
    #[arg(
        long,
        alias = "discovery-mode",
        value_name = "MODE",
        value_parser = MODES,
        default_value = "auto",
        hide_possible_values = true
    )]
    pub(super) mode: String,
    /// Names of the devices; repeatable [default: index, uuid]
    #[arg(
        long = "device-name-strategy",
        value_name = "STRATEGY",
        value_parser = ["index", "uuid", "type-index"],
        value_delimiter = ','
    )]
    pub(super) strategies: Vec<String>,
    /// Driver root [default: root in config.toml, or /]
    #[arg(long, value_name = "DIR")]
    pub(super) driver_root: Option<PathBuf>,
    /// Vendor part of the CDI kind [default: nvidia.com]
    #[arg(long, alias = "cdi-vendor", value_name = "VENDOR")]
    pub(super) vendor: Option<String>,
    /// Class part of the CDI kind [default: gpu]
    #[arg(long, alias = "cdi-class", value_name = "CLASS")]
    pub(super) class: Option<String>,
    /// no-additional-gids-for-device-nodes, for engines that reject the field
    #[arg(
        long = "feature-flag",
        alias = "feature-flags",
        value_name = "FLAG",
        value_parser = ["no-additional-gids-for-device-nodes"],
        hide_possible_values = true,
        value_delimiter = ','
    )]
    pub(super) feature_flags: Vec<String>,
    /// Ignored: ldconfig is never run
    #[arg(long, value_name = "FILE")]
    ldconfig_path: Option<PathBuf>,
}

const MODES: [&str; 8] = [
    "auto", "nvml", "gdrcopy", "gds", "imex", "mofed", "nvswitch", "wsl",
];

#[derive(Debug, Subcommand)]
pub(super) enum Transform {
    /// Replace the beginning of paths
    #[command(alias = "root-transform")]
    Root(Root),
}

#[derive(Args, Debug)]
pub(super) struct Root {
    /// Directory with which the paths begin
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(super) from: PathBuf,
    /// Directory that replaces it
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(super) to: PathBuf,
    /// Whether paths on the host or paths in the container are changed
    #[arg(long, value_name = "SIDE", value_enum, default_value = "host")]
    pub(super) relative_to: Side,
    /// Spec to read, or - for stdin
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub(super) input: PathBuf,
    /// File to write [default: stdout]
    #[arg(long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Side {
    Host,
    Container,
}

/// Without --set, the command prints the file. With --set, it prints the changed file, or with --in-place writes it.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Config {
    /// The file [default: /etc/nvidia-container-runtime/config.toml]
    #[arg(
        short = 'c',
        long = "config-file",
        alias = "config",
        value_name = "FILE"
    )]
    pub(super) file: Option<PathBuf>,
    /// Set a key, such as nvidia-container-cli.no-cgroups=true; without a value, a boolean key is true; repeatable
    #[arg(long = "set", value_name = "KEY[=VALUE]")]
    pub(super) set: Vec<String>,
    /// What separates the values of a list
    #[arg(long, value_name = "TEXT", default_value = ",")]
    pub(super) set_list_separator: String,
    /// Change the file
    #[arg(short, long, conflicts_with = "output")]
    pub(super) in_place: bool,
    /// Write the result to this file [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
    #[command(subcommand)]
    pub(super) command: Option<ConfigCommand>,
}

#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Print the default file, with a comment for each key
    Default {
        /// Write the file here [default: stdout]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum Runtime {
    /// Report how an engine starts the hook; for Docker and containerd, enable CDI and the runtime nvidia in its file
    Configure(Configure),
}

#[derive(Args, Debug)]
pub(super) struct Configure {
    /// The engine
    #[arg(long, value_name = "ENGINE", value_enum, default_value = "docker")]
    pub(super) runtime: Engine,
    /// The engine's configuration file [default: /etc/docker/daemon.json, /etc/containerd/config.toml]
    #[arg(long, alias = "config-path", value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Print the file, and do not write it
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Use the runtime nvidia for containers that do not select one
    #[arg(long, alias = "nvidia-set-as-default")]
    pub(super) set_as_default: bool,
    /// Name of the runtime
    #[arg(
        long = "nvidia-runtime-name",
        value_name = "NAME",
        default_value = "nvidia"
    )]
    pub(super) name: String,
    /// Program of the runtime [default: nvidia-container-runtime in this program's directory]
    #[arg(
        long = "nvidia-runtime-path",
        alias = "runtime-path",
        value_name = "FILE"
    )]
    pub(super) path: Option<PathBuf>,
    /// Accepted, because CDI is always enabled
    #[arg(
        long = "cdi.enabled", aliases = ["cdi.enable", "enable-cdi"], value_name = "BOOL",
        num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = ["true"], hide_possible_values = true
    )]
    cdi: Option<String>,
    #[arg(long, alias = "mode", hide = true, default_value = "auto", value_parser = ["auto", "config-file"])]
    config_mode: String,
    #[arg(long, hide = true, default_value = "file", value_parser = ["file"])]
    config_source: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Engine {
    Crio,
    Podman,
    Docker,
    Containerd,
}

#[derive(Debug, Subcommand)]
pub(super) enum System {
    /// Load the driver's modules and create its device nodes, like oci-nvidia-hook prepare
    CreateDeviceNodes(Nodes),
    /// Create the links in /dev/char, with which runc and systemd find devices
    #[command(name = "create-dev-char-symlinks")]
    CreateDevCharSymlinks {
        #[command(flatten)]
        nodes: Nodes,
        #[arg(long, hide = true, default_value = "/dev/char", value_parser = ["/dev/char"])]
        dev_char_path: String,
    },
}

#[derive(Args, Debug)]
pub(super) struct Nodes {
    /// Driver root [default: root in config.toml, or /]
    #[arg(long, alias = "root", value_name = "DIR")]
    pub(super) driver_root: Option<PathBuf>,
    /// Always done
    #[arg(long, alias = "create-device-nodes", alias = "create-all")]
    control_devices: bool,
    /// Always done
    #[arg(long)]
    load_kernel_modules: bool,
}
