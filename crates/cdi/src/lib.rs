//! The Container Device Interface as a format. It does not know vendors or engines.
//! <https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md>
//!
//! [`spec::Spec`] is what a spec file contains. [`mod@file`] reads and prints it as JSON or YAML, [`rules`] checks it as engines do,
//! [`name`] checks the names of devices, and [`registry`] finds the specs of a host and which of them defines a device.

pub mod file;
pub mod name;
pub mod registry;
pub mod rules;
pub mod spec;
pub mod yaml;
