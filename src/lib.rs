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
//! `docs/architecture.md` has the whole picture.

pub mod cdi_check;
pub mod cli;
pub mod doctor;
pub mod engine;
pub mod inject;
pub mod log;
pub mod lower;
pub mod oci;
pub mod plan;
pub mod record;
pub mod request;
pub mod select;
pub mod stages;
