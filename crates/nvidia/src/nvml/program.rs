//! Finds and starts `oci-nvidia-nvml`.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Result;

use base::report::failure;
use base::sys::child::{self, Child};
use findings::catalog;
use rustix::fs::Access;

use super::protocol::{ID, Request};

/// The name of the program.
pub const NAME: &str = "oci-nvidia-nvml";

/// Its directories in packages, beside the directory of programs. On SLE 15, /usr/lib takes the place of /usr/libexec.
const DIRS: [&str; 2] = ["libexec/oci-nvidia-hook", "lib/oci-nvidia-hook"];

/// Returns the path of the program.
///
/// # Errors
/// If it is not installed.
pub fn find() -> Result<PathBuf> {
    // The link also names the directory after an update has replaced the file: "/usr/bin/oci-nvidia-hook (deleted)", see proc(5).
    let this = std::env::current_exe()?;
    let mut places = vec![this.with_file_name(NAME)];
    if let Some(prefix) = this.ancestors().nth(2) {
        places.extend(DIRS.map(|dir| prefix.join(dir).join(NAME)));
    }
    for place in &places {
        if rustix::fs::access(place, Access::EXEC_OK).is_ok() {
            return Ok(place.clone());
        }
    }
    Err(failure(
        &catalog::NVML_PROCESS,
        format!("the program {NAME} is in none of its places: {places:?}"),
        "install the package oci-nvidia-hook again",
    ))
}

/// Returns the arguments of the program, from `argv[0]` on.
///
/// # Errors
/// If a path in the request is not UTF-8.
pub fn arguments(request: &Request) -> Result<Vec<OsString>> {
    let request = serde_json::to_string(request)?;
    Ok(vec![NAME.into(), ID.into(), request.into()])
}

/// How the process of the program is kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isolation {
    /// It sees no other process.
    Alone,
    /// It sees the processes that this one sees: NVML does not list others.
    AmongProcesses,
}

/// Starts the program without an input.
pub(crate) fn start(request: &Request, isolation: Isolation) -> Result<Child> {
    let (program, arguments) = (find()?, arguments(request)?);
    let run = |pipe: &mut File| run(&program, &arguments, pipe);
    let child = match isolation {
        Isolation::Alone => child::spawn(run),
        Isolation::AmongProcesses => child::spawn_among_processes(run),
    };
    child.map_err(|error| cannot_start(error, &program))
}

/// Starts the program, and returns the pipe to its standard input.
pub(crate) fn start_with_input(request: &Request) -> Result<(Child, File)> {
    let (program, arguments) = (find()?, arguments(request)?);
    child::spawn_with_input(|pipe| run(&program, &arguments, pipe))
        .map_err(|error| cannot_start(error, &program))
}

/// Replaces the forked process. If that fails, the pipe is closed without a line.
fn run(program: &Path, arguments: &[OsString], pipe: &mut File) {
    child::run_program(program, arguments, pipe).ok();
}

fn cannot_start(error: io::Error, program: &Path) -> anyhow::Error {
    anyhow::Error::new(error).context(format!("cannot start {program:?}"))
}
