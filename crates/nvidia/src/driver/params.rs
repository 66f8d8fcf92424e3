//! Parses `/proc/driver/nvidia/params`, which lists the parameters of the kernel module. The files of MIG capabilities have the same
//! form.

/// The owner and mode that the kernel module requests for a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePolicy {
    /// The owner
    pub uid: u32,
    /// The group
    pub gid: u32,
    /// The permission bits
    pub mode: u32,
    /// Whether user space may create the node and change its owner and mode
    pub modify: bool,
}

impl Default for NodePolicy {
    fn default() -> Self {
        Self {
            uid: 0,
            gid: 0,
            mode: 0o666,
            modify: true,
        }
    }
}

/// Returns a decimal number from `params` or a capability file: `name: 438`.
#[must_use]
pub fn field(text: &str, name: &str) -> Option<u32> {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().parse().ok()
}

/// Parses the policy for device nodes. Missing fields have NVIDIA's defaults.
#[must_use]
pub fn parse_policy(params: &str) -> NodePolicy {
    let default = NodePolicy::default();
    NodePolicy {
        uid: field(params, "DeviceFileUID").unwrap_or(default.uid),
        gid: field(params, "DeviceFileGID").unwrap_or(default.gid),
        mode: field(params, "DeviceFileMode").map_or(default.mode, |mode| mode & 0o777),
        modify: field(params, "ModifyDeviceFiles") != Some(0),
    }
}

/// The parameters for IMEX channels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Imex {
    /// The number of channels; `None` if the driver does not report it
    pub count: Option<u32>,
    /// Whether channel 0 is for all users of the host (`NVreg_CreateImexChannel0`)
    pub channel_0: bool,
}

/// Parses the parameters for IMEX channels.
#[must_use]
pub(crate) fn parse_imex(params: &str) -> Imex {
    Imex {
        count: field(params, "ImexChannelCount"),
        channel_0: field(params, "CreateImexChannel0") == Some(1),
    }
}
