//! Names the package with the libraries of a driver capability, for each distribution.

use std::collections::BTreeSet;
use std::path::Path;

use base::tree::Tree;

use crate::capability::Capability;

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
    let value = os_release.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    value.unwrap_or_default().trim_matches('"').split_whitespace()
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
            (Self::Suse, Capability::Utility) => Some("zypper install nvidia-compute-utils-G06"),
            (Self::Suse, Capability::Compute) => Some("zypper install nvidia-compute-G06"),
            (Self::Suse, Capability::Graphics | Capability::Display | Capability::Ngx) => {
                Some("zypper install nvidia-gl-G06")
            }
            (Self::Suse, Capability::Video) => Some("zypper install nvidia-video-G06"),
            (Self::Debian, Capability::Utility) => Some("apt install nvidia-smi"),
            (Self::Debian, Capability::Compute) => Some("apt install libcuda1"),
            (Self::Debian, Capability::Graphics | Capability::Display) => Some("apt install nvidia-driver-libs"),
            (Self::Debian, Capability::Video) => Some("apt install libnvcuvid1 libnvidia-encode1"),
            (Self::Ubuntu, Capability::Compute) => {
                Some("apt install libnvidia-compute-SERIES, with the driver's series")
            }
            (Self::Fedora, Capability::Compute | Capability::Utility) => {
                Some("dnf install xorg-x11-drv-nvidia-cuda (RPM Fusion), or nvidia-driver-cuda (NVIDIA)")
            }
            _ => None,
        }
    }

    /// Returns the commands for several capabilities, each once, or a general hint if no package is known.
    #[must_use]
    pub fn commands(self, capabilities: impl Iterator<Item = Capability>) -> String {
        const GENERAL: &str = "install all of the driver's libraries, of the same version as its kernel module";
        let commands = BTreeSet::from_iter(capabilities.map(|capability| self.package(capability).unwrap_or(GENERAL)));
        commands.into_iter().collect::<Vec<_>>().join("; ")
    }
}

/// Returns a message such as `the libraries of the driver capability "graphics" are missing below "/": libnvidia-glcore.so`.
#[must_use]
pub fn lacking_in_words(root: &Tree, lacking: &[(Capability, Vec<String>)]) -> String {
    let names: Vec<_> = lacking.iter().map(|(capability, _)| format!("\"{}\"", capability.name())).collect();
    let files = lacking.iter().flat_map(|(_, names)| names.iter().map(String::as_str));
    let files = BTreeSet::from_iter(files).into_iter().collect::<Vec<_>>().join(", ");
    let capabilities = if names.len() == 1 { "capability" } else { "capabilities" };
    format!(
        "the libraries of the driver {capabilities} {} are missing below {}: {files}",
        names.join(", "),
        root.path()
    )
}
