//! Extends the device programs of cgroup v2. It reads and loads all programs before it attaches the first one.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nix::errno::Errno;

use base::report::{Failure, Finding, errno_of, failure};
use base::sys::bpf::{self, Attached, BPF_F_ALLOW_MULTI, BPF_F_ALLOW_OVERRIDE, Insn};
use findings::catalog;

use super::judge::{Verdict, judge};
use super::own::carries_id;
use super::program::{UNBLIND_HINT, extend};
use super::{Access, Grant, LISTED_HINT, systemd, systemd_finding};
use crate::oci::device_rules::DeviceRule;

/// The program name that `bpftool prog` shows.
const NAME: &str = "onh_devices";

/// Makes the container's own programs allow the rules, and returns findings about other programs that deny them. `own` are the
/// cgroups that belong to the container alone, that of its init process first.
pub(super) fn allow(
    mount: &Path,
    own: &[PathBuf],
    id: &str,
    rules: &[DeviceRule],
) -> Result<Grant> {
    if let Some(unit) = own.iter().find(|cgroup| is_systemds(mount, cgroup)) {
        return Ok(Grant {
            access: Access::Unchanged,
            findings: vec![systemds_finding(unit)],
        });
    }
    // Before the programs are read, because systemd replaces its own program.
    let unit = unit(own, id);
    let in_systemd = unit.as_deref().map(|unit| systemd::allow(unit, rules));
    let mut outcome = extend_programs(own, rules)?;
    if let (Access::Added, Some(unit), Some(Err(error))) = (outcome.access, unit, in_systemd) {
        outcome.findings.push(systemd_finding(&unit, Some(&error)));
    }
    Ok(outcome)
}

/// Returns the container's own scope, if it has one; never a slice or a service, which other processes share.
fn unit(own: &[PathBuf], id: &str) -> Option<String> {
    let mut scopes = own
        .iter()
        .filter(|cgroup| cgroup.extension().is_some_and(|kind| kind == "scope"));
    // A scope that only cgroupsPath of config.json names is the container's too.
    let named = scopes.clone().rfind(|cgroup| carries_id(cgroup, id));
    Some(
        named
            .or_else(|| scopes.next_back())?
            .file_name()?
            .to_str()?
            .to_owned(),
    )
}

/// Extends the programs, and starts again up to two times if systemd or the runtime replaces a program at the same time.
fn extend_programs(own: &[PathBuf], rules: &[DeviceRule]) -> Result<Grant> {
    let mut tries = 3;
    loop {
        tries -= 1;
        match try_allow(own, rules) {
            Err(error)
                if tries > 0 && matches!(errno_of(&error), Some(Errno::ENOENT | Errno::ESTALE)) => {
            }
            other => return other,
        }
    }
}

fn try_allow(own: &[PathBuf], rules: &[DeviceRule]) -> Result<Grant> {
    let mut own_ids = BTreeSet::new();
    let mut work = Vec::new();
    let mut findings = Vec::new();
    let own: Vec<Cgroup> = own
        .iter()
        .cloned()
        .map(Cgroup::open)
        .collect::<Result<_>>()?;
    for cgroup in &own {
        let attached =
            bpf::attached(cgroup.dir.as_fd()).map_err(|errno| refused(errno, &cgroup.path))?;
        for id in attached.ids.iter().copied() {
            own_ids.insert(id);
            let (old, insns) = read_program(id).with_context(|| cgroup.cannot_extend(id))?;
            match judge(&insns, rules) {
                Verdict::Allows => {}
                Verdict::Denies => findings.push(deny_finding(cgroup, id)),
                Verdict::AllowList => {
                    if let Some(longer) =
                        extend(&insns, rules).with_context(|| cgroup.cannot_extend(id))?
                    {
                        work.push(Rewrite {
                            cgroup,
                            attached: attached.clone(),
                            id,
                            old,
                            longer,
                        });
                    }
                }
            }
        }
    }
    // The kernel asks the programs of all cgroups above as well, and each of them must allow the device.
    let effective = own
        .first()
        .map_or(Ok(Vec::new()), |cgroup| bpf::effective(cgroup.dir.as_fd()))?;
    let mut foreign = effective.iter().filter(|id| !own_ids.contains(id));
    let may_deny = foreign.any(|id| {
        read_program(*id).map_or(true, |(_, insns)| judge(&insns, rules) != Verdict::Allows)
    });
    if let (true, Some(cgroup)) = (may_deny, own.first()) {
        findings.push(foreign_finding(&cgroup.path));
    }
    if own_ids.is_empty() {
        return Ok(Grant {
            access: Access::Unfiltered,
            findings,
        });
    }
    if work.is_empty() {
        return Ok(Grant {
            access: Access::Present,
            findings,
        });
    }

    // All programs are loaded before the first one is attached. If the verifier refuses one, nothing has changed.
    let loaded: Vec<OwnedFd> = work
        .iter()
        .map(|rewrite| {
            bpf::load_device_program(NAME, &rewrite.longer)
                .with_context(|| rewrite.cgroup.cannot_extend(rewrite.id))
        })
        .collect::<Result<_>>()?;
    for (rewrite, new) in work.iter().zip(&loaded) {
        rewrite
            .attach(new)
            .with_context(|| rewrite.cgroup.cannot_extend(rewrite.id))?;
    }
    Ok(Grant {
        access: Access::Added,
        findings,
    })
}

/// The directory in which crun 1.23 and newer pins the programs that systemd attaches (`BPFProgram=` in
/// systemd.resource-control(5)). systemd attaches the pinned program again whenever the unit changes, so an extended one would
/// be lost.
const CRUN_PINS: &str = "/sys/fs/bpf/crun";

