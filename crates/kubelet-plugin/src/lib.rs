//! Offers the NVIDIA GPUs of a node to the kubelet, as a device plugin.
//!
//! ```text
//! monitor (child: NVML) ─▶ monitor::supervisor ─▶ node::Node ─▶ Offer ─┬▶ kubelet: ListAndWatch
//!                                                  ▲    health        └▶ allocator: Allocate, preferred
//!                                     host: /proc, /sys
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`monitor`] | asks NVML in a child process |
//! | [`health`], [`gpus`], [`devices`], [`node`] | what the node offers, decided from what the monitor and the kernel report |
//! | [`answer`], [`prefer`], [`allocator`] | what a container gets |
//! | [`host`] | what the kernel knows about the GPUs |
//! | [`kubelet`] | the sockets and the registration |
//! | [`control`] | commands for a running plugin |
//! | [`check`], [`cli`], [`log`] | command lines and output |

pub mod allocator;
pub mod answer;
pub mod check;
pub mod cli;
pub mod control;
pub mod devices;
pub mod gpus;
pub mod health;
pub mod host;
pub mod kubelet;
pub mod log;
pub mod model;
pub mod monitor;
pub mod node;
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

    /// The kubelet's list of the devices that it can assign.
    pub mod podresources {
        tonic::include_proto!("v1");
    }
}

use std::process::ExitCode;

/// Runs the command line of this process, and returns its exit code.
#[must_use]
pub fn run() -> ExitCode {
    ExitCode::FAILURE
}
