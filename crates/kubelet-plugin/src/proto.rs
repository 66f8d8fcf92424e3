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
