//! `oci-nvidia-nvml`: answers one request about the GPUs with the NVIDIA Management Library (NVML).
//!
//! It is the only program of this project that loads a library of NVIDIA. The hook, its commands and the kubelet plugin start it, see
//! [`nvidia_host::nvml::protocol`]. Before it loads anything, it drops its privileges and
//! limits its files and system calls ([`load`]).

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests open files that they created"
    )
)]

mod api;
mod compute_mode;
mod ffi;
mod files;
mod inventory;
mod lines;
mod load;
mod monitor;
mod monitoring;
mod processes;

use std::process::ExitCode;

use anyhow::Result;
use base::sys::stdio;
use nvidia_host::nvml::program::NAME;
use nvidia_host::nvml::progress::Progress;
use nvidia_host::nvml::protocol::{ID, OTHER_BUILD, Request};

use lines::Lines;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [id, request] = arguments.as_slice() else {
        stdio::print_stderr(&format!(
            "{NAME}: oci-nvidia-hook and oci-nvidia-kubelet-plugin start this program, and it has no commands\n"
        ));
        return ExitCode::from(2);
    };
    match answer(id, request) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            stdio::print_stderr(&format!("{NAME}: {}\n", base::report::line(&error)));
            ExitCode::FAILURE
        }
    }
}

fn answer(id: &str, request: &str) -> Result<()> {
    base::sys::child::close_inherited();
    if id != ID {
        stdio::print(format!("{OTHER_BUILD}\n").as_bytes())?;
        return Ok(());
    }
    let request = base::json::from_bytes(request.as_bytes())?;
    let stderr = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 3);
    let progress = stderr.ok().and_then(Progress::of_parent);
    let mut lines = Lines::take_stdout()?;
    match request {
        Request::Inventory { library, leave_out } => {
            inventory::answer(&library, &leave_out, &mut lines);
        }
        Request::Processes { library } => processes::answer(&library, &mut lines),
        Request::ComputeMode { library, target } => {
            compute_mode::answer(&library, &target, &mut lines);
        }
        Request::Monitor(request) => monitor::answer(&request, progress, &mut lines)?,
    }
    Ok(())
}
