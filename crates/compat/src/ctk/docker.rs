//! The file of Docker, daemon.json.

use anyhow::{Context, Result};
use serde_json::Value;

use super::RuntimeEntry;
use crate::edit::json::set;

/// The default path.
pub(super) const FILE: &str = "/etc/docker/daemon.json";

/// Returns the file with CDI, which Docker before 28.2 enables only with this key, and the runtime.
pub(super) fn changed(text: &str, wanted: &RuntimeEntry<'_>) -> Result<String> {
    let program = wanted
        .program
        .to_str()
        .context("the path of the runtime is not UTF-8")?;
    let mut text = set(text, &["features", "cdi"], &true.into())?;
    text = set(&text, &["runtimes", wanted.name, "path"], &program.into())?;
    if wanted.is_default {
        text = set(&text, &["default-runtime"], &Value::from(wanted.name))?;
    }
    Ok(text)
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
        let old = "{\n    \"log-level\": \"info\"\n}\n";
        let new = "{\n    \"log-level\": \"info\",\n    \"features\": {\n        \"cdi\": true\n    },\n    \"runtimes\": {\n        \"nvidia\": {\n            \"path\": \"/usr/bin/nvidia-container-runtime\"\n        }\n    }\n}\n";
        assert_eq!(changed(old, &wanted).unwrap(), new);
        assert_eq!(changed(new, &wanted).unwrap(), new);
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
