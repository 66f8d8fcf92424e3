//! Defines the command line of `oci-nvidia-hook`. The doc comments of these types are the help texts. Completions are generated
//! from the types, and tests compare the man page with them.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser, ValueHint};
use clap::{Args, Parser, Subcommand, ValueEnum};

use cdi_spec::file::Format;
use cdi_spec::name;
use nvidia_host::cdi::generate::Naming;

use super::selection::Parts;
use super::stage::Stage;
use super::terminal::Color;

/// OCI hook that gives Podman and CRI-O containers access to NVIDIA GPUs
///
/// Container engines start oci-nvidia-hook for every container, as configured in a JSON file in hooks.d. If the container's
/// environment requests GPUs with NVIDIA_VISIBLE_DEVICES, the hook mounts the driver's files and the device nodes of these GPUs
/// into the container before its process starts.
#[derive(Debug, Parser)]
#[command(
    name = "oci-nvidia-hook",
    version,
    propagate_version = true,
    args_override_self = true,
    arg_required_else_help = false,
    max_term_width = 80,
    after_help = "Exit status:\n  \
                  0 success, 1 failure (at a hook stage: the container must not start),\n  \
                  2 invalid command line, 3 errors that doctor found\n\n\
                  Examples:\n  \
                  podman run --rm -e NVIDIA_VISIBLE_DEVICES=all IMAGE nvidia-smi\n  \
                  oci-nvidia-hook explain < config.json\n  \
                  oci-nvidia-hook cdi generate\n  \
                  podman run --rm --device nvidia.com/gpu=all IMAGE nvidia-smi"
)]
pub struct Cli {
    /// Read this configuration file [default: /etc/nvidia-container-runtime/config.toml, if it exists]
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// The command to run
    #[command(subcommand)]
    pub command: Command,
}

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// A hook stage
    #[command(flatten)]
    Stage(Stage),
    /// Show what the hook would do for a container
    ///
    /// Prints the GPUs and files that the hook would provide, or why it would provide none, and changes nothing. Without
    /// CONTAINER, the command reads the container's OCI spec (config.json) or its state, which engines pass to hooks, from stdin.
    /// With the number of a finding, such as ONH-030, it prints what the finding means and how to fix it. The edits are the steps
    /// of the hook at prestart, or with --stage precreate the additions to config.json. The exit status is that of the hook.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook explain NAME\n  \
                            oci-nvidia-hook explain < config.json\n  \
                            oci-nvidia-hook explain ONH-030\n  \
                            oci-nvidia-hook explain --inventory gpus.json < config.json")]
    Explain(Explain),
    /// Check this host for problems, and print a fix for each
    ///
    /// The command does not need root, and reports the checks that it could not perform. It asks NVML. It does not change the
    /// host, except that it discards the cached inventory if NVML contradicts it. The exit status is 0 without problems, 1 with
    /// warnings and 3 with errors.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook doctor\n  \
                            oci-nvidia-hook doctor --container NAME\n  \
                            oci-nvidia-hook doctor --bundle report.tar.gz")]
    Doctor(Doctor),
    /// Show for each engine whether it starts the hook, and from which file
    ///
    /// If the device plugin for Kubernetes is installed, its unit and its sockets are shown too. The exit status is 1 if an installed
    /// engine does not start the hook.
    Status(Output),
    /// Show what the hook did for a container, and why
    ///
    /// Without CONTAINER, the command lists the latest containers that requested GPUs: time, id, result, name, GPUs and reason.
    /// Only root can read the records of root's containers.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook why\n  \
                            oci-nvidia-hook why NAME\n  \
                            oci-nvidia-hook why NAMESPACE/POD/CONTAINER")]
    Why(Why),
    /// Show the driver and the GPUs
    ///
    /// Prints the versions of the driver and of CUDA, and a table of the GPUs and MIG devices. If the program is called as
    /// nvidia-container-cli, the output is that of nvidia-container-cli info.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook info\n  \
                            oci-nvidia-hook info --json > gpus.json")]
    Info(Info),
    /// List the driver's files and devices that containers can get
    ///
    /// Prints one path on each line, relative to the driver root, in the order of nvidia-container-cli list; on a terminal with the
    /// kind of the file. Without an option that selects, the command lists everything: all devices, and also the 32-bit libraries.
    /// It asks NVML only if devices are listed. Driver libraries that are not in the program's catalog are reported on stderr:
    /// containers get them only with NVIDIA_DRIVER_CAPABILITIES=all.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook list --device 0 --binaries --libraries\n  \
                            oci-nvidia-hook list --json")]
    List(List),
    /// Load the driver's kernel modules, create its device nodes and ask NVML
    ///
    /// Containers then need not wait for that. The command must run as root. It prints each action on a line, reports failures on
    /// stderr, and exits with 1 if there are any. It creates the nodes of the given IMEX channels, and of channel 0 if the driver is
    /// configured to share it (NVreg_CreateImexChannel0=1).
    Prepare(Prepare),
    /// Generate, refresh, list and check CDI specs
    #[command(subcommand, arg_required_else_help = false, disable_help_subcommand = true)]
    Cdi(Cdi),
    /// Print the completion script for a shell
    ///
    /// Packages install these scripts.
    #[command(after_help = "Examples:\n  source <(oci-nvidia-hook completion bash)")]
    Completion {
        /// The shell
        shell: Shell,
    },
}

