//! The running processes of the device plugin, from proc(5): on the host or in a pod, with or without NRI.

use std::path::Path;

use base::tree::Tree;

use super::PROGRAM;

/// The commands that keep running until they are stopped. The monitor, which these start, has another name.
const RUN: &str = "run";
const NRI: &str = "nri";

/// What a process of the plugin does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Whether it serves the kubelet
    pub for_kubelet: bool,
    /// Whether it is an NRI plugin of an engine
    pub for_engine: bool,
    /// Whether it runs in a pod
    pub in_pod: bool,
}

/// Returns the processes of root. Other users can start programs with this name, too.
#[must_use]
pub fn of_host(host: &Tree) -> Vec<Process> {
    let names = host.names(Path::new("/proc"));
    let pids = names
        .iter()
        .filter_map(|name| name.to_str())
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    pids.filter_map(|pid| of_process(host, &Path::new("/proc").join(pid)))
        .collect()
}

fn of_process(host: &Tree, dir: &Path) -> Option<Process> {
    let process = parse(&host.read(&dir.join("cmdline")).ok()?)?;
    let status = host.read_text(&dir.join("status")).ok()?;
    let in_pod = host
        .read_text(&dir.join("cgroup"))
        .is_ok_and(|cgroup| cgroup.contains("kubepods"));
    is_of_root(&status).then_some(Process { in_pod, ..process })
}

/// Parses a command line, whose words end with NUL.
fn parse(command_line: &[u8]) -> Option<Process> {
    let text = String::from_utf8_lossy(command_line);
    let mut words = text.split('\0');
    let is_ours = Path::new(words.next()?)
        .file_name()
        .is_some_and(|name| name == PROGRAM);
    let (for_kubelet, for_engine) = match words
        .find(|word| [RUN, NRI].contains(word))
        .filter(|_| is_ours)?
    {
        NRI => (false, true),
        _ => (
            true,
            words.any(|word| word == "--nri" || word.starts_with("--nri=")),
        ),
    };
    Some(Process {
        for_kubelet,
        for_engine,
        in_pod: false,
    })
}

/// Reports whether the effective user of the process is root, from /proc/PID/status.
fn is_of_root(status: &str) -> bool {
    let users = status
        .lines()
        .find_map(|line| line.strip_prefix("Uid:"))
        .unwrap_or_default();
    users.split_whitespace().nth(1) == Some("0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines() {
        let found = |line: &str| {
            parse(line.replace(' ', "\0").as_bytes())
                .map(|found| (found.for_kubelet, found.for_engine))
        };
        for (line, expected) in [
            (
                "/usr/bin/oci-nvidia-kubelet-plugin run --kubelet-dir /var/lib/kubelet ",
                Some((true, false)),
            ),
            (
                "/usr/bin/oci-nvidia-kubelet-plugin run --nri ",
                Some((true, true)),
            ),
            (
                "oci-nvidia-kubelet-plugin --config /c run --replicas 2 --nri=/run/nri.sock",
                Some((true, true)),
            ),
            (
                "/usr/bin/oci-nvidia-kubelet-plugin nri ",
                Some((false, true)),
            ),
            ("/usr/bin/oci-nvidia-kubelet-plugin monitor ", None),
            ("/usr/bin/oci-nvidia-kubelet-plugin", None),
            ("/usr/bin/other run --nri", None),
            ("", None),
        ] {
            assert_eq!(found(line), expected, "{line}");
        }
    }

    #[test]
    fn processes_of_root_only() {
        assert!(is_of_root("Name:\tx\nUid:\t0\t0\t0\t0\n"));
        assert!(!is_of_root("Name:\tx\nUid:\t0\t1000\t0\t0\n") && !is_of_root("Name:\tx\n"));
    }
}
