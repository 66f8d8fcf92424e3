//! Decides how to give the kernel module and the libraries of the driver the same version. The newer one of the two shows what is out of
//! date, and the kind of the system shows what can be changed there.

use std::cmp::Ordering;
use std::path::Path;

use base::tree::Tree;

/// What a system can change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SystemKind {
    /// A host on which packages are installed in `/`
    #[default]
    Usual,
    /// A host whose updates go to a snapshot that becomes `/` at the next boot
    Transactional,
    /// A container with an own system, such as one of LXC: the kernel, and the modules in it, are the host's
    Container,
}

impl SystemKind {
    /// Examines the system with this root directory.
    #[must_use]
    pub fn of(root: &Tree) -> Self {
        if is_container(root) {
            Self::Container
        } else if root
            .locate(Path::new("/usr/sbin/transactional-update"))
            .is_ok()
        {
            Self::Transactional
        } else {
            Self::Usual
        }
    }
}

/// Container managers tell the first process of a system that it is in a container, and systemd stores what it was told
/// (<https://systemd.io/CONTAINER_INTERFACE>).
fn is_container(root: &Tree) -> bool {
    if root.locate(Path::new("/run/systemd/container")).is_ok() {
        return true;
    }
    let environment = root.read(Path::new("/proc/1/environ")).unwrap_or_default();
    environment
        .split(|byte| *byte == 0)
        .any(|variable| variable.starts_with(b"container="))
}

/// Compares two versions of the driver, `535.183.01`, number by number.
#[must_use]
pub fn compare(a: &str, b: &str) -> Ordering {
    let numbers = |text: &str| -> Vec<u64> {
        text.split('.')
            .map(|part| part.parse().unwrap_or_default())
            .collect()
    };
    numbers(a).cmp(&numbers(b))
}

/// Returns the generation of openSUSE's packages for a version of the driver.
#[must_use]
pub fn generation(version: &str) -> &'static str {
    let series = version.split('.').next().unwrap_or_default();
    if series.parse::<u32>().is_ok_and(|series| series >= 590) {
        "G07"
    } else {
        "G06"
    }
}

/// Returns the fix if the loaded kernel module has the version `module`, and all libraries have the version `libraries`.
#[must_use]
pub fn of_all(system: SystemKind, module: &str, libraries: &str) -> String {
    let install = format!(
        "install the libraries of driver {module} (openSUSE: nvidia-compute-utils-{}; Debian: nvidia-smi)",
        generation(module)
    );
    match (system, compare(libraries, module)) {
        (SystemKind::Container, _) => {
            format!("in this container, whose host has loaded the module, {install}")
        }
        (SystemKind::Usual, Ordering::Greater) => format!(
            "reboot the host, or unload the module and load the one of driver {libraries}; if it is not installed, install it"
        ),
        (SystemKind::Transactional, Ordering::Greater) => format!(
            "reboot the host; if the versions still differ, install the kernel module of driver {libraries} with \"transactional-update pkg install\""
        ),
        (SystemKind::Usual, _) => install,
        (SystemKind::Transactional, _) => {
            format!("{install} with \"transactional-update pkg install\", and reboot the host")
        }
    }
}

/// Returns the fix if some libraries have the version `found`, and the loaded kernel module has the version `module`. `install` installs these
/// libraries.
#[must_use]
pub fn of_some(system: SystemKind, module: &str, found: &str, install: &str) -> String {
    match (system, compare(found, module)) {
        (SystemKind::Container, _) => format!("in this container, {install}"),
        (_, Ordering::Greater) => {
            format!("reboot the host if its driver was just updated; otherwise {install}")
        }
        _ => install.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;

    #[test]
    fn versions_are_compared_by_number() {
        for (a, b, order) in [
            ("580.95.05", "580.119.02", Ordering::Less),
            ("580.119.02", "580.95.05", Ordering::Greater),
            ("535.183.01", "535.183.01", Ordering::Equal),
            ("535.183.06", "550.54.14", Ordering::Less),
            ("590.1", "590.1.1", Ordering::Less),
        ] {
            assert_eq!(compare(a, b), order, "{a} {b}");
        }
    }

    #[test]
    fn a_reboot_helps_only_if_the_libraries_are_newer() {
        use SystemKind::{Container, Transactional, Usual};
        for (system, module, libraries, has, lacks) in [
            (Usual, "535.1", "550.2", "reboot the host", "libraries of"),
            (
                Usual,
                "550.2",
                "535.1",
                "libraries of driver 550.2",
                "reboot",
            ),
            (
                Transactional,
                "535.1",
                "550.2",
                "module of driver 550.2",
                "libraries of",
            ),
            (
                Transactional,
                "550.2",
                "535.1",
                "libraries of driver 550.2",
                "snapshot",
            ),
            (
                Container,
                "535.1",
                "550.2",
                "libraries of driver 535.1",
                "reboot",
            ),
            (
                Container,
                "550.2",
                "535.1",
                "libraries of driver 550.2",
                "reboot",
            ),
        ] {
            let fix = of_all(system, module, libraries);
            assert!(fix.contains(has) && !fix.contains(lacks), "{fix}");
            let reboots = libraries > module && system != Container;
            let fix = of_some(system, module, libraries, "install it");
            assert_eq!(fix.contains("reboot"), reboots, "{fix}");
            assert!(fix.contains("install it"), "{fix}");
        }
    }

    #[test]
    fn kinds_of_systems() {
        for (file, content, kind) in [
            ("etc/os-release", "", SystemKind::Usual),
            (
                "usr/sbin/transactional-update",
                "",
                SystemKind::Transactional,
            ),
            ("run/systemd/container", "lxc\n", SystemKind::Container),
            (
                "proc/1/environ",
                "A=b\0container=lxc\0",
                SystemKind::Container,
            ),
            ("proc/1/environ", "A=container=lxc\0", SystemKind::Usual),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
            let root = Tree::open(&HostPath::new(dir.path())).unwrap();
            assert_eq!(SystemKind::of(&root), kind, "{file} {content:?}");
        }
    }
}