/// Options for the output of a command.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Output {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Use colors: auto (on a terminal), always or never
    #[arg(long, value_name = "WHEN", value_enum, default_value_t, hide_possible_values = true)]
    pub color: Color,
}

/// Options of `explain`.
#[derive(Args, Debug, Default)]
pub struct Explain {
    /// Id, beginning of an id, name, or pod of the container, as for why; or the number of a finding
    #[arg(value_name = "CONTAINER")]
    pub container: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Explain only the container's request, not the driver
    #[arg(long = "request")]
    pub request_only: bool,
    /// Interpret stdin as the input of this stage
    #[arg(long, value_enum)]
    pub stage: Option<ExplainStage>,
    /// Use the GPUs in this file, which info --json created
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub inventory: Option<PathBuf>,
    /// Driver root [default: root in config.toml, or /]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// What an engine would write to stdin of the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "camelCase")]
pub enum ExplainStage {
    /// config.json
    Precreate,
    /// The container state
    Prestart,
    /// The container state
    CreateRuntime,
    /// The container state
    CreateContainer,
    /// The container state
    #[value(hide = true)]
    StartContainer,
}

/// Options of `doctor`.
#[derive(Args, Debug)]
pub struct Doctor {
    /// Format and colors of the output
    #[command(flatten)]
    pub output: Output,
    /// Also write an archive for a bug report (.tar.gz) to this new file, without secrets and serial numbers
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub bundle: Option<PathBuf>,
    /// Check this running container (its id or name) instead of the host
    #[arg(long, value_name = "NAME", conflicts_with = "bundle")]
    pub container: Option<String>,
    /// Check the container of this process instead of the host
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..), conflicts_with_all = ["bundle", "container"])]
    pub pid: Option<i32>,
}

/// Options of `why`.
#[derive(Args, Debug)]
pub struct Why {
    /// Id, beginning of an id, name, or pod of the container (POD, NAMESPACE/POD or NAMESPACE/POD/CONTAINER)
    #[arg(value_name = "CONTAINER")]
    pub container: Option<String>,
    /// Format and colors of the output
    #[command(flatten)]
    pub output: Output,
}

