//! Extends the device programs of cgroup v2. It reads and loads all programs before it attaches the first one.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use base::report::Finding;
use base::sys::bpf::{Attached, Insn};
use findings::catalog;

use super::attach::{Cgroup, Program};
use super::interpret::{FilterEffect, interpret};
use super::ownership::carries_id;
use super::pinned::{Pinned, is_outdated};
use super::program::extend;
use super::{DeviceAccess, Grant, systemd, systemd_finding};
use crate::oci::device_rules::DeviceRule;

/// Makes the container's own programs allow the rules, and returns findings about other programs that deny them. `own` are the
/// container's own cgroups, starting with the cgroup of its init process.
pub(super) fn allow(own: &[PathBuf], id: &str, rules: &[DeviceRule]) -> Result<Grant> {
    match Pinned::find(own, rules)? {
        Some(pinned) => replace_pinned(&pinned, own, rules),
        None => extend_own(own, id, rules),
    }
}

/// Replaces the program that crun has given to systemd, and extends all others.
fn replace_pinned(pinned: &Pinned, own: &[PathBuf], rules: &[DeviceRule]) -> Result<Grant> {
    pinned.settle()?;
    let lasts = pinned.edit_unit_file().and_then(|()| systemd::wait());
    pinned.settle()?;
    let mut grant = extend_programs(own, rules)?;
    grant.access = DeviceAccess::Added;
    if let Err(error) = lasts {
        grant.findings.push(pinned.finding(&error));
    }
    Ok(grant)
}

fn extend_own(own: &[PathBuf], id: &str, rules: &[DeviceRule]) -> Result<Grant> {
    // Before the programs are read, because systemd replaces its own program.
    let unit = unit(own, id);
    let in_systemd = unit.as_deref().map(|unit| systemd::allow(unit, rules));
    let mut grant = extend_programs(own, rules)?;
    if let (DeviceAccess::Added, Some(unit), Some(Err(error))) = (grant.access, unit, in_systemd) {
        grant.findings.push(systemd_finding(&unit, Some(&error)));
    }
    Ok(grant)
}

/// Returns the container's own scope, if it has one; never a slice or a service, which other processes share.
fn unit(own: &[PathBuf], id: &str) -> Option<String> {
    let mut scope = None;
    for cgroup in own {
        if cgroup.extension().is_none_or(|kind| kind != "scope") {
            continue;
        }
        // A scope that only cgroupsPath of config.json names is the container's too.
        let is_named = scope.is_some_and(|known| carries_id(known, id));
        if !is_named || carries_id(cgroup, id) {
            scope = Some(cgroup);
        }
    }
    Some(scope?.file_name()?.to_str()?.to_owned())
}

/// Extends the programs, and starts again up to two times if systemd or the runtime replaces a program at the same time.
fn extend_programs(own: &[PathBuf], rules: &[DeviceRule]) -> Result<Grant> {
    let mut tries = 3;
    loop {
        tries -= 1;
        match try_allow(own, rules) {
            Err(error) if tries > 0 && is_outdated(&error) => {}
            other => return other,
        }
    }
}

fn try_allow(own: &[PathBuf], rules: &[DeviceRule]) -> Result<Grant> {
    let cgroups: Result<Vec<Cgroup>> = own.iter().map(|path| Cgroup::open(path)).collect();
    let cgroups = cgroups?;
    let Survey {
        own_ids,
        rewrites,
        mut findings,
    } = Survey::of(&cgroups, rules)?;
    if let Some(cgroup) = cgroups.first()
        && may_be_denied_above(cgroup, &own_ids, rules)?
    {
        findings.push(foreign_finding(&cgroup.path));
    }
    let access = match (own_ids.is_empty(), rewrites.is_empty()) {
        (true, _) => DeviceAccess::Unfiltered,
        (false, true) => DeviceAccess::Present,
        (false, false) => DeviceAccess::Added,
    };
    replace_all(rewrites)?;
    Ok(Grant { access, findings })
}

/// What is attached to the container's own cgroups.
#[derive(Default)]
struct Survey<'a> {
    own_ids: BTreeSet<u32>,
    rewrites: Vec<Rewrite<'a>>,
    findings: Vec<Finding>,
}

