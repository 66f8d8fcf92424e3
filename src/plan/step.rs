//! A step: one change to a container, and how it is described. `inject` carries steps out.

use std::ffi::OsString;
use std::fmt;

use base::paths::{ContainerPath, HostPath};
use nvidia_host::driver::ldcache::Arch;
use nvidia_host::edits::placement::Link;
use nvidia_host::edits::{Channel, DeviceNode, Need, ProcMask};
use serde_json::{Value, json};

use super::process::Process;

/// One change to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Mount a file of the host, read-only.
    MountFile { source: HostPath, target: ContainerPath, need: Need },
    /// Copy a file of the host, unless the image has its own.
    CopyFile { source: HostPath, target: ContainerPath, need: Need },
    /// Mount a socket, or a directory of sockets. `source` is where it is on the host, for messages.
    MountIpc { channel: Channel, source: HostPath, target: ContainerPath },
    /// Mount a device node of the host, whose number is checked again on the open file. For a process that cannot open that
    /// node (`own`), create one in the container.
    MountNode { node: DeviceNode, own: Option<Process> },
    /// `ln -sfn TEXT LINK`. The hook never resolves the text. If the image has a file of its own in place of the link, the
    /// mounted `file`, to which the link leads, is mounted over that.
    Link(Link),
    /// Mount a read-only directory with these files, which hides a directory of the image.
    MountFiles { target: ContainerPath, files: Vec<(&'static str, String)> },
    /// Hide the GPUs in `/proc/driver/nvidia` that the container does not have.
    MaskProc(ProcMask),
    /// Keep the driver's libraries from creating device nodes: hide only `/proc/driver/nvidia/params`.
    MaskParams,
    /// `chmod MODE TARGET`, unless the file can belong to the host.
    SetMode { target: ContainerPath, mode: u32 },
    /// Make the image's ldconfig search these directories, because it rebuilds the linker cache when a package is installed:
    /// `first` before all others, even if they are configured already, and `others` unless they are.
    ListDirectories { first: Vec<ContainerPath>, others: Vec<ContainerPath> },
    /// Add libraries to the linker cache.
    UpdateLinkerCache(Vec<CacheEntry>),
}

/// A library for the linker cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CacheEntry {
    pub soname: OsString,
    pub path: ContainerPath,
    pub arch: Arch,
}

impl Step {
    /// Returns whether the container requires the step.
    pub(crate) const fn need(&self) -> Need {
        match self {
            Self::MountFile { need, .. } | Self::CopyFile { need, .. } | Self::Link(Link { need, .. }) => *need,
            Self::MountIpc { .. } | Self::MountFiles { .. } | Self::SetMode { .. } | Self::ListDirectories { .. } => {
                Need::Optional
            }
            _ => Need::Required,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MountNode { node, own: Some(_) } => write!(f, "create {} in the container", node.path),
            Self::MountFile { source, target, .. }
            | Self::MountNode { node: DeviceNode { source, path: target, .. }, own: None }
            | Self::MountIpc { source, target, .. } => {
                write!(f, "mount {source} at {target} in the container")
            }
            Self::CopyFile { source, target, .. } => write!(f, "copy {source} to {target} in the container"),
            Self::MountFiles { target, .. } => write!(f, "mount a directory of the hook at {target} in the container"),
            Self::Link(Link { link, text, .. }) => write!(f, "link {link} to {text:?} in the container"),
            Self::MaskProc(_) => f.write_str("mask \"/proc/driver/nvidia\" in the container"),
            Self::MaskParams => f.write_str("mask \"/proc/driver/nvidia/params\" in the container"),
            Self::SetMode { target, mode } => write!(f, "set the mode of {target} to {mode:03o} in the container"),
            Self::ListDirectories { .. } => {
                f.write_str("list the driver's directories in \"/etc/ld.so.conf.d\" in the container")
            }
            Self::UpdateLinkerCache(_) => f.write_str("update \"/etc/ld.so.cache\" in the container"),
        }
    }
}

/// Returns a step as JSON; the names of the fields are an interface.
pub(crate) fn describe(step: &Step) -> Value {
    match step {
        Step::MountFile { source, target, .. } | Step::MountIpc { source, target, .. } => {
            json!({"action": "mount", "source": source.as_path(), "path": target.absolute()})
        }
        Step::CopyFile { source, target, .. } => {
            json!({"action": "copy", "source": source.as_path(), "path": target.absolute()})
        }
        Step::MountNode { node: DeviceNode { path, major, minor, .. }, own: Some(_) } => json!({
            "action": "create", "path": path.absolute(), "major": major, "minor": minor, "access": "rw",
        }),
        Step::MountNode { node: DeviceNode { source, path, major, minor, .. }, own: None } => json!({
            "action": "device", "source": source.as_path(), "path": path.absolute(), "major": major, "minor": minor,
            "access": "rw",
        }),
        Step::MountFiles { target, files } => {
            let names: Vec<_> = files.iter().map(|(name, _)| name).collect();
            json!({"action": "mount", "source": "", "path": target.absolute(), "names": names})
        }
        Step::Link(Link { link, text, .. }) => {
            json!({"action": "link", "path": link.absolute(), "target": text.to_string_lossy()})
        }
        Step::MaskProc(mask) => {
            let shown: Vec<_> = mask.mounts.iter().map(|(path, _)| path).collect();
            json!({"action": "mask", "path": "/proc/driver/nvidia", "shown": shown})
        }
        Step::MaskParams => json!({"action": "mask", "path": "/proc/driver/nvidia/params"}),
        Step::SetMode { target, mode } => {
            json!({"action": "mode", "path": target.absolute(), "mode": format!("{mode:03o}")})
        }
        Step::ListDirectories { first, others } => {
            let dirs: Vec<_> = first.iter().chain(others).map(ContainerPath::absolute).collect();
            json!({"action": "ldconfig-directories", "path": "/etc/ld.so.conf.d", "directories": dirs})
        }
        Step::UpdateLinkerCache(entries) => {
            let names: Vec<_> = entries.iter().map(|entry| entry.soname.to_string_lossy()).collect();
            json!({"action": "linker-cache", "path": "/etc/ld.so.cache", "names": names})
        }
    }
}
