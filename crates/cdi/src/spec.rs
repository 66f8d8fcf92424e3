//! The fields of a CDI spec, in the order in which they are written.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::name;

/// The content of a spec file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Spec {
    /// The version of the CDI specification: `0.5.0`
    pub cdi_version: String,
    /// Vendor and class: `nvidia.com/gpu`
    pub kind: String,
    /// Information about the spec; since 0.6.0
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices; at least one
    pub devices: Vec<Device>,
    /// The edits for every container that gets one of the devices
    #[serde(skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// A device that a container can request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Device {
    /// The part of the qualified name after `=`
    pub name: String,
    /// Information about the device; since 0.6.0
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The edits for a container that gets the device; must not be empty
    pub container_edits: ContainerEdits,
}

/// Changes that an engine makes to config.json of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct ContainerEdits {
    /// Environment variables, `NAME=VALUE`
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes, with permission to access the devices
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Network interfaces that move into the container; since 1.1.0
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    /// Programs that the runtime executes
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Files and directories of the host
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Settings for Intel RDT, not interpreted; since 0.7.0
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<serde_json::Value>,
    /// Groups that the container's process joins; since 0.7.0
    #[serde(skip_serializing_if = "Vec::is_empty", rename = "additionalGids")]
    pub additional_gids: Vec<u32>,
}

/// A device node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct DeviceNode {
    /// The path in the container
    pub path: String,
    /// The path on the host, if it differs; since 0.5.0
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// `c`, `b`, `u` or `p`; if it is missing, engines read it from the host's node
    #[serde(skip_serializing_if = "Option::is_none", rename = "type")]
    pub kind: Option<String>,
    /// The major number of the device
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// The minor number of the device
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// The permission bits of the node in the container
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// The accesses that the device cgroup permits, from `rwm`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// The owner of the node in the container; by default the container's user
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The group of the node in the container; by default the container's group
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Mount {
    /// The path on the host
    pub host_path: String,
    /// The path in the container
    pub container_path: String,
    /// The mount options, see mount(8)
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// The file system type; since 0.4.0
    #[serde(skip_serializing_if = "Option::is_none", rename = "type")]
    pub kind: Option<String>,
}

/// A program that the runtime executes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Hook {
    /// The stage, such as `createContainer`
    pub hook_name: String,
    /// The absolute path of the program
    pub path: String,
    /// The arguments, starting with `argv[0]`
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// The whole environment; if it is empty, runc passes the container's
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// The time limit in seconds
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct NetDevice {
    /// The name on the host
    pub host_interface_name: String,
    /// The name in the container
    pub name: String,
}

impl ContainerEdits {
    /// Whether there are no edits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Merges both without duplicates.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.env.extend(other.env);
        self.device_nodes.extend(other.device_nodes);
        self.net_devices.extend(other.net_devices);
        self.hooks.extend(other.hooks);
        self.mounts.extend(other.mounts);
        self.intel_rdt = other.intel_rdt.or(self.intel_rdt);
        self.additional_gids.extend(other.additional_gids);
        self.dedup()
    }

    /// Removes duplicates, and sorts the groups.
    #[must_use]
    fn dedup(mut self) -> Self {
        dedup(&mut self.env);
        dedup(&mut self.device_nodes);
        dedup(&mut self.net_devices);
        dedup(&mut self.hooks);
        dedup(&mut self.mounts);
        self.additional_gids.sort();
        self.additional_gids.dedup();
        self
    }

    /// Sorts mounts and nodes by the depth of their paths, then by name: a mount must come after the mounts that contain its target.
    #[must_use]
    pub fn sort(mut self) -> Self {
        self.device_nodes = by_depth(self.device_nodes, |node| &node.path);
        self.mounts = by_depth(self.mounts, |mount| &mount.container_path);
        self
    }

    /// Returns the edits that are not in `other`.
    #[must_use]
    fn without(mut self, other: &Self) -> Self {
        self.env.retain(|item| !other.env.contains(item));
        self.device_nodes
            .retain(|item| !other.device_nodes.contains(item));
        self.net_devices
            .retain(|item| !other.net_devices.contains(item));
        self.hooks.retain(|item| !other.hooks.contains(item));
        self.mounts.retain(|item| !other.mounts.contains(item));
        self.additional_gids
            .retain(|item| !other.additional_gids.contains(item));
        self
    }
}

fn dedup<T: PartialEq + Clone>(list: &mut Vec<T>) {
    let mut seen: Vec<T> = Vec::new();
    list.retain(|item| {
        let new = !seen.contains(item);
        if new {
            seen.push(item.clone());
        }
        new
    });
}

fn by_depth<T>(mut list: Vec<T>, path: fn(&T) -> &String) -> Vec<T> {
    list.sort_by_cached_key(|item| {
        (
            std::path::Path::new(path(item)).components().count(),
            path(item).clone(),
        )
    });
    list
}

impl Device {
    /// Returns a device with the edits of all these devices, or `None` if one of them already has this name.
    ///
    /// # Errors
    /// If the name is not valid for a device.
    pub fn merged(devices: &[Self], name: &str) -> Result<Option<Self>, String> {
        name::check_device(name)?;
        if devices.iter().any(|device| device.name == name) {
            return Ok(None);
        }
        let edits = devices.iter().map(|device| device.container_edits.clone());
        let container_edits = edits.fold(ContainerEdits::default(), ContainerEdits::merge);
        Ok(Some(Self {
            name: name.to_owned(),
            container_edits,
            ..Self::default()
        }))
    }
}

impl Spec {
    /// Removes duplicates, and removes from each device the edits that every container gets. A device that would become empty, and
    /// therefore invalid, keeps its edits.
    #[must_use]
    pub fn simplify(mut self) -> Self {
        self.container_edits = self.container_edits.dedup();
        for device in &mut self.devices {
            let own = std::mem::take(&mut device.container_edits).dedup();
            let rest = own.clone().without(&self.container_edits);
            device.container_edits = if rest.is_empty() { own } else { rest };
        }
        self
    }
}
