//! `doctor --container`: finds what a running container lacks: driver files, device nodes, or the permission to open them. Any program
//! can have set up the container.
//!
//! [`find`] finds its process, [`inspect`] reads the container into [`ContainerFacts`], and [`checks`] are pure functions. The
//! container may be hostile: its files are opened below its root, only stored regular files are read, and none is executed. They are
//! examined in a child process with a deadline.

mod checks;
mod facts;
pub(crate) mod find;
mod inspect;
#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use anyhow::Result;
use rustix::io::Errno;

use base::report::{Failure, failure};
use base::sys::child::{self, NoAnswer};
use findings::catalog;
use nvidia_host::config::Config;

use super::check::Checker::{One, Several};
use super::check::{Check, Named, Section, run};
use facts::ContainerFacts;
use find::ProcessId;
use inspect::Known;

/// How long the examination may take. Usually it takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// The checks, in the order of the output.
const CHECKS: &[Named<ContainerFacts>] = &[
    ("container", One(checks::process)),
    ("libraries", Several(checks::libraries)),
    ("nodes", Several(checks::nodes)),
    ("access", Several(checks::access)),
    ("cgroup", Several(checks::cgroup)),
];

/// Returns the names of the checks.
pub(super) fn names() -> impl Iterator<Item = (Section, &'static str)> {
    CHECKS.iter().map(|(name, _)| (Section::Container, *name))
}

/// Examines the container of this process. `name` is the name or id from the command line.
///
/// # Errors
/// If the process is not in a container, has ended, or may not be inspected.
pub(crate) fn examine(process: ProcessId, name: &str, config: &Config) -> Result<Vec<Check>> {
    let pid = process.pid;
    let known = Known::read(process, name, config)?;
    let checks = match child::ask(PATIENCE, || inspect::examine(&known)) {
        Ok(Ok(examined)) => run(Section::Container, CHECKS, &known.with(examined)),
        Ok(Err(errno)) if errno == Errno::SRCH.raw_os_error() => return Err(ended(pid)),
        Ok(Err(errno)) => return Err(cannot_enter(pid, io::Error::from_raw_os_error(errno))),
        Err(why) => vec![unanswered(&why, pid)],
    };
    // If the number is used again, the cgroup that was read belongs to another process.
    if find::by_pid(pid).ok() != Some(process) {
        return Err(ended(pid));
    }
    Ok(checks)
}

fn ended(pid: i32) -> anyhow::Error {
    failure(
        &catalog::NOT_EXAMINED,
        format!("process {pid} has ended"),
        EXISTING,
    )
}

const EXISTING: &str = "give a running container with --container; \"oci-nvidia-hook ps\" and \"podman ps\" list containers";

/// Returns the error for a file of a process in /proc that cannot be opened.
fn cannot_enter(pid: i32, error: io::Error) -> anyhow::Error {
    // The option hidepid= of /proc hides the processes of other users from everyone but root.
    if error.kind() == io::ErrorKind::NotFound && rustix::process::geteuid().is_root() {
        return failure(
            &catalog::NOT_EXAMINED,
            format!("process {pid} does not exist"),
            EXISTING,
        );
    }
    let what = format!("cannot inspect the container of process {pid}");
    let hint = if rustix::process::geteuid().is_root() {
        EXISTING
    } else {
        "run the command as root; \"ps -e\" lists the existing processes"
    };
    anyhow::Error::new(error).context(Failure::new(&catalog::NOT_EXAMINED, what, hint))
}

fn unanswered(why: &NoAnswer, pid: i32) -> Check {
    let what = format!("the files of the container cannot be examined: {why}");
    let fix = format!(
        "run \"findmnt --task {pid}\", and check that the servers of its FUSE and network file systems respond"
    );
    Check {
        section: Section::Container,
        check: "container",
        ..Check::of(&catalog::CONTAINER_SILENT, what, fix)
    }
}
