//! Reads CDI devices from annotations. Engines used annotations before the CRI had a field for CDI devices, and device plugins
//! still write them. <https://github.com/cncf-tags/container-device-interface#kubernetes-with-annotations>

use anyhow::Result;
use serde_json::value::RawValue;

use base::report::one_line;

use super::lists::{Object, text};

/// The prefix of these annotations; the rest of the name identifies the plugin.
const PREFIX: &str = "cdi.k8s.io/";

/// Returns the device names. The author of a pod can set annotations, so the names are only for messages.
///
/// # Errors
/// If the annotations are not an object.
pub(super) fn cdi_devices(annotations: Option<&RawValue>) -> Result<Vec<String>> {
    let known = Object::of_names(annotations, &|name| name.starts_with(PREFIX))?;
    let mut devices = Vec::new();
    for (_, value) in known.members() {
        for name in text(value).unwrap_or_default().split(',') {
            if !name.is_empty() {
                devices.push(one_line(name));
            }
        }
    }
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        let of = |text: &str| cdi_devices(Some(serde_json::from_str(text).unwrap()));
        let text = r#"{"cdi.k8s.io/a_b":"nvidia.com/gpu=0,nvidia.com/gpu=1","cdi.k8s.io/x":"","cdi.k8s.io/y":3,"cdi":"z"}"#;
        assert_eq!(of(text).unwrap(), ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]);
        assert!(of("[]").is_err());
        assert!(cdi_devices(None).unwrap().is_empty());
    }
}
