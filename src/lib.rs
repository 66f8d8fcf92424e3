//! One OCI hook that makes NVIDIA GPUs work in containers of CRI-O and Podman.
//!
//! Decide first, as data; act last, in one place:
//!
//! ```text
//! stdin state ─▶ oci::State ─▶ bundle/config.json ─▶ oci::SpecView      config.toml ─▶ Config
//!                                                        │                                │
//!                                                        └──────▶ request ◀───────────────┘
//!                  nothing asked: exit 0, no driver file touched     │ GpuRequest
//! host files ─▶ driver::locate ─▶ DriverFiles ──┐                    ▼
//! NVML child + /proc ─▶ Inventory ──────────────┴▶ edits::build ── Edits + Findings      pure
//!                                                                    │
//!                                                  lower::live ─▶ Vec<Step>              pure
//!                                                  lower::cdi ─▶ cdi::Spec, a file       for engines
//!                                                                    │
//!                            inject: prepare ─▶ enter ─▶ apply       ▼                   effects
//! ```
//!
//! | module | side |
//! |---|---|
//! | [`oci`], [`request`], [`config`] | what the engine, the container and the administrator say |
//! | [`driver`], [`inventory`], [`nvml`], [`host`] | what the host has |
//! | [`edits`], [`lower`] | what the container gets |
//! | [`cdi`] | the same as devices that engines know by name |
//! | [`plan`] | all of the above, as one decision about a container |
//! | [`inject`], [`stages`] | doing it |
//! | [`cli`], [`log`], [`record`] | around it |

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
