//! CDI: the driver and its GPUs as devices that engines know by name, `nvidia.com/gpu=0`.
//! <https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md>

pub mod check;
pub mod decode;
pub mod file;
pub mod generate;
pub mod name;
pub mod registry;
pub mod rules;
pub mod spec;
pub mod stamp;
pub mod yaml;
