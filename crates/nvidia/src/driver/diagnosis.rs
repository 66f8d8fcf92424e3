//! Determines why there is no working driver. Different causes have the same symptoms, "library not found" or "driver not loaded".

use base::report::failure;
use base::tree::Tree;
use findings::catalog;

use super::kind::DriverKind;
use super::libraries::{Library, Search};
use super::locate;
use super::mismatch::{self, SystemKind};
use super::pci::{self, PCI_DEVICES};
use super::platform::Platform;

/// The parts of a driver that a host has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Installation {
    /// The platform, if the driver for PCI GPUs is not its driver
    pub platform: Option<Platform>,
    /// The number of NVIDIA GPUs on the PCI bus; `None` if the bus cannot be examined
    pub pci_gpus: Option<usize>,
    /// The version of the loaded kernel module
    pub module: Option<String>,
    /// The version in the file name of libnvidia-ml
    pub libraries: Option<String>,
    /// The kind of the system
    pub system: SystemKind,
}

/// Examines the host. `module` is the version of the loaded kernel module. `host` is the directory that is the host, if that is not `/`.
#[must_use]
pub fn inspect(search: &Search<'_>, module: Option<String>, host: Option<&Tree>) -> Installation {
    let root = search.root;
    Installation {
        platform: Platform::of_host(root, host),
        pci_gpus: match root.owner_on(host, PCI_DEVICES) {
            Ok(root) => pci::count_gpus(&root),
            Err(_) => None,
        },
        module,
        libraries: version_of_libraries(search),
        system: SystemKind::of(host.unwrap_or(root)),
    }
}

/// Returns the version in the file name of libnvidia-ml. The names of WSL's files do not contain one.
#[must_use]
pub fn version_of_libraries(search: &Search<'_>) -> Option<String> {
    if search.kind == DriverKind::Wsl {
        return None;
    }
    version_of(locate::management_library(&search.of_version(""))?)
}

fn version_of(library: Library) -> Option<String> {
    let name = library.file_name.into_string().ok()?;
    Some(name.split_once(".so.")?.1.to_owned())
}

/// Returns the cause as an error, or `None` if the driver seems to be complete.
#[must_use]
pub fn diagnose(facts: &Installation, root: &Tree) -> Option<anyhow::Error> {
    match (&facts.module, &facts.libraries) {
        (Some(module), Some(libraries)) if module != libraries => Some(failure(
            &catalog::MISMATCH,
            format!(
                "the loaded kernel module has version {module}, and the libraries below {} have version {libraries}",
                root.path()
            ),
            mismatch::of_all(facts.system, module, libraries),
        )),
        (Some(module), None) => Some(failure(
            &catalog::NO_LIBRARIES,
            format!(
                "the kernel module of driver {module} is loaded, but libnvidia-ml is missing below {}",
                root.path()
            ),
            format!(
                "install the libraries of driver {module} (openSUSE: nvidia-compute-utils-{}; Debian: nvidia-smi), or set root in the \
                 [nvidia-container-cli] table of config.toml to the directory that contains them",
                mismatch::generation(module)
            ),
        )),
        (None, _) if facts.platform.is_some() => {
            facts.platform.map(|platform| platform.error(root))
        }
        (None, _) if facts.pci_gpus == Some(0) => Some(failure(
            &catalog::NO_GPU,
            "there is no NVIDIA GPU on the PCI bus of this host",
            "list the NVIDIA devices with \"lspci -d 10de:\"; on a host without GPUs, unset NVIDIA_VISIBLE_DEVICES for the \
             container, or set no-gpu = \"start\" in config.toml",
        )),
        (None, libraries) => {
            let gpus = match facts.pci_gpus {
                None => String::new(),
                Some(1) => "there is an NVIDIA GPU on the PCI bus, but ".to_owned(),
                Some(count) => format!("there are {count} NVIDIA GPUs on the PCI bus, but "),
            };
            let hint = match libraries {
                Some(_) if facts.system == SystemKind::Transactional => {
                    "reboot the host: the new driver is in the next snapshot".to_owned()
                }
                Some(_) => "load it with \"modprobe nvidia\"; if that fails, \"journalctl -k\" shows the reason \
                            (Secure Boot rejects unsigned modules)"
                    .to_owned(),
                None => "install the driver (openSUSE: nvidia-open-driver-G07-signed-kmp-default and \
                         nvidia-compute-utils-G07, before Turing nvidia-driver-G06-kmp-default and \
                         nvidia-compute-utils-G06; Debian: nvidia-driver)"
                    .to_owned(),
            };
            Some(failure(
                &catalog::NOT_LOADED,
                format!("{gpus}the kernel module nvidia is not loaded"),
                hint,
            ))
        }
        (Some(_), Some(_)) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;
    use base::report::render;

    #[test]
    fn each_has_its_own_words() {
        let dir = tempfile::tempdir().unwrap();
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        for (pci_gpus, module, libraries, is_transactional, says, fix) in [
            (
                Some(0),
                "",
                "",
                false,
                "there is no NVIDIA GPU on the PCI bus",
                "lspci",
            ),
            (
                Some(0),
                "",
                "535.1",
                false,
                "there is no NVIDIA GPU on the PCI bus",
                "lspci",
            ),
            (
                Some(2),
                "",
                "535.1",
                false,
                "there are 2 NVIDIA GPUs on the PCI bus, but the kernel module nvidia is not",
                "modprobe",
            ),
            (
                Some(2),
                "",
                "535.1",
                true,
                "there are 2 NVIDIA GPUs on the PCI bus",
                "reboot",
            ),
            (
                Some(2),
                "",
                "",
                false,
                "there are 2 NVIDIA GPUs on the PCI bus",
                "install the driver",
            ),
            (
                None,
                "",
                "535.1",
                false,
                "the kernel module nvidia is not loaded",
                "modprobe",
            ),
            (
                Some(1),
                "535.1",
                "550.2",
                false,
                "the loaded kernel module has version 535.1, and the libraries",
                "reboot",
            ),
            (
                Some(1),
                "535.1",
                "550.2",
                true,
                "have version 550.2",
                "transactional-update",
            ),
            (
                Some(1),
                "535.1",
                "",
                false,
                "driver 535.1 is loaded, but libnvidia-ml is missing",
                "nvidia-compute-utils",
            ),
        ] {
            let facts = Installation {
                platform: None,
                pci_gpus,
                module: some(module),
                libraries: some(libraries),
                system: if is_transactional {
                    SystemKind::Transactional
                } else {
                    SystemKind::Usual
                },
            };
            let text = render(&diagnose(&facts, &root).unwrap());
            let (what, hint) = text.split_once("\nhint: ").unwrap();
            assert!(what.contains(says) && hint.contains(fix), "{text}");
        }
        let fine = Installation {
            pci_gpus: Some(1),
            module: some("5.1"),
            libraries: some("5.1"),
            ..Installation::default()
        };
        assert!(diagnose(&fine, &root).is_none());
        for (platform, says, fix) in [
            (
                Platform::Wsl,
                "WSL 2, and NVIDIA's driver for Windows is missing",
                "install or update",
            ),
            (Platform::Tegra, "Jetson", "use NVIDIA's container toolkit"),
        ] {
            let facts = Installation {
                platform: Some(platform),
                pci_gpus: Some(0),
                ..Installation::default()
            };
            let text = render(&diagnose(&facts, &root).unwrap());
            assert!(
                text.contains(says) && text.contains(&format!("\nhint: {fix}")),
                "{text}"
            );
        }
    }
}
