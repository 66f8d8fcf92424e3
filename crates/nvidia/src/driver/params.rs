//! `/proc/driver/nvidia/params`: how the module has been configured. The files of MIG capabilities have the same form.

/// Owner and mode of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePolicy {
    /// Owner
    pub uid: u32,
    /// Group
    pub gid: u32,
    /// Permissions
    pub mode: u32,
    /// Whether the node may be made, and its owner and mode be changed
    pub modify: bool,
}

impl Default for NodePolicy {
    fn default() -> Self {
        Self { uid: 0, gid: 0, mode: 0o666, modify: true }
    }
}

/// A number of `params`, or of a capability file: `name: 438`, in decimal.
#[must_use]
pub fn field(text: &str, name: &str) -> Option<u32> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().parse().ok()
}

/// Parses `params`. A field that it lacks has NVIDIA's default.
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

/// What `params` states about IMEX channels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Imex {
    /// How many there are; `None` with a driver that does not state it
    pub count: Option<u32>,
    /// Whether channel 0 is for everyone on the host (`NVreg_CreateImexChannel0`)
    pub channel_0: bool,
}

/// Parses `params`.
#[must_use]
pub(crate) fn parse_imex(params: &str) -> Imex {
    Imex { count: field(params, "ImexChannelCount"), channel_0: field(params, "CreateImexChannel0") == Some(1) }
}
