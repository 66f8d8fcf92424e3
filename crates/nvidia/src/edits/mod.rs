//! Edits describe what a container gets, as data that does not depend on a container.
//!
//! An edit names a host file and a *placement* instead of a path in the container, because the library directories differ between
//! images. The path is determined when edits are lowered. Consequences of an edit, such as the device rule for a node or the linker
//! cache entry for a library, are derived in that step too.

pub mod build;
pub mod decide;
pub mod facts;
pub mod placement;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::capability::{Capabilities, Omit};
pub use crate::driver::ipc::{Channel, Ipc};
use crate::driver::ldcache::Arch;
pub use crate::driver::nodes::DeviceNode;
use crate::driver::sonames::Sonames;
use crate::feature::Features;
use base::paths::{ContainerPath, HostPath};

/// What a container gets from the driver, apart from the selection of GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The parts of the driver
    pub capabilities: Capabilities,
    /// Exceptions from these parts
    pub omit: Omit,
    /// Whether the container gets GPUs. Without a GPU, it gets only the driver's files.
    pub gpus: bool,
    /// Whether it may create and remove MIG devices
    pub mig_config: bool,
    /// Whether it may monitor all MIG devices
    pub mig_monitor: bool,
    /// IMEX channels, by number
    pub imex_channels: Vec<u32>,
    /// Devices next to the GPUs
    pub features: Features,
}

/// The directory of a file in the container, by its purpose.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Placement {
    /// The directory for shared libraries of this architecture
    Library(Arch),
    /// A directory below the library directory, from which programs load files by path
    LibraryBelow(Arch, &'static str),
    /// `/usr/bin`
    Binary,
    /// This directory
    At(ContainerPath),
}

/// Whether a container can start without something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// The container does not start without it.
    Required,
    /// The container starts without it, which a finding reports.
    Optional,
}

/// A driver file that is mounted read-only in the container.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostFile {
    /// The path of the file on the host
    pub source: HostPath,
    /// The directory in the container, by its purpose
    pub placement: Placement,
    /// The name of the file in that directory
    pub name: OsString,
    /// For a library, the names by which ld.so finds it
    pub sonames: Sonames,
    /// Whether the container can start without it
    pub need: Need,
}

/// A development link to a library, which is not a SONAME: `libcuda.so -> libcuda.so.1`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DevLink {
    /// The name of the link, relative to the library directory
    pub name: OsString,
    /// The SONAME that it leads to
    pub target: OsString,
}

/// A link to a device node: `/dev/dri/by-path/pci-0000:3b:00.0-card -> ../card1`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeLink {
    /// The path of the link
    pub path: ContainerPath,
    /// The text of the link, relative to its directory
    pub text: PathBuf,
    /// The node that it leads to
    pub node: ContainerPath,
}

/// The content of /proc/driver/nvidia in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcMask {
    /// Files with their content: `params`, `version`, `registry`
    pub files: Vec<(OsString, Vec<u8>)>,
    /// Files and directories of the host that stay visible: (path below /proc/driver/nvidia, source)
    pub mounts: Vec<(PathBuf, HostPath)>,
}

/// The directory of the GPUs below /proc/driver/nvidia.
const GPUS: &str = "gpus";

impl ProcMask {
    /// Returns the mask with one mount instead of one for each GPU, if the container has all GPUs of the host. `all` are the names of
    /// their directories. An excluded GPU is one of them, so a host with one keeps the separate mounts.
    #[must_use]
    pub fn with_gpus_together(mut self, all: &[&OsStr]) -> Self {
        let dir_of = |name: &OsStr| {
            let (_, source) = self
                .mounts
                .iter()
                .find(|(path, _)| *path == Path::new(GPUS).join(name))?;
            source
                .as_path()
                .parent()
                .filter(|dir| dir.join(name) == source.as_path())
        };
        let dirs: Option<Vec<&Path>> = all.iter().map(|name| dir_of(name)).collect();
        let Some([first, rest @ ..]) = dirs.as_deref() else {
            return self;
        };
        if rest.is_empty() || rest.iter().any(|dir| dir != first) {
            return self;
        }
        let together = (PathBuf::from(GPUS), HostPath::new(*first));
        self.mounts.retain(|(path, _)| !path.starts_with(GPUS));
        self.mounts.push(together);
        self
    }
}

