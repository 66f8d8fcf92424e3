//! `doctor --container`: finds what a running container lacks: driver files, device nodes, or the permission to open them. Any program
//! can have set up the container.
//!
//! [`find`] finds its process, [`inspect`] reads a part of the container into [`ContainerFacts`], and [`checks`] are pure
//! functions. The container may be hostile: its files are opened below its root, only stored regular files are read, and none is
//! executed. Each part is examined in a child process with a deadline, see [`parts`].

mod checks;
mod facts;
pub(crate) mod find;
mod inspect;
mod parts;
#[cfg(test)]
mod tests;

use std::io;

use anyhow::Result;
use rustix::io::Errno;

use base::report::{Failure, failure};
use findings::catalog;
use nvidia_host::config::Config;

use super::check::Checker::{One, Several};
use super::check::{Check, Named, Section};
use facts::ContainerFacts;
use find::ProcessId;
use inspect::Known;
use parts::{PATIENCE, Unanswered};

/// What is examined in one child process.
struct Part {
    kind: Examined,
    /// Its name in messages
    name: &'static str,
    checks: &'static [Named<ContainerFacts>],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Examined {
    Process,
    Libraries,
    Nodes,
}

/// The parts and their checks, in the order of the output.
const PARTS: [Part; 3] = [
    Part {
        kind: Examined::Process,
        name: "the process",
        checks: &[("container", One(checks::process))],
    },
    Part {
        kind: Examined::Libraries,
        name: "the driver libraries",
        checks: &[("libraries", Several(checks::libraries))],
    },
    Part {
        kind: Examined::Nodes,
        name: "the directory \"/dev\"",
        checks: &[
            ("nodes", Several(checks::nodes)),
            ("access", Several(checks::access)),
            ("cgroup", Several(checks::cgroup)),
        ],
    },
];

/// Returns the names of the checks.
pub(super) fn names() -> impl Iterator<Item = (Section, &'static str)> {
    PARTS
        .iter()
        .flat_map(|part| part.checks)
        .map(|(name, _)| (Section::Container, *name))
}

/// Examines the container of this process. `name` is the name or id from the command line.
///
/// # Errors
/// If the process is not in a container, has ended, or may not be inspected.
pub(crate) fn examine(process: ProcessId, name: &str, config: &Config) -> Result<Vec<Check>> {
    let pid = process.pid;
    let known = Known::read(process, name, config)?;
    let mut checks = Vec::new();
    for part in &PARTS {
        match parts::ask(PATIENCE, part, &|reporter| {
            inspect::inspect(&known, part.kind, reporter)
        }) {
            Ok(Ok(examined)) => checks.extend(examined),
            Ok(Err(error)) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {
                return Err(ended(pid));
            }
            Ok(Err(error)) => return Err(cannot_enter(pid, error)),
            Err(why) => checks.extend(unanswered(part, &why, pid)),
        }
    }
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

/// Returns the results for a part of the container that does not answer.
fn unanswered(part: &Part, why: &Unanswered, pid: i32) -> Vec<Check> {
    let what = match why {
        Unanswered::Silent(path) => {
            let place = if path.is_empty() {
                String::new()
            } else {
                format!(", at \"{path}\"")
            };
            format!("no answer within {} seconds{place}", PATIENCE.as_secs())
        }
        Unanswered::Failed(why) => why.clone(),
    };
    let what = format!("{} of the container cannot be examined: {what}", part.name);
    let fix = format!(
        "run \"findmnt --task {pid}\", and check that the servers of its FUSE and network file systems respond"
    );
    let mut checks = vec![Check::of(&catalog::CONTAINER_SILENT, what, fix)];
    let skipped = || Check::skipped(format!("{} cannot be examined", part.name));
    checks.resize_with(part.checks.len(), skipped);
    let named = checks.into_iter().zip(part.checks);
    named
        .map(|(check, (name, _))| Check {
            section: Section::Container,
            check: name,
            ..check
        })
        .collect()
}
