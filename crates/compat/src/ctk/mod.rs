//! Runs as `nvidia-ctk`: the commands of NVIDIA's program besides `hook`.
//!
//! [`cdi`] and [`run`] translate command lines into command lines of oci-nvidia-hook. [`config`], [`runtime`] and [`transform`] change files.

mod args;
mod cdi;
mod config;
mod containerd;
mod docker;
mod refused;
mod runtime;
mod transform;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Error, Result};

use base::report::{failure, render};
use base::sys::{process, stdio};
use command_line::parse::{self, Parsed};
use findings::catalog;
use nvidia_host::programs::CTK;

use crate::THIS_PROGRAM;
use args::{Cdi, CtkCli, CtkCommand, System};

/// What a command leaves to do.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// Print this on stdout
    Print(Vec<u8>),
    /// Run oci-nvidia-hook with these arguments
    PassOn(Vec<OsString>),
}

/// What the file of an engine gets.
#[derive(Debug)]
struct RuntimeEntry<'a> {
    /// The name of the runtime
    name: &'a str,
    /// Its program
    program: &'a Path,
    /// Whether containers use it that do not select a runtime
    is_default: bool,
}

/// Reports whether these arguments are a command other than "hook".
#[must_use]
pub fn is_command(args: &[OsString]) -> bool {
    for word in args {
        if !word.as_encoded_bytes().starts_with(b"-") {
            return word != "hook";
        }
    }
    true
}

/// Runs the command with the arguments after `argv[0]`. Returns 0, 1 if the command failed, or 2 if the command line is invalid.
#[must_use]
pub fn run(args: &[OsString]) -> ExitCode {
    let parsed = refused::check(args).and_then(|()| parse::parse::<CtkCli>(args));
    let cli = match parsed {
        Ok(Parsed::Run(cli)) => cli,
        Ok(Parsed::Help(text)) => return print(text.as_bytes()),
        Ok(Parsed::Version) => {
            return print(
                format!(
                    "{CTK} version {} (oci-nvidia-hook)\n",
                    env!("CARGO_PKG_VERSION")
                )
                .as_bytes(),
            );
        }
        Err(error) => return report(&error, 2),
    };
    match carry_out(&cli.command) {
        Ok(Outcome::Print(text)) => print(&text),
        Ok(Outcome::PassOn(args)) => {
            let mut command = vec![OsString::from("oci-nvidia-hook")];
            command.extend(args);
            let error = process::replace(Path::new(THIS_PROGRAM), &command);
            report(&Error::new(error).context("cannot run the hook"), 1)
        }
        Err(error) => report(&error, if is_usage(&error) { 2 } else { 1 }),
    }
}

fn carry_out(command: &CtkCommand) -> Result<Outcome> {
    match command {
        CtkCommand::Cdi(Cdi::Generate(options)) => cdi::generate(options).map(Outcome::PassOn),
        CtkCommand::Cdi(Cdi::List { spec_dirs }) => {
            let mut words: Vec<OsString> = vec!["cdi".into(), "list".into()];
            for dir in spec_dirs {
                words.extend(["--spec-dir".into(), dir.into()]);
            }
            Ok(Outcome::PassOn(words))
        }
        CtkCommand::Cdi(Cdi::Transform(args::Transform::Root(options))) => {
            transform::root(options).map(Outcome::Print)
        }
        CtkCommand::Config(options) => config::run(options).map(Outcome::Print),
        CtkCommand::Info => Ok(Outcome::PassOn(vec!["info".into()])),
        CtkCommand::Runtime(args::Runtime::Configure(options)) => {
            runtime::configure(options).map(Outcome::Print)
        }
        CtkCommand::System(
            System::CreateDeviceNodes(nodes) | System::CreateDevCharSymlinks { nodes, .. },
        ) => {
            let mut words: Vec<OsString> = vec!["prepare".into()];
            if let Some(root) = &nodes.driver_root {
                words.extend(["--root".into(), root.into()]);
            }
            Ok(Outcome::PassOn(words))
        }
        CtkCommand::Hook => Err(refusal(
            "the name of the hook is missing",
            "run \"nvidia-ctk hook --help\"",
        )),
    }
}

/// Returns the error for an option that is known, but not supported.
fn refusal(why: impl Into<String>, hint: impl Into<String>) -> anyhow::Error {
    failure(
        &catalog::COMMAND_LINE,
        format!("invalid command line: {}", why.into()),
        hint,
    )
}

fn is_usage(error: &anyhow::Error) -> bool {
    base::report::kind_of(error).is_some_and(|kind| std::ptr::eq(kind, &catalog::COMMAND_LINE))
}

/// Prints a line that is not part of the output.
fn note(text: &str) {
    stdio::print_stderr(&format!("{CTK}: {text}\n"));
}

fn report(error: &anyhow::Error, code: u8) -> ExitCode {
    note(&render(error));
    ExitCode::from(code)
}

