//! The names of the driver's device nodes: the only parser of `nvidia0`, `nvidiactl` and the others.

use std::fmt;
use std::path::{Path, PathBuf};

use super::nodes::CTL_MINOR;
use super::wsl;
use crate::decimal::parse_decimal;

/// The largest minor number of a GPU. Larger ones are nodes of the driver itself, such as `/dev/nvidiactl`
/// (`NV_MINOR_DEVICE_NUMBER_REGULAR_MAX`).
pub const LAST_GPU: u32 = 247;

/// The driver's control node below /dev.
pub const CONTROL: &str = "nvidiactl";
const CAP: &str = "nvidia-caps/nvidia-cap";

/// A device node of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeName {
    /// `/dev/nvidiaN`, with its minor number N
    Gpu(u32),
    /// `/dev/nvidiactl`
    Control,
    /// `/dev/nvidia-caps/nvidia-capN`, a MIG capability, with its minor number N
    Cap(u32),
    /// `/dev/dxg`, which stands for all GPUs on WSL 2
    Dxg,
}

impl NodeName {
    /// Parses a path relative to `/dev`, such as `nvidia0`. Returns `None` for nodes that belong to no single GPU and are not needed to
    /// open one.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        if name == wsl::NODE {
            return Some(Self::Dxg);
        }
        if name == CONTROL {
            return Some(Self::Control);
        }
        if let Some(minor) = name.strip_prefix(CAP) {
            return Some(Self::Cap(minor_number(minor)?));
        }
        let minor = minor_number(name.strip_prefix("nvidia")?)?;
        (minor <= LAST_GPU).then_some(Self::Gpu(minor))
    }

    /// Parses a path below `/dev`.
    #[must_use]
    pub fn of_path(path: &Path) -> Option<Self> {
        Self::parse(path.to_str()?.strip_prefix("/dev/")?)
    }

    /// Returns its path.
    #[must_use]
    pub fn path(self) -> PathBuf {
        Path::new("/dev").join(self.to_string())
    }

    /// Returns the node with this minor number and the major number 195.
    #[must_use]
    pub const fn of_minor(minor: u32) -> Option<Self> {
        match minor {
            0..=LAST_GPU => Some(Self::Gpu(minor)),
            CTL_MINOR => Some(Self::Control),
            _ => None,
        }
    }

    /// Reports whether a program that opens the node uses a GPU.
    #[must_use]
    pub const fn is_gpu(self) -> bool {
        matches!(self, Self::Gpu(_) | Self::Dxg)
    }
}

/// Prints the path relative to `/dev`.
impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(minor) => write!(f, "nvidia{minor}"),
            Self::Control => f.write_str(CONTROL),
            Self::Cap(minor) => write!(f, "{CAP}{minor}"),
            Self::Dxg => f.write_str(wsl::NODE),
        }
    }
}

/// Parses a minor number as the driver writes it: `/dev/nvidia01` is a file of another program.
fn minor_number(digits: &str) -> Option<u32> {
    if digits.len() > 1 && digits.starts_with('0') {
        return None;
    }
    parse_decimal(digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_nodes() {
        for (name, expected) in [
            ("nvidia0", Some(NodeName::Gpu(0))),
            ("nvidia247", Some(NodeName::Gpu(247))),
            ("nvidia248", None),
            ("nvidia", None),
            ("nvidia01", None),
            ("nvidia+1", None),
            ("nvidia4294967296", None),
            ("nvidiactl", Some(NodeName::Control)),
            ("nvidia-uvm", None),
            ("nvidia-modeset", None),
            ("nvidia-caps/nvidia-cap12", Some(NodeName::Cap(12))),
            ("nvidia-cap12", None),
            ("nvidia-caps/other12", None),
            ("dxg", Some(NodeName::Dxg)),
            ("null", None),
        ] {
            assert_eq!(NodeName::parse(name), expected, "{name}");
            let path = Path::new("/dev").join(name);
            assert_eq!(NodeName::of_path(&path), expected, "{name}");
            if let Some(node) = expected {
                assert_eq!(node.path(), path);
            }
        }
        assert_eq!(NodeName::of_path(Path::new("/tmp/nvidia0")), None);
    }
}
