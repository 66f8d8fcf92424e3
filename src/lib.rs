//! One OCI hook that makes NVIDIA GPUs work in containers of CRI-O and Podman.
//!
//! Decide first, as data; act last, in one place. Every way to set a container up takes these steps:
//!
//! ```text
//! stdin ─▶ oci::SpecView ─▶ plan::asked ─▶ request, config.toml      nothing asked: exit 0
//!                                │
//!                           plan::gpus ◀── nvidia_host::Host         driver files and GPUs of this host
//!                                │
//!                  Gpus::steps   │   Gpus::additions
//!                       ┌────────┴────────┐
//!                  inject: in the     config.json                    the only effects
//!                  container          on stdout
//! ```
//!
//! | module | what it is about |
//! |---|---|
//! | [`oci`], [`request`], [`select`] | what engine and container say, and which devices they get |
//! | [`plan`], [`lower`] | what is done for a container, decided |
//! | [`inject`] | doing it |
//! | [`stages`] | what engines and runtimes call: input, plan, effects, log |
//! | [`log`], [`record`] | what is kept of a call |
//! | [`engine`], [`cdi_check`], [`doctor`] | this host and its engines, inspected |
//! | [`cli`] | command lines parsed, results printed |
//!
//! `docs/architecture.md` has the whole picture. Nothing but [`run`] is public: other programs use the libraries in `crates`.

#![allow(
    missing_docs,
    reason = "a private library: the names of its items are their documentation where that is enough"
)]

mod cdi_check;
mod cli;
mod doctor;
mod engine;
mod inject;
mod log;
mod lower;
mod oci;
mod plan;
mod record;
mod request;
mod select;
mod stages;

#[doc(hidden)]
pub mod testing;

use std::process::ExitCode;

/// Runs the command of this process's arguments, and returns its exit code.
pub fn run() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    let environment = cli::terminal::Environment::read();
    // At some stages, some runtimes start a hook with the environment that the image chose (CVE-2025-23266).
    base::sys::process::clear_environment();
    cli::run(args, environment)
}
