//! The command lines of NVIDIA's programs, for engines, hooks and scripts that call these: the program is one of them when it
//! is called by its name, as by the links of the package oci-nvidia-hook-compat.

pub(crate) mod cdi_hook;
pub mod cli;
pub(crate) mod configure;
pub mod hook;

/// What docker's `--gpus` looks for on its PATH, and old hooks.d JSON files name.
pub(crate) const HOOK: &str = "nvidia-container-runtime-hook";
pub(crate) const OLD_HOOK: &str = "nvidia-container-toolkit";
/// What the hooks of LXC and enroot call, and Apptainer.
pub(crate) const CLI: &str = "nvidia-container-cli";

pub(crate) use crate::stages::cdi_hook::entry::{CDI_HOOK, CTK};
