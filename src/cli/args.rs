//! Defines the command line of `oci-nvidia-hook`. The doc comments of these types are the help texts. Completions are generated
//! from the types, and tests compare the man page with them.

mod cdi;
mod output;

use std::path::PathBuf;

use clap::builder::{NonEmptyStringValueParser, ValueHint};
use clap::{Args, Parser, Subcommand, ValueEnum};

pub use self::cdi::{Cdi, CdiCheck, SpecDirs, SpecOptions};
pub use self::output::Output;
use super::selection::Parts;
use super::stage::Stage;
use super::terminal::Color;
use crate::doctor::Section;

/// The heading of the options that all commands have, after the options of the command.
const GLOBAL: &str = "Global options";

/// OCI hook that gives Podman and CRI-O containers access to NVIDIA GPUs
///
/// Container engines start oci-nvidia-hook for every container, as a hook file in hooks.d configures. If the container's
/// environment requests GPUs with NVIDIA_VISIBLE_DEVICES, the hook mounts the driver's files and the device nodes of these GPUs
/// into the container before its process starts.
#[derive(Debug, Parser)]
#[command(
    name = "oci-nvidia-hook",
    version,
    args_override_self = true,
    arg_required_else_help = false,
    disable_help_subcommand = true,
    max_term_width = 80,
    after_help = "Called by engines:\n  \
                  prestart, createRuntime, poststop, edit-config\n\n\
                  Exit status:\n  \
                  0 success, 1 failure (at a hook stage: the container must not start),\n  \
                  2 invalid command line, 3 errors that doctor found\n\n\
                  Examples:\n  \
                  podman run --rm -e NVIDIA_VISIBLE_DEVICES=all IMAGE nvidia-smi\n  \
                  oci-nvidia-hook plan - < config.json\n  \
                  oci-nvidia-hook cdi generate\n  \
                  podman run --rm --device nvidia.com/gpu=all IMAGE nvidia-smi"
)]
pub struct Cli {
    /// Read this configuration file [default: /etc/nvidia-container-runtime/config.toml, if it exists]
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = GLOBAL)]
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
    /// Log to stderr which files are read, which driver is found, how long NVML takes, and each step
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub debug: bool,
    /// The command to run
    #[command(subcommand)]
    pub command: Command,
}

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the containers that have GPUs now, and their GPU processes
    ///
    /// Prints a row for each running container with GPUs: its GPUs, the number of its processes that use a GPU, the GPU memory of
    /// these processes, and when it started. It includes containers with GPUs from CDI or a device plugin. The command queries NVML; if
    /// that fails, processes and memory are unknown ("-"). Only root can read the records of root's containers.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook ps\n  \
                            oci-nvidia-hook ps --gpu 3\n  \
                            oci-nvidia-hook ps --all")]
    Ps(Ps),
    /// Show what the hook did for a container, and why
    ///
    /// Without CONTAINER, the command lists the containers that did not get what they requested in the last hour: failed, unfinished
    /// (the hook did not end), incomplete, or started without GPUs. Only root can read the records of root's containers.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook why\n  \
                            oci-nvidia-hook why NAME\n  \
                            oci-nvidia-hook why NAMESPACE/POD/CONTAINER")]
    Why(Why),
    /// Show what a container would get, without changing anything
    ///
    /// Prints the GPUs and files that the hook would provide, or why it would provide none. The container is named as for why. If
    /// the name is "-", the command reads the container's OCI spec (config.json) or its state, which engines pass to hooks, from
    /// stdin. The edits are the steps of the hook at prestart. What the image and the volumes have at these paths is examined only
    /// when the container starts. The exit status is 1 if the hook would fail.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook plan NAME\n  \
                            oci-nvidia-hook plan - < config.json\n  \
                            oci-nvidia-hook plan --inventory gpus.json - < config.json")]
    Plan(Plan),
    /// Show what a number such as ONH-030 means, and how to fix it
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook explain 30\n  \
                            oci-nvidia-hook explain --list")]
    Explain(Explain),
    /// Show the driver and the GPUs
    ///
    /// Prints the versions of the driver and of CUDA, and a table of the GPUs and MIG devices. If the program is called as
    /// nvidia-container-cli, the output has the format of nvidia-container-cli info.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook info\n  \
                            oci-nvidia-hook info --json > gpus.json")]
    Info(Info),
    /// List the driver's files and devices that containers can get
    ///
    /// Prints one path on each line, relative to the driver root, in the order of nvidia-container-cli list; on a terminal with the
    /// kind of the file. Without an option that selects, the command lists everything, including all devices and the 32-bit libraries. It
    /// queries NVML only if devices are listed. Driver libraries that are not in the program's
    /// catalog are reported on stderr: containers get them only with NVIDIA_DRIVER_CAPABILITIES=all.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook files --device 0 --binaries --libraries\n  \
                            oci-nvidia-hook files --json")]
    #[command(
        mut_arg("mig_config", |arg| arg.hide(true)),
        mut_arg("mig_monitor", |arg| arg.hide(true)),
        mut_arg("imex_channels", |arg| arg.hide(true)),
        mut_arg("no_persistenced", |arg| arg.hide(true)),
        mut_arg("no_fabricmanager", |arg| arg.hide(true)),
        mut_arg("no_gsp_firmware", |arg| arg.hide(true)),
        mut_arg("ipcs", |arg| arg.hide(true)),
        mut_arg("firmwares", |arg| arg.hide(true))
    )]
    Files(Files),
    /// Check this host for problems, and print a fix for each
    ///
    /// Prints the problems, errors first, with the checks that found them. One fix for several problems is printed once. With --all,
    /// the checks that passed and those that could not be performed are printed too. The command does not need root. It queries NVML. It
    /// does not change the host, except that it discards the cached inventory if NVML contradicts it. The exit status is 0 without
    /// problems, 1 with warnings and 3 with errors. oci-nvidia-hook(8) explains each check.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook doctor\n  \
                            oci-nvidia-hook doctor --all cdi\n  \
                            oci-nvidia-hook doctor --container NAME")]
    Doctor(Doctor),
    /// Show for each engine how its containers get GPUs
    ///
    /// Prints a table of the hook, CDI specs, the NRI plugin and the kubelet plugin, with the state and the file that decides it. The
    /// exit status is 1 if an installed engine neither starts the hook nor gets GPUs from the NRI plugin.
    Status(Output),
    /// Generate, refresh, list and check CDI specs
    #[command(
        subcommand,
        arg_required_else_help = false,
        disable_help_subcommand = true
    )]
    Cdi(Cdi),
    /// Load the driver's modules, create its device nodes, query NVML
    ///
    /// The next container then does not wait for this. The command must run as root. It prints each action on a line, reports failures on
    /// stderr, and exits with 1 if there are any. It creates the nodes of the given IMEX channels, and of channel 0 if the driver is
    /// configured to share it (NVreg_CreateImexChannel0=1).
    Prepare(Prepare),
    /// Print the completion script for a shell
    ///
    /// Packages install these scripts.
    #[command(after_help = "Examples:\n  source <(oci-nvidia-hook completion bash)")]
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Show the versions of the program, the driver and CUDA
    ///
    /// The command does not query NVML. It shows the version of CUDA if the inventory of the GPUs is cached.
    Version,
    /// Show this help, or the help of a command
    Help {
        /// The command
        command: Vec<String>,
    },
    /// A hook stage
    #[command(flatten)]
    Stage(Stage),
}

