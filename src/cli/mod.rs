//! Runs the command line: dispatches on the name with which the program is called, and on the command.
//!
//! [`stage`] parses what engines call, and is tried first. [`args`] defines all other commands and options, [`parse`] turns the
//! errors of clap into ours.

pub mod args;
pub(crate) mod cdi;
pub mod cdi_check;
mod completion;
mod containers;
pub(crate) mod doctor;
pub mod doctor_text;
pub(crate) mod explain;
pub(crate) mod files;
mod help;
mod hook_config;
pub(crate) mod info;
mod mps_line;
pub(crate) mod nvidia;
pub(crate) mod output;
pub(crate) mod plan;
mod plan_image;
pub(crate) mod prepare;
pub(crate) mod ps;
pub(crate) mod selection;
mod slow;
pub mod stage;
pub mod status;
mod time;
pub(crate) mod usage;
mod version;
pub(crate) mod why;
mod why_list;

pub use command_line::parse;
pub(crate) use command_line::terminal;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;

use base::report::{failure, kind_of};
use base::sys::{process, stdio};
use findings::catalog;
use nvidia_host::cdi::entry::{self as rootfs_edits, RootfsEdits};
use nvidia_host::programs;

use crate::record::call::{self, Call};
use crate::stages;
use args::{Cli, Command};
use parse::Parsed;
use terminal::ColorVariables;
use usage::{hook_usage_error, usage_error};

const VERSION: &str = concat!("oci-nvidia-hook ", env!("CARGO_PKG_VERSION"), "\n");

/// What the program reads from its environment, before it clears it.
#[derive(Debug)]
pub(crate) struct Environment {
    colors: ColorVariables,
    home: Option<PathBuf>,
}

impl Environment {
    #[expect(clippy::disallowed_methods, reason = "this is where it is read")]
    pub(crate) fn read() -> Self {
        Self {
            colors: ColorVariables::read(),
            home: std::env::var_os("HOME").map(PathBuf::from),
        }
    }
}

/// Does what needs the environment of this process, or a process without one. Returns `None` for all other command lines.
pub(crate) fn before_environment(args: &[OsString]) -> Option<ExitCode> {
    let (called, rest) = args.split_first()?;
    let name = Path::new(called).file_name().and_then(OsStr::to_str)?;
    match name {
        programs::RUNTIME => Some(nvidia_names::runtime::run(rest)),
        _ if programs::ALL.contains(&name) && has_environment() => Some(start_again(name, args)),
        _ => None,
    }
}

fn has_environment() -> bool {
    std::env::vars_os().next().is_some()
}

/// Starts this program again without an environment. Hook entries that other programs wrote can lack an `env`. runc before 1.3 then passes
/// the environment of the image to hooks at the createContainer stage (CVE-2025-23266). No dynamic linker reads it, because this program
/// is static. The start-up code of libc reads variables such as GLIBC_TUNABLES even then.
#[inline(never)]
fn start_again(name: &str, args: &[OsString]) -> ExitCode {
    let error = process::replace(Path::new("/proc/self/exe"), args);
    let error = failure(
        &catalog::SYSTEM,
        format!("cannot start again without an environment: {error}"),
        "mount /proc",
    );
    Call::for_stage(name).error(&error);
    ExitCode::FAILURE
}

/// Runs the command with these arguments, which begin with argv\[0\]. Returns 0, 1 if the command failed, or 2 if the command line
/// is invalid; `doctor` and `status` have more codes.
pub(crate) fn run(args: impl IntoIterator<Item = OsString>, environment: Environment) -> ExitCode {
    let mut args = args.into_iter();
    let called = args.next().unwrap_or_default();
    let args: Vec<OsString> = args.collect();
    let name = Path::new(&called).file_name().and_then(OsStr::to_str);
    if let Some(
        name @ (programs::RUNTIME_HOOK
        | programs::TOOLKIT
        | programs::CLI
        | programs::CDI_HOOK
        | programs::CTK),
    ) = name
    {
        return run_as(name, args);
    }
    if let Some((stage, config)) = stage::parse(&args) {
        return stage.run(config, false);
    }
    run_command(&args, environment)
}

/// Runs the program under the name of one of NVIDIA's.
// Not inlined, as the functions below: `run` would have a stack for the values of all commands, and each page costs a start a fault.
#[inline(never)]
fn run_as(name: &str, args: Vec<OsString>) -> ExitCode {
    match name {
        programs::RUNTIME_HOOK | programs::TOOLKIT => nvidia::hook::run(args),
        programs::CLI => nvidia::cli::run(args),
        programs::CTK if nvidia_names::ctk::is_command(&args) => nvidia_names::ctk::run(&args),
        _ => nvidia::cdi_hook::run(name, args),
    }
}

