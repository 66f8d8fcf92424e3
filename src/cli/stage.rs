//! Defines the stages at which engines call the hook.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::Subcommand;
use engines::hook_args;

use crate::stages::prestart::{self, Namespaces};
use crate::stages::{poststop, precreate};

/// A stage at which an engine or a runtime calls the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Subcommand)]
#[command(rename_all = "camelCase")]
pub enum Stage {
    /// Hook stage: set up the container
    ///
    /// Runtimes call this stage when the container's root file system is mounted and its process waits. The hook reads the
    /// container state from stdin, and config.json from the bundle that the state names.
    #[command(hide = true)]
    Prestart,
    /// Hook stage: same as prestart, under its current OCI name
    ///
    /// Runtimes call the hooks of both stages at the same point.
    #[command(hide = true)]
    CreateRuntime,
    /// Hook stage: set up the container from within its namespaces
    ///
    /// This stage is for engines that support only the newer stages. It does not support containers with a user namespace.
    #[command(hide = true)]
    CreateContainer,
    /// Hook stage of Podman: add the GPUs to config.json
    ///
    /// The hook reads config.json from stdin and prints the new one; the runtime then sets up the container. Do not put a hook file
    /// with this stage into a directory that CRI-O reads: CRI-O would not start.
    #[command(hide = true)]
    Precreate,
    /// Hook stage: do nothing
    #[command(hide = true)]
    Poststart,
    /// Hook stage: note the end of the container in its record
    ///
    /// Engines work without a hook file for this stage.
    #[command(hide = true)]
    Poststop,
}

impl Stage {
    /// Returns the stage with this name.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "prestart" => Self::Prestart,
            "createRuntime" => Self::CreateRuntime,
            "createContainer" => Self::CreateContainer,
            "precreate" => Self::Precreate,
            "poststart" => Self::Poststart,
            "poststop" => Self::Poststop,
            _ => return None,
        })
    }

    /// Runs the hook at this stage.
    pub fn run(self, config: Option<&Path>, debug: bool) -> ExitCode {
        match self {
            Self::Prestart | Self::CreateRuntime => {
                prestart::run(Namespaces::OfRuntime, config, debug)
            }
            Self::CreateContainer => prestart::run(Namespaces::OfContainer, config, debug),
            Self::Precreate => precreate::run(config),
            Self::Poststart => ExitCode::SUCCESS,
            Self::Poststop => poststop::run(),
        }
    }
}

/// Parses a command line that consists of a stage and `--config`. Returns `None` for any other command line, including invalid
/// ones, which clap parses and reports.
pub fn parse(args: &[OsString]) -> Option<(Stage, Option<&Path>)> {
    let call = hook_args::parse(args)?;
    if call.has_options {
        return None;
    }
    Some((Stage::named(call.stage)?, call.config))
}
