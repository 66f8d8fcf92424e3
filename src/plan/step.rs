//! A step: one change to a container, and how it is described. `inject` carries steps out.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt;

use base::paths::{ContainerPath, HostPath};
use nvidia_host::driver::ipc::{Expected, Ipc};
use nvidia_host::driver::ldcache::Arch;
use nvidia_host::edits::placement::Link;
use nvidia_host::edits::{Channel, DeviceNode, Need, ProcMask};
use serde_json::{Value, json};

use super::process::Process;

/// One change to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Mount a file of the host, read-only.
    MountFile {
        source: HostPath,
        target: ContainerPath,
        need: Need,
    },
    /// Copy a file of the host, unless the image has its own.
    CopyFile {
        source: HostPath,
        target: ContainerPath,
        need: Need,
    },
    /// Mount a socket, or a directory of sockets. `source` is where it is on the host, for messages.
    MountIpc {
        channel: Channel,
        source: HostPath,
        target: ContainerPath,
    },
    /// Mount a device node of the host, whose number is checked again on the open file. For a process that cannot open that
    /// node (`own`), create one in the container.
    MountNode {
        node: DeviceNode,
        own: Option<Process>,
    },
    /// `ln -sfn TEXT LINK`. The hook never resolves the text. If the image has a file of its own in place of the link, the
    /// mounted `file`, to which the link leads, is mounted over that.
    Link(Link),
    /// Mount a read-only directory with these files, which hides a directory of the image.
    MountFiles {
        target: ContainerPath,
        files: Vec<(&'static str, String)>,
    },
    /// Hide the GPUs in `/proc/driver/nvidia` that the container does not have.
    MaskProc(ProcMask),
    /// Keep the driver's libraries from creating device nodes: hide only `/proc/driver/nvidia/params`.
    MaskParams,
    /// `chmod MODE TARGET`, unless the file can belong to the host.
    SetMode { target: ContainerPath, mode: u32 },
    /// Make the image's ldconfig search these directories, because it rebuilds the linker cache when a package is installed:
    /// `first` before all others, even if they are configured already, and `others` unless they are.
    ListDirectories {
        first: Vec<ContainerPath>,
        others: Vec<ContainerPath>,
    },
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
    /// Returns the step that mounts the socket or the directory of a daemon.
    pub(crate) fn mount_ipc(ipc: &Ipc) -> Self {
        Self::MountIpc {
            channel: ipc.channel.clone(),
            source: ipc.source.clone(),
            target: ipc.path.clone(),
        }
    }

    /// Whether this mounts the directory of an MPS daemon.
    pub(crate) fn mounts_mps(&self) -> bool {
        let Self::MountIpc { channel, .. } = self else {
            return false;
        };
        matches!(channel.expected, Expected::MpsDirectory)
    }

    /// Returns whether the container requires the step.
    pub(crate) const fn need(&self) -> Need {
        match self {
            Self::MountFile { need, .. }
            | Self::CopyFile { need, .. }
            | Self::Link(Link { need, .. }) => *need,
            // CUDA could not use the GPU without its daemon.
            Self::MountIpc { channel, .. }
                if matches!(channel.expected, Expected::MpsDirectory) =>
            {
                Need::Required
            }
            Self::MountIpc { .. }
            | Self::MountFiles { .. }
            | Self::SetMode { .. }
            | Self::ListDirectories { .. } => Need::Optional,
            _ => Need::Required,
        }
    }

    /// Returns the major and minor number of the node that this step creates, if it creates one.
    pub(crate) const fn own_node(&self) -> Option<(u32, u32)> {
        match self {
            Self::MountNode { node, own: Some(_) } => Some((node.major, node.minor)),
            _ => None,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} in the container",
            in_words(&describe(self), |path| format!("{path:?}"))
        )
    }
}

