//! What Kubernetes calls a container: annotations that CRI-O and containerd give it.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use base::report::one_line;

use super::lists;

/// Of the pod, its namespace and the container: CRI-O's, and containerd's.
const NAMES: [[&str; 2]; 3] = [
    ["io.kubernetes.pod.name", "io.kubernetes.cri.sandbox-name"],
    ["io.kubernetes.pod.namespace", "io.kubernetes.cri.sandbox-namespace"],
    ["io.kubernetes.container.name", "io.kubernetes.cri.container-name"],
];

/// Empty where nothing is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    pub name: String,
    pub namespace: String,
    pub container: String,
}

impl Pod {
    /// From the annotations of config.json. The pod's author chose some of these names: they are for people to read.
    ///
    /// # Errors
    /// If they are not a JSON object.
    pub fn from_annotations(annotations: Option<&RawValue>) -> Result<Self> {
        let known = lists::members(annotations, NAMES.as_flattened())?;
        let find = |names: &[&str; 2]| {
            let found = names.iter().find_map(|name| known.get(*name)?.as_str());
            found.map(one_line).unwrap_or_default()
        };
        let [name, namespace, container] = NAMES.each_ref().map(find);
        Ok(Self { name, namespace, container })
    }
}
