//! The driver's device nodes on the host.

use std::io;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::FileType;

use base::paths::{ContainerPath, HostPath};
use base::report::{Failure, catalog, failure};
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

/// A node of which the driver's numbers are known, `/dev/nvidiactl` and `/dev/nvidiaN`.
///
/// # Errors
/// If it is missing or another device.
pub fn required(dev: &Tree, name: &str, minor: u32) -> Result<DeviceNode> {
    let node = required_of(dev, name, minor)?;
    // A node of another device under this name would give the container that device.
    if node.major != NVIDIA_MAJOR { Err(other_device(&node, &format!("{NVIDIA_MAJOR}:{minor}"))) } else { Ok(node) }
}

/// A node with this minor number of a driver whose major is assigned when it is loaded.
///
/// # Errors
/// If it is missing or has another minor number.
pub fn required_of(dev: &Tree, name: &str, minor: u32) -> Result<DeviceNode> {
    required_with(dev, name, minor, PREPARE)
}

/// The same, where this makes the node if it is missing.
///
/// # Errors
/// If it is missing or has another minor number.
pub fn required_with(dev: &Tree, name: &str, minor: u32, fix: &str) -> Result<DeviceNode> {
    let missing = || format!("the device node \"/dev/{name}\" is missing below {}", dev.path());
    let node = optional(dev, name)?.ok_or_else(|| failure(&catalog::NODE_MISSING, missing(), fix))?;
    if node.minor != minor { Err(other_device(&node, &format!("minor {minor}"))) } else { Ok(node) }
}

fn other_device(node: &DeviceNode, expected: &str) -> anyhow::Error {
    let DeviceNode { source, major, minor, .. } = node;
    failure(
        &catalog::NODE_WRONG,
        format!("the device node {source} is {major}:{minor}, not {expected} of the NVIDIA driver"),
        PREPARE,
    )
}

/// A node that a host may lack.
///
/// # Errors
/// If something else than a character device has its name.
pub fn optional(dev: &Tree, name: &str) -> Result<Option<DeviceNode>> {
    let path = Path::new("/dev").join(name);
    let located = match dev.locate(&path) {
        Ok(located) => located,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(anyhow::Error::new(error).context(format!("cannot look at {path:?}"))),
    };
    if located.kind != FileType::CharacterDevice {
        return Err(anyhow::Error::new(Failure::new(
            &catalog::NODE_WRONG,
            format!("{} is not a character device", located.host),
            PREPARE,
        )));
    }
    let container_path = ContainerPath::new(&path).with_context(|| format!("{path:?} is no device path"))?;
    let (major, minor) = located.device;
    Ok(Some(DeviceNode { source: located.host, path: container_path, major, minor }))
}
