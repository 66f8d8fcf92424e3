//! A CDI spec: its fields, in the order in which they are written.

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
    /// For people and programs that look after specs; since 0.6.0
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// At least one
    pub devices: Vec<Device>,
    /// For every container that gets one of the devices
    #[serde(skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// A device that a container can be given by its name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Device {
    /// What follows `=` in its qualified name
    pub name: String,
    /// Since 0.6.0
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// At least one
    pub container_edits: ContainerEdits,
}

/// What an engine does to the spec of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct ContainerEdits {
    /// `NAME=VALUE`
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Nodes that the container has, each with access to its device
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Network interfaces that move into the container; since 1.1.0
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    /// Programs that the runtime starts
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Files of the host that the container sees
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Since 0.7.0
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
    /// On the host, if it is another there; since 0.5.0
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// `c`, `b`, `u` or `p`; an engine looks at the host's node where it is not said
    #[serde(skip_serializing_if = "Option::is_none", rename = "type")]
    pub kind: Option<String>,
    /// The device's
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// The device's
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Permission bits of the container's node
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// What the device cgroup allows, of `rwm`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Who owns the container's node; not said: the container's user
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The same for its group
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Mount {
    /// The path on the host
    pub host_path: String,
    /// In the container
    pub container_path: String,
    /// The options of the mount, as in mount(8)
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// The file system's; since 0.4.0
    #[serde(skip_serializing_if = "Option::is_none", rename = "type")]
    pub kind: Option<String>,
}

/// A program that the runtime starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Hook {
    /// The stage at which the runtime calls it: `createContainer`
    pub hook_name: String,
    /// The absolute path of the program
    pub path: String,
    /// The arguments, starting with `argv[0]`
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// All of its environment; runc gives it the container's where this is empty
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
    /// On the host
    pub host_interface_name: String,
    /// In the container
    pub name: String,
}

impl ContainerEdits {
    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Both together, nothing twice.
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

    /// Nothing twice; groups by number.
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

    /// Mounts and nodes by the depth of their paths, then by name: a mount must come after those that it lies in.
    #[must_use]
    pub fn sort(mut self) -> Self {
        self.device_nodes = by_depth(self.device_nodes, |node| &node.path);
        self.mounts = by_depth(self.mounts, |mount| &mount.container_path);
        self
    }

    /// What `other` does not have.
    #[must_use]
    fn without(mut self, other: &Self) -> Self {
        self.env.retain(|item| !other.env.contains(item));
        self.device_nodes.retain(|item| !other.device_nodes.contains(item));
        self.net_devices.retain(|item| !other.net_devices.contains(item));
        self.hooks.retain(|item| !other.hooks.contains(item));
        self.mounts.retain(|item| !other.mounts.contains(item));
        self.additional_gids.retain(|item| !other.additional_gids.contains(item));
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
    list.sort_by_cached_key(|item| (std::path::Path::new(path(item)).components().count(), path(item).clone()));
    list
}

impl Device {
    /// A device that is all of these together; `None` if one of them has this name already.
    ///
    /// # Errors
    /// If no device can have this name.
    pub fn merged(devices: &[Self], name: &str) -> Result<Option<Self>, String> {
        name::check_device(name)?;
        if devices.iter().any(|device| device.name == name) {
            return Ok(None);
        }
        let edits = devices.iter().map(|device| device.container_edits.clone());
        let container_edits = edits.fold(ContainerEdits::default(), ContainerEdits::merge);
        Ok(Some(Self { name: name.to_owned(), container_edits, ..Self::default() }))
    }
}

impl Spec {
    /// Nothing twice, neither in one place nor in a device and for all of them. A device that had nothing else keeps
    /// what it has: an empty one is invalid.
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
