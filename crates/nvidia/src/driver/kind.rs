//! The kinds of driver that are supported, and what differs between them.

use serde::{Deserialize, Serialize};

use super::node_name::{CONTROL, NodeName};

/// The kind of a driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DriverKind {
    /// The driver of Linux, with the kernel module nvidia, which lists the GPUs and has a device node for each.
    #[default]
    Linux,
    /// The driver of WSL 2, which is part of Windows. `/dev/dxg` stands for all GPUs, which have no minor numbers. Only NVML lists them.
    Wsl,
}

impl DriverKind {
    /// Returns the name below /dev of the node that every container with a GPU needs.
    #[must_use]
    pub const fn control_node(self) -> &'static str {
        match self {
            Self::Linux => CONTROL,
            Self::Wsl => "dxg",
        }
    }

    /// Returns the name below /dev of the node of the GPU with this minor number.
    #[must_use]
    pub fn gpu_node(self, minor: u32) -> String {
        match self {
            Self::Linux => NodeName::Gpu(minor).to_string(),
            Self::Wsl => self.control_node().to_owned(),
        }
    }

    /// Returns a library that NVML opens by name, and that the host's linker cache may lack.
    #[must_use]
    pub const fn library_of_nvml(self) -> Option<&'static str> {
        match self {
            Self::Linux => None,
            Self::Wsl => Some("/usr/lib/wsl/lib/libdxcore.so"),
        }
    }

    /// Whether the kernel lists the GPUs. Otherwise, only NVML does.
    #[must_use]
    pub const fn is_listed_by_kernel(self) -> bool {
        matches!(self, Self::Linux)
    }

    /// Whether the CUDA compatibility libraries of images work. They need the nodes and files of the kernel module nvidia.
    #[must_use]
    pub const fn has_cuda_compat(self) -> bool {
        matches!(self, Self::Linux)
    }

    /// Whether a container with one GPU has all of them, because they share a node.
    #[must_use]
    pub const fn has_one_node_for_all(self) -> bool {
        matches!(self, Self::Wsl)
    }
}
