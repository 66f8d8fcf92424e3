//! Bindings to the NVIDIA Management Library (NVML). It runs in a child process: see [`crate::inventory::query`].
//! <https://docs.nvidia.com/deploy/nvml-api/>

#[cfg(not(feature = "nvml"))]
mod absent;
#[cfg_attr(
    not(feature = "nvml"),
    expect(dead_code, reason = "only the library creates handles")
)]
pub mod api;
pub mod compute_mode;
#[cfg(feature = "nvml")]
mod ffi;
#[cfg(feature = "nvml")]
pub mod monitoring;
pub mod processes;

#[cfg(not(feature = "nvml"))]
pub use absent::NvmlLibrary;
#[cfg(feature = "nvml")]
pub use ffi::NvmlLibrary;
