//! What kind of machine this is.

use std::path::Path;

use serde_json::{Value, json};

/// The facts about a machine that explain what a check can do there.
#[derive(Clone, Debug)]
pub struct Machine {
    pub kernel: String,
    /// A kernel that is not Linux itself, or Linux in an unusual place
    pub kind: Option<&'static str>,
    pub system: String,
    pub arch: &'static str,
    pub is_root: bool,
    /// v1, v2 or none
    pub cgroup: &'static str,
}

impl Machine {
    pub fn read() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let messages = crate::process::find("dmesg").and_then(|dmesg| {
            let ran = crate::process::command(dmesg).output().ok()?;
            Some(String::from_utf8_lossy(&ran.stdout).into_owned())
        });
        let version = read("/proc/version");
        Self {
            kind: kind(&version, &messages.unwrap_or_default()),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            system: system(&read("/etc/os-release")),
            arch: std::env::consts::ARCH,
            is_root: nix::unistd::geteuid().is_root(),
            cgroup: cgroup(&read("/proc/self/mountinfo")),
        }
    }

    pub fn describe(&self) -> Value {
        json!({
            "kernel": self.kernel,
            "kernel_kind": self.kind.unwrap_or("Linux"),
            "system": self.system,
            "architecture": self.arch,
            "root": self.is_root,
            "cgroup": self.cgroup,
            "container": container(),
        })
    }
}

/// Recognizes kernels that behave differently. gVisor has the version of Linux 4.4 and its date, and its own kernel messages.
fn kind(version: &str, messages: &str) -> Option<&'static str> {
    if messages.contains("Starting gVisor") || version.contains("Sun Jan 10 15:06:54 PST 2016") {
        return Some("gVisor");
    }
    (version.contains("microsoft") || version.contains("Microsoft")).then_some("WSL")
}

fn system(os_release: &str) -> String {
    let name = os_release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.unwrap_or("unknown").trim_matches('"').to_owned()
}

/// The version of the hierarchy that has the device rules: the controller of version 1, or else version 2 at the usual place.
fn cgroup(mountinfo: &str) -> &'static str {
    let mounts = || mountinfo.lines().filter_map(|line| line.split_once(" - "));
    let has_devices = |(_, kind): (&str, &str)| {
        kind.starts_with("cgroup ")
            && kind
                .rsplit(' ')
                .next()
                .is_some_and(|options| options.split(',').any(|one| one == "devices"))
    };
    let is_unified = |(place, kind): (&str, &str)| {
        kind.starts_with("cgroup2 ") && place.split(' ').nth(4) == Some("/sys/fs/cgroup")
    };
    if mounts().any(has_devices) {
        "v1"
    } else if mounts().any(is_unified) {
        "v2"
    } else {
        "none"
    }
}

/// Whether this is already in a container, by the marks of engines.
fn container() -> bool {
    [
        "/.dockerenv",
        "/run/.containerenv",
        "/var/run/secrets/kubernetes.io",
    ]
    .iter()
    .any(|path| Path::new(path).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_recognized() {
        let gvisor = "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n";
        assert_eq!(kind(gvisor, ""), Some("gVisor"));
        assert_eq!(
            kind(
                "Linux version 4.19.0",
                "[    0.000000] Starting gVisor...\n"
            ),
            Some("gVisor")
        );
        assert_eq!(
            kind("Linux version 5.15.153.1-microsoft-standard-WSL2", ""),
            Some("WSL")
        );
        assert_eq!(
            kind(
                "Linux version 6.12.0-1-default",
                "[    0.000000] Linux version 6.12.0\n"
            ),
            None
        );
    }

    #[test]
    fn hierarchies_are_recognized() {
        let v1 = "36 32 0:31 / /sys/fs/cgroup/devices rw shared:15 - cgroup cgroup rw,devices\n\
                  37 32 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(cgroup(v1), "v1");
        assert_eq!(
            cgroup(
                "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
            ),
            "v2"
        );
        assert_eq!(cgroup("30 23 0:26 / /proc rw - proc proc rw\n"), "none");
    }
}
