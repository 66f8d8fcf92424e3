//! What Kubernetes calls a container: annotations that CRI-O and containerd give it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::one_line;

/// Empty where nothing is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// The pod's name
    pub name: String,
    /// Its namespace
    pub namespace: String,
    /// The container's name in it
    pub container: String,
}

impl Pod {
    /// From the annotations of config.json. The pod's author chose some of these names: they are for people to read.
    #[must_use]
    pub fn of(annotations: &BTreeMap<String, Value>) -> Self {
        let find = |names: [&str; 2]| {
            let found = names.into_iter().find_map(|name| annotations.get(name)?.as_str());
            found.map(one_line).unwrap_or_default()
        };
        Self {
            name: find(["io.kubernetes.pod.name", "io.kubernetes.cri.sandbox-name"]),
            namespace: find(["io.kubernetes.pod.namespace", "io.kubernetes.cri.sandbox-namespace"]),
            container: find(["io.kubernetes.container.name", "io.kubernetes.cri.container-name"]),
        }
    }
}
