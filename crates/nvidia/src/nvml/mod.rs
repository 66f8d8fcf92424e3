//! Bindings to the NVIDIA Management Library (NVML). It runs in a child process: see [`crate::inventory::ask`].
//! <https://docs.nvidia.com/deploy/nvml-api/>

pub mod api;
mod ffi;
pub mod monitoring;

pub use ffi::Library;
