//! The names of a container in Kubernetes.

use serde::{Deserialize, Serialize};

/// The Kubernetes names of a container; empty if unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// Name of the pod
    pub name: String,
    /// Its namespace
    pub namespace: String,
    /// Name of the container in the pod
    pub container: String,
}

impl Pod {
    /// Whether no name is known.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
