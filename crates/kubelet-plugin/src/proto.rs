//! The interfaces of the kubelet and of engines, generated from `proto/`.
#![allow(
    missing_docs,
    clippy::all,
    clippy::pedantic,
    clippy::nursery,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]

tonic::include_proto!("v1beta1");

/// The kubelet's list of the devices that it can assign.
pub mod podresources {
    tonic::include_proto!("v1");
}

/// The messages between an engine and its NRI plugins.
pub mod nri {
    tonic::include_proto!("nri.pkg.api.v1alpha1");
}

/// The protocol that carries them.
pub mod ttrpc {
    tonic::include_proto!("ttrpc");
}

/// How the kubelet gets to know plugins with a socket in its directory `plugins_registry`.
pub mod pluginregistration {
    tonic::include_proto!("pluginregistration");
}

/// The kubelet's requests about claims.
pub mod dra {
    /// Kubernetes 1.34 and newer, and the messages of all versions.
    pub mod v1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
    }
    /// Kubernetes 1.32 and 1.33.
    pub mod v1beta1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
    }
}

/// The health of devices that claims have.
pub mod health {
    /// Kubernetes 1.37 and newer.
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/health/v1.rs"));
    }
    /// Kubernetes 1.34 to 1.36, and the messages of all versions.
    pub mod v1alpha1 {
        include!(concat!(env!("OUT_DIR"), "/health/v1alpha1.rs"));
    }
}
