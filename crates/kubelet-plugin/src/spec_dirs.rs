//! The directories that decide what a CDI spec has. As long as they are the same, the spec need not be made again, which takes a system call
//! or more for each file of the driver.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cdi_spec::spec::{ContainerEdits, Spec};
use nvidia_host::config::Config;

use crate::watched_files::WatchedFiles;

/// Directories in which device nodes, or the sockets of the driver's services, appear later.
const OF_HOST: [&str; 2] = ["dev", "run"];

/// Examines the directories of this spec.
#[must_use]
pub(crate) fn examine(spec: &Spec, config: &Config) -> WatchedFiles {
    let mut dirs = BTreeSet::new();
    add_dirs(&mut dirs, &spec.container_edits);
    for device in &spec.devices {
        add_dirs(&mut dirs, &device.container_edits);
    }
    let roots = [Some(&config.driver_root), config.dev_root.as_ref()];
    for root in roots.into_iter().flatten() {
        dirs.extend(OF_HOST.map(|name| root.as_path().join(name)));
    }
    WatchedFiles::of(dirs)
}

fn add_dirs(dirs: &mut BTreeSet<PathBuf>, edits: &ContainerEdits) {
    let mut paths: Vec<&str> = Vec::new();
    for node in &edits.device_nodes {
        paths.push(node.host_path.as_ref().unwrap_or(&node.path));
    }
    for mount in &edits.mounts {
        paths.push(&mount.host_path);
    }
    for hook in &edits.hooks {
        paths.push(&hook.path);
    }
    for path in paths {
        dirs.extend(Path::new(path).parent().map(Path::to_owned));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cdi_spec::spec::{Device, Mount};

    #[test]
    fn a_file_that_appears_or_is_removed() {
        let host = tempfile::tempdir().unwrap();
        let config = Config {
            driver_root: base::paths::HostPath::new(host.path()),
            ..Config::default()
        };
        let library = host.path().join("lib/libcuda.so");
        std::fs::create_dir(host.path().join("lib")).unwrap();
        std::fs::write(&library, "").unwrap();
        let mut edits = ContainerEdits::default();
        edits.mounts.push(Mount {
            host_path: library.to_str().unwrap().to_owned(),
            ..Mount::default()
        });
        let spec = Spec {
            devices: vec![Device {
                container_edits: edits,
                ..Device::default()
            }],
            ..Spec::default()
        };
        let change = |change: &dyn Fn()| {
            let dirs = examine(&spec, &config);
            assert!(dirs.are_the_same());
            // Times have the resolution of the kernel's tick.
            std::thread::sleep(std::time::Duration::from_millis(20));
            change();
            !dirs.are_the_same()
        };
        assert!(change(&|| std::fs::remove_file(&library).unwrap()));
        assert!(change(&|| {
            std::fs::create_dir(host.path().join("dev")).unwrap();
        }));
        assert!(change(&|| {
            std::fs::write(host.path().join("dev/nvidia-uvm"), "").unwrap();
        }));
        assert!(!change(&|| {
            std::fs::write(host.path().join("other"), "").unwrap();
        }));
    }
}
