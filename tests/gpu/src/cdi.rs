//! Applies CDI edits to config.json, as an engine does.

use std::os::unix::fs::{FileTypeExt, MetadataExt};

use cdi_spec::spec::{ContainerEdits, DeviceNode, Spec};
use serde_json::{Value, json};

/// Returns the edits for a device: the edits of all containers, and the device's own.
///
/// # Errors
/// If the spec has no such device.
pub fn edits_of(spec: &Spec, device: &str) -> Result<ContainerEdits, String> {
    let own = spec.devices.iter().find(|known| known.name == device);
    let own = own.ok_or_else(|| format!("the CDI spec {} lacks the device {device}", spec.kind))?;
    Ok(spec
        .container_edits
        .clone()
        .merge(own.container_edits.clone()))
}

/// Applies the edits.
///
/// # Errors
/// If a device node of the host cannot be read.
pub fn apply(config: &mut Value, edits: &ContainerEdits) -> Result<(), String> {
    push_all(
        &mut config["process"]["env"],
        edits.env.iter().map(|env| json!(env)),
    );
    push_all(
        &mut config["process"]["user"]["additionalGids"],
        edits.additional_gids.iter().map(|gid| json!(gid)),
    );
    for node in &edits.device_nodes {
        let device = device(node)?;
        let access = node.permissions.as_deref().unwrap_or("rwm");
        let rule = json!({"allow": true, "type": device["type"], "major": device["major"], "minor": device["minor"], "access": access});
        push_all(&mut config["linux"]["devices"], [device]);
        push_all(&mut config["linux"]["resources"]["devices"], [rule]);
    }
    let mounts = edits.mounts.iter().map(|mount| {
        json!({
            "destination": mount.container_path,
            "source": mount.host_path,
            "type": mount.kind.as_deref().unwrap_or("none"),
            "options": mount.options,
        })
    });
    push_all(&mut config["mounts"], mounts);
    for hook in &edits.hooks {
        let mut entry = json!({"path": hook.path, "args": hook.args, "env": hook.env});
        if let Some(timeout) = hook.timeout {
            entry["timeout"] = timeout.into();
        }
        push_all(&mut config["hooks"][&hook.hook_name], [entry]);
    }
    Ok(())
}

fn push_all(list: &mut Value, more: impl IntoIterator<Item = Value>) {
    let mut more = more.into_iter().peekable();
    if more.peek().is_none() {
        return;
    }
    if list.is_null() {
        *list = json!([]);
    }
    if let Some(list) = list.as_array_mut() {
        list.extend(more);
    }
}

/// What a spec does not state comes from the node of the host.
fn device(node: &DeviceNode) -> Result<Value, String> {
    let path = node.host_path.as_ref().unwrap_or(&node.path);
    let (kind, major, minor) = match (&node.kind, node.major, node.minor) {
        (Some(kind), Some(major), Some(minor)) => (kind.clone(), major, minor),
        _ => {
            let found =
                std::fs::metadata(path).map_err(|error| format!("cannot read {path}: {error}"))?;
            let number = found.rdev();
            let kind = if found.file_type().is_block_device() {
                "b"
            } else {
                "c"
            };
            (
                kind.to_owned(),
                i64::from(rustix::fs::major(number)),
                i64::from(rustix::fs::minor(number)),
            )
        }
    };
    let mut device = json!({"path": node.path, "type": kind, "major": major, "minor": minor});
    for (name, value) in [
        ("fileMode", node.file_mode),
        ("uid", node.uid),
        ("gid", node.gid),
    ] {
        if let Some(value) = value {
            device[name] = value.into();
        }
    }
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_applied() {
        let spec: Spec = serde_json::from_value(json!({
            "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
            "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/null"}]}}],
            "containerEdits": {
                "env": ["A=b"],
                "mounts": [{"hostPath": "/h", "containerPath": "/c", "options": ["ro", "bind"]}],
                "hooks": [{"hookName": "createRuntime", "path": "/hook", "args": ["hook"], "env": ["PATH=/"]}],
            },
        }))
        .unwrap();
        let mut config = json!({"process": {"env": ["X=y"], "user": {}}, "mounts": [], "linux": {"resources": {"devices": []}}});
        apply(&mut config, &edits_of(&spec, "0").unwrap()).unwrap();
        assert_eq!(config["process"]["env"], json!(["X=y", "A=b"]));
        assert_eq!(config["mounts"][0]["source"], "/h");
        assert_eq!(config["hooks"]["createRuntime"][0]["path"], "/hook");
        assert_eq!(
            config["linux"]["devices"][0],
            json!({"path": "/dev/null", "type": "c", "major": 1, "minor": 3})
        );
        assert_eq!(config["linux"]["resources"]["devices"][0]["access"], "rwm");
        assert!(
            edits_of(&spec, "1")
                .unwrap_err()
                .contains("lacks the device 1")
        );
    }
}
