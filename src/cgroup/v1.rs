//! Adds rules to the `devices` controller of cgroup v1.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};

use anyhow::{Context as _, Result};

use base::paths::HostPath;
use base::report::Failure;
use findings::catalog;

use super::{DeviceAccess, Grant, systemd_finding};
use crate::oci::device_rules::DeviceRule;

/// `echo c MAJOR:MINOR rw > CGROUP/devices.allow`, one write(2) for each, because the kernel accepts one rule at a time.
#[expect(clippy::disallowed_methods, reason = "a file of cgroupfs")]
pub(super) fn allow(cgroup: &HostPath, rules: &[DeviceRule]) -> Result<Grant> {
    let path = cgroup.as_path().join("devices.allow");
    let mut file = OpenOptions::new()
        .write(true)
        .open(&path)
        .with_context(|| format!("cannot open {path:?}"))?;
    for rule in rules {
        if let Err(error) = file.write_all(rule.to_string().as_bytes()) {
            let what = format!("cannot write \"{rule}\" to {path:?}");
            let error = match error.kind() {
                // `devcgroup_update_access` in the kernel: a cgroup cannot allow what its parent denies
                ErrorKind::PermissionDenied => anyhow::Error::new(error).context(Failure::new(
                    &catalog::CGROUP,
                    what,
                    "check \"devices.list\" of the cgroups above it: one of them denies the device",
                )),
                _ => anyhow::Error::new(error).context(what),
            };
            return Err(error);
        }
    }
    // "systemctl daemon-reload" rewrites the lists of scopes without these rules.
    let mut grant = Grant::plain(DeviceAccess::Added);
    let unit = cgroup.as_path().file_name().unwrap_or_default();
    let unit = unit.to_string_lossy();
    if unit.ends_with(".scope") {
        grant.findings.push(systemd_finding(&unit, None));
    }
    Ok(grant)
}
