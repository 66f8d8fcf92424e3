//! The facts of the host on which edits depend. They are plain data: [`crate::host::Host`] gathers them, and [`super::decide`] reads
//! nothing else.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Result;

use base::paths::HostPath;
use base::report::Finding;

use super::Ipc;
use crate::bus_id::BusId;
use crate::config::Limits;
use crate::driver::files::DriverFiles;
use crate::driver::nodes::{DeviceNode, NodeState, PREPARE, check_major, check_minor};
use crate::feature::Feature;
use crate::inventory::caps::MigCap;
use crate::inventory::procfs::DRIVER_PROC;
use crate::mps;

/// The facts for the edits of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// The driver's files for the requested capabilities
    pub files: DriverFiles,
    /// Sockets and directories of daemons
    pub ipc: Vec<Ipc>,
    /// The files of `/proc/driver/nvidia` that a container sees, with their content; `None` if the host has no such directory
    pub proc_files: Option<Vec<(OsString, Vec<u8>)>>,
    /// The device nodes, and files that belong to them
    pub devices: DeviceFacts,
    /// Findings about the files and the sockets
    pub findings: Vec<Finding>,
}

/// The facts about device nodes and about the files below /proc that belong to them. They cover the requested devices, not all nodes of
/// the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The root that has the nodes, for error messages
    pub dev_root: HostPath,
    /// The state of each node by its name below /dev: `nvidia0`, `dri/card1`, `nvidia-caps/nvidia-cap21`
    pub nodes: BTreeMap<String, NodeState>,
    /// The nodes of each GPU in `/dev/dri`, by name: `card1`, `renderD128`. A host without nvidia-drm has none.
    pub drm: BTreeMap<BusId, Vec<String>>,
    /// The device nodes of each requested feature, by name below /dev. Other files there are left out
    pub features: Vec<(Feature, Vec<String>)>,
    /// The minor numbers of MIG capabilities; `None` with a driver that has only files below /proc for them
    pub mig_minors: Option<BTreeMap<MigCap, u32>>,
    /// Whether the host has /proc/driver/nvidia
    pub has_proc: bool,
    /// Files and directories below /proc/driver/nvidia, with their path on the host
    pub proc_paths: BTreeMap<PathBuf, HostPath>,
    /// The directory of each GPU below `/proc/driver/nvidia/gpus`
    pub gpu_dirs: Vec<(BusId, OsString)>,
    /// The limits of config.toml
    pub limits: Limits,
    /// Whether the limits deny a MIG device of this host
    pub withholds_mig: bool,
    /// The GPUs of WSL 2; `None` on other hosts
    pub wsl: Option<WslGpus>,
    /// The MPS daemons of GPUs that are shared, if the container can use CUDA
    pub mps: Vec<mps::Daemon>,
}

/// The GPUs of WSL 2. A container that has `/dev/dxg` can use all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WslGpus {
    /// The number of GPUs
    pub count: usize,
    /// Those that the limits deny, as in a request
    pub denied: Vec<String>,
}

impl DeviceFacts {
    fn node(&self, name: &str) -> &NodeState {
        self.nodes.get(name).unwrap_or(&NodeState::Missing)
    }

    /// Returns the nodes of a feature.
    ///
    /// # Errors
    /// If one of them cannot be examined.
    pub fn of_feature(&self, feature: Feature) -> Result<Vec<DeviceNode>> {
        let names = self
            .features
            .iter()
            .filter(|(known, _)| *known == feature)
            .flat_map(|(_, names)| names);
        names
            .filter_map(|name| self.optional(name).transpose())
            .collect()
    }

    /// Returns an optional node.
    pub(super) fn optional(&self, name: &str) -> Result<Option<DeviceNode>> {
        self.node(name).optional(name)
    }

    /// Returns an optional node with this minor number and, if the driver's major number is expected, with that. Another device at the
    /// path could be a GPU that the container must not have.
    pub(super) fn optional_with(
        &self,
        name: &str,
        minor: u32,
        has_drivers_major: bool,
    ) -> Result<Option<DeviceNode>> {
        let Some(node) = self.optional(name)? else {
            return Ok(None);
        };
        let node = check_minor(node, minor)?;
        Ok(Some(if has_drivers_major {
            check_major(node)?
        } else {
            node
        }))
    }

    /// Returns a required node. `fix` is the command that creates it.
    pub(super) fn required(&self, name: &str, minor: u32, fix: &str) -> Result<DeviceNode> {
        self.node(name).required(name, minor, &self.dev_root, fix)
    }

    /// Returns `/dev/nvidiactl` or `/dev/nvidiaN`, whose major number is checked too.
    pub(super) fn required_of_driver(&self, name: &str, minor: u32) -> Result<DeviceNode> {
        check_major(self.required(name, minor, PREPARE)?)
    }

    /// Returns a path relative to /proc/driver/nvidia and its path on the host, for a mount in the container.
    pub(super) fn proc_mount(&self, path: &Path) -> Option<(PathBuf, HostPath)> {
        let source = self.proc_paths.get(path)?;
        Some((
            path.strip_prefix(DRIVER_PROC).ok()?.to_owned(),
            source.clone(),
        ))
    }

    /// Returns the directory of a GPU in /proc.
    #[must_use]
    pub(crate) fn gpu_dir(&self, bus_id: BusId) -> Option<PathBuf> {
        let (_, dir) = self.gpu_dirs.iter().find(|(known, _)| *known == bus_id)?;
        Some(Path::new(DRIVER_PROC).join("gpus").join(dir))
    }
}
