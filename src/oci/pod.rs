//! Reads a container's Kubernetes names from the annotations of CRI-O and containerd.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use base::report::one_line;

use super::lists;

/// Annotations with the names of the pod, its namespace and the container, of CRI-O and of containerd.
const NAMES: [[&str; 2]; 3] = [
    ["io.kubernetes.pod.name", "io.kubernetes.cri.sandbox-name"],
    ["io.kubernetes.pod.namespace", "io.kubernetes.cri.sandbox-namespace"],
    ["io.kubernetes.container.name", "io.kubernetes.cri.container-name"],
];

/// The Kubernetes names of a container; empty if unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    pub name: String,
    pub namespace: String,
    pub container: String,
}

impl Pod {
    /// Reads the names from the annotations of config.json. The author of the pod can set some of them, so they are only for
    /// messages.
    ///
    /// # Errors
    /// If the annotations are not a JSON object.
    pub fn from_annotations(annotations: Option<&RawValue>) -> Result<Self> {
        let known = lists::members(annotations, NAMES.as_flattened())?;
        let [name, namespace, container] = NAMES.map(|names| {
            let found = names.into_iter().find_map(|name| known.get(name)?.as_str());
            found.map(one_line).unwrap_or_default()
        });
        Ok(Self { name, namespace, container })
    }
}
