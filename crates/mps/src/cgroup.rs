//! The processes of a unit, which the kernel lists in its cgroup. A container cannot move a process into it, in contrast to a name or an
//! environment, which every process chooses itself.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base::sys::proc_file;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nvidia_host::mps;

/// How long killed processes may take to end. The server gives the memory of the GPU back.
const PATIENCE: Duration = Duration::from_secs(10);

/// The cgroup of the unit that runs this process.
#[derive(Debug)]
pub(crate) struct UnitCgroup {
    procs: PathBuf,
}

impl UnitCgroup {
    /// Returns the cgroup of this process if it is that of the unit for the GPU with this UUID, and otherwise `None`: the processes of another
    /// cgroup, such as the one of a login, are not ours.
    ///
    /// # Errors
    /// If the cgroup cannot be read.
    pub(crate) fn of_gpu(uuid: &str) -> io::Result<Option<Self>> {
        let own = proc_file::read_text("/proc/self/cgroup")?;
        for dir in directories(&own, uuid) {
            let procs = dir.join("cgroup.procs");
            let found = Self { procs };
            if found.pids().is_ok_and(|pids| pids.contains(&own_pid())) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn pids(&self) -> io::Result<Vec<Pid>> {
        let mut pids = Vec::new();
        for line in proc_file::read_text(&self.procs)?.lines() {
            if let Ok(pid) = line.parse() {
                pids.push(Pid::from_raw(pid));
            }
        }
        Ok(pids)
    }

    /// Returns the processes of the unit without this one. Processes of other PID namespaces, which have the number 0, do not count.
    ///
    /// # Errors
    /// If the cgroup cannot be read.
    pub(crate) fn others(&self) -> io::Result<Vec<Pid>> {
        let mut others = self.pids()?;
        others.retain(|pid| *pid != own_pid() && pid.as_raw() > 0);
        Ok(others)
    }

    /// Kills all processes of the unit except for this one, and waits for their end.
    ///
    /// # Errors
    /// If the cgroup cannot be read, or one of them does not end.
    pub(crate) fn kill_others(&self) -> io::Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let others = self.others()?;
            if others.is_empty() {
                return Ok(());
            }
            if Instant::now() >= end {
                let error = format!("the processes {others:?} do not end");
                return Err(io::Error::new(io::ErrorKind::TimedOut, error));
            }
            for pid in others {
                kill(pid, Signal::SIGKILL).ok();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn own_pid() -> Pid {
    nix::unistd::getpid()
}

/// Returns where the cgroup of the unit can be, from the content of /proc/self/cgroup: in the unified hierarchy, or on hosts with version 1
/// in the hierarchy of systemd.
fn directories(own: &str, uuid: &str) -> Vec<PathBuf> {
    let name = format!("/{}.service", mps::unit_of(uuid));
    let mut found = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        if !path.ends_with(&name) {
            continue;
        }
        let mounts: &[&str] = match controllers {
            "" => &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"],
            "name=systemd" => &["/sys/fs/cgroup/systemd"],
            _ => &[],
        };
        for mount in mounts {
            found.push(Path::new(mount).join(path.trim_start_matches('/')));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_cgroup_of_the_unit_counts() {
        let unit = "/system.slice/system-oci\\x2dnvidia\\x2dmps.slice/oci-nvidia-mps@GPU-1.service";
        let below = |mount: &str| PathBuf::from(format!("{mount}{unit}"));
        for (own, expected) in [
            (
                format!("0::{unit}\n"),
                vec![below("/sys/fs/cgroup"), below("/sys/fs/cgroup/unified")],
            ),
            (
                format!("3:cpuset:{unit}\n1:name=systemd:{unit}\n0::/\n"),
                vec![below("/sys/fs/cgroup/systemd")],
            ),
            (
                "0::/user.slice/user-0.slice/session-1.scope\n".to_owned(),
                vec![],
            ),
            (
                "0::/system.slice/oci-nvidia-mps@GPU-2.service\n".to_owned(),
                vec![],
            ),
            (format!("0::{unit}/x\n"), vec![]),
            ("0::/\n".to_owned(), vec![]),
        ] {
            assert_eq!(directories(&own, "GPU-1"), expected, "{own}");
        }
    }

    #[test]
    fn this_process_is_not_in_a_unit() {
        assert!(UnitCgroup::of_gpu("GPU-1").unwrap().is_none());
    }
}