#[inline(never)]
fn run_command(args: &[OsString], environment: Environment) -> ExitCode {
    match args.split_first() {
        // The hook entry of this program's CDI specs.
        Some((verb, rest)) if verb == rootfs_edits::VERB => run_hook_entry(rest),
        Some((verb, rest)) if verb == completion::VERB => {
            completion::complete(rest, environment.home.as_deref())
        }
        None => {
            stdio::print_stderr(&(help::text(&[]).unwrap_or_default() + "\n"));
            usage_error(&failure(
                &catalog::COMMAND_LINE,
                "a command is missing",
                "run \"oci-nvidia-hook help\"",
            ))
        }
        // The tests of the cost of a stage compare with this command, so it must not run clap.
        Some((word, [])) if word == "--version" => output::print(VERSION),
        _ => match parse::parse(args) {
            Ok(Parsed::Run(cli)) => {
                carry_out(&cli, environment).unwrap_or_else(|error| failed(&error))
            }
            Ok(Parsed::Help(text)) => output::print(&text),
            Ok(Parsed::Version) => output::print(VERSION),
            Err(error) => usage_error(&error),
        },
    }
}

fn run_hook_entry(args: &[OsString]) -> ExitCode {
    match RootfsEdits::parse(args.to_vec()) {
        Ok(edits) => stages::rootfs::run(edits),
        Err(error) => hook_usage_error(
            rootfs_edits::VERB,
            &failure(
                &catalog::COMMAND_LINE,
                format!("invalid command line: {error}"),
                "run \"oci-nvidia-hook --help\"",
            ),
        ),
    }
}

/// Reports the failure of a command. Some parts of a command line are judged only when the command runs.
fn failed(error: &anyhow::Error) -> ExitCode {
    let kind = kind_of(error);
    if kind.is_some_and(|kind| kind.id() == catalog::COMMAND_LINE.id()) {
        return usage_error(error);
    }
    Call::default().error(error);
    ExitCode::FAILURE
}

