//! Access to devices for a container that does not run yet.
//!
//! [`locate()`] decides, from texts, which device cgroup counts; [`allow`] opens it for the rules. Only for stages at
//! which the runtime has made the cgroup already; a device listed in config.json ([`crate::oci::device_rules::already_allowed`]) needs none of it.
//! Kernel side: `Documentation/admin-guide/cgroup-v1/devices.rst`, `cgroup-v2.rst` ("Device controller").

pub(crate) mod ask;
mod dbus;
mod judge;
mod locate;
mod own;
mod program;
mod systemd;
mod usual;
mod v1;
mod v2;

use std::path::Path;

use anyhow::{Context as _, Result};
use nix::unistd::Pid;

use base::report::{Finding, catalog};
use base::sys::proc_file;

use crate::oci::device_rules::DeviceRule;
pub use locate::{DeviceCgroup, locate};
pub use program::extend;

/// What the container may do now, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No device filter applies to it: there was nothing to do.
    Unfiltered,
    /// The filter had been opened before.
    Present,
    /// The hook added the devices to the filter.
    Added,
    /// The filter is another's: one that would put it back, or one of a cgroup that others share. Nothing was tried.
    NotOurs,
}

/// The result of [`allow`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// What the container may do now.
    pub access: Access,
    pub findings: Vec<Finding>,
}

impl Grant {
    fn plain(access: Access) -> Self {
        Self { access, findings: Vec::new() }
    }
}

/// The container whose device cgroup it is about.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Process id of the container's init
    pub pid: Pid,
    pub id: &'a str,
    /// `linux.cgroupsPath` of config.json; `None` if there is no config.json, and the caller vouches for the cgroup.
    pub cgroups_path: Option<&'a str>,
}

/// Lets the container read and write the devices, if it has a cgroup of its own. Can be repeated.
///
/// Must run in the runtime's mount namespace: there the cgroup is seen as the runtime sees it.
pub fn allow(member: Member<'_>, rules: &[DeviceRule]) -> Result<Grant> {
    if rules.is_empty() {
        return Ok(Grant::plain(Access::Present));
    }
    let pid = member.pid;
    let mounts = mounts()?;
    let located = located(&mounts, &format!("/proc/{pid}/cgroup"))
        .with_context(|| format!("cannot find the cgroup of process {pid}"))?;
    let Some((mount, path)) = located.place() else { return Ok(Grant::plain(Access::Unfiltered)) };
    let caller = self::located(&mounts, "/proc/self/cgroup").ok();
    let caller = caller.as_ref().and_then(DeviceCgroup::place).map(|(_, path)| path);
    let marks = own::Marks { id: member.id, cgroups_path: member.cgroups_path, caller };
    let own = marks.own(mount, path);
    if own.is_empty() {
        return Ok(match keeps_out(&located, rules) {
            Some(false) => Grant::plain(Access::Unfiltered),
            _ => Grant { access: Access::NotOurs, findings: vec![shared_finding(path)] },
        });
    }
    match &located {
        DeviceCgroup::V1(path) => v1::allow(path, rules),
        _ => v2::allow(mount, &own, member.id, rules),
    }
    .context("cannot give the container access to its devices")
}

/// What is left to say where config.toml forbids to change the cgroup (`no-cgroups`): a finding, if the devices cannot be
/// opened then. Nothing is changed.
pub(crate) fn forbidden(pid: Pid, rules: &[DeviceRule]) -> Option<Finding> {
    if rules.is_empty() {
        return None;
    }
    let located = located(&mounts().ok()?, &format!("/proc/{pid}/cgroup")).ok()?;
    (keeps_out(&located, rules) == Some(true)).then(|| {
        Finding::of(
            &catalog::NO_CGROUPS,
            "the container's cgroup denies the devices, and no-cgroups = true in config.toml leaves it as it is",
            format!("remove no-cgroups from config.toml: rootless containers do not need it; or {LISTED_HINT}"),
        )
    })
}

fn located(mounts: &str, cgroup: &str) -> Result<DeviceCgroup> {
    locate(mounts, &read(cgroup)?)
}

/// Whether the cgroup, with those above it, keeps a process from one of the devices; `None` if that cannot be seen.
fn keeps_out(located: &DeviceCgroup, rules: &[DeviceRule]) -> Option<bool> {
    ask::filter_of(located).ok()?.keeps_out(rules)
}

fn shared_finding(path: &Path) -> Finding {
    Finding::of(
        &catalog::SHARED_CGROUP,
        format!("the container has no cgroup of its own: it runs in {path:?}, whose device rules hold for others too"),
        "start it without \"--cgroups=disabled\", or allow the devices to that service: \"DeviceAllow=\" of its systemd unit",
    )
}

/// Moves this process to where `pid` is, so that the same devices can be opened.
///
/// Must run in the cgroup namespace of that process (cgroup_namespaces(7)).
pub(crate) fn join(pid: Pid) -> Result<()> {
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
pub(crate) const LISTED_HINT: &str =
    "have the engine list the devices in config.json (CDI, Podman's precreate stage, or a device plugin)";

/// systemd gives its units back the rules that it knows.
fn systemd_finding(unit: &str, why: Option<&anyhow::Error>) -> Finding {
    let why = why.map(|error| format!(": {}", base::report::line(error))).unwrap_or_default();
    Finding::of(
        &catalog::NOT_TOLD,
        format!("device access was added to {unit:?}, and \"systemctl daemon-reload\" takes it back{why}"),
        LISTED_HINT,
    )
}
