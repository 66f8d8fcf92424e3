//! The device programs of cgroup v2. Effects: read all, decide all, load all, and only then attach.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nix::errno::Errno;

use super::program::{UNBLIND_HINT, extend};
use super::{Access, DeviceRule, LISTED_HINT, Outcome, systemd, systemd_finding};
use crate::error::{Failure, failure};
use crate::finding::{Finding, catalog};
use crate::paths::HostPath;
use crate::sys::bpf::{self, BPF_F_ALLOW_MULTI, BPF_F_ALLOW_OVERRIDE, Insn};

/// As `bpftool prog` shows it.
const NAME: &str = "onh_devices";

/// Lets the container's own programs allow the rules, and says so if programs further up have a say.
///
/// systemd and the runtime can change programs under our hands (a daemon-reload); what was read is then read again.
pub(super) fn allow(mount: &HostPath, path: &HostPath, id: &str, rules: &[DeviceRule]) -> Result<Outcome> {
    let own = own_cgroups(mount.as_path(), path.as_path(), id);
    if let Some(unit) = own.iter().find(|cgroup| is_systemds(mount.as_path(), cgroup)) {
        return Ok(Outcome { access: Access::NotOurs, findings: vec![systemds_finding(unit)] });
    }
    // First: it exchanges its own program, which has to be read after that.
    let unit = unit(&own, id);
    let told = unit.as_deref().map(|unit| systemd::allow(unit, rules));
    let mut outcome = extend_programs(mount, path, id, rules)?;
    if let (Access::Added, Some(unit), Some(Err(error))) = (outcome.access, unit, told) {
        outcome.findings.push(systemd_finding(&unit, Some(&error)));
    }
    Ok(outcome)
}

/// The container's own scope, if systemd has made one for it; never a slice or service that others are in, too.
fn unit(own: &[PathBuf], id: &str) -> Option<String> {
    let mut names = own.iter().filter_map(|cgroup| cgroup.file_name()?.to_str());
    names.rfind(|name| name.ends_with(".scope") && carries_id(name, id)).map(str::to_owned)
}

fn extend_programs(mount: &HostPath, path: &HostPath, id: &str, rules: &[DeviceRule]) -> Result<Outcome> {
    let mut tries = 3;
    loop {
        tries -= 1;
        match try_allow(mount.as_path(), path.as_path(), id, rules) {
            Err(error) if tries > 0 && error.root_cause().downcast_ref() == Some(&Errno::ENOENT) => {}
            other => return other,
        }
    }
}

fn try_allow(mount: &Path, path: &Path, id: &str, rules: &[DeviceRule]) -> Result<Outcome> {
    let mut own_ids = BTreeSet::new();
    let mut work = Vec::new();
    let mut findings = Vec::new();
    let own: Vec<Cgroup> = own_cgroups(mount, path, id).into_iter().map(Cgroup::open).collect::<Result<_>>()?;
    for cgroup in &own {
        let attached = bpf::attached(cgroup.dir.as_fd()).map_err(|errno| refused(errno, &cgroup.path))?;
        for id in attached.ids {
            own_ids.insert(id);
            let (old, insns) = read_program(id).with_context(|| cgroup.cannot_extend(id))?;
            if let Some(longer) = extend(&insns, rules).with_context(|| cgroup.cannot_extend(id))? {
                work.push(Rewrite { cgroup, flags: attached.flags, id, old, longer });
            }
        }
    }
    let effective = own.first().map_or(Ok(Vec::new()), |cgroup| bpf::effective(cgroup.dir.as_fd()))?;
    if effective.iter().any(|id| !own_ids.contains(id)) {
        findings.push(foreign_finding(path));
    }
    if own_ids.is_empty() {
        return Ok(Outcome { access: Access::Unfiltered, findings });
    }
    if work.is_empty() {
        return Ok(Outcome { access: Access::Present, findings });
    }

    let loaded: Vec<OwnedFd> = work
        .iter()
        .map(|rewrite| {
            bpf::load_device_program(NAME, &rewrite.longer).with_context(|| rewrite.cgroup.cannot_extend(rewrite.id))
        })
        .collect::<Result<_>>()?;
    for (rewrite, new) in work.iter().zip(&loaded) {
        rewrite.attach(new).with_context(|| rewrite.cgroup.cannot_extend(rewrite.id))?;
    }
    Ok(Outcome { access: Access::Added, findings })
}

