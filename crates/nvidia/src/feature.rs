//! The devices next to GPUs that a container requests with a variable each: GPUDirect Storage, GPUDirect RDMA, GDRCopy and NVSwitches.
//! The table states what belongs to each of them, so that no other module names a node or a file.

use std::iter::FromIterator;

use base::paths::HostPath;
use base::report::Finding;
use findings::catalog;

/// The value with which a variable requests a feature. NVIDIA's stack compares it exactly.
pub const ENABLED: &str = "enabled";

/// A feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// GPUDirect Storage
    Gds,
    /// GPUDirect RDMA
    Mofed,
    /// GDRCopy
    Gdrcopy,
    /// The NVSwitches of the board
    Nvswitch,
}

/// What belongs to a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureRow {
    /// The name in `[devices]` of config.toml, and the class of its CDI device
    pub name: &'static str,
    /// The variable that requests it
    pub variable: &'static str,
    /// The name for people
    pub title: &'static str,
    /// Its nodes below /dev; `*` matches the rest of a name
    pub nodes: &'static [&'static str],
    /// Files of the driver root that a container gets with the nodes, if they exist
    pub files: &'static [&'static str],
    /// Directories of the driver root that a container gets with the nodes, if they exist. A directory with a socket, a FIFO or a
    /// device is not given to containers, which is checked for each container.
    pub directories: &'static [&'static str],
    /// The kernel module that has the devices
    pub module: &'static str,
}

const GDS: FeatureRow = FeatureRow {
    name: "gds",
    variable: "NVIDIA_GDS",
    title: "GPUDirect Storage",
    nodes: &["nvidia-fs*"],
    files: &["/etc/cufile.json"],
    // Only the database. /run/udev also has the control socket of udevd, which obeys uid 0 of any container.
    directories: &["/run/udev/data"],
    module: "nvidia_fs",
};
const MOFED: FeatureRow = FeatureRow {
    name: "mofed",
    variable: "NVIDIA_MOFED",
    title: "GPUDirect RDMA",
    nodes: &["infiniband/uverbs*", "infiniband/rdma_cm"],
    files: &[],
    directories: &[],
    module: "ib_uverbs",
};
const GDRCOPY: FeatureRow = FeatureRow {
    name: "gdrcopy",
    variable: "NVIDIA_GDRCOPY",
    title: "GDRCopy",
    nodes: &["gdrdrv"],
    files: &[],
    directories: &[],
    module: "gdrdrv",
};
const NVSWITCH: FeatureRow = FeatureRow {
    name: "nvswitch",
    variable: "NVIDIA_NVSWITCH",
    title: "NVSwitches",
    nodes: &["nvidia-nvswitchctl", "nvidia-nvswitch*"],
    files: &[],
    directories: &[],
    module: "nvidia",
};

impl Feature {
    /// All features.
    pub const ALL: [Self; 4] = [Self::Gds, Self::Mofed, Self::Gdrcopy, Self::Nvswitch];

    /// Returns what belongs to it.
    #[must_use]
    pub const fn row(self) -> &'static FeatureRow {
        match self {
            Self::Gds => &GDS,
            Self::Mofed => &MOFED,
            Self::Gdrcopy => &GDRCOPY,
            Self::Nvswitch => &NVSWITCH,
        }
    }

    /// Returns the feature with this name in config.toml.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|feature| feature.row().name == name)
    }

    /// Returns the finding about a host without its nodes. `request` is the beginning of the message.
    #[must_use]
    pub fn missing(self, request: &str, dev_root: &HostPath) -> Finding {
        let first = self.row().nodes.first().copied().unwrap_or_default();
        let what = format!("{request}, but \"/dev/{first}\" is missing below {dev_root}");
        Finding::new(&catalog::NO_FEATURE, what, self.how_to_get_nodes())
    }

    /// Returns the hint for a host without its nodes.
    #[must_use]
    pub fn how_to_get_nodes(self) -> String {
        let module = self.row().module;
        match self {
            Self::Nvswitch => {
                format!(
                    "on a board with NVSwitches, load the kernel module {module} and start nvidia-fabricmanager"
                )
            }
            _ => format!("load the kernel module on the host: \"modprobe {module}\""),
        }
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u8);

impl Features {
    /// No feature.
    pub const EMPTY: Self = Self(0);

    /// Adds a feature.
    pub const fn insert(&mut self, feature: Feature) {
        self.0 |= feature.bit();
    }

    /// Adds or removes a feature.
    pub const fn set(&mut self, feature: Feature, is_in: bool) {
        self.0 = if is_in {
            self.0 | feature.bit()
        } else {
            self.0 & !feature.bit()
        };
    }

    /// Whether it contains no feature.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether it contains the feature.
    #[must_use]
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & feature.bit() != 0
    }

    /// Returns its features, in the order of the table.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL
            .into_iter()
            .filter(move |feature| self.has(*feature))
    }

    /// Returns the names of its features.
    #[must_use]
    pub fn names(self) -> Vec<String> {
        self.iter()
            .map(|feature| feature.row().name.to_owned())
            .collect()
    }
}

impl FromIterator<Feature> for Features {
    fn from_iter<T: IntoIterator<Item = Feature>>(features: T) -> Self {
        let mut set = Self::default();
        features.into_iter().for_each(|feature| set.insert(feature));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_feature_is_one_of_the_set() {
        for feature in Feature::ALL {
            let set: Features = [feature].into_iter().collect();
            assert_eq!(set.iter().collect::<Vec<_>>(), [feature]);
            assert_eq!(Feature::from_name(feature.row().name), Some(feature));
            assert_eq!(
                feature.row().variable,
                format!("NVIDIA_{}", feature.row().name.to_uppercase())
            );
        }
        assert_eq!(Features::default().names(), Vec::<String>::new());
        assert_eq!(
            Feature::ALL.into_iter().collect::<Features>().names(),
            ["gds", "mofed", "gdrcopy", "nvswitch"]
        );
        assert_eq!(Feature::from_name("GDS"), None);
    }
}
