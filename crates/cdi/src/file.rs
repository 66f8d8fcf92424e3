//! Reads, prints and writes spec files in their two formats. A file is replaced atomically, so no engine reads half of it.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;

use base::nearest::nearest;

use super::spec::Spec;
use super::yaml;

/// The format of a spec file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// `.json`
    Json,
    /// `.yaml`
    #[default]
    Yaml,
}

impl Format {
    /// Returns the format that the extension of a path stands for, or `None` if engines do not read such files.
    #[must_use]
    pub fn from_path(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "json" => Some(Self::Json),
            "yaml" => Some(Self::Yaml),
            _ => None,
        }
    }

    /// Returns the file name extension, without a dot.
    #[must_use]
    pub const fn extension(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Yaml => "yaml",
        }
    }

    /// Returns a spec as text.
    ///
    /// # Errors
    /// The errors of serde_json; a spec causes none.
    pub fn print(self, spec: &Spec) -> serde_json::Result<String> {
        let value = serde_json::to_value(spec)?;
        Ok(match self {
            #[expect(
                clippy::disallowed_methods,
                reason = "a file for engines, not text for a terminal"
            )]
            Self::Json => serde_json::to_string_pretty(&value)? + "\n",
            Self::Yaml => yaml::print(&value),
        })
    }
}

/// Parses a spec file, as YAML or JSON: JSON is a subset of YAML. [`Spec::check`] checks the values.
///
/// # Errors
/// If the text is not YAML, or has a field that CDI does not define.
pub fn parse(bytes: &[u8]) -> Result<Spec, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    from_value(yaml::parse(text)?)
}

/// Converts a JSON value to a spec or a part of one.
///
/// # Errors
/// Names the first field that is unknown or has the wrong type.
pub fn from_value<T: DeserializeOwned>(mut value: Value) -> Result<T, String> {
    // serde would accept null as an object without fields.
    if value.is_null() {
        return Err("the file is empty".to_owned());
    }
    remove_nulls(&mut value);
    // One value in each line, so that the line of an error leads to the value.
    #[expect(clippy::disallowed_methods, reason = "read again below, not printed")]
    let text = serde_json::to_string_pretty(&value).map_err(|error| error.to_string())?;
    serde_json::from_str(&text).map_err(|error| {
        let message = error.to_string();
        let cause = message
            .rsplit_once(" at line ")
            .map_or(message.as_str(), |(cause, _)| cause);
        let cause = in_our_words(cause);
        match path_of_line(&value, &mut error.line())
            .as_deref()
            .unwrap_or_default()
        {
            "" => cause,
            path => format!("{}: {cause}", path.trim_start_matches('.')),
        }
    })
}

/// Returns a message of serde with the quotes of all other messages. Instead of all fields, it suggests the nearest one.
fn in_our_words(cause: &str) -> String {
    if !cause.starts_with("unknown field ") {
        return cause.replace('`', "\"");
    }
    let Some((what, expected)) = cause.split_once(", expected ") else {
        return cause.replace('`', "\"");
    };
    // The odd parts are between the quotes.
    let field = what.split('`').nth(1).unwrap_or_default();
    let known: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    let other_case = known.iter().find(|known| known.eq_ignore_ascii_case(field));
    let near = match other_case {
        Some(known) => Some(*known),
        None => nearest(field, known.iter().copied()),
    };
    let what = what.replace('`', "\"");
    match near {
        Some(near) => format!("{what}; did you mean \"{near}\"?"),
        None => what,
    }
}

/// Returns the path of the value that begins or ends in a line of the pretty-printed text, such as `.devices[0].name`. `line` counts
/// down to 1.
fn path_of_line(value: &Value, line: &mut usize) -> Option<String> {
    if *line == 1 {
        return Some(String::new());
    }
    *line -= 1;
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, part) in fields {
                if let Some(rest) = path_of_line(part, line) {
                    return Some(format!(".{name}{rest}"));
                }
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (at, part) in items.iter().enumerate() {
                if let Some(rest) = path_of_line(part, line) {
                    return Some(format!("[{at}]{rest}"));
                }
            }
        }
        _ => return None,
    }
    // The closing bracket is on its own line.
    path_of_line(&Value::Null, line)
}

/// Removes fields that are null: engines treat them as missing, because Go's decoder does.
fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            for value in fields.values_mut() {
                remove_nulls(value);
            }
        }
        Value::Array(items) => {
            for value in items {
                remove_nulls(value);
            }
        }
        _ => {}
    }
}