fn carry_out(
    Cli {
        config,
        color,
        debug,
        command,
    }: &Cli,
    environment: Environment,
) -> Result<ExitCode> {
    if let Some(home) = environment.home {
        status::set_home(home);
    }
    let config = hook_config::of_command(command, config.as_deref());
    let config = config.as_deref();
    let terminal = environment.colors.stdout(*color);
    if *debug {
        call::log_to_stderr();
        base::debug::set(call::debug);
    }
    // An engine may give its terminal to the hook.
    if !matches!(command, Command::Stage(_)) {
        slow::print_wait_notice();
    }
    match command {
        Command::Stage(stage) => Ok(stage.run(config, false)),
        Command::Plan(options) => plan::run(options, config, terminal),
        Command::Explain(options) => explain::run(options, terminal),
        Command::Doctor(options) => Ok(doctor::run(options, config, terminal)),
        Command::Status(options) => status::run(*options, config, terminal),
        Command::Ps(options) => ps::run(options, config, terminal),
        Command::Why(options) => why::run(options, config, terminal),
        Command::Info(options) => info::run(options, config, terminal),
        Command::Files(options) => files::run(options, config),
        Command::Prepare(options) => prepare::run(options, config),
        Command::Cdi(command) => cdi::run(command, config, terminal),
        Command::Completion { shell } => Ok(completion::run(*shell)),
        Command::Version => Ok(version::run(config)),
        Command::Help { command } => Ok(help::run(command)),
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    fn parsed(args: &[&str]) -> Result<Cli> {
        match parse::parse(&args.iter().map(OsString::from).collect::<Vec<_>>())? {
            Parsed::Run(cli) => Ok(cli),
            Parsed::Help(text) => bail!("{text}"),
            Parsed::Version => bail!("version"),
        }
    }

    #[test]
    fn options_of_commands() {
        let config = parsed(&["info", "--config", "/c"]).unwrap().config;
        assert_eq!(config, Some("/c".into()));
        assert_eq!(
            parsed(&["--config=/x", "info", "--config=/c"])
                .unwrap()
                .config,
            config,
            "the last one counts"
        );
        let Command::Files(list) = parsed(&["files", "-lbd", "0,1", "--device=GPU-x"])
            .unwrap()
            .command
        else {
            panic!()
        };
        assert_eq!(
            list.parts.selection.devices,
            Some(vec!["0".into(), "1".into(), "GPU-x".into()])
        );
        assert!(list.parts.libraries && list.parts.binaries && !list.parts.ipcs);
        let Command::Cdi(args::Cdi::Check(check)) = parsed(&["cdi", "check", "0", "--json", "all"])
            .unwrap()
            .command
        else {
            panic!()
        };
        assert!(check.output.json && check.names == ["0", "all"]);
        let Command::Plan(plan) = parsed(&["plan", "-", "--request"]).unwrap().command else {
            panic!()
        };
        assert!(plan.container == "-" && plan.request_only);
        for (line, gids) in [
            (&[][..], None),
            (&["--additional-gids"], Some(true)),
            (&["--additional-gids", "--no-additional-gids"], Some(false)),
        ] {
            let Command::Cdi(args::Cdi::Refresh { spec, .. }) =
                parsed(&[&["cdi", "refresh"], line].concat())
                    .unwrap()
                    .command
            else {
                panic!()
            };
            assert_eq!(spec.additional_gids(), gids, "{line:?}");
        }
    }

    #[test]
    fn help_can_stand_anywhere() {
        for (args, usage) in [
            (
                &["--help"][..],
                "Usage: oci-nvidia-hook [OPTIONS] <COMMAND>",
            ),
            (&["files", "-h"], "Usage: oci-nvidia-hook files [OPTIONS]"),
            (
                &["files", "--json", "--help"],
                "Usage: oci-nvidia-hook files [OPTIONS]",
            ),
            (
                &["cdi", "--help"],
                "Usage: oci-nvidia-hook cdi [OPTIONS] <COMMAND>",
            ),
            (
                &["cdi", "check", "--help"],
                "Usage: oci-nvidia-hook cdi check [OPTIONS] [NAME]...",
            ),
        ] {
            let text = parsed(args).unwrap_err().to_string();
            assert!(text.contains(usage), "{args:?}: {text}");
        }
    }

    #[test]
    fn stages_have_the_same_names_for_both_parsers() {
        let mut stages = 0;
        for command in <Cli as clap::CommandFactory>::command().get_subcommands() {
            let Some(stage) = stage::Stage::named(command.get_name()) else {
                continue;
            };
            let line = [command.get_name(), "--config=/c"];
            let Cli {
                config,
                command: Command::Stage(found),
                ..
            } = parsed(&line).unwrap()
            else {
                panic!("{line:?}")
            };
            assert_eq!((found, config.as_deref()), (stage, Some(Path::new("/c"))));
            stages += 1;
        }
        assert_eq!(stages, engines::hook_args::STAGES.len());
        let mut commands = engines::hook_args::COMMANDS.to_vec();
        for command in <Cli as clap::CommandFactory>::command().get_subcommands() {
            if !command.is_hide_set() {
                assert!(commands.contains(&command.get_name()), "{command:?}");
                commands.retain(|known| *known != command.get_name());
            }
        }
        assert!(commands.is_empty(), "{commands:?}");
    }

    #[test]
    fn wrong_command_lines() {
        for args in [
            &[][..],
            &["startContainer"],
            &["prestart", "--json"],
            &["--conf", "x"],
            &["doctor", "--pid", "0"],
            // An option is not a value, except after "=".
            &["info", "--root", "--x"],
            &["info", "--root", ""],
            &["--config", "-x", "prestart"],
            &["info", "\x1b[2J\n\nx"],
        ] {
            let text = base::report::render(&parsed(args).unwrap_err());
            let (message, hint) = text.split_once('\n').unwrap();
            assert!(
                message.starts_with("invalid command line: ") && message.ends_with(" (ONH-002)"),
                "{text}"
            );
            assert!(
                hint.starts_with("hint: ") && hint.ends_with("--help\"") && !hint.contains('\n'),
                "{text}"
            );
            assert!(!text.contains('\x1b'), "{text}");
        }
    }

    #[test]
    fn values_that_look_like_options() {
        for (args, value) in [
            (&["info", "--root=--x"][..], "--x"),
            (&["info", "--root", "-"], "-"),
            (&["info", "--root=-x"], "-x"),
        ] {
            let Command::Info(info) = parsed(args).unwrap().command else {
                panic!()
            };
            assert_eq!(info.root, Some(value.into()), "{args:?}");
        }
        let Command::Files(list) = parsed(&["files", "-d-1", "-d=-2"]).unwrap().command else {
            panic!()
        };
        assert_eq!(
            list.parts.selection.devices,
            Some(vec!["-1".into(), "-2".into()])
        );
    }

    #[test]
    fn examples_are_command_lines() {
        fn check(command: &clap::Command) -> usize {
            let text = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            let examples = text
                .lines()
                .filter_map(|line| line.trim().strip_prefix("oci-nvidia-hook "));
            let checked = examples.map(|line| {
                let words: Vec<_> = line
                    .split([' ', '>', '<'])
                    .take_while(|word| !word.is_empty())
                    .collect();
                parsed(&words).unwrap_or_else(|error| panic!("{line}: {error}"))
            });
            checked.count() + command.get_subcommands().map(check).sum::<usize>()
        }
        assert!(check(&<Cli as clap::CommandFactory>::command()) > 10);
    }

    #[test]
    fn clap_finds_no_mistake() {
        <Cli as clap::CommandFactory>::command().debug_assert();
        <nvidia::cli::ContainerCli as clap::CommandFactory>::command().debug_assert();
    }
}
