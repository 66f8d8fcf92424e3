//! Offers the NVIDIA GPUs of a node to the kubelet, as a device plugin.
pub mod answer;
pub mod devices;
pub mod gpus;
pub mod health;
pub mod model;
pub mod monitor;
pub mod prefer;

/// The kubelet's interfaces, generated from `proto/`.
#[allow(
    missing_docs,
    clippy::all,
    clippy::pedantic,
    clippy::nursery,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod proto {
    tonic::include_proto!("v1beta1");
}

use std::process::ExitCode;

/// Runs the command line of this process, and returns its exit code.
#[must_use]
pub fn run() -> ExitCode {
    ExitCode::FAILURE
}
