//! NVIDIA's management library: the functions we use, and the confined child in which it runs.
//! <https://docs.nvidia.com/deploy/nvml-api/>

pub mod api;
pub mod child;
mod ffi;
pub mod identity;
