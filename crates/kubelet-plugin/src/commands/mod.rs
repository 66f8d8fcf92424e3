//! The commands of the program: reads the command line, and runs one of them.

pub mod agent;
pub mod ask;
pub mod check;
pub mod check_claims;
pub mod claims;
pub mod cli;
pub mod control;
mod delivery;
mod mps_report;
pub mod observer;
pub mod offered;
pub mod report;
pub mod role;
pub mod run;

use std::ffi::OsString;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use base::report::{failure, kind_of};
use base::sys::stdio;
use clap::CommandFactory;
use clap_complete::{generate, shells};
use command_line::parse::{self, Parsed};
use command_line::terminal::{Color, ColorVariables};
use findings::catalog;
use plugin_api::control as control_socket;

use crate::cdi_specs;
use crate::log::{self, Log};
use crate::settings::options::Options;
use crate::settings::values::Interface;
use crate::settings::{self, Settings};
use crate::strategy::Chooser;
use cli::{Cli, Command, EngineOptions, Shell};
use report::{CheckReport, JsonReport};
use role::{Role, SpecPaths};

/// The exit status for an invalid command line.
const USAGE: u8 = 2;

/// The name of this program.
const PROGRAM: &str = env!("CARGO_PKG_NAME");

/// The name of NVIDIA's plugin.
const NVIDIAS: &str = "nvidia-device-plugin";

/// Runs the command line of this process, and returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = arguments(std::env::args_os());
    if arguments.is_empty() {
        stdio::print_stderr(&format!("{}\n", Cli::command().render_long_help()));
        let hint = format!("run \"{PROGRAM} --help\"");
        return failed(&failure(
            &catalog::COMMAND_LINE,
            "invalid command line: a command is missing",
            hint,
        ));
    }
    let printed = match parse::parse(&arguments) {
        Ok(Parsed::Run(cli)) => dispatch(cli),
        Ok(Parsed::Help(text)) => print(&text),
        Ok(Parsed::Version) => print(&format!("{PROGRAM} {}\n", env!("CARGO_PKG_VERSION"))),
        Err(error) => Err(error),
    };
    printed.unwrap_or_else(|error| failed(&error))
}

fn failed(error: &anyhow::Error) -> ExitCode {
    Log::new().error(error);
    if kind_of(error) == Some(&catalog::COMMAND_LINE) {
        return ExitCode::from(USAGE);
    }
    ExitCode::FAILURE
}

/// Returns the arguments after argv\[0\]. Adds the command if the program is called with the name of
/// NVIDIA's device plugin, which has no commands: manifests contain that name.
fn arguments(given: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut given = given.into_iter();
    let program = given.next().map(PathBuf::from).unwrap_or_default();
    let mut arguments = Vec::new();
    if program.file_name().is_some_and(|name| name == NVIDIAS) {
        arguments.push("run".into());
    }
    arguments.extend(given);
    arguments
}

fn dispatch(cli: Cli) -> Result<ExitCode> {
    if cli.debug {
        log::enable_debug();
    }
    let config = cli.config;
    match cli.command {
        Command::Run {
            mut options,
            cdi_dir,
            hook_path,
            run_dir,
            nri,
        } => {
            options.config = config;
            let (settings, findings) = settings::read(&options)?;
            Log::new().findings(&findings);
            let mut specs = SpecPaths {
                dir: cdi_dir,
                hook: hook_path,
            };
            if nri.is_some() && specs.dir.is_none() {
                specs.dir = Some(cdi_specs::DIR.into());
            }
            let role = Role::for_kubelet(&settings, run_dir);
            let nri = nri.map(|socket| EngineOptions::at(socket).options());
            let config = options.config.as_deref();
            block_on(run::run(settings, config, role, specs, nri))?
        }
        Command::Nri {
            engine,
            cdi_dir,
            hook_path,
        } => {
            let config = config.as_deref();
            let (settings, findings) = settings::read_file(Settings::default(), config)?;
            Log::new().findings(&findings);
            let specs = SpecPaths {
                dir: Some(cdi_dir),
                hook: hook_path,
            };
            let nri = Some(engine.options());
            block_on(run::run(settings, config, Role::Engine, specs, nri))?
        }
        Command::Check {
            mut options,
            run_dir,
            json,
        } => {
            options.config = config;
            run_check(&options, &run_dir, json, cli.color)
        }
        Command::Clear { uuid, run_dir } => clear(&uuid, &run_dir),
        Command::Completion { shell } => print(&completion(shell)?),
    }
}

fn run_check(options: &Options, run_dir: &Path, json: bool, color: Color) -> Result<ExitCode> {
    let (settings, findings) = settings::read(options)?;
    let offered = control_socket::devices(run_dir);
    let config = options.config.as_deref();
    match settings.plugin.interface {
        Interface::Dra => {
            let asked = check_claims::check(&settings, config, &findings, &offered);
            print_report(&block_on(asked)??, json, color)
        }
        Interface::DevicePlugin => {
            let dir = delivery::spec_dir(&offered);
            let chooser = Chooser::new(&settings.plugin, &settings.kubelet_dir, &dir, Log::new());
            let choice = chooser.choose();
            let asked = check::check(&settings, config, &choice, &findings, &offered);
            print_report(&block_on(asked)??, json, color)
        }
    }
}

fn print_report<D: JsonReport>(
    report: &CheckReport<D>,
    json: bool,
    color: Color,
) -> Result<ExitCode> {
    let text = if json {
        report.to_json()?
    } else {
        report.to_text(ColorVariables::read().stdout(color))
    };
    let printed = print(&text)?;
    if printed != ExitCode::SUCCESS {
        return Ok(printed);
    }
    Ok(report.exit_code())
}

fn clear(uuid: &str, run_dir: &Path) -> Result<ExitCode> {
    let cleared = control::clear(run_dir, uuid)?;
    if cleared {
        return print("cleared\n");
    }
    print("the plugin knows no errors of this GPU\n")?;
    Ok(ExitCode::FAILURE)
}

fn completion(shell: Shell) -> Result<String> {
    let mut cli = Cli::command();
    let mut script = Vec::new();
    match shell {
        Shell::Bash => generate(shells::Bash, &mut cli, PROGRAM, &mut script),
        Shell::Zsh => generate(shells::Zsh, &mut cli, PROGRAM, &mut script),
        Shell::Fish => generate(shells::Fish, &mut cli, PROGRAM, &mut script),
    }
    Ok(String::from_utf8(script)?)
}

/// Runs on this thread: the kernel kills the monitor when the thread that started it ends (PR_SET_PDEATHSIG(2const)).
fn block_on<T>(future: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start tokio")?;
    let result = runtime.block_on(future);
    // A thread that reads a file or runs a program may wait without an end.
    runtime.shutdown_background();
    Ok(result)
}

fn print(text: &str) -> Result<ExitCode> {
    let is_read = stdio::print(text.as_bytes()).context("cannot write to stdout")?;
    if is_read {
        return Ok(ExitCode::SUCCESS);
    }
    Ok(ExitCode::FAILURE)
}
