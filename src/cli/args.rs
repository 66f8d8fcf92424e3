//! The command line of `oci-nvidia-hook`. Help texts and completions are made from these types, and tests compare the man
//! page with them.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser, ValueHint};
use clap::{Args, Parser, Subcommand, ValueEnum};

use cdi_spec::file::Format;
use cdi_spec::name;
use nvidia_host::cdi::generate::Naming;

use super::selection::Parts;
use super::stage::Stage;
use super::terminal::Color;

/// NVIDIA GPUs in containers of CRI-O and Podman
///
/// A container engine starts this program for every container, as a hooks.d JSON file configures. The program reads the
/// container's environment. If that asks for GPUs with NVIDIA_VISIBLE_DEVICES, it mounts the driver's files and the GPUs'
/// device nodes into the container before the container starts.
#[derive(Debug, Parser)]
#[command(
    name = "oci-nvidia-hook",
    version,
    propagate_version = true,
    args_override_self = true,
    arg_required_else_help = false,
    max_term_width = 80,
    after_help = "Exit status:\n  \
                  0 done or nothing to do, 1 failed (at a hook stage: the container must not\n  \
                  start), 2 wrong command line; doctor and status have more\n\n\
                  Examples:\n  \
                  podman run --rm -e NVIDIA_VISIBLE_DEVICES=all IMAGE nvidia-smi\n  \
                  oci-nvidia-hook explain < config.json\n  \
                  oci-nvidia-hook cdi generate\n  \
                  podman run --rm --device nvidia.com/gpu=all IMAGE nvidia-smi"
)]
pub struct Cli {
    /// Read this file, which must exist [default: /etc/nvidia-container-runtime/config.toml, if it exists]
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// A stage of an engine
    #[command(flatten)]
    Stage(Stage),
    /// Show what the hook would do for a container
    ///
    /// It follows the hook's decisions and changes nothing: which GPUs and which files, or why none. Without CONTAINER, it
    /// reads the container's OCI spec (config.json), or the container state that engines pass to hooks, from stdin. A number
    /// such as ONH-030 in place of CONTAINER prints what that finding means and how to fix it. The edits are the steps of the
    /// hook at prestart; with --stage precreate, what precreate adds to config.json. The exit status is the hook's.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook explain NAME\n  \
                            oci-nvidia-hook explain < config.json\n  \
                            oci-nvidia-hook explain ONH-030\n  \
                            oci-nvidia-hook explain --inventory gpus.json < config.json")]
    Explain(Explain),
    /// Find what is wrong with this host, and how to fix it
    ///
    /// It does not need root, and reports what it could not examine. It asks NVML and changes nothing on the host, except
    /// that it drops the inventory that is cached for containers if NVML now contradicts it. The exit status is 0 if there is
    /// nothing to fix, 1 with warnings, 3 with errors.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook doctor\n  \
                            oci-nvidia-hook doctor --container NAME\n  \
                            oci-nvidia-hook doctor --bundle report.tar.gz")]
    Doctor(Doctor),
    /// Show for each engine whether it starts this hook, and by which file
    ///
    /// The exit status is 1 if an installed engine does not start it.
    Status(Status),
    /// Show what the hook did for a container, and why
    ///
    /// Without CONTAINER, it lists the last containers that asked for GPUs: when, which, and their GPUs. Only root can read
    /// the records of root's containers.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook why\n  \
                            oci-nvidia-hook why NAME\n  \
                            oci-nvidia-hook why NAMESPACE/POD/CONTAINER")]
    Why(Why),
    /// Show the driver and the GPUs
    ///
    /// It prints the versions of the driver and of CUDA, and a table of the GPUs and MIG devices. Called as
    /// nvidia-container-cli, the program prints the labels of nvidia-container-cli info.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook info\n  \
                            oci-nvidia-hook info --json > gpus.json")]
    Info(Info),
    /// List the driver's files and devices that containers can get
    ///
    /// It prints a path on each line, without the driver's root, in the order of nvidia-container-cli list. On a terminal, the kind
    /// of the file comes first. Without an option that chooses, it lists everything: all devices, and the 32-bit libraries too. It
    /// asks the driver for its GPUs only where devices are listed. Libraries that this program does not know are named on stderr;
    /// containers get them with NVIDIA_DRIVER_CAPABILITIES=all only.
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook list --device 0 --binaries --libraries\n  \
                            oci-nvidia-hook list --json")]
    List(List),
    /// Load the driver's modules, make its device nodes and ask NVML, as root
    ///
    /// No container has to wait for that afterwards. It prints what it did, a line each, and nothing if nothing was missing.
    /// It reports what fails on stderr, and exits with 1. It makes the nodes of the IMEX channels that are named, and of
    /// channel 0 where the driver is configured to share it (NVreg_CreateImexChannel0=1).
    Prepare(Prepare),
    /// Write, refresh, list and check CDI specs
    #[command(subcommand, arg_required_else_help = false, disable_help_subcommand = true)]
    Cdi(Cdi),
    /// Print the script that completes commands and options in a shell
    ///
    /// Packages install it.
    #[command(after_help = "Examples:\n  source <(oci-nvidia-hook completion bash)")]
    Completion {
        /// The shell
        shell: Shell,
    },
}

