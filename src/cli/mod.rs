//! The command line: grammar, dispatch, exit codes.

pub mod hook;
pub mod output;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::error::{Failure, failure};
use crate::log::Log;

/// What the process was started with. Read once, here: nothing below looks at the environment.
#[derive(Debug, Default)]
pub struct Invocation {
    /// Without argv[0]
    pub args: Vec<OsString>,
    /// `$XDG_CONFIG_HOME`, for a rootless user's own config.toml
    pub xdg_config_home: Option<PathBuf>,
}

/// What to do.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    Inject { config: Option<PathBuf> },
    Nothing,
    Help,
    Version,
}

const USAGE: u8 = 2;

/// Runs the command; the exit code is 0, 1 if it failed, 2 if the command line is wrong.
#[must_use]
pub fn run(invocation: Invocation) -> ExitCode {
    let command = match parse(invocation.args) {
        Ok(command) => command,
        Err(error) => {
            Log::default().error(&error);
            return ExitCode::from(USAGE);
        }
    };
    match command {
        Command::Inject { config } => hook::run(config.as_deref(), invocation.xdg_config_home.as_deref()),
        Command::Nothing => ExitCode::SUCCESS,
        Command::Help => output::print(output::HELP),
        Command::Version => output::print(concat!("oci-nvidia-hook ", env!("CARGO_PKG_VERSION"), "\n")),
    }
}

fn parse(args: Vec<OsString>) -> Result<Command> {
    parse_args(args).map_err(|error| {
        if error.downcast_ref::<Failure>().is_some() {
            return error;
        }
        failure(format!("wrong command line: {error}"), "run \"oci-nvidia-hook --help\"")
    })
}

fn parse_args(args: Vec<OsString>) -> Result<Command> {
    use lexopt::Arg::{Long, Short, Value};
    let mut parser = lexopt::Parser::from_args(args);
    let mut config = None;
    let mut stage = None;
    while let Some(arg) = parser.next()? {
        match arg {
            Long("config") => config = Some(PathBuf::from(parser.value()?)),
            Long("help") | Short('h') => return Ok(Command::Help),
            Long("version") | Short('V') => return Ok(Command::Version),
            Value(word) if stage.is_none() => stage = Some(word),
            other => return Err(other.unexpected().into()),
        }
    }
    let Some(stage) = stage else {
        bail!("it names no stage");
    };
    match stage.to_str() {
        // CRI-O rewrites prestart into createRuntime: the same moment, the same job.
        Some("prestart" | "createRuntime") => Ok(Command::Inject { config }),
        // Nothing is left on the host when a container ends.
        Some("poststart" | "poststop") => Ok(Command::Nothing),
        _ => bail!("{stage:?} is no stage this hook serves (prestart, createRuntime, poststart, poststop)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Command> {
        parse(args.iter().map(OsString::from).collect())
    }

    #[test]
    fn commands() {
        for (args, command) in [
            (&["prestart"][..], Command::Inject { config: None }),
            (&["createRuntime"], Command::Inject { config: None }),
            (&["--config", "/c", "prestart"], Command::Inject { config: Some("/c".into()) }),
            (&["prestart", "--config=/c"], Command::Inject { config: Some("/c".into()) }),
            (&["poststop"], Command::Nothing),
            (&["--help"], Command::Help),
            (&["prestart", "-V"], Command::Version),
        ] {
            assert_eq!(parsed(args).unwrap(), command, "{args:?}");
        }
    }

    #[test]
    fn wrong_command_lines() {
        for args in [&[][..], &["precreate"], &["prestart", "x"], &["--conf", "x"], &["--config"], &["doctor"]] {
            let text = crate::error::render(&parsed(args).unwrap_err());
            assert!(text.starts_with("wrong command line: ") && text.contains("--help"), "{text}");
        }
    }
}
