//! Examines the driver's device nodes on the host.

use std::io;
use std::path::Path;

use anyhow::Result;
use nix::libc;
use rustix::fs::{Access, FileType};
use rustix::io::Errno;

use base::paths::{ContainerPath, HostPath};
use base::report::failure;
use base::tree::Tree;
use findings::catalog;

use super::access::Permissions;

/// The major number of `/dev/nvidiaN`, `/dev/nvidiactl` and `/dev/nvidia-modeset`; assigned in the kernel's
/// Documentation/admin-guide/devices.txt. The others are dynamic.
pub const NVIDIA_MAJOR: u32 = 195;
/// The minor number of `/dev/nvidiactl`.
pub const CTL_MINOR: u32 = 255;
/// The minor number of `/dev/nvidia-modeset`.
pub const MODESET_MINOR: u32 = 254;

/// The directory of IMEX channels below /dev, and the name of their driver in /proc/devices.
pub const IMEX_CHANNELS: &str = "nvidia-caps-imex-channels";
/// Returns the name below /dev of the node of an IMEX channel.
#[must_use]
pub fn imex_channel(channel: u32) -> String {
    format!("{IMEX_CHANNELS}/channel{channel}")
}

/// The directory of the nodes of MIG capabilities.
pub const CAPS: &str = "/dev/nvidia-caps";

/// The hint for missing and wrong nodes.
pub const PREPARE: &str = "run \"oci-nvidia-hook prepare\" as root on the host";

/// A device node of the driver.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceNode {
    /// The path on the host
    pub source: HostPath,
    /// The path in the container
    pub path: ContainerPath,
    /// The major number
    pub major: u32,
    /// The minor number
    pub minor: u32,
    /// RunAs can open the host's node
    pub permissions: Permissions,
}

/// The file at the path of a device node. It is plain data, so that the checks can be tested without a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// Nothing
    Missing,
    /// A character device
    Device(DeviceNode),
    /// Another file, at this path on the host
    NotADevice(HostPath),
    /// It cannot be examined, for this `errno`.
    Unreadable(i32),
}

/// Whether the device cgroup of this process denies a device node. The kernel reports that as EPERM, and insufficient permissions as EACCES
/// (`devcgroup_inode_permission`). The device is not opened: a GPU that failed would not answer.
#[must_use]
pub fn is_denied_by_cgroup(path: &Path) -> bool {
    let access = Access::READ_OK | Access::WRITE_OK;
    rustix::fs::access(path, access) == Err(Errno::PERM)
}

impl DeviceNode {
    /// Whether neither the group nor other users may open the node for reading and writing.
    #[must_use]
    pub const fn is_shut(&self) -> bool {
        !self.permissions.allow(0o6, false, true) && !self.permissions.allow(0o6, false, false)
    }
}

impl NodeState {
    /// Examines `/dev/NAME` below this root. Symbolic links are followed.
    #[must_use]
    pub fn inspect(dev: &Tree, name: &str) -> Self {
        let path = Path::new("/dev").join(name);
        let located = match dev.locate(&path) {
            Ok(located) => located,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Self::Missing,
            Err(error) => return Self::Unreadable(error.raw_os_error().unwrap_or(libc::EIO)),
        };
        let is_device = located.kind == FileType::CharacterDevice;
        let (major, minor) = located.device;
        match ContainerPath::new(&path).filter(|_| is_device) {
            Some(path) => {
                let permissions = Permissions::from(&located);
                Self::Device(DeviceNode {
                    source: located.host,
                    path,
                    major,
                    minor,
                    permissions,
                })
            }
            None => Self::NotADevice(located.host),
        }
    }

    /// Returns the node `/dev/NAME`, or `None` if it is missing.
    ///
    /// # Errors
    /// If the file is not a character device, or cannot be examined.
    pub fn optional(&self, name: &str) -> Result<Option<DeviceNode>> {
        match self {
            Self::Missing => Ok(None),
            Self::Device(node) => Ok(Some(node.clone())),
            Self::NotADevice(path) => Err(failure(
                &catalog::NODE_WRONG,
                format!("{path} is not a character device"),
                PREPARE,
            )),
            Self::Unreadable(errno) => {
                let error = anyhow::Error::new(io::Error::from_raw_os_error(*errno));
                Err(error.context(format!("cannot examine \"/dev/{name}\"")))
            }
        }
    }

    /// Returns the node `/dev/NAME`. Only its minor number is checked, because the kernel assigns the major number of most drivers at
    /// run time. `dev_root` and `fix` are for the error message: the root that should have the node, and the command that creates it.
    ///
    /// # Errors
    /// If the node is missing or has another minor number, or if [`Self::optional`] fails.
    pub fn required(
        &self,
        name: &str,
        minor: u32,
        dev_root: &HostPath,
        fix: &str,
    ) -> Result<DeviceNode> {
        let Some(node) = self.optional(name)? else {
            let what = format!("the device node \"/dev/{name}\" is missing below {dev_root}");
            return Err(failure(&catalog::NODE_MISSING, what, fix));
        };
        check_minor(node, minor)
    }
}

/// Checks the minor number of a node.
///
/// # Errors
/// If the node has another minor number.
pub(crate) fn check_minor(node: DeviceNode, minor: u32) -> Result<DeviceNode> {
    if node.minor != minor {
        Err(other_device(&node, &format!("minor {minor}")))
    } else {
        Ok(node)
    }
}

/// Checks the major number of a node with a fixed one: `/dev/nvidiactl` or `/dev/nvidiaN`.
///
/// # Errors
/// If the node has another major number. The container would get access to another device.
pub(crate) fn check_major(node: DeviceNode) -> Result<DeviceNode> {
    if node.major == NVIDIA_MAJOR {
        return Ok(node);
    }
    Err(other_device(
        &node,
        &format!("{NVIDIA_MAJOR}:{}", node.minor),
    ))
}

fn other_device(node: &DeviceNode, expected: &str) -> anyhow::Error {
    let DeviceNode {
        source,
        major,
        minor,
        ..
    } = node;
    failure(
        &catalog::NODE_WRONG,
        format!("the device node {source} is {major}:{minor}, not {expected} of the NVIDIA driver"),
        PREPARE,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_at_the_path_of_a_node() {
        let dir = tempfile::tempdir().unwrap();
        let dev = dir.path().join("dev");
        std::fs::create_dir(&dev).unwrap();
        std::fs::write(dev.join("nvidia0"), "").unwrap();
        std::os::unix::fs::symlink("nvidia2", dev.join("nvidia1")).unwrap();
        std::os::unix::fs::symlink("nvidia3", dev.join("nvidia3")).unwrap();
        let state =
            |name: &str| NodeState::inspect(&Tree::open(&HostPath::new(dir.path())).unwrap(), name);
        assert_eq!(state("nvidiactl"), NodeState::Missing);
        assert_eq!(
            state("nvidia0"),
            NodeState::NotADevice(HostPath::new(dev.join("nvidia0")))
        );
        assert_eq!(state("nvidia1"), NodeState::Missing, "a link to nothing");
        assert_eq!(state("nvidia3"), NodeState::Unreadable(libc::ELOOP));
        assert!(matches!(
            state("nvidia0/x"),
            NodeState::Missing | NodeState::Unreadable(libc::ENOTDIR)
        ));
        let null = NodeState::inspect(&Tree::open(&HostPath::new("/")).unwrap(), "null");
        assert!(
            matches!(
                null,
                NodeState::Device(DeviceNode {
                    major: 1,
                    minor: 3,
                    ..
                })
            ),
            "{null:?}"
        );
    }
}