/// Options of `plan`.
#[derive(Args, Debug, Default)]
pub struct Plan {
    /// Id, beginning of an id, name, or pod of the container; or - to read config.json or a container's state from stdin
    #[arg(value_name = "CONTAINER|-")]
    pub container: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Show only the container's request, without the driver
    #[arg(long = "request")]
    pub request_only: bool,
    /// Use the GPUs in this file, which info --json created
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub inventory: Option<PathBuf>,
    /// Driver root [default: root in config.toml, or /]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// Options of `explain`.
#[derive(Args, Debug, Default)]
pub struct Explain {
    /// Number of a finding: ONH-030, or 30
    #[arg(
        value_name = "NUMBER",
        required_unless_present = "list",
        conflicts_with = "list"
    )]
    pub number: Option<String>,
    /// List all numbers with their titles
    #[arg(long)]
    pub list: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `doctor`.
#[derive(Args, Debug)]
pub struct Doctor {
    /// Only these checks [default: all]
    #[arg(value_name = "SECTION", value_enum)]
    pub sections: Vec<Section>,
    /// Also print the checks that passed or could not be performed
    #[arg(long)]
    pub all: bool,
    /// Format of the output
    #[command(flatten)]
    pub output: Output,
    /// Check this running container (its id or name) instead of the host
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new(), conflicts_with = "sections")]
    pub container: Option<String>,
    /// Check the container of this process instead of the host
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..), conflicts_with_all = ["container", "sections"])]
    pub pid: Option<i32>,
}

/// Options of `ps`.
#[derive(Args, Debug, Default)]
pub struct Ps {
    /// Also list the containers that ended or failed, with their state and the number of the finding
    #[arg(long, short)]
    pub all: bool,
    /// List only the containers with this GPU or MIG device: its index, UUID or bus id
    #[arg(long, value_name = "GPU", value_parser = NonEmptyStringValueParser::new())]
    pub gpu: Option<String>,
    /// Format of the output
    #[command(flatten)]
    pub output: Output,
}

/// Options of `why`.
#[derive(Args, Debug)]
pub struct Why {
    /// Id, beginning of an id, name, or pod of the container (POD, NAMESPACE/POD or NAMESPACE/POD/CONTAINER)
    #[arg(value_name = "CONTAINER")]
    pub container: Option<String>,
    /// Format of the output
    #[command(flatten)]
    pub output: Output,
}

/// Options of `info`.
#[derive(Args, Debug)]
pub struct Info {
    /// Format of the output
    #[command(flatten)]
    pub output: Output,
    /// Print comma-separated values: a table of the driver, an empty line, a table of the GPUs
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
    /// Driver root [default: root in config.toml, or /]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// Options of `files`.
#[derive(Args, Debug)]
pub struct Files {
    /// The files and devices to list
    #[command(flatten)]
    pub parts: Parts,
    /// Format of the output
    #[command(flatten)]
    pub output: Output,
    /// Driver root [default: root in config.toml, or /]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// Options of `prepare`.
#[derive(Args, Debug)]
pub struct Prepare {
    /// Also create the nodes of these IMEX channels: a comma-separated list of numbers
    #[arg(long = "imex-channel", value_name = "CHANNEL", value_delimiter = ',')]
    pub imex_channels: Vec<String>,
    /// Driver root [default: root in config.toml, or /]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// Shells with a completion script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// bash
    Bash,
    /// zsh
    Zsh,
    /// fish
    Fish,
}
