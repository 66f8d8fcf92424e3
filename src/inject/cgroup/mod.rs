//! Access to devices for a container that does not run yet.
//!
//! [`locate()`] decides, from texts, which device cgroup counts; [`allow`] opens it for the rules. Only for stages at
//! which the runtime has made the cgroup already; a device listed in config.json ([`already_allowed`]) needs none of it.
//! Kernel side: `Documentation/admin-guide/cgroup-v1/devices.rst`, `cgroup-v2.rst` ("Device controller").

pub mod ask;
mod dbus;
mod listed;
mod locate;
mod program;
mod systemd;
mod usual;
mod v1;
mod v2;

use std::fmt;

use anyhow::{Context as _, Result};
use nix::unistd::Pid;

use crate::finding::{Finding, catalog};
use crate::sys::proc_file;
pub use listed::already_allowed;
pub use locate::{DeviceCgroup, locate};
pub use program::extend;

/// A character device to be read and written, never made: mknod(2) stays refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceRule {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

/// As `devices.allow` takes it.
impl fmt::Display for DeviceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "c {}:{} rw", self.major, self.minor)
    }
}

/// What the container may do now, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No device filter applies to it: there was nothing to do.
    Unfiltered,
    /// The filter had been opened before.
    Present,
    /// We opened the filter.
    Added,
    /// The filter is another's, who would put it back: nothing was tried.
    NotOurs,
}

/// The result of [`allow`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What the container may do now.
    pub access: Access,
    /// What is left to say.
    pub findings: Vec<Finding>,
}

impl Outcome {
    fn plain(access: Access) -> Self {
        Self { access, findings: Vec::new() }
    }
}

/// Lets the container read and write the devices. `pid` is its init, `id` its OCI id. Can be repeated.
///
/// Must run in the runtime's mount namespace: there the cgroup is seen as the runtime sees it.
pub fn allow(pid: Pid, id: &str, rules: &[DeviceRule]) -> Result<Outcome> {
    if rules.is_empty() {
        return Ok(Outcome::plain(Access::Present));
    }
    let cgroup = read(&format!("/proc/{pid}/cgroup"))?;
    let located = locate(&mounts()?, &cgroup).with_context(|| format!("cannot find the cgroup of process {pid}"))?;
    match located {
        DeviceCgroup::None => Ok(Outcome::plain(Access::Unfiltered)),
        DeviceCgroup::V1(path) => v1::allow(&path, rules),
        DeviceCgroup::V2 { mount, path } => v2::allow(&mount, &path, id, rules),
    }
    .context("cannot give the container access to its devices")
}

/// Moves this process to where `pid` is, so that the same devices can be opened.
///
/// Must run in the cgroup namespace of that process (cgroup_namespaces(7)).
pub fn join(pid: Pid) -> Result<()> {
    let cgroup = read(&format!("/proc/{pid}/cgroup"))?;
    let path = match locate(&mounts()?, &cgroup)? {
        DeviceCgroup::None => return Ok(()),
        DeviceCgroup::V1(path) | DeviceCgroup::V2 { path, .. } => path.as_path().join("cgroup.procs"),
    };
    // 0 is whoever writes it, whatever its number is in this pid namespace; see cgroups(7).
    std::fs::write(&path, "0").with_context(|| format!("cannot write {path:?}"))
}

/// The line of mountinfo that counts if cgroups are mounted where everybody has them, else all lines.
fn mounts() -> Result<String> {
    match usual::line() {
        Some(line) => Ok(line),
        None => read("/proc/self/mountinfo"),
    }
}

/// Bytes that are no UTF-8 can only be in lines about other things: engines name cgroups in ASCII.
fn read(path: &str) -> Result<String> {
    proc_file::read_text(path).with_context(|| format!("cannot read {path:?}"))
}

/// The ways by which a container's devices are in its config.json: there whoever applies its rules again applies ours.
pub const LISTED_HINT: &str =
    "have the engine list the devices in config.json (CDI, Podman's precreate stage, or a device plugin)";

/// systemd gives its units back the rules that it knows.
fn systemd_finding(unit: &str, why: Option<&anyhow::Error>) -> Finding {
    let why = why.map(|error| format!(": {}", crate::error::line(error))).unwrap_or_default();
    Finding::of(
        &catalog::NOT_TOLD,
        format!("device access was added to {unit:?}, and \"systemctl daemon-reload\" takes it back{why}"),
        LISTED_HINT,
    )
}
