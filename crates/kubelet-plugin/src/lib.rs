//! Offers the NVIDIA GPUs of a node to the kubelet, as a device plugin.
//!
//! ```text
//! monitor (child: NVML) ─▶ monitor::supervisor ─▶ node::Node ─▶ Offer ─┬▶ kubelet: ListAndWatch
//!                                                  ▲    health        └▶ allocator: Allocate, preferred
//!                                     host: /proc, /sys
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`monitor`] | asks NVML in a child process |
//! | [`health`], [`gpus`], [`devices`], [`node`] | what the node offers, decided from what the monitor and the kernel report |
//! | [`answer`], [`prefer`], [`allocator`] | what a container gets |
//! | [`host`] | what the kernel knows about the GPUs |
//! | [`cdi_keeper`] | the CDI spec of the node |
//! | [`kubelet`] | the sockets and the registration |
//! | [`nri`] | the GPUs of containers that request them with a variable, for engines |
//! | [`mod@run`] | connects them |
//! | [`control`] | commands for a running plugin |
//! | [`check`], [`cli`], [`log`] | command lines and output |

pub mod allocator;
pub mod answer;
pub mod cdi_keeper;
pub mod check;
pub mod cli;
pub mod control;
pub mod devices;
pub mod gpus;
pub mod health;
pub mod host;
pub mod kubelet;
pub mod log;
pub mod model;
pub mod monitor;
pub mod node;
pub mod nri;
pub mod prefer;
pub mod run;

/// The interfaces of the kubelet and of engines, generated from `proto/`.
#[allow(
    missing_docs,
    clippy::all,
    clippy::pedantic,
    clippy::nursery,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod proto {
    tonic::include_proto!("v1beta1");

    /// The kubelet's list of the devices that it can assign.
    pub mod podresources {
        tonic::include_proto!("v1");
    }

    /// The messages between an engine and its NRI plugins.
    pub mod nri {
        tonic::include_proto!("nri.pkg.api.v1alpha1");
    }

    /// The protocol that carries them.
    pub mod ttrpc {
        tonic::include_proto!("ttrpc");
    }
}

use std::future::Future;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use base::report::{catalog, kind_of};
use clap::{CommandFactory, Parser};
use nvidia_host::config::{self, Config};

use cli::{Cli, Command, Engine, Settings};
use log::Log;
use run::Paths;

/// The exit status for an invalid command line.
const USAGE: u8 = 2;

/// Runs the command line of this process, and returns its exit code.
#[must_use]
pub fn run() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) => {
            // The output may be closed; the status still shows the error.
            error.print().ok();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE));
        }
    };
    dispatch(command).unwrap_or_else(|error| {
        Log::new().error(&error);
        let is_usage = kind_of(&error) == Some(&catalog::COMMAND_LINE);
        if is_usage { ExitCode::from(USAGE) } else { ExitCode::FAILURE }
    })
}

fn dispatch(command: Command) -> Result<ExitCode> {
    match command {
        Command::Run { settings, kubelet_dir, cdi_dir, hook_path, run_dir, nri } => {
            let config = read_config(&settings)?;
            let cdi_dir = cdi_dir.or_else(|| nri.as_ref().map(|_| PathBuf::from(cdi_keeper::DIR)));
            let paths = Paths { kubelet_dir: Some(kubelet_dir), cdi_dir, hook: hook_path, run_dir };
            let nri = nri.map(|socket| Engine::at(socket).options());
            block_on(run::run(config, settings.config.as_deref(), paths, nri))?
        }
        Command::Nri { config: path, engine, cdi_dir, hook_path } => {
            let config = read_file(path.as_deref())?;
            let run_dir = PathBuf::new(); // only for the kubelet
            let paths = Paths { kubelet_dir: None, cdi_dir: Some(cdi_dir), hook: hook_path, run_dir };
            block_on(run::run(config, path.as_deref(), paths, Some(engine.options())))?
        }
        Command::Check { settings, json } => {
            let config = read_config(&settings)?;
            let report = block_on(check::check(&config, settings.config.as_deref()))??;
            print(&if json { report.to_json()? } else { report.to_text() })?;
            Ok(report.exit_code())
        }
        Command::Clear { uuid, run_dir } => {
            let cleared = block_on(control::clear(&run_dir, &uuid))??;
            print(if cleared { "cleared\n" } else { "the plugin knows no errors of this GPU\n" })?;
            Ok(if cleared { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), env!("CARGO_PKG_NAME"), &mut script);
            print(&String::from_utf8(script)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Monitor { config, skip } => {
            monitor::child::run(&config::read(config.as_deref())?.0, &skip)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Reads config.toml, reports its findings, and applies the options.
fn read_config(settings: &Settings) -> Result<Config> {
    let mut config = read_file(settings.config.as_deref())?;
    settings.apply(&mut config.kubelet_plugin)?;
    Ok(config)
}

fn read_file(path: Option<&Path>) -> Result<Config> {
    let (config, findings) = config::read(path)?;
    findings.iter().for_each(|finding| Log::new().finding(finding));
    Ok(config)
}

/// Runs on this thread: the kernel ends the monitor together with the thread that started it.
fn block_on<T>(future: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start tokio")?;
    Ok(runtime.block_on(future))
}

fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to stdout")
}
