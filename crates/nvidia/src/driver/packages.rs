//! Names the package with the libraries of a driver capability, for each distribution.

use std::collections::BTreeSet;
use std::path::Path;

use base::tree::Tree;

use super::mismatch::{SystemKind, generation};
use crate::capability::Capability;

/// What to do on WSL 2 if a part of the driver is missing.
pub(super) const IN_WINDOWS: &str = "install or update the NVIDIA driver in Windows, then run \"wsl --shutdown\" in Windows and start WSL again";

/// A driver capability, and the libraries that it depends on and that are missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lacking {
    /// The capability
    pub capability: Capability,
    /// The file names of the libraries
    pub libraries: Vec<String>,
}

/// A family of distributions with the same packages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distribution {
    /// openSUSE, SLE
    Suse,
    /// Debian
    Debian,
    /// Ubuntu
    Ubuntu,
    /// Fedora, RHEL
    Fedora,
    /// Another one
    Other,
}

/// Parses os-release(5).
#[must_use]
pub fn distribution(os_release: &str) -> Distribution {
    for word in words(os_release, "ID").chain(words(os_release, "ID_LIKE")) {
        match word {
            "ubuntu" => return Distribution::Ubuntu,
            "debian" => return Distribution::Debian,
            "fedora" | "rhel" | "centos" => return Distribution::Fedora,
            _ if word.contains("suse") || word.starts_with("sle") => return Distribution::Suse,
            _ => {}
        }
    }
    Distribution::Other
}

fn words<'a>(os_release: &'a str, key: &str) -> impl Iterator<Item = &'a str> {
    let value = os_release
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    value
        .unwrap_or_default()
        .trim_matches('"')
        .split_whitespace()
}

/// Reads the distribution of a driver root.
#[must_use]
pub fn distribution_of(root: &Tree) -> Distribution {
    let paths = ["/etc/os-release", "/usr/lib/os-release"].map(Path::new);
    let text = paths.into_iter().find_map(|path| root.read_text(path).ok());
    distribution(&text.unwrap_or_default())
}

impl Distribution {
    /// Returns the packages with the libraries of a capability, if they are known. `GENERATION` stands for the generation of the driver in the
    /// names of openSUSE, and `SERIES` for the first number of its version in the names of Ubuntu.
    const fn packages(self, capability: Capability) -> Option<&'static str> {
        match (self, capability) {
            (Self::Suse, Capability::Utility) => Some("nvidia-compute-utils-GENERATION"),
            (Self::Suse, Capability::Compute) => Some("nvidia-compute-GENERATION"),
            (Self::Suse, Capability::Graphics | Capability::Display | Capability::Ngx) => {
                Some("nvidia-gl-GENERATION")
            }
            (Self::Suse, Capability::Video) => Some("nvidia-video-GENERATION"),
            (Self::Debian, Capability::Utility) => Some("nvidia-smi"),
            (Self::Debian, Capability::Compute) => Some("libcuda1"),
            (Self::Debian, Capability::Graphics | Capability::Display) => {
                Some("nvidia-driver-libs")
            }
            (Self::Debian, Capability::Video) => Some("libnvcuvid1 libnvidia-encode1"),
            (Self::Ubuntu, Capability::Compute) => Some("libnvidia-compute-SERIES"),
            (Self::Fedora, Capability::Compute | Capability::Utility) => {
                Some("xorg-x11-drv-nvidia-cuda # NVIDIA's repository: nvidia-driver-cuda")
            }
            _ => None,
        }
    }

    /// Returns the packages with the programs of MPS, if they are known.
    const fn packages_of_mps(self) -> Option<&'static str> {
        match self {
            Self::Suse => Some("nvidia-compute-utils-GENERATION"),
            Self::Debian => Some("nvidia-cuda-mps"),
            Self::Ubuntu => Some("nvidia-compute-utils-SERIES"),
            Self::Fedora => self.packages(Capability::Compute),
            Self::Other => None,
        }
    }

    /// Returns the command that installs these packages for the driver of a version, which is empty if it is unknown.
    fn command(self, system: SystemKind, packages: &str, version: &str) -> String {
        let install = match (self, system) {
            (Self::Suse, SystemKind::Transactional) => "transactional-update pkg install",
            (Self::Suse, _) => "zypper install",
            (Self::Fedora, _) => "dnf install",
            (Self::Debian | Self::Ubuntu | Self::Other, _) => "apt install",
        };
        let series = version.split('.').next().unwrap_or_default();
        let names = packages.replace("GENERATION", generation(version));
        if !series.is_empty() {
            return format!("{install} {}", names.replace("SERIES", series));
        }
        // A shell ignores what follows the mark.
        let remark = match self {
            Self::Suse => " # driver 590 and newer: G07",
            Self::Ubuntu => " # SERIES: the first number of the driver's version",
            Self::Debian | Self::Fedora | Self::Other => "",
        };
        format!("{install} {names}{remark}")
    }
}