impl<'a> Survey<'a> {
    fn of(cgroups: &'a [Cgroup], rules: &[DeviceRule]) -> Result<Self> {
        let mut survey = Self::default();
        for cgroup in cgroups {
            let attached = cgroup.attached()?;
            for id in &attached.ids {
                survey
                    .add(cgroup, &attached, *id, rules)
                    .with_context(|| cgroup.cannot_extend(*id))?;
            }
        }
        Ok(survey)
    }

    fn add(
        &mut self,
        cgroup: &'a Cgroup,
        attached: &Attached,
        id: u32,
        rules: &[DeviceRule],
    ) -> Result<()> {
        self.own_ids.insert(id);
        let old = Program::by_id(id)?;
        match interpret(&old.insns, rules) {
            FilterEffect::Allows => {}
            FilterEffect::Denies => self.findings.push(deny_finding(cgroup, id)),
            FilterEffect::AllowList => {
                if let Some(longer) = extend(&old.insns, rules)? {
                    self.rewrites.push(Rewrite {
                        cgroup,
                        attached: attached.clone(),
                        old,
                        longer,
                    });
                }
            }
        }
        Ok(())
    }
}

/// A program and its replacement.
struct Rewrite<'a> {
    cgroup: &'a Cgroup,
    /// What was attached when the program was read
    attached: Attached,
    old: Program,
    longer: Vec<Insn>,
}

/// Replaces the programs. All are loaded before the first one is attached. If the verifier refuses one, nothing has changed.
fn replace_all(rewrites: Vec<Rewrite<'_>>) -> Result<()> {
    let mut loaded = Vec::new();
    for rewrite in rewrites {
        let (cgroup, old) = (rewrite.cgroup, rewrite.old);
        let new = Program::load(rewrite.longer).with_context(|| cgroup.cannot_extend(old.id))?;
        loaded.push((cgroup, rewrite.attached, old, new));
    }
    for (cgroup, attached, old, new) in &loaded {
        cgroup
            .replace(attached, old.fd.as_fd(), new.fd.as_fd())
            .with_context(|| cgroup.cannot_extend(old.id))?;
    }
    Ok(())
}

/// Reports whether a program of a cgroup above the container's may deny the devices. The kernel asks these programs as well, and
/// each of them must allow a device.
fn may_be_denied_above(
    cgroup: &Cgroup,
    own_ids: &BTreeSet<u32>,
    rules: &[DeviceRule],
) -> Result<bool> {
    for id in cgroup.effective()? {
        if own_ids.contains(&id) {
            continue;
        }
        match Program::by_id(id) {
            Ok(program) if interpret(&program.insns, rules) == FilterEffect::Allows => {}
            _ => return Ok(true),
        }
    }
    Ok(false)
}

fn deny_finding(cgroup: &Cgroup, id: u32) -> Finding {
    Finding::new(
        &catalog::DENIED_BY_PROGRAM,
        format!(
            "device program {id} of cgroup {:?} denies the devices and allows others",
            cgroup.path
        ),
        format!("inspect it with \"bpftool prog show id {id}\", and allow the devices there"),
    )
}

fn foreign_finding(path: &Path) -> Finding {
    Finding::new(
        &catalog::CGROUP_ABOVE,
        format!(
            "a device program of a cgroup above {path:?} also has to allow the devices, and is not the container's"
        ),
        "allow them with \"DeviceAllow=\" in the systemd unit or slice that the engine runs in",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scope_is_the_units() {
        let unit_of =
            |own: &[&str], id| unit(&own.iter().map(PathBuf::from).collect::<Vec<_>>(), id);
        let m = "/sys/fs/cgroup/machine.slice/libpod-0a.scope";
        assert_eq!(
            unit_of(&[&format!("{m}/container"), m], "0a").as_deref(),
            Some("libpod-0a.scope")
        );
        assert_eq!(
            unit_of(&["/sys/fs/cgroup/system.slice/onh-box.scope"], "0a").as_deref(),
            Some("onh-box.scope")
        );
        assert_eq!(
            unit_of(&["/sys/fs/cgroup/libpod_parent/libpod-0a"], "0a"),
            None
        );
    }
}
