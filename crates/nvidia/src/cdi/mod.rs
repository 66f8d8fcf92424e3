//! Edits as a CDI spec: how they are lowered, the spec of all devices, the arguments of our hook entry, and how it is known
//! that a spec is out of date.

pub mod entry;
pub mod generate;
pub mod lower;
pub mod of_host;
pub mod stamp;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use base::report::{Failure, catalog};
use cdi_spec::file::{self, Format};

/// NVIDIA's name for it: a spec of nvidia-ctk is replaced, where one of another name would be in conflict with it.
pub const DEFAULT_NAME: &str = "nvidia";

/// The file that is written where none is named.
#[must_use]
pub fn default_path(format: Format) -> PathBuf {
    Path::new("/var/run/cdi").join(DEFAULT_NAME).with_extension(format.extension())
}

/// Writes a spec file in one step.
///
/// # Errors
/// If that is not possible; then what was there before still is.
pub fn write(path: &Path, text: &str) -> Result<()> {
    file::write(path, text).with_context(|| {
        Failure::new(
            &catalog::SPEC_FILE,
            format!("cannot write {path:?}"),
            "run it as root, or name a file with --output",
        )
    })
}
