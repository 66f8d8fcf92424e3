//! Finds the first process of a container with a given id.
//!
//! Engines use the id in the name of the container's cgroup, see [`cgroup_id`].

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use anyhow::Result;

use base::report::failure;
use base::sys::proc_file;
use findings::catalog;

use super::cannot_enter;
use crate::oci::{cgroup_id, conmon};

/// The minimum length of the beginning of an id. Shorter ones occur in other names.
const SHORTEST: usize = 6;
/// Returns the start time of a process from /proc/PID/stat. The name of the process can contain spaces and parentheses.
fn parse_start(stat: &str) -> Option<u64> {
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

/// A process. The kernel reuses the numbers of processes, so the start time is compared too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProcessId {
    /// In clock ticks since the boot
    pub start: u64,
    pub pid: i32,
}

impl ProcessId {
    /// Reads the start time of a process in its directory `dir` in /proc.
    ///
    /// # Errors
    /// If the process has ended, or is hidden from this user.
    pub(crate) fn read(dir: &Path, pid: i32) -> io::Result<Self> {
        let stat = proc_file::read_text(dir.join("stat"))?;
        let start =
            parse_start(&stat).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(Self { start, pid })
    }
}

/// A process in a cgroup with the id of a container. A user can create such a cgroup below a delegated one. So processes that the
/// container's conmon started come first, and then the oldest one, for engines without conmon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    is_unknown: bool,
    process: ProcessId,
}

/// Returns the process with this number.
///
/// # Errors
/// If it does not exist.
pub(crate) fn by_pid(pid: i32) -> Result<ProcessId> {
    ProcessId::read(Path::new(&format!("/proc/{pid}")), pid)
        .map_err(|error| cannot_enter(pid, error))
}

/// Returns the first process of the running container with this name, or whose id begins with it. Podman and CRI-O name it in the arguments
/// of conmon. `known` returns the id for other names: of pods, and of containers of other engines, that the hook has set up.
///
/// # Errors
/// If no container or several containers match.
pub(crate) fn by_name(
    proc: &Path,
    name: &str,
    known: impl Fn(&str) -> Option<String>,
) -> Result<ProcessId> {
    let mut running = conmon::ids_of(proc, name).into_iter();
    match (running.next(), running.next()) {
        (Some(id), None) => by_id(proc, &id),
        (Some(one), Some(other)) => {
            let what = format!(
                "several running containers are called {name:?}, such as {one} and {other}"
            );
            Err(failure(&catalog::NOT_EXAMINED, what, "give the id"))
        }
        // The record can belong to an earlier container with the same name.
        (None, _) => by_id(proc, &known(name).unwrap_or_else(|| name.to_owned())),
    }
}

/// Returns the process that started first in the container whose id begins with `id`.
///
/// # Errors
/// If no container or several containers match.
pub(crate) fn by_id(proc: &Path, id: &str) -> Result<ProcessId> {
    if id.len() < SHORTEST || !id.bytes().all(|c| c.is_ascii_hexdigit()) {
        return Err(not_found(id));
    }
    let first = first_processes(proc, id).map_err(anyhow::Error::new)?;
    let mut found = first.into_iter();
    match (found.next(), found.next()) {
        (Some((_, process)), None) => Ok(process),
        (Some((one, _)), Some((other, _))) => {
            let what = format!("{id:?} is the beginning of {one} and {other}");
            Err(failure(
                &catalog::NOT_EXAMINED,
                what,
                "give more characters of the id",
            ))
        }
        (None, _) => Err(not_found(id)),
    }
}

/// Returns the first process of each container whose id begins with `id`. Processes that have ended are skipped.
///
/// # Errors
/// If `proc` cannot be read.
pub(crate) fn first_processes(proc: &Path, id: &str) -> io::Result<BTreeMap<String, ProcessId>> {
    let mut first: BTreeMap<String, Candidate> = BTreeMap::new();
    for entry in std::fs::read_dir(proc)?.flatten() {
        let name = entry.file_name();
        let Ok(pid) = name.to_string_lossy().parse::<i32>() else {
            continue;
        };
        let Ok(cgroup) = proc_file::read_text(entry.path().join("cgroup")) else {
            continue;
        };
        let Some(id) = cgroup_id::find(&cgroup, id) else {
            continue;
        };
        let Ok(process) = ProcessId::read(&entry.path(), pid) else {
            continue;
        };
        let candidate = Candidate {
            is_unknown: !conmon::is_parent_of(proc, id, pid),
            process,
        };
        let known = first.entry(id.to_owned()).or_insert(candidate);
        *known = (*known).min(candidate);
    }
    let processes = first.into_iter().map(|(id, first)| (id, first.process));
    Ok(processes.collect())
}

