//! The running processes of the device plugin, from proc(5): on the host or in a pod, with or without NRI.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use base::sys::host_process::{self, Status};
use base::sys::proc_file;
use base::tree::Tree;

use crate::PROGRAM;

/// The commands that keep running until they are stopped. The monitor, which these start, has another name.
const RUN: &str = "run";
const NRI: &str = "nri";

/// What a process of the plugin does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginProcess {
    /// Whether it serves the kubelet
    pub for_kubelet: bool,
    /// Whether it is an NRI plugin of an engine
    pub for_engine: bool,
    /// Whether it runs in a pod
    pub in_pod: bool,
    /// The root directory of the kubelet, if an option names it
    pub kubelet_dir: Option<PathBuf>,
}

/// The most processes with the plugin's name that are examined: the plugin has one or two.
const MAX_PROCESSES: usize = 64;

impl PluginProcess {
    /// Returns the systemd unit of a process that does not run in a pod, without `.service`.
    #[must_use]
    pub const fn unit(&self) -> &'static str {
        if self.for_kubelet {
            PROGRAM
        } else {
            "oci-nvidia-nri"
        }
    }
}

/// Returns the processes of root. Other users can start programs with this name, too.
#[must_use]
pub fn of_host(host: &Tree) -> Vec<PluginProcess> {
    let proc = host.on_host(Path::new("/proc"));
    let (mut examined, mut processes) = (0, Vec::new());
    for name in host.names(Path::new("/proc")) {
        let name = name.to_string_lossy();
        let dir = proc.join(&*name);
        let is_pid = name.bytes().all(|byte| byte.is_ascii_digit());
        if !is_pid || examined == MAX_PROCESSES || !runs_plugin(&dir) {
            continue;
        }
        examined += 1;
        processes.extend(of_process(&dir));
    }
    processes
}

/// Whether a process of root seems to run the plugin. Its arguments are read only then, because each process chooses its arguments.
fn runs_plugin(dir: &Path) -> bool {
    let is_named = |status: Status| status.uid == 0 && status.may_run(PROGRAM);
    if !Status::read(dir).is_ok_and(is_named) {
        return false;
    }
    // The plugin has fewer capabilities than its process in a pod, so the kernel does not show it this link.
    match std::fs::read_link(dir.join("exe")) {
        Ok(exe) => exe.file_name().is_some_and(is_program),
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
    }
}

/// An updated program has no name any more.
fn is_program(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.strip_suffix(" (deleted)").unwrap_or(&name) == PROGRAM
}

fn of_process(dir: &Path) -> Option<PluginProcess> {
    let mut process = parse(&host_process::arguments(dir).ok()?)?;
    if let Ok(cgroup) = proc_file::read_text(dir.join("cgroup")) {
        process.in_pod = cgroup.contains("kubepods");
    }
    Some(process)
}

/// Parses a command line, whose words end with NUL.
fn parse(command_line: &[u8]) -> Option<PluginProcess> {
    let text = String::from_utf8_lossy(command_line);
    let mut words = text.split('\0');
    if Path::new(words.next()?).file_name()? != PROGRAM {
        return None;
    }
    let command = words.find(|word| [RUN, NRI].contains(word))?;
    let mut process = PluginProcess {
        for_kubelet: command == RUN,
        for_engine: command == NRI,
        in_pod: false,
        kubelet_dir: None,
    };
    while let Some(word) = words.next() {
        match word.split_once('=').unwrap_or((word, "")) {
            ("--nri", _) => process.for_engine = true,
            ("--kubelet-dir", "") => process.kubelet_dir = words.next().map(PathBuf::from),
            ("--kubelet-dir", dir) => process.kubelet_dir = Some(dir.into()),
            _ => {}
        }
    }
    Some(process)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;

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
    fn directories_of_the_kubelet() {
        for (line, dir) in [
            (
                "run --kubelet-dir /var/lib/k0s/kubelet --nri",
                Some("/var/lib/k0s/kubelet"),
            ),
            (
                "run --nri --kubelet-dir=/data/kubelet",
                Some("/data/kubelet"),
            ),
            ("run --nri", None),
        ] {
            let line = format!("{PROGRAM} {line}").replace(' ', "\0");
            let found = parse(line.as_bytes()).unwrap();
            assert_eq!(found.kubelet_dir.as_deref(), dir.map(Path::new), "{line}");
            assert!(found.for_engine, "{line}");
        }
    }

    #[test]
    fn names_of_the_program() {
        for (name, expected) in [
            (PROGRAM, true),
            ("oci-nvidia-kubelet-plugin (deleted)", true),
            ("oci-nvidia-kube", false),
            ("python3", false),
        ] {
            assert_eq!(is_program(OsStr::new(name)), expected, "{name}");
        }
    }

    /// 900 processes that declare a gigabyte of arguments must not be read.
    #[test]
    fn arguments_of_other_programs_are_not_read() {
        let host = tempfile::tempdir().unwrap();
        let dir = host.path().join("proc/7");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("cmdline"), format!("{PROGRAM}\0run\0")).unwrap();
        let tree = Tree::open(&HostPath::new(host.path())).unwrap();
        for (name, uid, exe, expected) in [
            (
                "oci-nvidia-kube",
                "0",
                "/usr/bin/oci-nvidia-kubelet-plugin",
                1,
            ),
            (
                "oci-nvidia-kube",
                "65534",
                "/usr/bin/oci-nvidia-kubelet-plugin",
                0,
            ),
            ("python3", "0", "/usr/bin/oci-nvidia-kubelet-plugin", 0),
            ("oci-nvidia-kube", "0", "/usr/bin/python3", 0),
        ] {
            let status = format!("Name:\t{name}\nPPid:\t1\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n");
            std::fs::write(dir.join("status"), status).unwrap();
            std::fs::remove_file(dir.join("exe")).ok();
            std::os::unix::fs::symlink(exe, dir.join("exe")).unwrap();
            assert_eq!(of_host(&tree).len(), expected, "{name} {uid} {exe}");
        }
    }
}