fn is_systemds(mount: &Path, cgroup: &Path) -> bool {
    pins(mount, cgroup)
        .iter()
        .any(|pin| rustix::fs::lstat(pin).is_ok())
}

/// Returns the possible pins of a scope: crun's versions use the unit's name or its path. bpffs does not allow dots in names
/// (bpf(2)).
fn pins(mount: &Path, cgroup: &Path) -> Vec<PathBuf> {
    let is_unit = cgroup.extension().is_some_and(|kind| kind == "scope");
    let names = [
        cgroup.file_name().map(Path::new),
        cgroup.strip_prefix(mount).ok(),
    ];
    let names = names
        .into_iter()
        .flatten()
        .filter(|_| is_unit)
        .filter_map(Path::to_str);
    names
        .map(|name| Path::new(CRUN_PINS).join(name.replace('.', "_")))
        .collect()
}

fn systemds_finding(unit: &Path) -> Finding {
    Finding::new(
        &catalog::CRUN,
        format!(
            "crun has given the device program of {:?} to systemd",
            unit.file_name().unwrap_or_default()
        ),
        LISTED_HINT,
    )
}

struct Cgroup {
    path: PathBuf,
    dir: File,
}

impl Cgroup {
    fn open(path: PathBuf) -> Result<Self> {
        let dir = File::open(&path).with_context(|| format!("cannot open cgroup {path:?}"))?;
        Ok(Self { path, dir })
    }

    fn cannot_extend(&self, id: u32) -> String {
        format!(
            "cannot extend device program {id} of cgroup {:?}",
            self.path
        )
    }
}

/// A program and its replacement.
struct Rewrite<'a> {
    cgroup: &'a Cgroup,
    /// What was attached when the program was read
    attached: Attached,
    id: u32,
    old: OwnedFd,
    longer: Vec<Insn>,
}

impl Rewrite<'_> {
    /// Replaces the old program atomically, with the flags with which it was attached.
    fn attach(&self, new: &OwnedFd) -> Result<()> {
        let dir = self.cgroup.dir.as_fd();
        if self.attached.flags & BPF_F_ALLOW_MULTI == 0 {
            return self.attach_alone(new);
        }
        match bpf::attach(dir, new.as_fd(), BPF_F_ALLOW_MULTI, Some(self.old.as_fd())) {
            // KERNEL(5.6): BPF_F_REPLACE. On older kernels both are attached for a moment, and both must allow: no access is
            // gained
            Err(Errno::EINVAL) => {
                bpf::attach(dir, new.as_fd(), BPF_F_ALLOW_MULTI, None)?;
                Ok(bpf::detach(dir, self.old.as_fd())?)
            }
            // a bpf_link holds it, which only the owner of the link can update; or it was detached in the meantime
            Err(Errno::ENOENT) => Err(anyhow::Error::new(Errno::ENOENT).context(Failure::new(
                &catalog::CGROUP,
                "another program has attached it with a BPF link",
                LISTED_HINT,
            ))),
            other => Ok(other?),
        }
    }

    /// Replaces the program of a cgroup that accepts only one, where an attach replaces any program. BPF_F_REPLACE is only for
    /// several. KERNEL(6.17): bpf(2) fails with ESTALE if the revision has changed. For older kernels, the attached programs
    /// are compared first. The race is harmless: only the runtime attaches such a program to the container's cgroup (systemd
    /// 239 and newer uses BPF_F_ALLOW_MULTI), and the runtime waits for the hook.
    fn attach_alone(&self, new: &OwnedFd) -> Result<()> {
        let dir = self.cgroup.dir.as_fd();
        let now = bpf::attached(dir)?;
        if now != self.attached {
            return Err(Errno::ESTALE.into());
        }
        Ok(bpf::attach_at(
            dir,
            new.as_fd(),
            self.attached.flags & BPF_F_ALLOW_OVERRIDE,
            self.attached.revision,
        )?)
    }
}

fn read_program(id: u32) -> Result<(OwnedFd, Vec<Insn>)> {
    let fd = bpf::prog_by_id(id).context("cannot open it")?;
    let info = bpf::prog_info(fd.as_fd()).context("cannot read it")?;
    if info.maps > 0 {
        return Err(failure(
            &catalog::CGROUP,
            format!("its program {:?} uses maps", info.name),
            LISTED_HINT,
        ));
    }
    let insns = info.insns.ok_or_else(|| {
        failure(
            &catalog::CGROUP,
            "the kernel withholds its instructions",
            UNBLIND_HINT,
        )
    })?;
    Ok((fd, insns))
}

fn refused(errno: Errno, path: &Path) -> anyhow::Error {
    let what = format!("cannot read the device programs of cgroup {path:?}");
    let error = anyhow::Error::new(errno);
    match errno {
        Errno::EPERM => error.context(Failure::new(
            &catalog::CGROUP,
            what,
            "run the engine as root on the host, or have it list the devices in config.json (CDI)",
        )),
        _ => error.context(what),
    }
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
    fn crun_pins_programs_of_scopes() {
        let pins = |cgroup| pins(Path::new("/sys/fs/cgroup"), Path::new(cgroup));
        let found = pins("/sys/fs/cgroup/machine.slice/libpod-0a.scope");
        let expected = [
            "/sys/fs/bpf/crun/libpod-0a_scope",
            "/sys/fs/bpf/crun/machine_slice/libpod-0a_scope",
        ];
        assert_eq!(found, expected.map(PathBuf::from));
        assert!(
            pins("/sys/fs/cgroup/libpod_parent/libpod-0a").is_empty(),
            "not a systemd unit"
        );
    }

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
