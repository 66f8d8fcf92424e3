//! Changes configuration files and leaves the rest of them unchanged, comments included.

pub(crate) mod file;
pub(crate) mod toml;