fn not_found(id: &str) -> anyhow::Error {
    failure(
        &catalog::NOT_EXAMINED,
        format!("no running container {id:?}"),
        "as root, give an id that \"podman ps --no-trunc\" or \"crictl ps --no-trunc\" prints, or a process of the container with \
         --pid",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    /// Adds the files of proc(5) that show that a process is the conmon of a container with the name `web`.
    fn monitor(proc: &Path, pid: i32, id: &str) {
        let dir = proc.join(pid.to_string());
        let uid = nix::unistd::geteuid();
        let status = format!("Name:\tconmon\nPPid:\t1\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n");
        std::fs::write(dir.join("status"), status).unwrap();
        std::fs::write(proc.join("conmon"), "the program").unwrap();
        symlink(proc.join("conmon"), dir.join("exe")).unwrap();
        std::fs::write(dir.join("cmdline"), format!("conmon\0-c\0{id}\0-n\0web")).unwrap();
    }

    #[test]
    fn the_first_process_of_one_container() {
        let proc = tempfile::tempdir().unwrap();
        let other = ID.replace("abcdef0123", "abcdef9999");
        for (pid, cgroup, name, start) in [
            (40, format!("0::/libpod-conmon-{ID}.scope"), "conmon", 10),
            (50, format!("0::/libpod-{ID}.scope/container"), "a) b", 12),
            (45, format!("0::/libpod-{ID}.scope/container"), "later", 13),
            (60, "0::/init.scope".to_owned(), "init", 1),
            (70, format!("0::/libpod-{other}.scope"), "sh", 14),
        ] {
            let dir = proc.path().join(pid.to_string());
            std::fs::create_dir(&dir).unwrap();
            std::fs::write(dir.join("cgroup"), cgroup).unwrap();
            let rest = "S 1 ".to_owned() + &"0 ".repeat(17);
            std::fs::write(
                dir.join("stat"),
                format!("{pid} ({name}) {rest}{start} 0 0"),
            )
            .unwrap();
        }
        std::fs::create_dir(proc.path().join("80")).unwrap();
        // The name of a running container, also if the hook has a record of an earlier one with the same name.
        monitor(proc.path(), 40, ID);
        let recorded = |name: &str| (name == "pod" || name == "web").then(|| other.clone());
        for (name, pid) in [("web", 50), ("pod", 70), (&ID[..28], 50)] {
            assert_eq!(
                by_name(proc.path(), name, recorded).unwrap().pid,
                pid,
                "{name}"
            );
        }
        monitor(proc.path(), 70, &other);
        let error = by_name(proc.path(), "web", recorded)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("several running containers are called \"web\", such as "),
            "{error}"
        );
        assert_eq!(
            by_name(proc.path(), "x", |_| None).unwrap_err().to_string(),
            "no running container \"x\""
        );
        assert_eq!(
            by_id(proc.path(), ID).unwrap(),
            ProcessId { start: 12, pid: 50 }
        );
        assert_eq!(by_id(proc.path(), &ID[..28]).unwrap().pid, 50);
        // An older process of a user who created a cgroup with this name: conmon started the other one.
        std::fs::write(
            proc.path().join("45/stat"),
            format!("45 (x) S 1 {}3 0", "0 ".repeat(17)),
        )
        .unwrap();
        assert_eq!(by_id(proc.path(), ID).unwrap().pid, 45);
        let started = "Name:\ta\nPPid:\t40\nUid:\t0\t0\t0\t0\n";
        std::fs::write(proc.path().join("50/status"), started).unwrap();
        assert_eq!(by_id(proc.path(), ID).unwrap().pid, 50);
        for (id, message) in [
            ("0123456", "is the beginning of"),
            ("0123", "no running"),
            ("ffffffff", "no running"),
            ("../../", "no"),
        ] {
            let error = by_id(proc.path(), id).unwrap_err();
            assert!(error.to_string().contains(message), "{id}: {error}");
        }
    }
}
