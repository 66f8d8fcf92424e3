//! Steps as text: for `explain`.

use serde_json::{Value, json};

use super::live::Step;
use crate::paths::ContainerPath;

/// A step as data.
#[must_use]
pub fn describe(step: &Step) -> Value {
    match step {
        Step::MountFile { source, target, .. } | Step::MountIpc { source, target, .. } => {
            json!({"action": "mount", "source": source.as_path(), "path": target.absolute()})
        }
        Step::MountNode { target, device: (major, minor), own: Some(_), .. } => json!({
            "action": "create", "path": target.absolute(), "major": major, "minor": minor, "access": "rw",
        }),
        Step::MountNode { source, target, device: (major, minor), own: None } => json!({
            "action": "device", "source": source.as_path(), "path": target.absolute(), "major": major, "minor": minor,
            "access": "rw",
        }),
        Step::MountFiles { target, files } => {
            let names: Vec<_> = files.iter().map(|(name, _)| name).collect();
            json!({"action": "mount", "source": "", "path": target.absolute(), "names": names})
        }
        Step::Link { link, text, .. } => {
            json!({"action": "link", "path": link.absolute(), "target": text.to_string_lossy()})
        }
        Step::MaskProc(mask) => {
            let shown: Vec<_> = mask.mounts.iter().map(|(path, _)| path).collect();
            json!({"action": "mask", "path": "/proc/driver/nvidia", "shown": shown})
        }
        Step::MaskParams => json!({"action": "mask", "path": "/proc/driver/nvidia/params"}),
        Step::SetMode { target, mode } => {
            json!({"action": "mode", "path": target.absolute(), "mode": format!("{mode:03o}")})
        }
        Step::ListDirectories { first, others } => {
            let dirs: Vec<_> = first.iter().chain(others).map(ContainerPath::absolute).collect();
            json!({"action": "ldconfig-directories", "path": "/etc/ld.so.conf.d", "directories": dirs})
        }
        Step::UpdateLinkerCache(entries) => {
            let names: Vec<_> = entries.iter().map(|entry| entry.soname.to_string_lossy()).collect();
            json!({"action": "linker-cache", "path": "/etc/ld.so.cache", "names": names})
        }
    }
}

/// The same on one line.
#[must_use]
pub fn line(step: &Value) -> String {
    let field = |name: &str| step.get(name).and_then(Value::as_str).unwrap_or_default();
    let path = field("path");
    match field("action") {
        "mount" | "device" => format!("mount {} at {path}", field("source")),
        "create" => format!("create {path}"),
        "link" => format!("link {path} to {}", field("target")),
        "mask" => format!("mask {path}"),
        "mode" => format!("set the mode of {path} to {}", field("mode")),
        "ldconfig-directories" => format!("list directories in {path}"),
        _ => format!("update {path}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edits::Need;
    use crate::paths::HostPath;

    #[test]
    fn a_step_is_told_twice() {
        let path = |path| ContainerPath::new(path).unwrap();
        let step = Step::MountNode {
            source: HostPath::new("/d/dev/nvidia0"),
            target: path("/dev/nvidia0"),
            device: (195, 0),
            own: None,
        };
        let told = describe(&step);
        assert_eq!(told["major"], 195);
        assert_eq!(line(&told), "mount /d/dev/nvidia0 at /dev/nvidia0");
        let link = Step::Link { link: path("/a/x"), text: "y".into(), file: path("/a/y"), need: Need::Optional };
        assert_eq!(line(&describe(&link)), "link /a/x to y");
    }
}
