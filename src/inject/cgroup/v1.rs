//! cgroup v1: one line per rule into `devices.allow`.
//! <https://docs.kernel.org/admin-guide/cgroup-v1/devices.html>

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

use super::DeviceRule;

/// Adds the rules to the device cgroup at `path`.
///
/// # Errors
/// If the file cannot be written, or an ancestor does not allow the device.
pub(super) fn allow(path: &Path, rules: &[DeviceRule]) -> Result<()> {
    let file = path.join("devices.allow");
    let mut allow = OpenOptions::new().write(true).open(&file).with_context(|| format!("open {file:?}"))?;
    for rule in rules {
        // The kernel takes one rule in each write(2).
        allow.write_all(rule.to_string().as_bytes()).with_context(|| format!("write \"{rule}\" to {file:?}"))?;
    }
    Ok(())
}
