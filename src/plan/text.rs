//! Formats steps for `plan`, in groups for people.

use serde_json::Value;

use super::step::in_words;

fn word(item: &Value, name: &str) -> String {
    match item.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::new(),
    }
}

/// Groups steps for a person: a heading, and the words of each step under it.
pub(crate) fn groups(steps: &[Value]) -> Vec<(String, Vec<String>)> {
    let mut groups: Vec<(String, Vec<String>)> = Vec::new();
    for step in steps {
        let (heading, words) = grouped(step);
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
    use serde_json::json;

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
