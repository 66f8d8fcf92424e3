//! The arguments of `cdi`.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser, ValueHint};
use clap::{Args, Subcommand, ValueEnum};

use cdi_spec::file::Format;
use cdi_spec::name;
use nvidia_host::cdi::generate::Naming;

use super::output::Output;

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
    /// prints nothing, and queries NVML only if something changed or MIG devices exist. The kernel does not report changes of MIG
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
    /// Write the spec to this file; for generate, - is stdout [default: /var/run/cdi/nvidia.yaml]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// Format of the spec [default: the format of the file's extension]
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(["json", "yaml"]).map(|name| format(&name)))]
    pub format: Option<Format>,
    /// Names of the devices
    #[arg(
        long,
        value_name = "LIST",
        value_enum,
        value_delimiter = ',',
        default_value = "index,uuid"
    )]
    pub name_strategy: Vec<NameStrategy>,
    /// Vendor part of the CDI kind
    #[arg(long, value_name = "VENDOR", value_parser = vendor_or_class, default_value = "nvidia.com")]
    pub vendor: String,
    /// Class part of the CDI kind; gds, mofed, gdrcopy, nvswitch and imex-channel select these devices instead of GPUs
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

    /// Returns the names that devices get.
    pub fn naming(&self) -> Naming {
        let has = |strategy| self.name_strategy.contains(&strategy);
        Naming {
            index: has(NameStrategy::Index),
            uuid: has(NameStrategy::Uuid),
            type_index: has(NameStrategy::TypeIndex),
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
    /// Format of the output
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
    /// The kind and the index, as in nvidia.com/gpu=gpu0 and nvidia.com/gpu=mig0:1
    TypeIndex,
}

fn format(name: &str) -> Format {
    if name == "json" {
        Format::Json
    } else {
        Format::Yaml
    }
}

fn vendor_or_class(text: &str) -> Result<String, String> {
    name::check_vendor_or_class(text).map_err(|why| why.to_string())?;
    if text.len() == 1 {
        return Err(
            "CRI-O 1.37 does not start if the vendor or class of a CDI spec has only one letter"
                .to_owned(),
        );
    }
    Ok(text.to_owned())
}
