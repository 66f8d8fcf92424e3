//! What `doctor` reports about hosts with each set of our packages.

use std::fmt::Write;

use oci_nvidia_hook::testing::doctor::{Caller, Status};

use super::host::changed;
use super::{NEEDS, examine};
use crate::support::{read, source};

tests! {
    NEEDS => each_set_of_packages;
}

fn lines(path: &str) -> Vec<String> {
    let text = read(source(path));
    text.lines().map(str::to_owned).collect()
}

/// What the package -compat installs, from the lists of debhelper.
fn compat() -> String {
    let mut script = String::new();
    for line in lines("packaging/debian/oci-nvidia-hook-compat.links") {
        if let Some((program, link)) = line.split_once(' ')
            && link.starts_with("usr/bin/")
        {
            writeln!(script, "ln -sfn /{program} {link}").unwrap();
        }
    }
    assert!(script.lines().count() > 3, "{script}");
    for line in lines("packaging/debian/oci-nvidia-hook-compat.install") {
        let (file, dir) = line.split_once(' ').unwrap();
        let file = source(file);
        writeln!(script, "mkdir -p {dir}; cp '{}' {dir}", file.display()).unwrap();
    }
    script
}

/// The kubelet plugin, and what its service leaves in the directories of the host: a directory for specs, which also has files of editors
/// and the locks of earlier versions.
const PLUGIN: &str = "install -m 755 /dev/null usr/bin/oci-nvidia-kubelet-plugin\n\
     mkdir -p var/lib/kubelet/device-plugins run/cdi run/oci-nvidia-kubelet-plugin var; ln -sfn ../run var/run\n\
     touch run/cdi/.k8s.gpu.nvidia.com.lock run/cdi/.k8s.device-plugin.nvidia.com.lock run/cdi/.nvidia.yaml.swp run/cdi/nvidia.yaml.bak\n";

const NO_DRIVER: &str = "rm -r sys/bus/pci/devices/* proc/driver/nvidia dev/nvidia* usr/lib/x86_64-linux-gnu/* run/nvidia-persistenced dev/char\n\
     : >proc/modules; : >proc/devices; rm -f etc/ld.so.cache\n";

/// Each package next to each other one: a healthy host has no warning and no error, and a host without a GPU has that one only.
fn each_set_of_packages() {
    for (driver, expected) in [("", &[][..]), (NO_DRIVER, &[Some("ONH-010")][..])] {
        for compat in [String::new(), compat()] {
            for plugin in ["", PLUGIN] {
                let dir = changed(&format!("{driver}{compat}{plugin}"));
                let mut checks = examine(dir.path(), Caller::default());
                checks.retain(|check| check.status >= Status::Warning);
                let ids: Vec<_> = checks.iter().map(|check| check.id).collect();
                assert_eq!(ids, expected, "{driver}{compat}{plugin}: {checks:#?}");
            }
        }
    }
}
