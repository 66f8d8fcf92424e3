//! JSON values → a spec. A field that CDI does not have makes a file invalid for every engine.
//!
//! By hand: what serde makes of these structs takes 60 KB of the program.

use std::collections::BTreeMap;

use crate::few;

use serde_json::{Map, Value};

use super::spec::{ContainerEdits, Device, DeviceNode, Hook, Mount, NetDevice, Spec};

/// Decodes a spec.
///
/// # Errors
/// The first field that is unknown, or of another type than CDI has it.
pub fn spec(value: Value) -> Result<Spec, String> {
    let mut fields = Fields::of(value)?;
    let spec = Spec {
        cdi_version: fields.text("cdiVersion")?,
        kind: fields.text("kind")?,
        annotations: fields.texts_by_name("annotations")?,
        devices: fields.list("devices", device)?,
        container_edits: fields.get("containerEdits", container_edits)?.unwrap_or_default(),
    };
    fields.end(spec)
}

fn device(value: Value) -> Result<Device, String> {
    let mut fields = Fields::of(value)?;
    let device = Device {
        name: fields.text("name")?,
        annotations: fields.texts_by_name("annotations")?,
        container_edits: fields.get("containerEdits", container_edits)?.unwrap_or_default(),
    };
    fields.end(device)
}

fn container_edits(value: Value) -> Result<ContainerEdits, String> {
    let mut fields = Fields::of(value)?;
    let edits = ContainerEdits {
        env: fields.list("env", text)?,
        device_nodes: fields.list("deviceNodes", device_node)?,
        net_devices: fields.list("netDevices", net_device)?,
        hooks: fields.list("hooks", hook)?,
        mounts: fields.list("mounts", mount)?,
        intel_rdt: fields.get("intelRdt", Ok)?,
        additional_gids: fields.list("additionalGids", natural)?,
    };
    fields.end(edits)
}

fn device_node(value: Value) -> Result<DeviceNode, String> {
    let mut fields = Fields::of(value)?;
    let node = DeviceNode {
        path: fields.text("path")?,
        host_path: fields.get("hostPath", text)?,
        kind: fields.get("type", text)?,
        major: fields.get("major", integer)?,
        minor: fields.get("minor", integer)?,
        file_mode: fields.get("fileMode", natural)?,
        permissions: fields.get("permissions", text)?,
        uid: fields.get("uid", natural)?,
        gid: fields.get("gid", natural)?,
    };
    fields.end(node)
}

fn mount(value: Value) -> Result<Mount, String> {
    let mut fields = Fields::of(value)?;
    let mount = Mount {
        host_path: fields.text("hostPath")?,
        container_path: fields.text("containerPath")?,
        options: fields.list("options", text)?,
        kind: fields.get("type", text)?,
    };
    fields.end(mount)
}

fn hook(value: Value) -> Result<Hook, String> {
    let mut fields = Fields::of(value)?;
    let hook = Hook {
        hook_name: fields.text("hookName")?,
        path: fields.text("path")?,
        args: fields.list("args", text)?,
        env: fields.list("env", text)?,
        timeout: fields.get("timeout", integer)?,
    };
    fields.end(hook)
}

fn net_device(value: Value) -> Result<NetDevice, String> {
    let mut fields = Fields::of(value)?;
    let device = NetDevice { host_interface_name: fields.text("hostInterfaceName")?, name: fields.text("name")? };
    fields.end(device)
}

fn text(value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(format!("{other} is no text")),
    }
}

fn integer(value: Value) -> Result<i64, String> {
    value.as_i64().ok_or_else(|| format!("{value} is no whole number"))
}

fn natural(value: Value) -> Result<u32, String> {
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| format!("{value} is no number from 0 to {}", u32::MAX))
}

/// The fields of an object that nobody took yet. `null` is as if it were not there.
struct Fields(Map<String, Value>);

impl Fields {
    fn of(value: Value) -> Result<Self, String> {
        match value {
            Value::Object(map) => Ok(Self(map)),
            other => Err(format!("{other} is no object")),
        }
    }

    fn get<T>(&mut self, name: &str, decode: fn(Value) -> Result<T, String>) -> Result<Option<T>, String> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => decode(value).map(Some).map_err(|why| format!("{name}: {why}")),
        }
    }

    fn text(&mut self, name: &str) -> Result<String, String> {
        Ok(self.get(name, text)?.unwrap_or_default())
    }

    fn list<T>(&mut self, name: &str, decode: fn(Value) -> Result<T, String>) -> Result<Vec<T>, String> {
        let items = match self.0.remove(name) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(items)) => items,
            Some(other) => return Err(format!("{name}: {other} is no list")),
        };
        items.into_iter().map(|item| decode(item).map_err(|why| format!("{name}: {why}"))).collect()
    }

    fn texts_by_name(&mut self, name: &str) -> Result<BTreeMap<String, String>, String> {
        let map = self.get(name, Self::of)?.map(|fields| fields.0).unwrap_or_default();
        let texts = map.into_iter().map(|(key, value)| Ok((key, text(value)?))).collect::<Result<Vec<_>, String>>();
        texts.map(few::map)
    }

    fn end<T>(self, decoded: T) -> Result<T, String> {
        match self.0.keys().next() {
            Some(unknown) => Err(format!("unknown field {unknown:?}")),
            None => Ok(decoded),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_field_there_and_back() {
        let edits = json!({
            "env": ["A=b"], "additionalGids": [44], "intelRdt": {"closID": "x"},
            "deviceNodes": [{"path": "/dev/x", "hostPath": "/y", "type": "c", "major": 1, "minor": 2, "fileMode": 438,
                             "permissions": "rw", "uid": 3, "gid": 4}],
            "netDevices": [{"hostInterfaceName": "eth0", "name": "eth1"}],
            "hooks": [{"hookName": "prestart", "path": "/p", "args": ["a"], "env": ["A=b"], "timeout": 5}],
            "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["ro"], "type": "bind"}],
        });
        let device = json!({"name": "d", "annotations": {"a": "b"}, "containerEdits": edits});
        let full = json!({"cdiVersion": "1.1.0", "kind": "a.b/c", "annotations": {"a": "b"}, "devices": [device],
                          "containerEdits": edits});
        let decoded = spec(full.clone()).unwrap();
        assert_eq!(serde_json::to_value(decoded).unwrap(), full);
    }

    #[test]
    fn wrong_fields_are_named() {
        for (value, says) in [
            (json!(null), "null is no object"),
            (json!({"extra": 1}), "unknown field \"extra\""),
            (json!({"cdiVersion": 1.0}), "cdiVersion: 1.0 is no text"),
            (json!({"devices": {}}), "devices: {} is no list"),
            (json!({"devices": [{"name": "d", "containerEdits": {"deviceNodes": [{"major": "1"}]}}]}), {
                "devices: containerEdits: deviceNodes: major: \"1\" is no whole number"
            }),
            (json!({"containerEdits": {"additionalGids": [-1]}}), "additionalGids: -1 is no number from 0"),
            (json!({"annotations": {"a": 1}}), "1 is no text"),
        ] {
            let why = spec(value).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }
}
