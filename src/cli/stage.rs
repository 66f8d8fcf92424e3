//! Defines the stages at which engines call the hook.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::Subcommand;
use engines::hook_args::{self, REMOVED_STAGES};
use nvidia_host::programs::EDIT_CONFIG;

use crate::stages::{edit_config, poststop, prestart, removed};

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
    /// Hook stage: do nothing
    #[command(hide = true)]
    Poststart,
    /// Hook stage: note the end of the container in its record
    ///
    /// Engines work without a hook file for this stage.
    #[command(hide = true)]
    Poststop,
    /// Print config.json with the GPUs, for nvidia-container-runtime
    ///
    /// The program reads config.json from stdin. It prints the config.json with which nvidia-container-runtime starts runc.
    #[command(name = EDIT_CONFIG, hide = true)]
    EditConfig,
    /// A stage of an earlier version, one of [`REMOVED_STAGES`]
    #[command(skip)]
    Removed(&'static str),
}

impl Stage {
    /// Returns the stage with this name.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "prestart" => Self::Prestart,
            "createRuntime" => Self::CreateRuntime,
            "poststart" => Self::Poststart,
            "poststop" => Self::Poststop,
            _ => {
                let mut removed = REMOVED_STAGES.into_iter();
                return removed.find(|stage| *stage == name).map(Self::Removed);
            }
        })
    }

    /// Runs the hook at this stage.
    pub fn run(self, config: Option<&Path>, debug: bool) -> ExitCode {
        match self {
            Self::Prestart | Self::CreateRuntime => prestart::run(config, debug),
            Self::EditConfig => edit_config::run(config),
            Self::Removed(stage) => removed::run(stage, config),
            Self::Poststart => ExitCode::SUCCESS,
            Self::Poststop => poststop::run(),
        }
    }
}

/// Parses a command line that consists of a stage and `--config`, or of [`EDIT_CONFIG`]. Returns `None` for any other command line,
/// including invalid ones, which clap parses and reports.
pub fn parse(args: &[OsString]) -> Option<(Stage, Option<&Path>)> {
    if let [word] = args
        && word == EDIT_CONFIG
    {
        return Some((Stage::EditConfig, None));
    }
    let call = hook_args::parse(args)?;
    let stage = Stage::named(call.stage)?;
    // clap does not know the removed stages.
    if call.has_options && !matches!(stage, Stage::Removed(_)) {
        return None;
    }
    Some((stage, call.config))
}