/// Options of `info`.
#[derive(Args, Debug)]
pub struct Info {
    /// Format and colors of the output
    #[command(flatten)]
    pub output: Output,
    /// Print comma-separated values: a table of the driver, an empty line, a table of the GPUs
    #[arg(long)]
    pub csv: bool,
    /// Driver root [default: root in config.toml, or /]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// Options of `list`.
#[derive(Args, Debug)]
pub struct List {
    /// The files and devices to list
    #[command(flatten)]
    pub parts: Parts,
    /// Format and colors of the output
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

/// The commands of `cdi`.
#[derive(Debug, Subcommand)]
pub enum Cdi {
    /// Write a CDI spec, which lets engines offer the GPUs as devices
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook cdi generate\n  \
                            oci-nvidia-hook cdi generate --output - --format yaml")]
    Generate {
        /// Content and file of the spec
        #[command(flatten)]
        spec: SpecOptions,
        /// Directories with other specs that may conflict
        #[command(flatten)]
        dirs: SpecDirs,
        /// Driver root [default: root in config.toml, or /]
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        root: Option<PathBuf>,
    },
    /// Regenerate the CDI spec if it is out of date
    ///
    /// Without --create, the command does nothing if the spec does not exist. It is meant for boot, udev and package scripts: it
    /// prints nothing, and asks NVML only if something changed or MIG devices exist. The kernel does not report changes of MIG
    /// devices: run this command after nvidia-smi mig.
    Refresh {
        /// Write the spec even if it does not exist yet
        #[arg(long)]
        create: bool,
        /// Content and file of the spec
        #[command(flatten)]
        spec: SpecOptions,
        /// Driver root [default: root in config.toml, or /]
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        root: Option<PathBuf>,
    },
    /// List the CDI devices that engines find
    List {
        /// Directories of specs
        #[command(flatten)]
        dirs: SpecDirs,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Ignored: this command does not use the driver
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        root: Option<PathBuf>,
    },
    /// Show for each CDI device whether engines can use it, and if not, why
    #[command(after_help = "Examples:\n  oci-nvidia-hook cdi check nvidia.com/gpu=0")]
    Check(CdiCheck),
}

/// Options for the content and the file of a CDI spec.
#[derive(Args, Clone, Debug)]
pub struct SpecOptions {
    /// Write the spec to this file, or to stdout if it is - [default: /var/run/cdi/nvidia.yaml]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// Format of the spec [default: that of the file's extension]
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(["json", "yaml"]).map(|name| format(&name)))]
    pub format: Option<Format>,
    /// Names of the devices
    #[arg(long, value_name = "LIST", value_enum, default_value = "index,uuid")]
    pub name_strategy: NameStrategy,
    /// Vendor part of the CDI kind
    #[arg(long, value_name = "VENDOR", value_parser = vendor_or_class, default_value = "nvidia.com")]
    pub vendor: String,
    /// Class part of the CDI kind
    #[arg(long, value_name = "CLASS", value_parser = vendor_or_class, default_value = "gpu")]
    pub class: String,
    /// Add the container's process to the groups of the device nodes [default: if all engines of this host support it: Podman 5.1, CRI-O 1.30]
    #[arg(long, overrides_with = "no_additional_gids")]
    additional_gids: bool,
    /// Never add supplementary groups
    #[arg(long, overrides_with = "additional_gids")]
    no_additional_gids: bool,
    /// Program that the runtime starts [default: this program]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub hook_path: Option<PathBuf>,
}

impl SpecOptions {
    /// Returns whether containers are added to the groups of the device nodes; `None` if that depends on the engines of this host.
    pub const fn additional_gids(&self) -> Option<bool> {
        match (self.additional_gids, self.no_additional_gids) {
            (false, false) => None,
            (is_on, _) => Some(is_on),
        }
    }
}

/// Directories of CDI specs.
#[derive(Args, Clone, Debug, Default)]
pub struct SpecDirs {
    /// Search this directory for specs; the last one has the highest priority [default: /etc/cdi, /var/run/cdi]
    #[arg(long = "spec-dir", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub spec_dirs: Vec<PathBuf>,
}

/// Options of `cdi check`.
#[derive(Args, Debug)]
pub struct CdiCheck {
    /// Names of CDI devices [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Directories of specs
    #[command(flatten)]
    pub dirs: SpecDirs,
    /// Format and colors of the output
    #[command(flatten)]
    pub output: Output,
    /// Driver root [default: root in config.toml, or /]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// Names of CDI devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NameStrategy {
    /// The index, as in nvidia.com/gpu=0
    Index,
    /// The UUID
    Uuid,
    /// Both
    #[value(name = "index,uuid", alias = "uuid,index")]
    Both,
}

impl From<NameStrategy> for Naming {
    fn from(strategy: NameStrategy) -> Self {
        Self { index: strategy != NameStrategy::Uuid, uuid: strategy != NameStrategy::Index }
    }
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

fn format(name: &str) -> Format {
    if name == "json" { Format::Json } else { Format::Yaml }
}

fn vendor_or_class(text: &str) -> Result<String, String> {
    name::check_vendor_or_class(text).map_err(|why| why.to_string())?;
    if text.len() == 1 {
        return Err("CRI-O 1.37 does not start if the vendor or class of a CDI spec has only one letter".to_owned());
    }
    Ok(text.to_owned())
}
