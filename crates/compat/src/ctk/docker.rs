//! The file of Docker, daemon.json.

use anyhow::{Context, Result};
use base::json;
use serde_json::{Map, Value};

use super::RuntimeEntry;

/// The default path.
pub(super) const FILE: &str = "/etc/docker/daemon.json";

/// Returns the file with CDI, which Docker before 28.2 enables only with this key, and the runtime. Like NVIDIA's program, it sorts the
/// keys of a file that it changes.
pub(super) fn changed(text: &str, wanted: &RuntimeEntry<'_>) -> Result<String> {
    let program = wanted
        .program
        .to_str()
        .context("the path of the runtime is not UTF-8")?;
    let old: Map<String, Value> = match text.trim() {
        "" => Map::new(),
        text => json::from_bytes(text.as_bytes())?,
    };
    let mut new = old.clone();
    object(&mut new, "features")?.insert("cdi".to_owned(), true.into());
    let runtimes = object(&mut new, "runtimes")?;
    object(runtimes, wanted.name)?.insert("path".to_owned(), program.into());
    if wanted.is_default {
        new.insert("default-runtime".to_owned(), wanted.name.into());
    }
    if new == old {
        return Ok(text.to_owned());
    }
    Ok(json::pretty(&new)? + "\n")
}

/// Returns the object with this name, which is created if it is missing.
fn object<'v>(
    parent: &'v mut Map<String, Value>,
    name: &str,
) -> Result<&'v mut Map<String, Value>> {
    let value = parent.entry(name).or_insert_with(|| Map::new().into());
    value
        .as_object_mut()
        .with_context(|| format!("{name:?} is not an object"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn what_docker_gets() {
        let wanted = RuntimeEntry {
            name: "nvidia",
            program: Path::new("/usr/bin/nvidia-container-runtime"),
            is_default: false,
        };
        let old = "{\n    \"log-level\": \"info\",\n    \"debug\": true\n}\n";
        let new = r#"{
  "debug": true,
  "features": {
    "cdi": true
  },
  "log-level": "info",
  "runtimes": {
    "nvidia": {
      "path": "/usr/bin/nvidia-container-runtime"
    }
  }
}
"#;
        assert_eq!(changed(old, &wanted).unwrap(), new);
        assert_eq!(changed(new, &wanted).unwrap(), new);
        assert!(
            changed("", &wanted)
                .unwrap()
                .starts_with("{\n  \"features\"")
        );
        for (wrong, why) in [
            ("{", "EOF"),
            ("[]", "invalid type"),
            ("{\"features\": 3}", "\"features\" is not an object"),
        ] {
            let error = format!("{:#}", changed(wrong, &wanted).unwrap_err());
            assert!(error.contains(why), "{error}");
        }
        // The file of NVIDIA's program.
        let theirs = "{\"default-runtime\": \"runc\", \"runtimes\": {\"nvidia\": {\"args\": [], \"path\": \"nvidia-container-runtime\"}}}";
        let text = changed(
            theirs,
            &RuntimeEntry {
                is_default: true,
                ..wanted
            },
        )
        .unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&value["default-runtime"], &value["features"]["cdi"]),
            (&"nvidia".into(), &true.into())
        );
        assert_eq!(
            value["runtimes"]["nvidia"]["path"],
            "/usr/bin/nvidia-container-runtime"
        );
    }
}
