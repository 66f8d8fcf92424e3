//! What a running container has, as [`inspect`](super::inspect) reads it.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use base::sys::confine::Identity;
use nvidia_host::driver::DriverKind;

use crate::cgroup::filter::Filter;

/// The properties of a running container that affect GPUs.
#[derive(Debug)]
pub(crate) struct ContainerFacts {
    /// Its first process, as a number of the host
    pub pid: i32,
    /// The name or id from the command line; empty with `--pid`
    pub name: String,
    /// The version of the host's kernel module
    pub module: Option<String>,
    /// The kind of the host's driver. WSL 2 has no such module.
    pub driver_kind: DriverKind,
    pub process: ContainerProcess,
    /// The libraries that programs open by name
    pub libraries: Vec<Library>,
    /// The device nodes in its /dev
    pub nodes: Vec<ContainerNode>,
    /// The minor numbers of the GPUs that the host's kernel lists; `None` if it lists none, as without a driver and on WSL 2
    pub gpus: Option<BTreeSet<u32>>,
    /// Its device cgroup, or why that cannot be read
    pub filter: Result<Filter, String>,
}

impl ContainerFacts {
    pub(super) fn is_of_wsl(&self) -> bool {
        self.driver_kind == DriverKind::Wsl
    }
}

/// A process, as the host sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ContainerProcess {
    /// User and group with which files are opened
    pub identity: Identity,
    pub groups: Vec<u32>,
    /// Whether the process ignores permissions of the host's files (`CAP_DAC_OVERRIDE` in the host's user namespace)
    pub overrides: bool,
    /// `NVIDIA_DRIVER_CAPABILITIES`, if it is set
    pub capabilities: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Library {
    /// The name that programs open: `libcuda.so.1`
    pub name: String,
    /// The file that the dynamic linker finds
    pub found: Option<FoundLibrary>,
    /// A file in another directory, if the dynamic linker finds none
    pub elsewhere: Option<String>,
}

/// The file of a library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FoundLibrary {
    pub path: String,
    /// The version in the file name, which can be wrong for a mount
    pub version: Option<String>,
    /// Its device and inode number
    pub id: (u64, u64),
    /// Whether it is the host's file in the version of the kernel module; `None` if that file is unknown
    pub is_hosts: Option<bool>,
    /// Whether the file is empty, as mount points of earlier starts are
    pub is_empty: bool,
}

/// An expected device node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ContainerNode {
    /// `nvidiactl`
    pub name: String,
    /// Its major and minor number, if they are known
    pub expected: Option<(u32, u32)>,
    pub found: Option<FoundNode>,
}

/// The file at the path of a device node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FoundNode {
    /// Its major and minor number, if it is a character device
    pub device: Option<(u32, u32)>,
    pub mode: u32,
    /// Its owner, as an id of the host
    pub uid: u32,
    /// Its group, as an id of the host
    pub gid: u32,
    /// Whether its file system is mounted with nodev, with which device nodes cannot be opened
    pub nodev: bool,
}
