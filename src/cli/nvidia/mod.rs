//! Accepts the command lines of NVIDIA's programs, for engines, hooks and scripts that call them. The name with which the program
//! is called decides which one; the package oci-nvidia-hook-compat installs links with these names.

pub(crate) mod cdi_hook;
pub mod cli;
pub mod hook;
