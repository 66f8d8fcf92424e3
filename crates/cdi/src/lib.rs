//! The file format of the Container Device Interface. This crate does not know vendors or engines.
//! <https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md>
//!
//! [`spec::Spec`] is the content of a spec file. [`mod@file`] reads and prints it as JSON or YAML, [`rules`] checks it by the rules
//! of the engines, [`name`] checks device names, [`environment`] the environment of hooks, and [`registry`] finds the specs of a host and the one that defines a device.
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

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests open files that they created"
    )
)]

pub mod environment;
pub mod file;
pub mod name;
pub mod registry;
pub mod rules;
pub mod spec;
pub mod yaml;