/// How a command prints its answer.
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
    /// An id, the start of one, a name, or a pod, as for why
    #[arg(value_name = "CONTAINER")]
    pub container: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Explain only what the container asks for, not the driver
    #[arg(long = "request")]
    pub request_only: bool,
    /// Take stdin for what this stage gets: config.json at precreate, else the container state
    #[arg(long, value_enum)]
    pub stage: Option<ExplainStage>,
    /// Explain with the GPUs of this file, which info --json has printed
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub inventory: Option<PathBuf>,
    /// The root directory of the driver
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// What an engine would write to the hook's stdin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "camelCase")]
pub enum ExplainStage {
    /// config.json
    Precreate,
    /// The container state
    Prestart,
    /// The same
    CreateRuntime,
    /// The same
    CreateContainer,
    /// The same
    #[value(hide = true)]
    StartContainer,
}

/// Options of `doctor`.
#[derive(Args, Debug)]
pub struct Doctor {
    /// How the answer is printed
    #[command(flatten)]
    pub output: Output,
    /// Also write what a bug report needs to this new file (.tar.gz), without secrets and serial numbers
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub bundle: Option<PathBuf>,
    /// Examine this running container (an id or a name) instead of the host
    #[arg(long, value_name = "NAME")]
    pub container: Option<String>,
    /// Examine the container of this process
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
}

/// Options of `status`.
#[derive(Args, Debug)]
pub struct Status {
    /// How the answer is printed
    #[command(flatten)]
    pub output: Output,
}

/// Options of `why`.
#[derive(Args, Debug)]
pub struct Why {
    /// An id, the start of one, a name, or a pod (POD, NAMESPACE/POD or NAMESPACE/POD/CONTAINER)
    #[arg(value_name = "CONTAINER")]
    pub container: Option<String>,
    /// How the answer is printed
    #[command(flatten)]
    pub output: Output,
}

