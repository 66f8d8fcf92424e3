//! Checks specs by the rules of the engines, and determines the version that a spec needs.

use super::name;
use super::spec::{ContainerEdits, DeviceNode, Hook, Spec};

/// The versions of CDI, oldest first. 0.8.0 and 1.0.0 added no fields.
pub const VERSIONS: [&str; 10] = [
    "0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0",
];

/// The stages that CDI permits for hooks.
pub const STAGES: [&str; 6] = [
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
];

impl Spec {
    /// Sets the lowest version that has all fields of the spec.
    #[must_use]
    pub fn with_minimum_version(mut self) -> Self {
        self.cdi_version = self.minimum_version().to_owned();
        self
    }

    /// Returns the lowest version that has all fields of the spec.
    #[must_use]
    pub fn minimum_version(&self) -> &'static str {
        let class = self.kind.split_once('/').map_or("", |(_, class)| class);
        // The oldest version that engines still read
        let mut version = "0.3.0".max(needed_by(&self.container_edits));
        if class.contains('.') || !self.annotations.is_empty() {
            version = version.max("0.6.0");
        }
        for device in &self.devices {
            version = version.max(needed_by(&device.container_edits));
            if !device.annotations.is_empty() {
                version = version.max("0.6.0");
            }
            if !device.name.starts_with(|c: char| c.is_ascii_alphabetic()) {
                version = version.max("0.5.0");
            }
        }
        version
    }

    /// Checks the spec as engines do.
    ///
    /// # Errors
    /// Describes the first mistake.
    pub fn check(&self) -> Result<(), String> {
        let version = self
            .cdi_version
            .strip_prefix('v')
            .unwrap_or(&self.cdi_version);
        if !VERSIONS.contains(&version) {
            return Err(format!("unknown cdiVersion {:?}", self.cdi_version));
        }
        let needed = self.minimum_version();
        if needed > version {
            return Err(format!(
                "cdiVersion is {version}, but the spec has fields of {needed}"
            ));
        }
        name::parse_kind(&self.kind).map_err(|why| format!("kind: {why}"))?;
        check_edits(&self.container_edits).map_err(|why| format!("containerEdits: {why}"))?;
        let mut seen = std::collections::BTreeSet::new();
        for device in &self.devices {
            let in_device = |why| format!("device {:?}: {why}", device.name);
            name::check_device(&device.name).map_err(in_device)?;
            if device.container_edits.is_empty() {
                return Err(in_device("containerEdits is missing or empty".to_owned()));
            }
            check_edits(&device.container_edits).map_err(in_device)?;
            if !seen.insert(&device.name) {
                return Err(in_device("defined twice".to_owned()));
            }
        }
        if self.devices.is_empty() {
            Err("there are no devices".to_owned())
        } else {
            Ok(())
        }
    }
}

/// Returns the lowest version that has all fields of these edits. All versions have one digit in each part, so they sort as texts.
fn needed_by(edits: &ContainerEdits) -> &'static str {
    if !edits.net_devices.is_empty() {
        return "1.1.0";
    }
    if !edits.additional_gids.is_empty() || edits.intel_rdt.is_some() {
        return "0.7.0";
    }
    if edits
        .device_nodes
        .iter()
        .any(|node| node.host_path.is_some())
    {
        return "0.5.0";
    }
    if edits.mounts.iter().any(|mount| mount.kind.is_some()) {
        return "0.4.0";
    }
    ""
}

fn check_edits(edits: &ContainerEdits) -> Result<(), String> {
    for text in &edits.env {
        if !is_variable(text) {
            return Err(format!("{text:?} is not an environment variable"));
        }
    }
    for node in &edits.device_nodes {
        check_node(node)?;
    }
    for hook in &edits.hooks {
        check_hook(hook)?;
    }
    for mount in &edits.mounts {
        if mount.host_path.is_empty() || mount.container_path.is_empty() {
            return Err(format!(
                "the mount of {:?} at {:?} lacks a path",
                mount.host_path, mount.container_path
            ));
        }
    }
    Ok(())
}

/// `NAME=VALUE`
fn is_variable(text: &str) -> bool {
    !text.starts_with('=') && text.contains('=')
}

fn check_node(node: &DeviceNode) -> Result<(), String> {
    let path = &node.path;
    if path.is_empty() {
        return Err("a device node has no path".to_owned());
    }
    let kind = node.kind.as_deref().unwrap_or_default();
    if !["", "b", "c", "u", "p"].contains(&kind) {
        return Err(format!(
            "the device node {path:?} has the unknown type {kind:?}"
        ));
    }
    let permissions = node.permissions.as_deref().unwrap_or_default();
    if permissions != "none" && !permissions.chars().all(|c| "rwm".contains(c)) {
        return Err(format!(
            "the device node {path:?} has invalid permissions {permissions:?}"
        ));
    }
    // -1 is the wildcard of device rules, and would allow every device.
    let is_negative = |number: Option<i64>| number.is_some_and(|number| number < 0);
    if is_negative(node.major) || is_negative(node.minor) {
        return Err(format!(
            "the device node {path:?} has a negative device number"
        ));
    }
    Ok(())
}