/// Returns a step as JSON; the names of the fields are an interface.
pub(crate) fn describe(step: &Step) -> Value {
    match step {
        Step::MountFile { source, target, .. } | Step::MountIpc { source, target, .. } => {
            json!({"action": "mount", "source": of_host(source), "path": inside(target)})
        }
        Step::CopyFile { source, target, .. } => {
            json!({"action": "copy", "source": of_host(source), "path": inside(target)})
        }
        Step::MountNode { node, own } => describe_node(node, own.is_some()),
        Step::MountFiles { target, files } => {
            let names: Vec<_> = files.iter().map(|(name, _)| name).collect();
            json!({"action": "mount", "source": "", "path": inside(target), "names": names})
        }
        Step::Link(Link { link, text, .. }) => {
            json!({"action": "link", "path": inside(link), "target": text.to_string_lossy()})
        }
        Step::MaskProc(mask) => {
            let shown: Vec<_> = mask
                .mounts
                .iter()
                .map(|(path, _)| path.to_string_lossy())
                .collect();
            json!({"action": "mask", "path": "/proc/driver/nvidia", "shown": shown})
        }
        Step::MaskParams => json!({"action": "mask", "path": "/proc/driver/nvidia/params"}),
        Step::SetMode { target, mode } => {
            json!({"action": "mode", "path": inside(target), "mode": format!("{mode:03o}")})
        }
        Step::ListDirectories { first, others } => {
            let dirs: Vec<_> = first.iter().chain(others).map(inside).collect();
            json!({"action": "ldconfig-directories", "path": "/etc/ld.so.conf.d", "directories": dirs})
        }
        Step::UpdateLinkerCache(entries) => {
            let names: Vec<_> = entries
                .iter()
                .map(|entry| entry.soname.to_string_lossy())
                .collect();
            json!({"action": "linker-cache", "path": "/etc/ld.so.cache", "names": names})
        }
    }
}

fn describe_node(node: &DeviceNode, is_created: bool) -> Value {
    let (path, major, minor) = (inside(&node.path), node.major, node.minor);
    if is_created {
        return json!({"action": "create", "path": path, "major": major, "minor": minor, "access": "rw"});
    }
    let source = of_host(&node.source);
    json!({
        "action": "device", "source": source, "path": path, "major": major, "minor": minor, "access": "rw",
    })
}

/// Returns the path as text. `json!` would panic for the path of a file whose name is not UTF-8.
fn of_host(path: &HostPath) -> Cow<'_, str> {
    path.as_path().to_string_lossy()
}

fn inside(path: &ContainerPath) -> String {
    path.absolute().to_string_lossy().into_owned()
}

/// Returns a described step as one line, with paths as `quote` writes them.
pub(super) fn in_words(step: &Value, quote: impl Fn(&str) -> String) -> String {
    let field = |name: &str| step.get(name).and_then(Value::as_str).unwrap_or_default();
    let (source, path) = (field("source"), quote(field("path")));
    match field("action") {
        "mount" if source.is_empty() => format!("mount a directory of the hook at {path}"),
        "mount" | "device" => format!("mount {} at {path}", quote(source)),
        "copy" => format!("copy {} to {path}", quote(source)),
        "create" => format!("create {path}"),
        "link" => format!("link {path} to {}", quote(field("target"))),
        "mask" => format!("mask {path}"),
        "mode" => format!("set the mode of {path} to {}", field("mode")),
        "ldconfig-directories" => format!("list directories in {path}"),
        _ => format!("update {path}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn a_name_that_is_not_utf_8() {
        let name = || OsString::from_vec(b"/\xff\xe9".to_vec());
        let target = ContainerPath::new(name()).unwrap();
        let step = Step::CopyFile {
            source: HostPath::new(name()),
            target,
            need: Need::Required,
        };
        let shown = "/\u{fffd}\u{fffd}";
        assert_eq!(
            describe(&step),
            json!({"action": "copy", "source": shown, "path": shown})
        );
        assert_eq!(
            step.to_string(),
            format!("copy \"{shown}\" to \"{shown}\" in the container")
        );
    }
}
