//! Checks the hook and the device plugin on a machine with a GPU, and writes a report that can be attached to an issue.
//!
//! The program runs twice. The first process stays in the mount namespace of the machine: it lists what must not change, before and
//! after, and writes the report. It starts the second process, which enters a mount namespace, performs the checks and prints a line
//! for each. What the checks create is in that namespace, and ends with it.
#![allow(
    clippy::indexing_slicing,
    reason = "of JSON values, whose index operator does not panic"
)]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    unreachable_pub,
    reason = "a tool for tests, which runs programs and prints"
)]

mod bench;
mod cdi;
mod check;
mod checks;
mod container;
mod driver;
mod isolation;
mod kubelet;
mod machine;
mod options;
mod process;
mod redact;
mod report;
mod shared_gpu;
mod smi;
mod supervise;
mod unchanged;

use std::process::ExitCode;

use options::{Command, Options};

fn main() -> ExitCode {
    let options = match Options::parse() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("gpu-checks: {error}\nhint: gpu-checks --help");
            return ExitCode::from(2);
        }
    };
    let ended = match &options.command {
        Command::Help => {
            print!("{}", options::HELP);
            Ok(true)
        }
        Command::Version => {
            println!("gpu-checks {}", env!("CARGO_PKG_VERSION"));
            Ok(true)
        }
        Command::List => {
            checks::ALL
                .iter()
                .for_each(|check| println!("{:<22} {}", check.name, check.about));
            Ok(true)
        }
        Command::OnHost(words) => isolation::run_with_nodes(words),
        Command::Inside => check::perform(&options),
        Command::Run => supervise::run(&options),
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu-checks: {error}");
            ExitCode::from(2)
        }
    }
}
