//! Recognizes platforms whose driver has other files and device nodes than the driver for PCI GPUs: WSL 2, which is supported
//! ([`super::wsl`]), and Tegra, which is not and has symptoms of a missing driver, for which the usual advice is wrong.

use std::path::Path;

use anyhow::Error;

use base::report::failure;
use base::tree::Tree;
use findings::catalog;

use super::wsl;

/// A platform without the driver for PCI GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    /// Jetson and other modules with a Tegra SoC, whose GPU the kernel module nvgpu drives
    Tegra,
    /// The Windows Subsystem for Linux, version 2: the driver is part of Windows
    Wsl,
}

/// A file that only the platform has.
struct Sign {
    platform: Platform,
    path: &'static str,
    /// A word in the file; empty if the existence of the file suffices
    contains: &'static str,
}

/// NVIDIA's stack searches for the same files, except for the device tree: Yocto's images for Jetson lack nv_tegra_release.
const SIGNS: [Sign; 4] = [
    Sign {
        platform: Platform::Wsl,
        path: wsl::NODE_PATH,
        contains: "",
    },
    Sign {
        platform: Platform::Tegra,
        path: "/etc/nv_tegra_release",
        contains: "",
    },
    Sign {
        platform: Platform::Tegra,
        path: "/sys/devices/soc0/family",
        contains: "Tegra",
    },
    Sign {
        platform: Platform::Tegra,
        path: "/proc/device-tree/compatible",
        contains: "nvidia,tegra",
    },
];

/// How NVML marks the name of a GPU that the kernel module nvgpu drives: `Orin (nvgpu)`.
const NVGPU: &str = "(nvgpu)";

impl Platform {
    /// Examines a host without the kernel module nvidia. A computer with a Tegra SoC and a PCI GPU has the usual driver. `host` is the
    /// directory that is the host, if that is not `/`.
    #[must_use]
    pub fn of_host(root: &Tree, host: Option<&Tree>) -> Option<Self> {
        SIGNS
            .iter()
            .find(|sign| sign.is_on(root, host))
            .map(|sign| sign.platform)
    }

    /// Whether the host is WSL 2, if it is one without the kernel module nvidia.
    #[must_use]
    pub fn of_wsl(root: &Tree, host: Option<&Tree>) -> bool {
        SIGNS
            .iter()
            .any(|sign| sign.platform == Self::Wsl && sign.is_on(root, host))
    }

    /// Examines the models of the GPUs of a host with the kernel module nvidia: on Jetson, it drives only the display.
    #[must_use]
    pub fn of_models<'a>(models: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let mut models = models.into_iter().peekable();
        let is_integrated = models.peek().is_some() && models.all(|model| model.contains(NVGPU));
        is_integrated.then_some(Self::Tegra)
    }

    /// Returns the error for a request on a host that has no driver below `root` as far as this program knows.
    #[must_use]
    pub fn error(self, root: &Tree) -> Error {
        match self {
            Self::Tegra => failure(
                &catalog::PLATFORM,
                "this host is a Jetson or has another Tegra SoC, whose driver is not supported",
                "use NVIDIA's container toolkit on this host: its mode \"csv\" mounts the files that JetPack lists",
            ),
            Self::Wsl => wsl::no_driver(root),
        }
    }
}

impl Sign {
    fn is_on(&self, root: &Tree, host: Option<&Tree>) -> bool {
        let Self { path, contains, .. } = *self;
        let Ok(tree) = root.owner_on(host, path) else {
            return false;
        };
        let path = Path::new(path);
        if contains.is_empty() {
            return tree.locate(path).is_ok();
        }
        tree.read(path).is_ok_and(|content| {
            content
                .windows(contains.len())
                .any(|part| part == contains.as_bytes())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use base::paths::HostPath;

    #[test]
    fn signs() {
        for (path, content, platform) in [
            ("dev/dxg", "", Some(Platform::Wsl)),
            (
                "etc/nv_tegra_release",
                "# R36 (release), REVISION: 4.3",
                Some(Platform::Tegra),
            ),
            ("sys/devices/soc0/family", "Tegra\n", Some(Platform::Tegra)),
            ("sys/devices/soc0/family", "Snapdragon\n", None),
            (
                "proc/device-tree/compatible",
                "nvidia,p3768-0000\0nvidia,tegra234\0",
                Some(Platform::Tegra),
            ),
            (
                "proc/device-tree/compatible",
                "raspberrypi,4-model-b\0",
                None,
            ),
            ("etc/os-release", "", None),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
            let root = Tree::open(&HostPath::new(dir.path())).unwrap();
            assert_eq!(
                Platform::of_host(&root, Some(&root)),
                platform,
                "{path}: {content}"
            );
        }
    }

    #[test]
    fn integrated_gpus() {
        assert_eq!(Platform::of_models(["Orin (nvgpu)"]), Some(Platform::Tegra));
        assert_eq!(
            Platform::of_models(["Orin (nvgpu)", "NVIDIA RTX A6000"]),
            None
        );
        assert_eq!(Platform::of_models([]), None);
    }
}
