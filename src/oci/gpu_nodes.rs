//! The GPU nodes that an engine gives to a container, from CDI or with `--device`. Everything that asks for them reads them here.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::FileType;

use nvidia_host::device_id::Nodes;
use nvidia_host::driver::node_name::NodeName;
use nvidia_host::request::{Node, nodes};

use super::spec_view::{LinuxDevice, Mount, SpecView};

/// A node of the driver in a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuNode<'s> {
    /// Its path in the container
    pub path: &'s Path,
    pub name: NodeName,
}

/// The nodes of the driver in a container, as config.json shows them.
#[derive(Debug)]
pub(crate) struct GpuNodes<'s> {
    /// The nodes that the runtime creates, by their numbers
    pub created: Vec<GpuNode<'s>>,
    /// The nodes that the engine bind-mounts, by the names of their files. Rootless engines mount nodes, because they may not create any
    pub mounted: Vec<GpuNode<'s>>,
    /// Whether the engine lists all nodes of the host, so that `created` does not show what was given to this container
    pub all_of_host: bool,
}

/// Returns the nodes of the driver in a container.
pub(crate) fn gpu_nodes(spec: &SpecView) -> GpuNodes<'_> {
    let mut created = Vec::new();
    for node in characters(&spec.devices) {
        let path = node.path;
        created.extend(node.name().map(|name| GpuNode { path, name }));
    }
    let mut mounted = Vec::new();
    for mount in spec.mounts.iter().filter(|mount| mount.is_bind()) {
        let path = &mount.destination;
        // The source has another name than the node if the driver root is not "/".
        let name = NodeName::of_path(&mount.source).or_else(|| NodeName::of_path(path));
        mounted.extend(name.map(|name| GpuNode { path, name }));
    }
    GpuNodes {
        created,
        mounted,
        all_of_host: spec.has_all_nodes,
    }
}

impl<'s> GpuNodes<'s> {
    /// Returns all nodes.
    pub(crate) fn all(&self) -> impl Iterator<Item = GpuNode<'s>> {
        self.created.iter().chain(&self.mounted).copied()
    }

    /// Returns the nodes of GPUs, without control nodes.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = GpuNode<'s>> {
        self.all().filter(|node| node.name.is_gpu())
    }

    /// Reports whether the container has this node.
    pub(crate) fn has(&self, name: NodeName) -> bool {
        self.all().any(|node| node.name == name)
    }

    /// Returns the node through which all GPU programs use the driver, if the engine gave it to this container: `/dev/nvidiactl`, or
    /// `/dev/dxg` on WSL 2.
    pub(crate) fn control(&self) -> Option<GpuNode<'s>> {
        let is_control =
            |node: &&GpuNode<'_>| matches!(node.name, NodeName::Control | NodeName::Dxg);
        let created = if self.all_of_host {
            &[][..]
        } else {
            &self.created
        };
        self.mounted.iter().chain(created).find(is_control).copied()
    }
}

/// Returns the GPUs of a container by the numbers of its nodes, for limits: the path of a mount can hide which device it is. `None` if it
/// has no node of a single GPU. Unlike [`gpu_nodes`], this examines the sources of mounts on the host.
pub(crate) fn granted(spec: &SpecView) -> Option<Nodes> {
    let mut given = characters(&spec.devices);
    for mount in spec.mounts.iter().filter(|mount| mount.is_bind()) {
        given.extend(mounted_node(mount));
    }
    nodes::granted(&given)
}

/// Returns the character devices. `u` is another word for `c`, see runtime-spec.
pub fn characters(devices: &[LinuxDevice]) -> Vec<Node<'_>> {
    let mut characters = Vec::new();
    for device in devices {
        if matches!(device.kind.as_deref(), Some("c" | "u")) {
            characters.push(Node {
                path: &device.path,
                major: number(device.major),
                minor: number(device.minor),
            });
        }
    }
    characters
}

fn number(number: Option<i64>) -> Option<u32> {
    u32::try_from(number?).ok()
}

/// Returns the character device that a mount gives to the container.
fn mounted_node(mount: &Mount) -> Option<Node<'_>> {
    // No other path is examined: it may be on a file system that does not answer.
    let destination = mount.destination.as_os_str().as_bytes();
    if !destination.starts_with(b"/dev/nvidia") && !mount.source.starts_with("/dev") {
        return None;
    }
    let (major, minor) = device_number(&mount.source)?;
    Some(Node {
        path: &mount.destination,
        major: Some(major),
        minor: Some(minor),
    })
}

/// Returns the major and minor number of a file on the host; `None` if it is not a character device.
pub(crate) fn device_number(path: &Path) -> Option<(u32, u32)> {
    let stat = rustix::fs::stat(path).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
        return None;
    }
    let number = stat.st_rdev;
    Some((rustix::fs::major(number), rustix::fs::minor(number)))
}

#[cfg(test)]
mod tests;