/// Everything that a container gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edits {
    /// Libraries, programs, descriptions, firmware
    pub files: Vec<HostFile>,
    /// Sockets of daemons
    pub ipc: Vec<Ipc>,
    /// Development links to the libraries
    pub links: Vec<DevLink>,
    /// Device nodes, each with access to the device
    pub nodes: Vec<DeviceNode>,
    /// Links to nodes
    pub node_links: Vec<NodeLink>,
    /// What replaces /proc/driver/nvidia; `None` if the host does not have it
    pub proc_mask: Option<ProcMask>,
    /// The GPUs that EGL in the container may list, with bit N for device minor N; 0 if EGL is not requested
    pub egl_devices: u64,
}

impl Edits {
    /// Merges both in a stable order, without duplicates.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        extend(&mut self.files, other.files);
        extend(&mut self.ipc, other.ipc);
        extend(&mut self.links, other.links);
        extend(&mut self.nodes, other.nodes);
        extend(&mut self.node_links, other.node_links);
        self.egl_devices |= other.egl_devices;
        self.proc_mask = match (self.proc_mask, other.proc_mask) {
            (Some(mut mask), Some(more)) => {
                extend(&mut mask.files, more.files);
                extend(&mut mask.mounts, more.mounts);
                Some(mask)
            }
            (mask, None) | (None, mask) => mask,
        };
        self
    }
}

fn extend<T: PartialEq>(list: &mut Vec<T>, more: Vec<T>) {
    for item in more {
        if !list.contains(&item) {
            list.push(item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::access::Permissions;

    #[test]
    fn all_gpus_have_one_mount() {
        let mask = |given: &[&str], all: &[&str]| {
            let mount = |path: &&str| {
                (
                    (*path).into(),
                    HostPath::new(Path::new("/proc/driver/nvidia").join(path)),
                )
            };
            let mask = ProcMask {
                files: vec![],
                mounts: given.iter().map(mount).collect(),
            };
            let all: Vec<_> = all.iter().map(OsStr::new).collect();
            let mounts = mask.with_gpus_together(&all).mounts;
            mounts
                .iter()
                .map(|(path, source)| format!("{} {}", path.display(), source))
                .collect::<Vec<_>>()
        };
        let (caps, both) = ("capabilities/mig/config", &["gpus/a", "gpus/b"][..]);
        assert_eq!(
            mask(both, &["a", "b"]),
            ["gpus \"/proc/driver/nvidia/gpus\""]
        );
        assert_eq!(
            mask(&["gpus/a", caps, "gpus/b"], &["b", "a"]).len(),
            2,
            "other mounts stay"
        );
        for (given, all) in [
            (both, &["a", "b", "c"][..]),
            (&["gpus/a"], &["a"]),
            (both, &[]),
            (&[], &["a", "b"]),
        ] {
            let unchanged = given
                .iter()
                .map(|path| format!("{path} \"/proc/driver/nvidia/{path}\""))
                .collect::<Vec<_>>();
            assert_eq!(mask(given, all), unchanged, "{given:?} of {all:?}");
        }
    }

    #[test]
    fn merging_twice_is_merging_once() {
        let node = |minor| DeviceNode {
            source: HostPath::new(format!("/dev/nvidia{minor}")),
            path: ContainerPath::new(format!("/dev/nvidia{minor}")).unwrap(),
            major: 195,
            minor,
            permissions: Permissions::default(),
        };
        let mask = |bus: &str| ProcMask {
            files: vec![],
            mounts: vec![(bus.into(), HostPath::new("/x"))],
        };
        let a = Edits {
            nodes: vec![node(0)],
            proc_mask: Some(mask("1")),
            ..Edits::default()
        };
        let b = Edits {
            nodes: vec![node(0), node(1)],
            proc_mask: Some(mask("2")),
            ..Edits::default()
        };
        let once = a.clone().merge(b.clone());
        assert_eq!(once.nodes.len(), 2);
        assert_eq!(once.proc_mask.as_ref().unwrap().mounts.len(), 2);
        assert_eq!(once.clone().merge(b), once);
        assert_eq!(Edits::default().merge(a.clone()), a);
    }
}
