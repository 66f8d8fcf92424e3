//! Names the package with the libraries of a driver capability, for each distribution.

use std::collections::BTreeSet;
use std::path::Path;

use base::tree::Tree;

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
    /// Returns the command that installs the libraries of a capability, if it is known.
    #[must_use]
    pub const fn package(self, capability: Capability) -> Option<&'static str> {
        match (self, capability) {
            (Self::Suse, Capability::Utility) => {
                Some("zypper install nvidia-compute-utils-G06 (driver 590 and newer: G07)")
            }
            (Self::Suse, Capability::Compute) => {
                Some("zypper install nvidia-compute-G06 (driver 590 and newer: G07)")
            }
            (Self::Suse, Capability::Graphics | Capability::Display | Capability::Ngx) => {
                Some("zypper install nvidia-gl-G06 (driver 590 and newer: G07)")
            }
            (Self::Suse, Capability::Video) => {
                Some("zypper install nvidia-video-G06 (driver 590 and newer: G07)")
            }
            (Self::Debian, Capability::Utility) => Some("apt install nvidia-smi"),
            (Self::Debian, Capability::Compute) => Some("apt install libcuda1"),
            (Self::Debian, Capability::Graphics | Capability::Display) => {
                Some("apt install nvidia-driver-libs")
            }
            (Self::Debian, Capability::Video) => Some("apt install libnvcuvid1 libnvidia-encode1"),
            (Self::Ubuntu, Capability::Compute) => {
                Some("apt install libnvidia-compute-SERIES, with the driver's series")
            }
            (Self::Fedora, Capability::Compute | Capability::Utility) => Some(
                "dnf install xorg-x11-drv-nvidia-cuda (RPM Fusion), or nvidia-driver-cuda (NVIDIA)",
            ),
            _ => None,
        }
    }

    /// Returns the command that installs the programs of MPS, if it is known.
    #[must_use]
    pub const fn package_of_mps(self) -> Option<&'static str> {
        match self {
            Self::Suse => {
                Some("zypper install nvidia-compute-utils-G06 (driver 590 and newer: G07)")
            }
            Self::Debian => Some("apt install nvidia-cuda-mps"),
            Self::Ubuntu => {
                Some("apt install nvidia-compute-utils-SERIES, with the driver's series")
            }
            Self::Fedora => self.package(Capability::Compute),
            Self::Other => None,
        }
    }
}

/// Returns the command that installs the libraries of a capability in this driver root, if it is known. In another root than `/`, the
/// package belongs to the distribution of the driver root: on the host, the command would install a second driver.
#[must_use]
pub fn install(root: &Tree, capability: Capability) -> Option<String> {
    let command = distribution_of(root).package(capability)?;
    Some(match root.path().as_path() {
        path if path == Path::new("/") => command.to_owned(),
        path => format!("chroot {path:?} {command}"),
    })
}

/// Returns the command that creates the linker cache of this driver root again.
#[must_use]
pub fn ldconfig(root: &Tree) -> String {
    match root.path().as_path() {
        path if path == Path::new("/") => "ldconfig".to_owned(),
        path => format!("ldconfig -r {path:?}"),
    }
}

/// Returns the commands for several capabilities, each once, or a general hint if no package is known.
pub(super) fn commands(root: &Tree, lacking: &[Lacking]) -> String {
    const GENERAL: &str =
        "reinstall the driver with all libraries, in the version of its kernel module";
    let mut commands = BTreeSet::new();
    for Lacking { capability, .. } in lacking {
        commands.insert(install(root, *capability).unwrap_or_else(|| GENERAL.to_owned()));
    }
    Vec::from_iter(commands).join("; ")
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
        assert_eq!(install(&root, Capability::Compute), None);
        let lacking = |capability| Lacking {
            capability,
            libraries: Vec::new(),
        };
        assert_eq!(ldconfig(&root), format!("ldconfig -r {:?}", dir.path()));
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        for (id, command) in [
            ("debian", "apt install libcuda1"),
            (
                "opensuse-leap",
                "zypper install nvidia-compute-G06 (driver 590 and newer: G07)",
            ),
        ] {
            std::fs::write(dir.path().join("etc/os-release"), format!("ID=\"{id}\"\n")).unwrap();
            let expected = format!("chroot {:?} {command}", dir.path());
            assert_eq!(install(&root, Capability::Compute), Some(expected.clone()));
            assert_eq!(
                commands(&root, &[Capability::Compute; 2].map(lacking)),
                expected
            );
        }
        let commands = commands(
            &root,
            &[Capability::Compute, Capability::Compat32].map(lacking),
        );
        assert!(commands.ends_with(
            "; reinstall the driver with all libraries, in the version of its kernel module"
        ));
    }
}