/// Returns the command that installs packages in this driver root. In another root than `/`, the package belongs to the distribution of the
/// driver root: on the host, the command would install a second driver.
fn install_packages(root: &Tree, packages: &str, version: &str) -> String {
    let command = distribution_of(root).command(SystemKind::of(root), packages, version);
    match root.path().as_path() {
        path if path == Path::new("/") => command,
        path => format!("chroot {path:?} {command}"),
    }
}

/// Returns the command that installs the libraries of a capability in this driver root, for the driver of a version, if the package is known.
#[must_use]
pub fn install(root: &Tree, capability: Capability, version: &str) -> Option<String> {
    let packages = distribution_of(root).packages(capability)?;
    Some(install_packages(root, packages, version))
}

/// Returns the command that installs the programs of MPS in this driver root, if the package is known.
#[must_use]
pub fn install_mps(root: &Tree, version: &str) -> Option<String> {
    let packages = distribution_of(root).packages_of_mps()?;
    Some(install_packages(root, packages, version))
}

/// Returns the command that creates the linker cache of this driver root again.
#[must_use]
pub fn ldconfig(root: &Tree) -> String {
    match root.path().as_path() {
        path if path == Path::new("/") => "ldconfig".to_owned(),
        path => format!("ldconfig -r {path:?}"),
    }
}

/// Returns the command that installs the packages of several capabilities, or a general hint if no package is known.
pub(super) fn commands(root: &Tree, lacking: &[Lacking], version: &str) -> String {
    const GENERAL: &str =
        "reinstall the driver with all libraries, in the version of its kernel module";
    let mut packages = BTreeSet::new();
    for Lacking { capability, .. } in lacking {
        packages.extend(distribution_of(root).packages(*capability));
    }
    if packages.is_empty() {
        return GENERAL.to_owned();
    }
    install_packages(root, &Vec::from_iter(packages).join(" "), version)
}

/// Returns a message such as `the libraries of the driver capability "graphics" are missing below "/": libnvidia-glcore.so`.
pub(super) fn lacking_in_words(root: &Tree, lacking: &[Lacking]) -> String {
    let mut names = Vec::new();
    let mut files = BTreeSet::new();
    for Lacking {
        capability,
        libraries,
    } in lacking
    {
        names.push(format!("\"{}\"", capability.name()));
        files.extend(libraries.iter().map(String::as_str));
    }
    let capabilities = if names.len() == 1 {
        "capability"
    } else {
        "capabilities"
    };
    format!(
        "the libraries of the driver {capabilities} {} are missing below {}: {}",
        names.join(", "),
        root.path(),
        Vec::from_iter(files).join(", ")
    )
}

/// Returns such a message for the driver of WSL 2.
pub(super) fn lacking_in_windows(lacking: &[Lacking]) -> String {
    let mut words = Vec::new();
    for Lacking {
        capability,
        libraries,
    } in lacking
    {
        words.push(format!("{} ({})", capability.name(), libraries.join(", ")));
    }
    format!(
        "the driver for WSL 2 does not have the libraries for {}",
        words.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;

    #[test]
    fn the_distribution_is_that_of_the_driver_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        assert_eq!(install(&root, Capability::Compute, "535.1"), None);
        assert_eq!(ldconfig(&root), format!("ldconfig -r {:?}", dir.path()));
        std::fs::create_dir_all(dir.path().join("etc")).unwrap();
        for (id, version, command) in [
            ("debian", "535.1", "apt install libcuda1"),
            ("ubuntu", "580.1", "apt install libnvidia-compute-580"),
            (
                "opensuse-leap",
                "580.1",
                "zypper install nvidia-compute-G06",
            ),
            (
                "opensuse-leap",
                "590.1",
                "zypper install nvidia-compute-G07",
            ),
            (
                "opensuse-leap",
                "",
                "zypper install nvidia-compute-G06 # driver 590 and newer: G07",
            ),
        ] {
            std::fs::write(dir.path().join("etc/os-release"), format!("ID=\"{id}\"\n")).unwrap();
            let expected = format!("chroot {:?} {command}", dir.path());
            assert_eq!(install(&root, Capability::Compute, version), Some(expected));
        }
        std::fs::create_dir_all(dir.path().join("usr/sbin")).unwrap();
        std::fs::write(dir.path().join("usr/sbin/transactional-update"), "").unwrap();
        let lacking = |capability| Lacking {
            capability,
            libraries: Vec::new(),
        };
        let several = [Capability::Compute, Capability::Video, Capability::Compat32];
        let command = commands(&root, &several.map(lacking), "535.1");
        let expected = "transactional-update pkg install nvidia-compute-G06 nvidia-video-G06";
        assert_eq!(command, format!("chroot {:?} {expected}", dir.path()));
        let unknown = commands(&root, &[lacking(Capability::Compat32)], "535.1");
        assert!(unknown.starts_with("reinstall the driver"), "{unknown}");
    }
}