fn check_hook(hook: &Hook) -> Result<(), String> {
    let stage = &hook.hook_name;
    if !STAGES.contains(&stage.as_str()) {
        return Err(format!("a hook has the unknown stage {stage:?}"));
    }
    if hook.path.is_empty() {
        return Err(format!("a {stage} hook has no path"));
    }
    for text in &hook.env {
        if !is_variable(text) {
            return Err(format!(
                "{text:?} of a {stage} hook is not an environment variable"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Device, DeviceNode, Hook, Mount, NetDevice};

    fn spec() -> Spec {
        let node = DeviceNode {
            path: "/dev/nvidia0".into(),
            ..DeviceNode::default()
        };
        let edits = ContainerEdits {
            device_nodes: vec![node],
            ..ContainerEdits::default()
        };
        let device = Device {
            name: "gpu0".into(),
            container_edits: edits,
            ..Device::default()
        };
        Spec {
            cdi_version: "0.3.0".into(),
            kind: "nvidia.com/gpu".into(),
            devices: vec![device],
            ..Spec::default()
        }
    }

    #[test]
    fn the_version_follows_the_fields() {
        type Change = fn(&mut Spec);
        let changes: [(&str, Change); 9] = [
            ("0.3.0", |_| {}),
            ("0.4.0", |spec| {
                spec.container_edits.mounts = vec![Mount {
                    kind: Some("bind".into()),
                    ..Mount::default()
                }];
            }),
            ("0.5.0", |spec| spec.devices[0].name = "0".into()),
            ("0.5.0", |spec| {
                spec.devices[0].container_edits.device_nodes[0].host_path = Some("/x".into())
            }),
            ("0.6.0", |spec| {
                spec.annotations = [("a".into(), "b".into())].into()
            }),
            ("0.6.0", |spec| spec.kind = "nvidia.com/gpu.x".into()),
            ("0.7.0", |spec| {
                spec.devices[0].container_edits.additional_gids = vec![44]
            }),
            ("0.7.0", |spec| {
                spec.container_edits.intel_rdt = Some(serde_json::json!({}))
            }),
            ("1.1.0", |spec| {
                spec.container_edits.net_devices = vec![NetDevice::default()]
            }),
        ];
        for (version, change) in changes {
            let mut spec = spec();
            change(&mut spec);
            assert_eq!(spec.minimum_version(), version);
        }
    }

    #[test]
    fn each_rule_of_the_engines() {
        type Change = fn(&mut Spec);
        let changes: [(&str, Change); 16] = [
            ("unknown cdiVersion", |spec| {
                spec.cdi_version = "0.9.0".into()
            }),
            ("fields of 0.5.0", |spec| spec.devices[0].name = "0".into()),
            ("kind: ", |spec| spec.kind = "gpu".into()),
            ("no devices", |spec| spec.devices.clear()),
            ("defined twice", |spec| {
                spec.devices.push(spec.devices[0].clone())
            }),
            ("containerEdits is missing", |spec| {
                spec.devices[0].container_edits = ContainerEdits::default()
            }),
            ("does not end with", |spec| {
                spec.devices[0].name = "gpu:".into()
            }),
            ("not an environment variable", |spec| {
                spec.container_edits.env = vec!["=x".into()]
            }),
            ("has no path", |spec| {
                spec.devices[0].container_edits.device_nodes[0].path.clear()
            }),
            ("unknown type \"d\"", |spec| {
                spec.devices[0].container_edits.device_nodes[0].kind = Some("d".into())
            }),
            ("permissions", |spec| {
                spec.devices[0].container_edits.device_nodes[0].permissions = Some("rx".into())
            }),
            ("negative", |spec| {
                spec.devices[0].container_edits.device_nodes[0].major = Some(-1)
            }),
            ("unknown stage", |spec| {
                spec.container_edits.hooks = vec![Hook::default()]
            }),
            ("hook has no path", |spec| {
                spec.container_edits.hooks = vec![Hook {
                    hook_name: "prestart".into(),
                    ..Hook::default()
                }];
            }),
            ("of a prestart hook", |spec| {
                let hook = Hook {
                    hook_name: "prestart".into(),
                    path: "/x".into(),
                    ..Hook::default()
                };
                spec.container_edits.hooks = vec![Hook {
                    env: vec!["x".into()],
                    ..hook
                }];
            }),
            ("lacks a path", |spec| {
                spec.container_edits.mounts = vec![Mount::default()]
            }),
        ];
        assert_eq!(spec().check(), Ok(()));
        for (says, change) in changes {
            let mut spec = spec();
            change(&mut spec);
            let why = spec.check().unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }
}
