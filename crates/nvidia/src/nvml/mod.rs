//! What the programs that need the NVIDIA Management Library (NVML) and `oci-nvidia-nvml`, the only program that loads it, say to each
//! other. <https://docs.nvidia.com/deploy/nvml-api/>

pub mod compute_mode;
mod failed;
pub mod message;
pub mod mode_process;
pub mod monitoring;
pub mod processes;
pub mod program;
pub mod progress;
pub mod protocol;
pub mod query;

pub use failed::{Code, Failed};
