//! Creates CDI specs from edits, and detects specs that are out of date.
//!
//! [`lower`] converts edits, [`generate`] makes the spec of all devices, [`of_host`] does so for this host, [`extra_devices`] makes the specs of
//! other devices, and [`refresh`] updates both. [`entry`] has the arguments of the hook entry, and [`stamp`] the state of the host for
//! which a spec is valid. [`compare`] finds the parts of a spec that are not the host's.

pub mod compare;
pub mod entry;
pub mod extra_devices;
pub mod generate;
pub mod lower;
pub mod of_host;
pub mod refresh;
pub mod stamp;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use base::report::Failure;
use cdi_spec::file::{self, Format};
use findings::catalog;

/// The file name that nvidia-ctk uses. Its spec is replaced, because a file with another name would conflict with it.
pub const DEFAULT_NAME: &str = "nvidia";

/// Returns the path of the spec file if the user does not name one.
#[must_use]
pub fn default_path(format: Format) -> PathBuf {
    Path::new("/var/run/cdi")
        .join(DEFAULT_NAME)
        .with_extension(format.extension())
}

/// Replaces a spec file atomically.
///
/// # Errors
/// If the file cannot be written. The previous file is then unchanged.
pub fn write(path: &Path, text: &str) -> Result<()> {
    file::write(path, text).with_context(|| {
        Failure::new(
            &catalog::SPEC_FILE,
            format!("cannot write {path:?}"),
            if rustix::process::geteuid().is_root() {
                "select a file in a writable directory with --output"
            } else {
                "run the command as root, or select a file with --output"
            },
        )
    })
}
