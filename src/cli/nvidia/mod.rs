//! Accepts the command lines of NVIDIA's programs, for engines, hooks and scripts that call them. The name with which the program
//! is called decides which one; the package oci-nvidia-hook-compat installs links with these names.

pub(crate) mod cdi_hook;
pub mod cli;
pub mod hook;

/// The name that dockerd searches for in its PATH for `--gpus`.
pub(crate) const HOOK: &str = "nvidia-container-runtime-hook";
/// An older name of the hook, which old hook files contain.
pub(crate) const OLD_HOOK: &str = "nvidia-container-toolkit";
/// The program that Apptainer and the hooks of LXC and enroot call.
pub(crate) const CLI: &str = "nvidia-container-cli";

pub(crate) use crate::stages::cdi_hook::entry::{CDI_HOOK, CTK};
