//! The Container Device Interface as a format. It does not know vendors or engines.
//! <https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md>
//!
//! [`spec::Spec`] is what a spec file contains. [`mod@file`] reads and prints it as JSON or YAML, [`rules`] checks it as engines do,
//! [`name`] checks the names of devices, and [`registry`] finds the specs of a host and which of them defines a device.
//!
//! ```
//! use cdi_spec::file::{self, Format};
//!
//! # fn main() -> Result<(), String> {
//! let text = "{cdiVersion: 0.5.0, kind: example.com/gpu, devices: [{name: '0', containerEdits: {env: [GPU=0]}}]}";
//! let spec = file::parse(text.as_bytes())?;
//! spec.check()?;
//! let yaml = Format::Yaml.print(&spec).map_err(|error| error.to_string())?;
//! assert!(yaml.contains("kind: example.com/gpu\n"));
//!
//! let wrong = file::parse(text.replace("env", "environment").as_bytes()).unwrap_err();
//! assert!(wrong.starts_with("devices[0].containerEdits.environment: unknown field"));
//! # Ok(())
//! # }
//! ```

pub mod file;
pub mod name;
pub mod registry;
pub mod rules;
pub mod spec;
pub mod yaml;