/// The cgroups whose programs are the container's: its init's, and those above it up to the one that carries its id.
///
/// crun puts init into a sub-cgroup (`libpod-<id>.scope/container`), while systemd's program, and crun's, can sit on
/// the scope; both have to allow. Further up are slices and services that others share: widening them would widen more
/// than this container. Engines name the container's cgroup `<id>`, `<engine>-<id>` or `<engine>-<id>.scope`
/// (`libpod-`, `crio-`, `docker-`, `cri-containerd-`, `runc-`); a name that only contains the id is not enough, as
/// runtimes accept an id like "machine". Without such a name only init's own cgroup counts.
fn own_cgroups(mount: &Path, path: &Path, id: &str) -> Vec<PathBuf> {
    let carries_id =
        |cgroup: &Path| cgroup.file_name().and_then(|name| name.to_str()).is_some_and(|name| carries_id(name, id));
    let inside: Vec<&Path> = path.ancestors().take_while(|cgroup| *cgroup != mount).collect();
    let count = inside.iter().position(|cgroup| carries_id(cgroup)).map_or(1, |last| last + 1);
    if inside.is_empty() {
        return vec![path.to_owned()];
    }
    inside.into_iter().take(count).map(Path::to_owned).collect()
}

fn carries_id(name: &str, id: &str) -> bool {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    name.strip_suffix(id).is_some_and(|engine| engine.is_empty() || engine.ends_with('-'))
}

/// Where crun since 1.23 keeps the programs that it has systemd attach (`BPFProgram=` in systemd.resource-control(5)). What
/// is put in their place is gone when systemd attaches them again, and it does so whenever the unit changes.
const CRUN_PINS: &str = "/sys/fs/bpf/crun";

fn is_systemds(mount: &Path, cgroup: &Path) -> bool {
    pins(mount, cgroup).iter().any(|pin| rustix::fs::lstat(pin).is_ok())
}

/// By the unit's name, or by its path: crun's versions differ. bpffs takes no dots (bpf(2)).
fn pins(mount: &Path, cgroup: &Path) -> Vec<PathBuf> {
    let is_unit = cgroup.extension().is_some_and(|kind| kind == "scope");
    let names = [cgroup.file_name().map(Path::new), cgroup.strip_prefix(mount).ok()];
    let names = names.into_iter().flatten().filter(|_| is_unit).filter_map(Path::to_str);
    names.map(|name| Path::new(CRUN_PINS).join(name.replace('.', "_"))).collect()
}

fn systemds_finding(unit: &Path) -> Finding {
    Finding::of(
        &catalog::CRUN,
        format!("crun has given the device program of {:?} to systemd", unit.file_name().unwrap_or_default()),
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
        format!("cannot extend device program {id} of cgroup {:?}", self.path)
    }
}

/// A program and what is to take its place.
struct Rewrite<'a> {
    cgroup: &'a Cgroup,
    flags: u32,
    id: u32,
    old: OwnedFd,
    longer: Vec<Insn>,
}

impl Rewrite<'_> {
    /// `bpftool cgroup attach CGROUP device …` in the same way as the old program was attached, in one step.
    fn attach(&self, new: &OwnedFd) -> Result<()> {
        let dir = self.cgroup.dir.as_fd();
        if self.flags & BPF_F_ALLOW_MULTI == 0 {
            // one program per cgroup: attaching is replacing
            return Ok(bpf::attach(dir, new.as_fd(), self.flags & BPF_F_ALLOW_OVERRIDE, None)?);
        }
        match bpf::attach(dir, new.as_fd(), BPF_F_ALLOW_MULTI, Some(self.old.as_fd())) {
            // KERNEL(5.6): no replacing before. All must allow, so that until the old one is off nothing is open
            Err(Errno::EINVAL) => {
                bpf::attach(dir, new.as_fd(), BPF_F_ALLOW_MULTI, None)?;
                Ok(bpf::detach(dir, self.old.as_fd())?)
            }
            // held by a bpf_link, which only its owner may point at another program; or just gone
            Err(Errno::ENOENT) => Err(anyhow::Error::new(Errno::ENOENT).context(Failure::new(
                &catalog::CGROUP,
                "it is attached by a link of another program",
                LISTED_HINT,
            ))),
            other => Ok(other?),
        }
    }
}

