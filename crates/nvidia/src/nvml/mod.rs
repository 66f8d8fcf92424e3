//! NVIDIA's management library: the functions we use. It runs in a child process: [`crate::inventory::ask`].
//! <https://docs.nvidia.com/deploy/nvml-api/>

pub mod api;
mod ffi;

pub use ffi::Library;
