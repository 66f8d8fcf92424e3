//! The file of containerd, config.toml, in its versions 2 and 3.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{RuntimeEntry, note};
use crate::edit::toml::{entries, literal, set};

/// The default path.
pub(super) const FILE: &str = "/etc/containerd/config.toml";
/// The plugin with the runtimes in version 2, which containerd 2 reads too, and in version 3.
const V2: &str = "io.containerd.grpc.v1.cri";
const V3: &str = "io.containerd.cri.v1.runtime";
/// The interface between containerd and OCI runtimes such as runc.
const SHIM: &str = "\"io.containerd.runc.v2\"";

/// Returns the file with CDI for pods, and the runtime with the options of runc.
pub(super) fn changed(text: &str, wanted: &RuntimeEntry<'_>) -> Result<String> {
    let program = wanted
        .program
        .to_str()
        .context("the path of the runtime is not UTF-8")?;
    let mut text = text.to_owned();
    let plugin = match literal(&text, &["version"]).as_deref() {
        None if text
            .lines()
            .all(|line| matches!(line.trim().chars().next(), None | Some('#'))) =>
        {
            text = set(&text, &["version"], "2")?;
            V2
        }
        Some("2") => V2,
        Some("3") => V3,
        _ => bail!(
            "it has version 1, or a version after 3: \"containerd config migrate\" prints it in a new version"
        ),
    };
    let cri = ["plugins", plugin];
    text = set(&text, &[&cri[..], &["enable_cdi"]].concat(), "true")?;
    let dirs = [&cri[..], &["cdi_spec_dirs"]].concat();
    if literal(&text, &dirs).is_none() {
        text = set(&text, &dirs, "[\"/etc/cdi\", \"/var/run/cdi\"]")?;
    }
    let runtimes = [&cri[..], &["containerd", "runtimes"]].concat();
    let (runc, ours) = (
        [&runtimes[..], &["runc"]].concat(),
        [&runtimes[..], &[wanted.name]].concat(),
    );
    for below in [&[][..], &["options"]] {
        // SystemdCgroup must equal the kubelet's setting, as with runc.
        for (key, value) in entries(&text, &[&runc[..], below].concat()) {
            if !matches!(key.as_str(), "runtime_type" | "BinaryName") {
                text = set(&text, &[&ours[..], below, &[key.as_str()]].concat(), &value)?;
            }
        }
    }
    text = set(&text, &[&ours[..], &["runtime_type"]].concat(), SHIM)?;
    text = set(
        &text,
        &[&ours[..], &["options", "BinaryName"]].concat(),
        &Value::from(program).to_string(),
    )?;
    if wanted.is_default {
        let key = [&cri[..], &["containerd", "default_runtime_name"]].concat();
        text = set(&text, &key, &Value::from(wanted.name).to_string())?;
    }
    let disabled = literal(&text, &["disabled_plugins"]).unwrap_or_default();
    if disabled.contains("\"cri\"") || disabled.contains(V2) || disabled.contains(V3) {
        note(
            "disabled_plugins lists the plugin for Kubernetes (cri), so the settings have no effect",
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn wanted(is_default: bool) -> RuntimeEntry<'static> {
        RuntimeEntry {
            name: "nvidia",
            program: Path::new("/usr/bin/nvidia-container-runtime"),
            is_default,
        }
    }

    #[test]
    fn both_versions() {
        let empty = changed("# nothing\n", &wanted(false)).unwrap();
        assert!(empty.starts_with("# nothing\nversion = 2\n"), "{empty}");
        let old = "version = 3 # new\n\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n  # runc\n  runtime_type = 'io.containerd.runc.v2'\n  cgroup_writable = false\n  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\n    BinaryName = ''\n    SystemdCgroup = true\n";
        let new = changed(old, &wanted(true)).unwrap();
        for line in old.lines() {
            assert!(new.contains(line), "{line}: {new}");
        }
        for (version, text, is_default) in [(V2, &empty, false), (V3, &new, true)] {
            assert_eq!(
                changed(text, &wanted(false)).unwrap(),
                *text,
                "a second time"
            );
            let at = |path: &str| {
                let path = format!("plugins/{version}/{path}");
                literal(text, &path.split('/').collect::<Vec<_>>())
            };
            assert_eq!(at("enable_cdi").as_deref(), Some("true"));
            assert_eq!(
                at("cdi_spec_dirs").as_deref(),
                Some("[\"/etc/cdi\", \"/var/run/cdi\"]")
            );
            assert_eq!(
                at("containerd/runtimes/nvidia/runtime_type").as_deref(),
                Some(SHIM)
            );
            let program = at("containerd/runtimes/nvidia/options/BinaryName");
            assert_eq!(
                program.as_deref(),
                Some("\"/usr/bin/nvidia-container-runtime\"")
            );
            assert_eq!(
                at("containerd/runtimes/nvidia/options/SystemdCgroup").as_deref(),
                is_default.then_some("true")
            );
            assert_eq!(
                at("containerd/runtimes/nvidia/cgroup_writable").as_deref(),
                is_default.then_some("false")
            );
            assert_eq!(
                at("containerd/default_runtime_name").as_deref(),
                is_default.then_some("\"nvidia\"")
            );
        }
        for old in ["version = 1\n", "root = '/x'\n", "version = 4\n"] {
            assert!(
                changed(old, &wanted(false))
                    .unwrap_err()
                    .to_string()
                    .contains("containerd config migrate")
            );
        }
    }
}