fn read_program(id: u32) -> Result<(OwnedFd, Vec<Insn>)> {
    let fd = bpf::prog_by_id(id).context("cannot open it")?;
    let info = bpf::prog_info(fd.as_fd()).context("cannot read it")?;
    if info.maps > 0 {
        return Err(failure(&catalog::CGROUP, format!("its program {:?} uses maps", info.name), LISTED_HINT));
    }
    let insns =
        info.insns.ok_or_else(|| failure(&catalog::CGROUP, "the kernel withholds its instructions", UNBLIND_HINT))?;
    Ok((fd, insns))
}

fn refused(errno: Errno, path: &Path) -> anyhow::Error {
    let what = format!("cannot read the device programs of cgroup {path:?}");
    let error = anyhow::Error::new(errno);
    match errno {
        Errno::EPERM => error.context(Failure::new(
            &catalog::CGROUP,
            what,
            "run the engine as root of the host, or have it list the devices in config.json (CDI)",
        )),
        _ => error.context(what),
    }
}

fn foreign_finding(path: &Path) -> Finding {
    Finding::of(
        &catalog::CGROUP_ABOVE,
        format!(
            "a device program of a cgroup above {path:?} also has to allow the devices, and is not the container's"
        ),
        "allow them where it comes from: \"DeviceAllow=\" of the systemd unit or slice that the engine runs in",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crun_pins_programs_of_scopes() {
        let pins = |cgroup| pins(Path::new("/sys/fs/cgroup"), Path::new(cgroup));
        let found = pins("/sys/fs/cgroup/machine.slice/libpod-0a.scope");
        let expected = ["/sys/fs/bpf/crun/libpod-0a_scope", "/sys/fs/bpf/crun/machine_slice/libpod-0a_scope"];
        assert_eq!(found, expected.map(PathBuf::from));
        assert!(pins("/sys/fs/cgroup/libpod_parent/libpod-0a").is_empty(), "no unit of systemd's");
    }

    #[test]
    fn own_cgroups_end_where_the_id_is() {
        let all = |mount: &str, path: &str, id: &str| {
            own_cgroups(Path::new(mount), Path::new(path), id)
                .into_iter()
                .map(|path| path.to_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let m = "/sys/fs/cgroup";
        assert_eq!(
            all(m, "/sys/fs/cgroup/machine.slice/libpod-0a.scope/container", "0a"),
            ["/sys/fs/cgroup/machine.slice/libpod-0a.scope/container", "/sys/fs/cgroup/machine.slice/libpod-0a.scope"]
        );
        for (path, id) in [
            ("/sys/fs/cgroup/kubepods.slice/crio-0a.scope", "0a"),
            ("/sys/fs/cgroup/libpod_parent/libpod-0a", "0a"),
            ("/sys/fs/cgroup/0a", "0a"),
            // no id anywhere: only init's own
            ("/sys/fs/cgroup/system.slice/foo.service", "0a"),
            // an id that is part of a name above
            ("/sys/fs/cgroup/machine.slice/machine", "machine"),
            ("/sys/fs/cgroup/machine.slice/x/y", "machine"),
            ("/sys/fs/cgroup/x/y", "cgroup"),
            ("/sys/fs/cgroup", "cgroup"),
        ] {
            assert_eq!(all(m, path, id), [path], "{id}");
        }
        let unit_of = |path: &str| unit(&own_cgroups(Path::new(m), Path::new(path), "0a"), "0a");
        for path in ["/sys/fs/cgroup/machine.slice/libpod-0a.scope/container", "/sys/fs/cgroup/a.slice/libpod-0a.scope"]
        {
            assert_eq!(unit_of(path).as_deref(), Some("libpod-0a.scope"));
        }
        for path in ["/sys/fs/cgroup/libpod_parent/libpod-0a", "/sys/fs/cgroup/user.slice/session-1.scope"] {
            assert_eq!(unit_of(path), None, "{path}");
        }
    }
}
