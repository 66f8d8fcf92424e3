//! An OCI hook that gives Podman and CRI-O containers access to NVIDIA GPUs.
//!
//! The hook first decides, as data, what a container gets, and acts last, in one place. A start of a container with GPUs makes these
//! calls:
//!
//! 1. [`oci::spec_view::read_if`] reads config.json of the bundle that the state on stdin names.
//! 2. [`stages::decide::request`] decides whether the container requests GPUs and whether it may have them, with [`plan::read_config`]
//!    and [`plan::verdict`]. Most containers request nothing, and the hook exits.
//! 3. [`stages::decide::gpus_for`] inspects the host with [`nvidia_host::host::Host::inspect`]. [`plan::decide`] selects the devices
//!    and the driver files.
//! 4. [`plan::Gpus::steps`] places the files in the image. [`inject::prepare()`] opens the sources on the host, [`cgroup::allow`]
//!    permits the devices, and [`inject::apply()`] changes the container, all or nothing.
//!
//! For `nvidia-container-runtime`, the last call is [`plan::Gpus::additions`], and the only effect is config.json on stdout. The hook entry of a CDI spec
//! begins with [`plan::rootfs::steps`]: its arguments contain the decision.
//!
//! | module | purpose |
//! |---|---|
//! | [`oci`] | what engine and container state |
//! | [`plan`] | the decision: what is done for a container |
//! | [`inject`], [`cgroup`] | carry the decision out |
//! | [`record`] | what is printed, logged and stored of a call |
//! | [`stages`] | what engines and runtimes call: input, plan, effects, record |
//! | [`doctor`] | problems of this host |
//! | [`cli`] | command lines parsed, results printed |
//!
//! `docs/architecture.md` has the whole picture. Public are only [`run`] and [`testing`]: other programs use the libraries in `crates`.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests open files that they created"
    )
)]
#![allow(
    missing_docs,
    reason = "a private library: many items need no documentation besides their names"
)]

mod cgroup;
mod cli;
mod doctor;
mod inject;
mod oci;
mod plan;
mod record;
mod stages;

#[doc(hidden)]
pub mod testing;

use std::process::ExitCode;

/// Runs the command line of this process, and returns its exit code.
pub fn run() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    if let Some(code) = cli::before_environment(&args) {
        return code;
    }
    let environment = cli::Environment::read();
    // Some runtimes start hooks of some stages with the environment of the image (CVE-2025-23266).
    base::sys::process::clear_environment();
    cli::run(args, environment)
}
