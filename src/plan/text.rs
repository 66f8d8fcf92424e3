//! Formats steps and additions to config.json for `plan`: as JSON, and in groups for people.

use serde_json::{Value, json};

use super::additions::Additions;
use super::step::in_words;

/// Returns the additions of precreate as JSON: the keys that lead to the array, and the item.
pub(crate) fn describe_additions(additions: &Additions) -> Vec<Value> {
    let mut described = Vec::new();
    for (array, items) in additions.arrays() {
        for item in items {
            described.push(json!({"action": "add", "array": array, "item": item}));
        }
    }
    described
}

/// Returns the keys of the array and the item, in words.
fn addition(array: &Value, item: &Value) -> (String, String) {
    let keys = words(array);
    let device = || format!("c {}:{}", word(item, "major"), word(item, "minor"));
    let text = match keys.as_slice() {
        ["mounts"] => word(item, "destination"),
        ["linux", "devices"] => format!("{} {}", word(item, "path"), device()),
        ["linux", "resources", "devices"] => format!("allow {} {}", device(), word(item, "access")),
        ["hooks", ..] => {
            let args = words(&item["args"]);
            let args = args.get(1..).unwrap_or_default();
            format!("{} {}", word(item, "path"), args.join(" "))
        }
        _ => item.to_string(),
    };
    (format!("added to {} of config.json", keys.join(".")), text)
}

/// Returns the texts of a list.
fn words(list: &Value) -> Vec<&str> {
    let items = list.as_array().into_iter().flatten();
    items.filter_map(Value::as_str).collect()
}

fn word(item: &Value, name: &str) -> String {
    match item.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::new(),
    }
}

/// Groups steps or additions for a person: a heading, and the words of each step under it.
pub(crate) fn groups(steps: &[Value]) -> Vec<(String, Vec<String>)> {
    let mut groups: Vec<(String, Vec<String>)> = Vec::new();
    for step in steps {
        let (heading, words) = match step.get("array") {
            Some(array) => addition(array, &step["item"]),
            None => grouped(step),
        };
        match groups.iter_mut().find(|(known, _)| *known == heading) {
            Some((_, items)) => items.push(words),
            None => groups.push((heading, vec![words])),
        }
    }
    groups
}

/// Returns the heading for a step, and its words there.
fn grouped(step: &Value) -> (String, String) {
    let (source, path) = (word(step, "source"), word(step, "path"));
    let (dir, name) = path.rsplit_once('/').unwrap_or_default();
    match word(step, "action").as_str() {
        "mount" if source.is_empty() => (
            "directories covered with a read-only layer".to_owned(),
            path,
        ),
        "mount" => (
            format!("files in {dir}{}", from(&source, dir)),
            renamed(&source, name),
        ),
        "copy" => (
            format!("copies in {dir}{}", from(&source, dir)),
            renamed(&source, name),
        ),
        "device" => (
            format!("device nodes in {dir}{}", from(&source, dir)),
            renamed(&source, name),
        ),
        "create" => ("device nodes that the hook creates".to_owned(), path),
        "link" => (format!("links in {dir}"), name.to_owned()),
        _ => ("other changes".to_owned(), in_words(step, str::to_owned)),
    }
}

/// Returns the directory of the source, if it is another one.
fn from(source: &str, dir: &str) -> String {
    match source.rsplit_once('/') {
        Some((other, _)) if other != dir => format!(", from {other}"),
        _ => String::new(),
    }
}

/// Returns the name in the container, with the name on the host if it is another one.
fn renamed(source: &str, name: &str) -> String {
    match source.rsplit('/').next() {
        Some(other) if other != name => format!("{name} ({other})"),
        _ => name.to_owned(),
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
    fn steps_as_json_and_in_groups() {
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
        let of = |steps: &[Value]| {
            groups(steps)
                .into_iter()
                .map(|(heading, items)| format!("{heading}: {}", items.join(", ")))
        };
        let lines = |steps: &[Value]| of(steps).collect::<Vec<_>>();
        assert_eq!(
            lines(&[json]),
            ["device nodes in /dev, from /d/dev: nvidia0"]
        );
        let additions = Additions {
            devices: vec![json!({"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0})],
            device_rules: vec![
                json!({"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rw"}),
            ],
            additional_gids: vec![json!(44)],
            mounts: vec![
                json!({"source": "/d/x", "destination": "/x"}),
                json!({"source": "/d/y", "destination": "/y"}),
            ],
            hooks: vec![json!({"path": "/usr/bin/p", "args": ["p", "rootfs", "--x"]})],
            ..Additions::default()
        };
        let expected = [
            "process.user.additionalGids of config.json: 44",
            "mounts of config.json: /x, /y",
            "hooks.createRuntime of config.json: /usr/bin/p rootfs --x",
            "linux.devices of config.json: /dev/nvidia0 c 195:0",
            "linux.resources.devices of config.json: allow c 195:0 rw",
        ];
        assert_eq!(
            lines(&describe_additions(&additions)),
            expected.map(|line| format!("added to {line}"))
        );
        let mount =
            |source: &str, path: &str| json!({"action": "mount", "source": source, "path": path});
        let link = Step::Link(Link {
            link: path("/a/x"),
            text: "y".into(),
            file: path("/a/y"),
            need: Need::Optional,
        });
        let steps = [
            mount("/lib/a.so", "/lib/a.so"),
            mount("/d/b.so", "/lib/b.so"),
            describe(&link),
            mount("/lib/c.so.1", "/lib/c.so"),
            json!({"action": "mode", "path": "/a/z", "mode": "444"}),
        ];
        let expected = [
            "files in /lib: a.so, c.so (c.so.1)",
            "files in /lib, from /d: b.so",
            "links in /a: x",
            "other changes: set the mode of /a/z to 444",
        ];
        assert_eq!(lines(&steps), expected);
    }
}
