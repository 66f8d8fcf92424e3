//! Formats steps and additions to config.json for `explain`.

use serde_json::{Value, json};

use super::additions::Additions;
use super::step::in_words;

/// Returns the additions of precreate as JSON: the keys that lead to the array, and the item.
pub(crate) fn describe_additions(additions: &Additions) -> Vec<Value> {
    let items = additions.arrays().into_iter().flat_map(|(array, items)| items.iter().map(move |item| (array, item)));
    items.map(|(array, item)| json!({"action": "add", "array": array, "item": item})).collect()
}

fn addition(array: &Value, item: &Value) -> String {
    let keys: Vec<_> = array.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let device = || format!("c {}:{}", word(item, "major"), word(item, "minor"));
    let text = match keys.as_slice() {
        ["mounts"] => format!("{} at {}", word(item, "source"), word(item, "destination")),
        ["linux", "devices"] => format!("{} {}", word(item, "path"), device()),
        ["linux", "resources", "devices"] => format!("allow {} {}", device(), word(item, "access")),
        ["hooks", ..] => {
            let args = item.get("args").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
            format!("{} {}", word(item, "path"), args.skip(1).collect::<Vec<_>>().join(" "))
        }
        _ => item.to_string(),
    };
    format!("add to {} of config.json: {text}", keys.join("."))
}

fn word(item: &Value, name: &str) -> String {
    match item.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::new(),
    }
}

/// Formats a step or an addition as one line.
pub(crate) fn line(step: &Value) -> String {
    match step.get("array") {
        Some(array) => addition(array, &step["item"]),
        None => in_words(step, str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::super::step::{Step, describe};
    use super::*;
    use base::paths::ContainerPath;
    use base::paths::HostPath;
    use nvidia_host::driver::access::Permissions;
    use nvidia_host::edits::placement::Link;
    use nvidia_host::edits::{DeviceNode, Need};

    #[test]
    fn steps_as_json_and_as_lines() {
        let path = |path| ContainerPath::new(path).unwrap();
        let step = Step::MountNode {
            node: DeviceNode {
                source: HostPath::new("/d/dev/nvidia0"),
                path: path("/dev/nvidia0"),
                major: 195,
                minor: 0,
                permissions: Permissions::default(),
            },
            own: None,
        };
        let json = describe(&step);
        assert_eq!(json["major"], 195);
        assert_eq!(line(&json), "mount /d/dev/nvidia0 at /dev/nvidia0");
        let additions = Additions {
            devices: vec![json!({"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0})],
            device_rules: vec![json!({"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rw"})],
            additional_gids: vec![json!(44)],
            mounts: vec![json!({"source": "/d/x", "destination": "/x"})],
            hooks: vec![json!({"path": "/usr/bin/p", "args": ["p", "rootfs", "--x"]})],
            ..Additions::default()
        };
        let lines: Vec<_> = describe_additions(&additions).iter().map(line).collect();
        let expected = [
            "process.user.additionalGids of config.json: 44",
            "mounts of config.json: /d/x at /x",
            "hooks.createRuntime of config.json: /usr/bin/p rootfs --x",
            "linux.devices of config.json: /dev/nvidia0 c 195:0",
            "linux.resources.devices of config.json: allow c 195:0 rw",
        ];
        assert_eq!(lines, expected.map(|line| format!("add to {line}")));
        let link = Step::Link(Link { link: path("/a/x"), text: "y".into(), file: path("/a/y"), need: Need::Optional });
        assert_eq!(line(&describe(&link)), "link /a/x to y");
    }
}
