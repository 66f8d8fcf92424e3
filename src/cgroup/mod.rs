//! Gives a container that does not run yet access to devices through its device cgroup.
//!
//! [`locate()`] determines which device cgroup applies; [`allow`] adds the rules to it. This is only needed at stages at which
//! the runtime has already created the cgroup, and not for devices that config.json lists
//! ([`crate::oci::device_rules::already_allowed`]). Kernel side: `Documentation/admin-guide/cgroup-v1/devices.rst`,
//! `cgroup-v2.rst` ("Device controller").

mod attach;
mod dbus;
mod default_mount;
pub(crate) mod filter;
mod interpret;
mod locate;
mod ownership;
mod pinned;
mod program;
mod systemd;
mod v1;
mod v2;

use std::path::Path;

use anyhow::{Context as _, Result};
use nix::unistd::Pid;

use base::report::Finding;
use base::sys::proc_file;
use findings::catalog;

use crate::oci::device_rules::DeviceRule;
use locate::Hierarchy;
pub use locate::{DeviceCgroup, hierarchies, locate};
pub use program::extend;

/// The container's access to the devices, and how it got it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceAccess {
    /// No device filter applies to the container.
    Unfiltered,
    /// The filter already allowed the devices.
    Present,
    /// The hook added the devices to the filter.
    Added,
    /// The filter was not changed, because the cgroup is shared with other processes. It may allow the devices.
    Unchanged,
    /// The filter denies at least one of the devices, after all changes. The first finding explains it.
    Denied,
}

/// The result of [`allow`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The container's access to the devices
    pub access: DeviceAccess,
    pub findings: Vec<Finding>,
}

impl Grant {
    fn plain(access: DeviceAccess) -> Self {
        Self {
            access,
            findings: Vec::new(),
        }
    }
}

/// The container whose device cgroup is changed.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Process id of the container's init
    pub pid: Pid,
    pub id: &'a str,
    /// `linux.cgroupsPath` of config.json; `None` without a config.json: the caller guarantees that the cgroup is the
    /// container's.
    pub cgroups_path: Option<&'a str>,
}

/// Lets the container read and write the devices, if it has a separate cgroup. Idempotent.
///
/// Must run in the runtime's mount namespace, where cgroups have the paths that the runtime used.
pub fn allow(member: Member<'_>, rules: &[DeviceRule]) -> Result<Grant> {
    if rules.is_empty() {
        return Ok(Grant::plain(DeviceAccess::Present));
    }
    let pid = member.pid;
    let mounts = mounts()?;
    let located = located(&mounts, &format!("/proc/{pid}/cgroup"))
        .with_context(|| format!("cannot find the cgroup of process {pid}"))?;
    let Some((mount, path)) = located.place() else {
        return Ok(Grant::plain(DeviceAccess::Unfiltered));
    };
    let caller = self::located(&mounts, "/proc/self/cgroup").ok();
    let caller = caller.as_ref().and_then(DeviceCgroup::place);
    let container = ownership::ContainerCgroup {
        id: member.id,
        cgroups_path: member.cgroups_path,
        caller: caller.map(|(_, path)| path),
    };
    let own = container.own(mount, path);
    if own.is_empty() {
        return Ok(shared(&located, path, rules));
    }
    let grant = match &located {
        DeviceCgroup::V1(path) => v1::allow(path, rules),
        _ => v2::allow(&own, member.id, rules),
    };
    let mut grant = grant.context("cannot give the container access to its devices")?;
    // Without a finding, each program allows the devices, and the filter need not be read again.
    if !grant.findings.is_empty() && denies_any(&located, rules) == Some(true) {
        grant.access = DeviceAccess::Denied;
    }
    Ok(grant)
}

/// Returns the access in a cgroup that is not the container's.
fn shared(located: &DeviceCgroup, path: &Path, rules: &[DeviceRule]) -> Grant {
    let access = match denies_any(located, rules) {
        Some(false) => return Grant::plain(DeviceAccess::Unfiltered),
        Some(true) => DeviceAccess::Denied,
        None => DeviceAccess::Unchanged,
    };
    Grant {
        access,
        findings: vec![shared_finding(path)],
    }
}

/// Returns the access of a container whose cgroup must not be changed, because of `no-cgroups` in config.toml.
pub(crate) fn examine(pid: Pid, rules: &[DeviceRule]) -> Grant {
    let access = match is_denied(pid, rules) {
        Ok(Some(true)) => DeviceAccess::Denied,
        Ok(Some(false)) => return Grant::plain(DeviceAccess::Present),
        Ok(None) | Err(_) => return Grant::plain(DeviceAccess::Unchanged),
    };
    let finding = Finding::new(
        &catalog::NO_CGROUPS,
        "the container's cgroup denies the devices, and no-cgroups = true in config.toml keeps the hook from changing it",
        format!(
            "remove no-cgroups from config.toml: rootless containers do not need it; or {LISTED_HINT}"
        ),
    );
    Grant {
        access,
        findings: vec![finding],
    }
}

fn is_denied(pid: Pid, rules: &[DeviceRule]) -> Result<Option<bool>> {
    if rules.is_empty() {
        return Ok(Some(false));
    }
    let located = located(&mounts()?, &format!("/proc/{pid}/cgroup"))?;
    Ok(denies_any(&located, rules))
}

fn located(mounts: &[Hierarchy], cgroup: &str) -> Result<DeviceCgroup> {
    locate(mounts, &read(cgroup)?)
}

/// Reports whether the cgroup or one above it denies one of the devices; `None` if that cannot be determined.
fn denies_any(located: &DeviceCgroup, rules: &[DeviceRule]) -> Option<bool> {
    filter::filter_of(located).ok()?.denies_any(rules)
}

fn shared_finding(path: &Path) -> Finding {
    Finding::new(
        &catalog::SHARED_CGROUP,
        format!(
            "the container has no separate cgroup: it runs in {path:?}, whose device rules also apply to other processes"
        ),
        "start it without \"--cgroups=disabled\", or allow the devices with \"DeviceAllow=\" in the systemd unit of that service",
    )
}

/// Returns the mounted hierarchies, without reading the whole mount table if they are at the usual path.
fn mounts() -> Result<Vec<Hierarchy>> {
    match default_mount::hierarchy() {
        Some(hierarchy) => Ok(vec![hierarchy]),
        None => {
            let table = proc_file::read_table(MOUNTINFO);
            let table = table.with_context(|| format!("cannot read {MOUNTINFO:?}"))?;
            Ok(hierarchies(&table))
        }
    }
}

const MOUNTINFO: &str = "/proc/self/mountinfo";

/// Reads a file as text. Engines name cgroups in ASCII.
fn read(path: &str) -> Result<String> {
    proc_file::read_text(path).with_context(|| format!("cannot read {path:?}"))
}

/// The hint to list the devices in config.json: a runtime or systemd that restores the container's rules then restores these
/// too.
pub(crate) const LISTED_HINT: &str =
    "have the engine list the devices in config.json (CDI, or a device plugin)";

/// The finding for a unit to which systemd restores only the device rules that it knows.
fn systemd_finding(unit: &str, why: Option<&anyhow::Error>) -> Finding {
    let why = match why {
        Some(error) => format!(": {}", base::report::line(error)),
        None => String::new(),
    };
    Finding::new(
        &catalog::SYSTEMD_UNAWARE,
        format!(
            "device access was added to {unit:?}, and \"systemctl daemon-reload\" removes it again{why}"
        ),
        LISTED_HINT,
    )
}
