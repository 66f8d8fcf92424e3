//! Checks specs by the rules of the engines, and determines the version that a spec needs.

use super::name;
use super::spec::{ContainerEdits, Spec};

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
        let devices = || self.devices.iter();
        let edits = || {
            devices()
                .map(|device| &device.container_edits)
                .chain([&self.container_edits])
        };
        let dotted = self
            .kind
            .split_once('/')
            .is_some_and(|(_, class)| class.contains('.'));
        let starts_otherwise =
            |name: &str| !name.starts_with(|first: char| first.is_ascii_alphabetic());
        if edits().any(|edits| !edits.net_devices.is_empty()) {
            "1.1.0"
        } else if edits()
            .any(|edits| !edits.additional_gids.is_empty() || edits.intel_rdt.is_some())
        {
            "0.7.0"
        } else if dotted
            || !self.annotations.is_empty()
            || devices().any(|device| !device.annotations.is_empty())
        {
            "0.6.0"
        } else if edits().any(|edits| {
            edits
                .device_nodes
                .iter()
                .any(|node| node.host_path.is_some())
        }) || devices().any(|device| starts_otherwise(&device.name))
        {
            "0.5.0"
        } else if edits().any(|edits| edits.mounts.iter().any(|mount| mount.kind.is_some())) {
            "0.4.0"
        } else {
            "0.3.0"
        }
    }

    /// Checks the spec as engines do.
    ///
    /// # Errors
    /// Describes the first mistake.
    pub fn check(&self) -> Result<(), String> {
        let position = |version: &str| VERSIONS.iter().position(|known| *known == version);
        let version = self
            .cdi_version
            .strip_prefix('v')
            .unwrap_or(&self.cdi_version);
        let Some(stated) = position(version) else {
            return Err(format!("unknown cdiVersion {:?}", self.cdi_version));
        };
        let needed = self.minimum_version();
        if position(needed) > Some(stated) {
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

fn check_edits(edits: &ContainerEdits) -> Result<(), String> {
    let is_variable = |text: &str| text.find('=').is_some_and(|at| at > 0);
    if let Some(wrong) = edits.env.iter().find(|text| !is_variable(text)) {
        return Err(format!("{wrong:?} is not an environment variable"));
    }
    for node in &edits.device_nodes {
        let kind = node.kind.as_deref().unwrap_or_default();
        let permissions = node.permissions.as_deref().unwrap_or_default();
        if node.path.is_empty() {
            return Err("a device node has no path".to_owned());
        }
        if !["", "b", "c", "u", "p"].contains(&kind) {
            return Err(format!(
                "the device node {:?} has the unknown type {kind:?}",
                node.path
            ));
        }
        if permissions != "none" && !permissions.chars().all(|c| "rwm".contains(c)) {
            return Err(format!(
                "the device node {:?} has invalid permissions {permissions:?}",
                node.path
            ));
        }
        // -1 is the wildcard of device rules, and would allow every device.
        if node.major.is_some_and(|major| major < 0) || node.minor.is_some_and(|minor| minor < 0) {
            return Err(format!(
                "the device node {:?} has a negative device number",
                node.path
            ));
        }
    }
    for hook in &edits.hooks {
        if !STAGES.contains(&hook.hook_name.as_str()) {
            return Err(format!("a hook has the unknown stage {:?}", hook.hook_name));
        }
        if hook.path.is_empty() {
            return Err(format!("a {} hook has no path", hook.hook_name));
        }
        if let Some(wrong) = hook.env.iter().find(|text| !is_variable(text)) {
            return Err(format!(
                "{wrong:?} of a {} hook is not an environment variable",
                hook.hook_name
            ));
        }
    }
    match edits
        .mounts
        .iter()
        .find(|mount| mount.host_path.is_empty() || mount.container_path.is_empty())
    {
        Some(mount) => Err(format!(
            "the mount of {:?} at {:?} lacks a path",
            mount.host_path, mount.container_path
        )),
        None => Ok(()),
    }
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
