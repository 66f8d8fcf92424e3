//! Ends the processes of MPS that an earlier supervisor left behind, which their environment shows.
//!
//! A number in a file would not be enough: the process may have ended, and another one may have its number.

use std::path::Path;
use std::time::{Duration, Instant};

use base::sys::proc_file;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long killed processes may take to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// A process of MPS.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MpsProcess {
    pid: i32,
    environment: String,
}

impl MpsProcess {
    fn variable(&self, name: &str) -> Option<&str> {
        let mut words = self.environment.split('\0');
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }

    /// Whether the process belongs to the daemon with this directory.
    fn is_of(&self, pipe: &Path) -> bool {
        self.variable("CUDA_MPS_PIPE_DIRECTORY").map(Path::new) == Some(pipe)
    }
}

/// Returns the processes of MPS of this user. Processes of other users do not count, because they can have any name and environment.
fn processes() -> Vec<MpsProcess> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return found;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) {
            found.extend(process(pid));
        }
    }
    found
}

fn process(pid: i32) -> Option<MpsProcess> {
    let dir = format!("/proc/{pid}");
    // The name has at most 15 bytes.
    if !proc_file::read_text(format!("{dir}/comm"))
        .ok()?
        .starts_with("nvidia-cuda-mps")
    {
        return None;
    }
    let owner = rustix::fs::stat(&dir).ok()?.st_uid;
    if owner != rustix::process::geteuid().as_raw() {
        return None;
    }
    let environment = proc_file::read(format!("{dir}/environ")).ok()?;
    Some(MpsProcess {
        pid,
        environment: String::from_utf8_lossy(&environment).into_owned(),
    })
}

/// Kills what an earlier supervisor of this daemon left behind, and waits for its end.
pub(super) fn end(pipe: &Path) {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        let mut left = processes();
        left.retain(|process| process.is_of(pipe));
        if left.is_empty() {
            return;
        }
        for process in left {
            kill(Pid::from_raw(process.pid), Signal::SIGKILL).ok();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_directory() {
        let process = |environment: &str| MpsProcess {
            pid: 7,
            environment: environment.replace(' ', "\0"),
        };
        let ours = process("A=1 CUDA_MPS_PIPE_DIRECTORY=/run/oci-nvidia-mps/GPU-1/pipe B=");
        assert!(ours.is_of(Path::new("/run/oci-nvidia-mps/GPU-1/pipe")));
        assert!(!ours.is_of(Path::new("/run/oci-nvidia-mps/GPU-2/pipe")));
        assert!(!process("").is_of(Path::new("")));
    }
}
