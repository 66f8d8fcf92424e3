//! The commands of the program: reads the command line, and runs one of them.

pub mod ask;
pub mod check;
pub mod check_claims;
pub mod claims;
pub mod cli;
pub mod control;
pub mod observer;
pub mod offered;
pub mod run;

use std::ffi::OsString;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use base::paths::HostPath;
use base::report::{failure, kind_of};
use base::sys::stdio;
use clap::CommandFactory;
use clap_complete::{generate, shells};
use command_line::parse::{self, Parsed};
use command_line::terminal::Environment;
use engines::kubelet_plugin::running;
use findings::catalog;
use nvidia_host::config;

use crate::cdi_keeper;
use crate::log::{self, Log};
use crate::monitor::{self, measure::Measures};
use crate::settings::values::Interface;
use crate::settings::{self, Settings};
use crate::strategy::Chooser;
use cli::{Cli, Command, Engine, Shell};
use run::Paths;

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
        Ok(Parsed::Version) => print(concat!(
            env!("CARGO_PKG_NAME"),
            " ",
            env!("CARGO_PKG_VERSION"),
            "\n"
        )),
        Err(error) => Err(error),
    };
    printed.unwrap_or_else(|error| failed(&error))
}

fn failed(error: &anyhow::Error) -> ExitCode {
    Log::new().error(error);
    let is_usage = kind_of(error) == Some(&catalog::COMMAND_LINE);
    if is_usage {
        ExitCode::from(USAGE)
    } else {
        ExitCode::FAILURE
    }
}

/// Returns the arguments after argv\[0\]. Adds the command if the program is called with the name of NVIDIA's, which has none:
/// manifests contain that name.
fn arguments(given: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut given = given.into_iter();
    let program = given.next();
    let name = program
        .as_ref()
        .and_then(|program| Path::new(program).file_name());
    let command = name
        .is_some_and(|name| name == NVIDIAS)
        .then(|| "run".into());
    command.into_iter().chain(given).collect()
}

fn dispatch(
    Cli {
        config,
        color,
        debug,
        command,
    }: Cli,
) -> Result<ExitCode> {
    if debug {
        log::enable_debug();
    }
    match command {
        Command::Run {
            mut options,
            cdi_dir,
            hook_path,
            run_dir,
            nri,
        } => {
            options.config = config;
            let (settings, findings) = settings::read(&options)?;
            findings
                .iter()
                .for_each(|finding| Log::new().finding(finding));
            let cdi_dir = cdi_dir.or_else(|| nri.as_ref().map(|_| PathBuf::from(cdi_keeper::DIR)));
            let paths = Paths {
                kubelet_dir: Some(settings.kubelet_dir.clone()),
                cdi_dir,
                hook: hook_path,
                run_dir,
            };
            let nri = nri.map(|socket| Engine::at(socket).options());
            block_on(run::run(settings, options.config.as_deref(), paths, nri))?
        }
        Command::Nri {
            engine,
            cdi_dir,
            hook_path,
        } => {
            let (settings, findings) = settings::read_file(Settings::default(), config.as_deref())?;
            findings
                .iter()
                .for_each(|finding| Log::new().finding(finding));
            let run_dir = PathBuf::new(); // only for the kubelet
            let paths = Paths {
                kubelet_dir: None,
                cdi_dir: Some(cdi_dir),
                hook: hook_path,
                run_dir,
            };
            block_on(run::run(
                settings,
                config.as_deref(),
                paths,
                Some(engine.options()),
            ))?
        }
        Command::Check {
            mut options,
            run_dir,
            json,
        } => {
            options.config = config;
            let (settings, findings) = settings::read(&options)?;
            let offered = running::ask(&run_dir);
            if settings.plugin.interface == Interface::Dra {
                let asked =
                    check_claims::check(&settings, options.config.as_deref(), &findings, &offered);
                let report = block_on(asked)??;
                let text = if json {
                    report.to_json()?
                } else {
                    report.to_text(Environment::read().stdout(color))
                };
                let printed = print(&text)?;
                return Ok(if printed == ExitCode::SUCCESS {
                    report.exit_code()
                } else {
                    printed
                });
            }
            let choice = Chooser::new(&settings.plugin, &settings.kubelet_dir, Log::new()).choose();
            let report = block_on(check::check(
                &settings,
                options.config.as_deref(),
                &choice,
                &findings,
                &offered,
            ))??;
            let printed = print(&if json {
                report.to_json()?
            } else {
                report.to_text(Environment::read().stdout(color))
            })?;
            Ok(if printed == ExitCode::SUCCESS {
                report.exit_code()
            } else {
                printed
            })
        }
        Command::Clear { uuid, run_dir } => {
            let cleared = block_on(control::clear(&run_dir, &uuid))??;
            let printed = print(if cleared {
                "cleared\n"
            } else {
                "the plugin knows no errors of this GPU\n"
            })?;
            Ok(if cleared { printed } else { ExitCode::FAILURE })
        }
        Command::Completion { shell } => {
            let (mut cli, name, mut script) = (Cli::command(), env!("CARGO_PKG_NAME"), Vec::new());
            match shell {
                Shell::Bash => generate(shells::Bash, &mut cli, name, &mut script),
                Shell::Zsh => generate(shells::Zsh, &mut cli, name, &mut script),
                Shell::Fish => generate(shells::Fish, &mut cli, name, &mut script),
            }
            print(&String::from_utf8(script)?)
        }
        Command::Monitor {
            driver_root,
            dev_root,
            skip,
            measure,
            measure_all,
        } => {
            let (mut config, _) = config::read(config.as_deref())?;
            config.driver_root = driver_root.map_or(config.driver_root, HostPath::new);
            config.dev_root = dev_root.map(HostPath::new).or(config.dev_root);
            let measures = match (measure, measure_all) {
                (_, true) => Measures::All,
                (true, false) => Measures::Few,
                (false, false) => Measures::Nothing,
            };
            monitor::child::run(&config, &skip, measures)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs on this thread: the kernel kills the monitor when the thread that started it ends (PR_SET_PDEATHSIG(2const)).
fn block_on<T>(future: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start tokio")?;
    Ok(runtime.block_on(future))
}

fn print(text: &str) -> Result<ExitCode> {
    let is_read = stdio::print(text.as_bytes()).context("cannot write to stdout")?;
    Ok(if is_read {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
