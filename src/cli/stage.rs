//! The stages at which engines call the program. Their command lines are read here by hand, so that the start of a container
//! never runs the parser of the other commands.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::Subcommand;

use super::output;
use crate::stages::prestart::{self, Place};
use crate::stages::{poststop, precreate};

/// A command that an engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Subcommand)]
#[command(rename_all = "camelCase")]
pub enum Stage {
    /// Hook stage: set the container up
    ///
    /// An engine calls it when the container's file system is mounted and its process waits. The container state is read
    /// from stdin, and config.json from the bundle that the state names.
    Prestart,
    /// Hook stage: the same as prestart, by its newer name
    ///
    /// CRI-O and Podman call it where a hook's JSON file says prestart.
    CreateRuntime,
    /// Hook stage: the same, from inside the container's namespaces
    ///
    /// For engines that know only the newer stages. It does not work in a container with a user namespace.
    CreateContainer,
    /// Podman's hook stage: print config.json with the GPUs in it
    ///
    /// It reads config.json from stdin and prints the new one; the runtime then sets the container up. Never put a JSON
    /// file with this stage into a directory that CRI-O reads: CRI-O would not start.
    Precreate,
    /// Hook stage: do nothing
    Poststart,
    /// Hook stage: remove what a start created, and its record
    ///
    /// What a start created in the container is removed if it is unchanged. The record of a start that failed stays for a
    /// while.
    Poststop,
}

impl Stage {
    /// The stage of this name.
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

    /// Runs it.
    pub fn run(self, config: Option<&Path>, debug: bool) -> ExitCode {
        match self {
            Self::Prestart | Self::CreateRuntime => prestart::run(Place::Outside, config, debug),
            Self::CreateContainer => prestart::run(Place::Inside, config, debug),
            Self::Precreate => match precreate::run(config) {
                Some(config_json) => output::write(&config_json),
                None => ExitCode::FAILURE,
            },
            Self::Poststart => ExitCode::SUCCESS,
            Self::Poststop => poststop::run(),
        }
    }
}

/// The stage and `--config` of a command line that has nothing else; `None` for any other, also for a wrong one: the parser of
/// all commands reads those.
pub fn parse(args: &[OsString]) -> Option<(Stage, Option<&Path>)> {
    let (mut stage, mut config) = (None, None);
    let is_value = |value: &&str| !value.is_empty() && (*value == "-" || !value.starts_with('-'));
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let word = arg.to_str()?;
        if word == "--config" {
            config = Some(args.next()?.to_str().filter(is_value)?);
        } else if let Some(value) = word.strip_prefix("--config=") {
            config = Some(Some(value).filter(|value| !value.is_empty())?);
        } else if stage.is_none() {
            stage = Some(Stage::named(word)?);
        } else {
            return None;
        }
    }
    Some((stage?, config.map(Path::new)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_command_lines_are_read_by_hand() {
        let read = |line: &str| {
            let args: Vec<_> = line.split_whitespace().map(OsString::from).collect();
            parse(&args).map(|(stage, config)| (stage, config.map(Path::to_path_buf)))
        };
        let with_config = |stage| Some((stage, Some("/c".into())));
        for (line, expected) in [
            ("prestart", Some((Stage::Prestart, None))),
            ("createContainer", Some((Stage::CreateContainer, None))),
            ("--config /c prestart", with_config(Stage::Prestart)),
            ("--config /x prestart --config /c", with_config(Stage::Prestart)),
            ("precreate --config=/c", with_config(Stage::Precreate)),
            ("prestart --config -c", None),
            ("prestart --config", None),
            ("prestart --config=", None),
            ("prestart --help", None),
            ("prestart prestart", None),
            ("startContainer", None),
            ("explain", None),
            ("--config /c", None),
            ("", None),
        ] {
            assert_eq!(read(line), expected, "{line}");
        }
    }
}
