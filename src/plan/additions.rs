//! Lowers container edits to additions to config.json, like an engine does with the edits of a CDI spec. Pure.
//!
//! Existing entries of config.json are neither removed nor changed.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Value, json};

use cdi_spec::spec::{ContainerEdits, DeviceNode, Hook, Mount};
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::lower::STAGE;

use crate::oci::SpecView;
use crate::oci::device_rules::{DeviceRule, already_allowed};
use crate::oci::insertion::append;
use crate::oci::spec_view::{IdMapping, OVERFLOW_ID};

/// Facts that config.json does not contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OciFacts {
    /// Whether the hook and the runtime are in a user namespace (rootless Podman)
    pub in_user_namespace: bool,
}

/// Options of a bind mount of a device node, which must not have `nodev`. Read-only, like
/// [`base::sys::mount::MountAttrs::DEVICE_NODE`].
const NODE_OPTIONS: [&str; 5] = ["ro", "nosuid", "noexec", "rbind", "rprivate"];

/// Items to add to the arrays of config.json.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Additions {
    /// `linux.devices`
    pub devices: Vec<Value>,
    /// `linux.resources.devices`
    pub device_rules: Vec<Value>,
    /// `process.user.additionalGids`
    pub additional_gids: Vec<Value>,
    /// `mounts`
    pub mounts: Vec<Value>,
    /// `hooks.createRuntime`
    pub hooks: Vec<Value>,
    /// Paths on the host of mount points of nodes in volumes, which the runtime creates if they are missing
    pub points: Vec<PathBuf>,
}

impl Additions {
    /// Returns the parts of these edits that config.json lacks.
    #[must_use]
    pub fn new(edits: &ContainerEdits, spec: &SpecView, facts: OciFacts) -> Self {
        let mut additions = Self::default();
        for node in &edits.device_nodes {
            additions.device(node, spec, facts);
        }
        additions.mounts.extend(
            edits
                .mounts
                .iter()
                .filter(|mount| !has_mount(spec, &mount.container_path))
                .map(bind),
        );
        let gids = edits
            .additional_gids
            .iter()
            .filter_map(|gid| gid_inside(*gid, spec, facts));
        let mut gids: Vec<u32> = gids
            .filter(|gid| !spec.additional_gids.contains(gid))
            .collect();
        gids.sort();
        gids.dedup();
        additions
            .additional_gids
            .extend(gids.into_iter().map(Value::from));
        additions.hooks.extend(
            edits
                .hooks
                .iter()
                .filter(|hook| !has_hook(spec, hook))
                .map(entry),
        );
        additions
    }

    /// Adds a node and its device rule.
    fn device(&mut self, node: &DeviceNode, spec: &SpecView, facts: OciFacts) {
        let (Some(major), Some(minor)) = (number(node.major), number(node.minor)) else {
            return;
        };
        let path = Path::new(&node.path);
        let rule = DeviceRule { major, minor };
        // A rootless runtime cannot filter devices, so config.json needs no rule.
        if !facts.in_user_namespace && !already_allowed(&spec.device_rules, rule) {
            self.device_rules.push(json!({
                "allow": true, "type": "c", "major": major, "minor": minor,
                "access": node.permissions.as_deref().unwrap_or("rw"),
            }));
        }
        if spec.devices.iter().any(|device| device.path == path) || has_mount(spec, &node.path) {
            return;
        }
        // mknod(2) fails in a user namespace, and in a volume it would create a node on the host.
        let in_volume = in_volume(spec, path);
        if facts.in_user_namespace || spec.user_namespace || in_volume.is_some() {
            self.points.extend(in_volume);
            let source = node.host_path.as_ref().unwrap_or(&node.path);
            self.mounts.push(mount(source, &node.path, &NODE_OPTIONS));
            return;
        }
        let mut device = json!({
            "path": node.path, "type": "c", "major": major, "minor": minor,
            "uid": node.uid.unwrap_or_default(), "gid": node.gid.unwrap_or_default(),
        });
        if let (Some(mode), Some(fields)) = (node.file_mode, device.as_object_mut()) {
            fields.insert("fileMode".to_owned(), (mode & 0o777).into());
        }
        self.devices.push(device);
    }

    /// Returns the path of each array in config.json, and its new items.
    pub fn arrays(&self) -> [(&'static [&'static str], &[Value]); 5] {
        [
            (
                &["process", "user", "additionalGids"],
                &self.additional_gids,
            ),
            (&["mounts"], &self.mounts),
            (&["hooks", STAGE], &self.hooks),
            (&["linux", "devices"], &self.devices),
            (&["linux", "resources", "devices"], &self.device_rules),
        ]
    }

    /// Adds the items to the text of config.json. All other bytes are preserved, except null at the path of an array.
    ///
    /// # Errors
    /// If the text is not a valid config.json.
    pub fn apply(&self, mut config: String) -> Result<String> {
        self.arrays()
            .iter()
            .try_for_each(|(path, items)| append(&mut config, path, items))?;
        Ok(config)
    }
}

fn number(number: Option<i64>) -> Option<u32> {
    u32::try_from(number?).ok()
}

fn bind(edit: &Mount) -> Value {
    let options: Vec<_> = edit.options.iter().map(String::as_str).collect();
    mount(&edit.host_path, &edit.container_path, &options)
}

fn mount(source: &str, destination: &str, options: &[&str]) -> Value {
    json!({"destination": destination, "type": "bind", "source": source, "options": options})
}

fn entry(hook: &Hook) -> Value {
    let mut entry = json!({"path": hook.path, "args": hook.args, "env": hook.env});
    if let (Some(timeout), Some(fields)) = (hook.timeout, entry.as_object_mut()) {
        fields.insert("timeout".to_owned(), timeout.into());
    }
    entry
}

fn has_mount(spec: &SpecView, destination: &str) -> bool {
    spec.mounts
        .iter()
        .any(|mount| mount.destination == Path::new(destination))
}

/// Returns the path on the host if `path` is in a bind mount. The deepest mount above it counts, and the last one of several.
fn in_volume(spec: &SpecView, path: &Path) -> Option<PathBuf> {
    let above = spec
        .mounts
        .iter()
        .filter(|mount| path.starts_with(&mount.destination));
    let mount = above
        .max_by_key(|mount| mount.destination.components().count())
        .filter(|mount| mount.is_bind())?;
    Some(
        mount
            .source
            .join(path.strip_prefix(&mount.destination).ok()?),
    )
}

/// Reports whether config.json has an equal hook entry already, which would do the same.
fn has_hook(spec: &SpecView, hook: &Hook) -> bool {
    let Some(ours) = RootfsEdits::from_entry(&hook.args) else {
        return false;
    };
    spec.hooks
        .iter()
        .any(|present| RootfsEdits::from_entry(&present.args).as_ref() == Some(&ours))
}

/// Returns a group id of the host as the id in the container; `None` if it is not mapped.
pub(crate) fn gid_inside(gid: u32, spec: &SpecView, facts: OciFacts) -> Option<u32> {
    if facts.in_user_namespace && gid == OVERFLOW_ID {
        return None;
    }
    if spec.user_namespace {
        IdMapping::inside(&spec.gid_mappings, gid)
    } else {
        Some(gid)
    }
}

#[cfg(test)]
mod tests;
