//! Offers the NVIDIA GPUs of a node to the kubelet, as a device plugin or for claims.
//!
//! ```text
//! monitor (child: NVML) ─▶ monitor::supervisor ─▶ node::Node ─▶ Offer ─┬▶ kubelet: ListAndWatch
//!                                                  ▲    health        └▶ answer: Allocate, preferred
//!                                     host: /proc, /sys
//! ```
//!
//! Each module uses only modules below it:
//!
//! | module | purpose |
//! |---|---|
//! | [`commands`] | the commands of the program. `run` connects all others |
//! | [`metrics`], [`labels`] | metrics for Prometheus, and labels of the node |
//! | [`nri`] | the GPUs of containers that request them with a variable, for engines |
//! | [`dra`] | the GPUs as devices for claims |
//! | [`kubelet`] | the sockets and the registration |
//! | [`answer`] | what a container gets |
//! | [`node`] | what the node offers, decided from what the monitor and the kernel report |
//! | [`strategy`] | how containers get their devices, if the settings do not state it |
//! | [`cdi_specs`] | the CDI specs of the node |
//! | [`monitor`] | asks NVML in a child process |
//! | [`settings`] | the settings, also in the form of other device plugins |
//! | [`model`], [`proto`], [`log`] | the data that modules exchange, the messages of gRPC and NRI, and the log |

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests open files that they created"
    )
)]

pub mod answer;
pub mod cdi_specs;
pub mod commands;
mod dir_events;
pub mod dra;
pub mod kubelet;
pub mod labels;
pub mod log;
pub mod metrics;
pub mod model;
pub mod monitor;
pub mod node;
pub mod nri;
pub mod proto;
pub mod settings;
mod spec_dirs;
pub mod strategy;
mod watched_files;

pub use commands::main;
