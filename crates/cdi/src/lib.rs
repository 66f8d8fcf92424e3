//! The Container Device Interface as a format: spec files, device names, and the rules by which engines read them. It knows
//! no vendor and no engine.
//! <https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md>

pub mod file;
pub mod name;
pub mod registry;
pub mod rules;
pub mod spec;
pub mod yaml;
