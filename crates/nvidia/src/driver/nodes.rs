//! The driver's device nodes on the host.

use std::io;
use std::path::Path;

use anyhow::Result;
use nix::libc;
use rustix::fs::FileType;

use base::paths::{ContainerPath, HostPath};
use base::report::{catalog, failure};
use base::tree::Tree;

/// The major number of `/dev/nvidiaN`, `/dev/nvidiactl` and `/dev/nvidia-modeset`; assigned in the kernel's
/// Documentation/admin-guide/devices.txt. The others are dynamic.
pub const NVIDIA_MAJOR: u32 = 195;
/// The minor number of `/dev/nvidiactl`.
pub const CTL_MINOR: u32 = 255;
/// The minor number of `/dev/nvidia-modeset`.
pub const MODESET_MINOR: u32 = 254;

/// The directory of IMEX channels below /dev, and the name of their driver in /proc/devices.
pub const IMEX_CHANNELS: &str = "nvidia-caps-imex-channels";
/// The directory of the nodes of MIG capabilities.
pub const CAPS: &str = "/dev/nvidia-caps";

/// What makes missing nodes, and replaces wrong ones.
pub const PREPARE: &str = "run \"oci-nvidia-hook prepare\" as root on the host";

/// A device node of the driver: where it is, and which device it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceNode {
    /// On the host
    pub source: HostPath,
    /// In the container
    pub path: ContainerPath,
    /// Device major
    pub major: u32,
    /// Device minor
    pub minor: u32,
}

/// What is at the path of a device node. Plain data, so that it can be judged apart from looking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// Nothing
    Missing,
    /// A character device
    Device(DeviceNode),
    /// Something else, at this path of the host
    NotADevice(HostPath),
    /// It cannot be examined, for this `errno`.
    Unreadable(i32),
}

impl NodeState {
    /// What is at `/dev/NAME` below this root. Symbolic links are followed.
    #[must_use]
    pub fn of(dev: &Tree, name: &str) -> Self {
        let path = Path::new("/dev").join(name);
        let located = match dev.locate(&path) {
            Ok(located) => located,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Self::Missing,
            Err(error) => return Self::Unreadable(error.raw_os_error().unwrap_or(libc::EIO)),
        };
        let is_device = located.kind == FileType::CharacterDevice;
        let (major, minor) = located.device;
        match ContainerPath::new(&path).filter(|_| is_device) {
            Some(path) => Self::Device(DeviceNode { source: located.host, path, major, minor }),
            None => Self::NotADevice(located.host),
        }
    }

    /// The node `/dev/NAME`; `None` if it is missing.
    ///
    /// # Errors
    /// If something other than a character device has its name, or it cannot be examined.
    pub fn optional(&self, name: &str) -> Result<Option<DeviceNode>> {
        match self {
            Self::Missing => Ok(None),
            Self::Device(node) => Ok(Some(node.clone())),
            Self::NotADevice(path) => {
                Err(failure(&catalog::NODE_WRONG, format!("{path} is not a character device"), PREPARE))
            }
            Self::Unreadable(errno) => {
                let error = anyhow::Error::new(io::Error::from_raw_os_error(*errno));
                Err(error.context(format!("cannot look at \"/dev/{name}\"")))
            }
        }
    }

    /// The node `/dev/NAME` of a driver whose major number is assigned when it is loaded. `dev_root` and `fix` are for
    /// the error: where the node should be, and what creates it.
    ///
    /// # Errors
    /// If it is missing or has another minor number, and as [`Self::optional`].
    pub fn required(&self, name: &str, minor: u32, dev_root: &HostPath, fix: &str) -> Result<DeviceNode> {
        let missing = || {
            let what = format!("the device node \"/dev/{name}\" is missing below {dev_root}");
            failure(&catalog::NODE_MISSING, what, fix)
        };
        let node = self.optional(name)?.ok_or_else(missing)?;
        if node.minor != minor { Err(other_device(&node, &format!("minor {minor}"))) } else { Ok(node) }
    }
}

/// A node of which the driver's major number is known, `/dev/nvidiactl` or `/dev/nvidiaN`, as it must be.
///
/// # Errors
/// If it has another number: a node of another device under this name would give the container that device.
pub(crate) fn check_major(node: DeviceNode) -> Result<DeviceNode> {
    if node.major == NVIDIA_MAJOR {
        return Ok(node);
    }
    Err(other_device(&node, &format!("{NVIDIA_MAJOR}:{}", node.minor)))
}

fn other_device(node: &DeviceNode, expected: &str) -> anyhow::Error {
    let DeviceNode { source, major, minor, .. } = node;
    failure(
        &catalog::NODE_WRONG,
        format!("the device node {source} is {major}:{minor}, not {expected} of the NVIDIA driver"),
        PREPARE,
    )
}
