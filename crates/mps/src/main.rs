//! `oci-nvidia-mps`: runs NVIDIA's MPS daemon for a GPU that config.toml shares, and closes the GPU while the daemon does not work.
//!
//! A CUDA program that does not find its daemon runs without MPS and without limits (driver 580). So the compute mode of a shared GPU is
//! `EXCLUSIVE_PROCESS` while the daemon has its limits, and `PROHIBITED` otherwise. The unit `oci-nvidia-mps@UUID` has two commands: `run`
//! ([`supervise`]), and `end` ([`close`]), which systemd starts whenever `run` has ended. `oci-nvidia-mps.service` starts the units of the
//! GPUs that config.toml shares.
//!
//! | module | purpose |
//! |---|---|
//! | [`supervise`] | starts the daemon, and checks it until it fails |
//! | [`close`] | what becomes of the GPU after that |
//! | [`control`] | the daemon's commands and answers |
//! | [`cgroup`] | the processes of the unit |
//! | [`directory`] | the files below /run |

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests open files that they created"
    )
)]

mod cgroup;
mod close;
mod control;
mod directory;
mod supervise;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use base::report::{failure, kind_of, one_line, render};
use base::sys::stdio;
use clap::{Parser, Subcommand};
use command_line::parse::{self, Parsed};
use findings::catalog;
use nvidia_host::config;
use nvidia_host::host::Host;
use nvidia_host::inventory::limits::is_shared;
use nvidia_host::prepare::host::may_prepare;

/// The name of this program.
const PROGRAM: &str = env!("CARGO_PKG_NAME");
/// The exit status for an invalid command line.
const USAGE: u8 = 2;
/// The exit status if config.toml does not share the GPU, or the driver lacks MPS (`EX_CONFIG` in sysexits.h): another attempt is useless.
const NOT_POSSIBLE: u8 = 78;

/// Shares NVIDIA GPUs with MPS
///
/// oci-nvidia-mps.service runs this program for each GPU that the key mps-gpus of config.toml lists. The program starts
/// the driver's MPS daemon with the limits of config.toml, and closes the GPU to all programs while the daemon does not work.
#[derive(Debug, Parser)]
#[command(
    name = "oci-nvidia-mps",
    version,
    disable_help_subcommand = true,
    max_term_width = 80,
    after_help = "Exit status:\n  0 success, 1 failure, 2 invalid command line, 78 the GPU cannot be shared"
)]
struct Cli {
    /// Read this configuration file [default: /etc/nvidia-container-runtime/config.toml, if it exists]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the UUIDs of the GPUs that config.toml shares
    List,
    /// Run the daemon of a GPU, as oci-nvidia-mps@UUID.service
    Run {
        /// The UUID of the GPU
        uuid: String,
        /// Let the driver's daemon keep all capabilities of the unit
        #[arg(long)]
        keep_capabilities: bool,
    },
    /// Close the GPU after the daemon has ended, or open it if config.toml does not share it any more
    End {
        /// The UUID of the GPU
        uuid: String,
        /// Why the unit has ended: systemd's SERVICE_RESULT
        result: String,
    },
    /// Open GPUs that config.toml does not share any more
    Restore {
        /// Also those that config.toml shares, because the program is removed
        #[arg(long)]
        all: bool,
    },
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let result = match parse::parse(&arguments) {
        Ok(Parsed::Run(cli)) => run(cli),
        Ok(Parsed::Help(text)) => print(&text),
        Ok(Parsed::Version) => print(&format!("{PROGRAM} {}\n", env!("CARGO_PKG_VERSION"))),
        Err(error) => Err(error),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn run(cli: Cli) -> Result<()> {
    let config = cli.config.as_deref();
    if let Command::List = cli.command {
        return list(config);
    }
    if !may_prepare()? {
        return Err(failure(
            &catalog::MPS_START,
            "only root of the host can set the compute mode of a GPU",
            "run \"systemctl start oci-nvidia-mps\" as root",
        ));
    }
    match cli.command {
        Command::List => Ok(()),
        Command::Run {
            uuid,
            keep_capabilities,
        } => supervise::run(&uuid, config, keep_capabilities),
        Command::End { uuid, result } => close::end(&uuid, config, &result),
        Command::Restore { all } => close::restore(config, all),
    }
}

/// Prints the GPUs for which `oci-nvidia-mps.service` starts units.
fn list(file: Option<&Path>) -> Result<()> {
    let (config, findings) = config::read(file)?;
    for finding in findings {
        note(&format!("{} ({})", finding.what, finding.kind.id()));
    }
    if config.sharing.mps_gpus.is_empty() {
        return Ok(());
    }
    let mut text = String::new();
    for gpu in &Host::inspect(&config, &|| ())?.inventory.gpus {
        if is_shared(&config.sharing, gpu) {
            text.push_str(&format!("{}\n", gpu.uuid));
        }
    }
    print(&text)
}

fn print(text: &str) -> Result<()> {
    stdio::write_stdout(text.as_bytes())?;
    Ok(())
}

/// Prints a line to the journal, and does not wait for its reader.
fn note(text: &str) {
    stdio::offer_stderr(&format!("{PROGRAM}: {}\n", one_line(text)));
}

fn failed(error: &anyhow::Error) -> ExitCode {
    stdio::offer_stderr(&format!("{PROGRAM}: {}\n", render(error)));
    let kind = kind_of(error).map(|kind| kind.id());
    if kind == Some(catalog::COMMAND_LINE.id()) {
        return ExitCode::from(USAGE);
    }
    if kind == Some(catalog::MPS_START.id()) {
        return ExitCode::from(NOT_POSSIBLE);
    }
    ExitCode::FAILURE
}