/// Replaces a file atomically, with mode 0644. Creates its directory if necessary.
///
/// # Errors
/// If the file cannot be written. The previous file is then unchanged.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let dir = path
        .parent()
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or_else(|| Path::new("."));
    create_dir(dir)?;
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidFilename))?;
    // Engines ignore the temporary file: they read only *.json and *.yaml.
    let temporary = dir.join(format!(".{}.{}.new", name.display(), std::process::id()));
    let written = write_new(&temporary, text).and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        std::fs::remove_file(&temporary).ok();
    }
    written
}

/// Creates a directory that all users can read, whatever the umask. A directory that exists is not changed.
fn create_dir(dir: &Path) -> io::Result<()> {
    let mode = 0o755;
    if std::fs::symlink_metadata(dir).is_ok() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(mode).create(dir)?;
    std::fs::set_permissions(dir, Permissions::from_mode(mode))
}

#[expect(
    clippy::disallowed_methods,
    reason = "creates a new file, and follows no link"
)]
fn write_new(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(path)?;
    // The umask must not remove the read permission, which rootless Podman needs.
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ContainerEdits, Device};
    use serde_json::json;

    fn spec() -> Spec {
        let edits = ContainerEdits {
            env: vec!["A=yes".into(), "B=1: # x".into()],
            ..ContainerEdits::default()
        };
        let devices = ["0", "1:0", "all"].map(|name| Device {
            name: name.into(),
            container_edits: edits.clone(),
            ..Device::default()
        });
        Spec {
            cdi_version: "0.5.0".into(),
            kind: "nvidia.com/gpu".into(),
            devices: devices.into(),
            ..Spec::default()
        }
    }

    #[test]
    fn both_formats_say_the_same() {
        for format in [Format::Json, Format::Yaml] {
            assert_eq!(
                parse(format.print(&spec()).unwrap().as_bytes()).unwrap(),
                spec(),
                "{format:?}"
            );
        }
        // To engines a name that is a number is none.
        assert!(
            Format::Yaml
                .print(&spec())
                .unwrap()
                .contains("name: \"0\"\n")
        );
    }

    #[test]
    fn a_file_is_replaced_at_once_and_readable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/cdi/nvidia.yaml");
        write(&path, "old").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let open = File::open(&path).unwrap();
        write(&path, "new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(
            std::io::read_to_string(open).unwrap(),
            "old",
            "who reads it now reads the old one"
        );
        assert_eq!(
            path.metadata().unwrap().permissions().mode() & 0o7777,
            0o644
        );
        assert_eq!(
            std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
            1
        );
    }

    #[test]
    fn a_file_that_cannot_be_written_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("nvidia.yaml")).unwrap();
        write(&dir.path().join("nvidia.yaml"), "x").unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn null_is_a_field_that_is_missing() {
        let edits = json!({"env": null, "mounts": null, "intelRdt": null});
        let spec: Spec =
            from_value(json!({"cdiVersion": null, "devices": null, "containerEdits": edits}))
                .unwrap();
        assert_eq!(spec, Spec::default());
    }

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
        let decoded: Spec = from_value(full.clone()).unwrap();
        assert_eq!(serde_json::to_value(decoded).unwrap(), full);
    }

    #[test]
    fn wrong_fields_are_named() {
        for (value, says) in [
            (json!(null), "the file is empty"),
            (json!({"extra": 1}), "unknown field \"extra\""),
            (
                json!({"device": []}),
                "unknown field \"device\"; did you mean \"devices\"?",
            ),
            (
                json!({"CDIVersion": ""}),
                "unknown field \"CDIVersion\"; did you mean \"cdiVersion\"?",
            ),
            (
                json!({"cdiVersion": 1.0}),
                "cdiVersion: invalid type: floating point",
            ),
            (json!({"devices": {}}), "devices: invalid type: map"),
            (
                json!({"devices": [{"name": "d", "containerEdits": {"deviceNodes": [{"major": "1"}]}}]}),
                { "devices[0].containerEdits.deviceNodes[0].major: invalid type: string" },
            ),
            (
                json!({"containerEdits": {"additionalGids": [-1]}}),
                "containerEdits.additionalGids[0]: invalid value: integer \"-1\"",
            ),
            (
                json!({"annotations": {"a": 1}}),
                "annotations.a: invalid type: integer \"1\"",
            ),
            (
                json!({"containerEdits": {"env": [], "mounts": [{}, {"hostPath": "/a", "x": 1}], "hooks": [{"args": ["a"]}]}}),
                { "containerEdits.mounts[1].x: unknown field \"x\"" },
            ),
            (json!([1]), "invalid type: "),
        ] {
            let why = from_value::<Spec>(value).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }
}