fn print(text: &[u8]) -> ExitCode {
    match stdio::print(text).context("cannot write to stdout") {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => report(&error, 1),
    }
}

#[cfg(test)]
#[path = "../../../../tests/it/known_options.rs"]
mod known_options;

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn outcome(line: &str) -> Result<Outcome> {
        let args: Vec<_> = line.split_whitespace().map(OsString::from).collect();
        refused::check(&args)?;
        match parse::parse::<CtkCli>(&args)? {
            Parsed::Run(cli) => carry_out(&cli.command),
            Parsed::Help(_) | Parsed::Version => anyhow::bail!("help"),
        }
    }

    #[test]
    fn lines_of_guides_become_lines_of_the_hook() {
        for (line, words) in [
            ("cdi generate", "cdi generate --output - --format yaml"),
            (
                "cdi generate --output=/etc/cdi/nvidia.yaml",
                "cdi generate --output /etc/cdi/nvidia.yaml",
            ),
            (
                "-q cdi generate --output /c/nvidia",
                "cdi generate --output /c/nvidia.yaml",
            ),
            (
                "cdi generate --output /c/x.json --format=json --mode=nvml",
                "cdi generate --output /c/x.json --format json",
            ),
            (
                "cdi generate --device-name-strategy=type-index --device-name-strategy=uuid --mode auto",
                "cdi generate --name-strategy type-index,uuid --output - --format yaml",
            ),
            (
                "cdi generate --driver-root /run/nvidia/driver --vendor=example.com --class=x",
                "cdi generate --root /run/nvidia/driver --vendor example.com --class x --output - --format yaml",
            ),
            (
                "cdi generate --feature-flag no-additional-gids-for-device-nodes",
                "cdi generate --no-additional-gids --output - --format yaml",
            ),
            (
                "cdi generate --mode=gds",
                "cdi generate --class gds --output - --format yaml",
            ),
            (
                "cdi generate --mode imex --output /c/i",
                "cdi generate --class imex-channel --output /c/i.yaml",
            ),
            ("cdi list", "cdi list"),
            (
                "cdi list --spec-dir=/a --spec-dir /b",
                "cdi list --spec-dir /a --spec-dir /b",
            ),
            ("info", "info"),
            (
                "system create-device-nodes --control-devices --load-kernel-modules",
                "prepare",
            ),
            ("system create-dev-char-symlinks --create-all", "prepare"),
            (
                "system create-dev-char-symlinks --driver-root=/d",
                "prepare --root /d",
            ),
        ] {
            let words = words.split(' ').map(OsString::from).collect();
            assert_eq!(outcome(line).unwrap(), Outcome::PassOn(words), "{line}");
        }
    }

    #[test]
    fn what_is_not_supported_has_a_reason() {
        for (line, why) in [
            ("cdi generate --mode=csv", "invalid value \"csv\""),
            (
                "cdi generate --mode=gds --class=x",
                "--class is not supported with this mode: ",
            ),
            (
                "cdi generate --device-id=0",
                "--device-id is not supported: ",
            ),
            (
                "-d cdi generate --nvidia-ctk-path /usr/bin/nvidia-ctk",
                "--nvidia-ctk-path is not supported: ",
            ),
            ("cdi generate --feature-flag=x", "invalid value \"x\""),
            (
                "system create-device-nodes --dry-run",
                "--dry-run is not supported: ",
            ),
            (
                "system create-dev-char-symlinks --dev-char-path=/x",
                "invalid value \"/x\"",
            ),
            (
                "runtime configure --config-mode=oci-hook",
                "invalid value \"oci-hook\"",
            ),
            (
                "runtime configure --cdi.enabled=false",
                "invalid value \"false\"",
            ),
            ("frobnicate", "unrecognized subcommand \"frobnicate\""),
            ("hook", "the name of the hook is missing"),
        ] {
            let text = render(&outcome(line).unwrap_err());
            assert!(
                text.contains(&format!("invalid command line: {why}")) && text.contains("\nhint: "),
                "{line}: {text}"
            );
            assert!(text.contains(" (ONH-002)"), "{text}");
        }
    }

    /// Each option of NVIDIA's program is known, so that it is carried out or refused with a reason.
    #[test]
    fn every_option_is_known() {
        use clap::CommandFactory;
        let count = known_options::check(&CtkCli::command(), &refused::names(), CTK);
        assert!(count > 60, "{count}");
    }

    #[test]
    fn hook_entries_are_not_commands() {
        for (line, is) in [
            ("cdi generate", true),
            ("--help", true),
            ("", true),
            ("-q hook x", false),
            ("hook", false),
        ] {
            assert_eq!(
                is_command(
                    &line
                        .split_whitespace()
                        .map(OsString::from)
                        .collect::<Vec<_>>()
                ),
                is,
                "{line}"
            );
        }
    }
}