/// Options of `info`.
#[derive(Args, Debug)]
pub struct Info {
    /// How the answer is printed
    #[command(flatten)]
    pub output: Output,
    /// Print comma-separated values: a table of the driver, a blank line, a table of the GPUs
    #[arg(long)]
    pub csv: bool,
    /// The root directory of the driver
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// Options of `list`.
#[derive(Args, Debug)]
pub struct List {
    /// What to list
    #[command(flatten)]
    pub parts: Parts,
    /// How the answer is printed
    #[command(flatten)]
    pub output: Output,
    /// The root directory of the driver
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// Options of `prepare`.
#[derive(Args, Debug)]
pub struct Prepare {
    /// IMEX channels, by number; a comma list
    #[arg(long = "imex-channel", value_name = "CHANNEL", value_delimiter = ',')]
    pub imex_channels: Vec<String>,
    /// The root directory of the driver
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// The commands of `cdi`.
#[derive(Debug, Subcommand)]
pub enum Cdi {
    /// Write a CDI spec: GPUs as devices of podman --device, CRI-O and others
    #[command(after_help = "Examples:\n  \
                            oci-nvidia-hook cdi generate\n  \
                            oci-nvidia-hook cdi generate --output - --format yaml")]
    Generate {
        /// What the spec is like
        #[command(flatten)]
        spec: SpecOptions,
        /// Where engines look for it
        #[command(flatten)]
        dirs: SpecDirs,
        /// The root directory of the driver
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        root: Option<PathBuf>,
    },
    /// Rewrite the CDI spec if it no longer fits the host
    ///
    /// Without --create it does nothing where there is no spec. It is for boot, udev and package scripts: it prints nothing,
    /// and asks the driver only if something changed or there are MIG devices. The kernel does not report that MIG devices
    /// change: run it after nvidia-smi mig.
    Refresh {
        /// Write the spec even if there is none yet
        #[arg(long)]
        create: bool,
        /// What the spec is like
        #[command(flatten)]
        spec: SpecOptions,
        /// The root directory of the driver
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        root: Option<PathBuf>,
    },
    /// List the CDI devices that engines find
    List {
        /// Where to look
        #[command(flatten)]
        dirs: SpecDirs,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Without effect: specs are found without the driver
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        root: Option<PathBuf>,
    },
    /// Show for each CDI device whether engines can use it, and why not
    #[command(after_help = "Examples:\n  oci-nvidia-hook cdi check nvidia.com/gpu=0")]
    Check(CdiCheck),
}

/// What a CDI spec is like, and where it is written.
#[derive(Args, Clone, Debug)]
pub struct SpecOptions {
    /// Write the spec there, - for stdout [default: /var/run/cdi/nvidia.yaml]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// The format of the spec [default: by the name of the file]
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(["json", "yaml"]).map(|name| format(&name)))]
    pub format: Option<Format>,
    /// How devices are named
    #[arg(long, value_name = "LIST", value_enum, default_value = "index,uuid")]
    pub name_strategy: NameStrategy,
    /// The vendor in the devices' names
    #[arg(long, value_name = "VENDOR", value_parser = vendor_or_class, default_value = "nvidia.com")]
    pub vendor: String,
    /// The class in the devices' names
    #[arg(long, value_name = "CLASS", value_parser = vendor_or_class, default_value = "gpu")]
    pub class: String,
    /// Put containers into the groups of device nodes [default: only if all engines of this host read that: Podman 5.1,
    /// CRI-O 1.30]
    #[arg(long, overrides_with = "no_additional_gids")]
    additional_gids: bool,
    /// Do not put containers into these groups
    #[arg(long, overrides_with = "additional_gids")]
    no_additional_gids: bool,
    /// The program that containers' runtimes start [default: this one]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub hook_path: Option<PathBuf>,
}

impl SpecOptions {
    /// Whether containers are put into the groups of device nodes; `None`: if the engines of this host read that.
    pub const fn additional_gids(&self) -> Option<bool> {
        match (self.additional_gids, self.no_additional_gids) {
            (false, false) => None,
            (is_on, _) => Some(is_on),
        }
    }
}

/// Where CDI specs are.
#[derive(Args, Clone, Debug, Default)]
pub struct SpecDirs {
    /// Look for specs there; the last one has priority [default: /etc/cdi, /var/run/cdi]
    #[arg(long = "spec-dir", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub spec_dirs: Vec<PathBuf>,
}

/// Options of `cdi check`.
#[derive(Args, Debug)]
pub struct CdiCheck {
    /// Devices [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Where to look
    #[command(flatten)]
    pub dirs: SpecDirs,
    /// How the answer is printed
    #[command(flatten)]
    pub output: Output,
    /// The root directory of the driver
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

/// How CDI devices are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NameStrategy {
    /// By index
    Index,
    /// By UUID
    Uuid,
    /// By index and UUID
    #[value(name = "index,uuid", alias = "uuid,index")]
    Both,
}

impl From<NameStrategy> for Naming {
    fn from(strategy: NameStrategy) -> Self {
        Self { index: strategy != NameStrategy::Uuid, uuid: strategy != NameStrategy::Index }
    }
}

/// A shell that has completions.
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
        return Err("CRI-O 1.37 does not start with a CDI spec whose vendor or class has one letter".to_owned());
    }
    Ok(text.to_owned())
}
