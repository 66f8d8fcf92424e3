//! The stages at which a container is set up that has a process already: prestart, createRuntime, createContainer.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use nix::unistd::Pid;

use base::paths::HostPath;
use base::report::{Failure, catalog, classify, line};
use base::sys::{ns, proc_file};

use super::{image, read_stdin};
use crate::inject::container::{self, OpenContainer};
use crate::inject::{self, cgroup};
use crate::log::Log;
use crate::oci;
use crate::oci::device_rules::DeviceRule;
use crate::plan::{self, Container, Gpus};
use crate::record::Outcome;
use crate::request;

/// From where the hook sees the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// prestart, createRuntime: the runtime's namespaces; the state has the container's process
    Outside,
    /// createContainer: the container's namespaces, before pivot_root
    Inside,
    /// Called by who sets a container up without a runtime: in its mount namespace, and nowhere else
    Here,
}

impl Place {
    const fn stage(self) -> &'static str {
        match self {
            Self::Outside => "prestart",
            Self::Inside => "createContainer",
            Self::Here => "configure",
        }
    }
}

/// Sets the container up whose state is on stdin. 0 if it may start, 1 if it must not. `debug` has the log on stderr,
/// whatever config.toml says.
pub(crate) fn run(place: Place, config: Option<&Path>, debug: bool) -> ExitCode {
    let mut log = Log::for_stage(place.stage());
    match set_up(place, config, debug, &mut log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.fail(&error);
            ExitCode::FAILURE
        }
    }
}

fn set_up(place: Place, config: Option<&Path>, debug: bool, log: &mut Log) -> Result<()> {
    let bytes = read_stdin()?;
    let state = oci::state::parse(&bytes)?;
    let spec = oci::spec_view::read_if(&state.bundle, request::may_ask).map_err(|error| {
        // crun up to 1.28 names "/" as the bundle of a container with a user namespace and devices: the state is all that
        // is known of it, and the record all that is left of its start.
        log.name_container(&state.id, oci::state::pod(&bytes), &state.bundle);
        match place {
            Place::Inside if ns::in_user_namespace().unwrap_or_default() => error.context(unread_inside()),
            _ => error,
        }
    })?;
    log.name_container(&state.id, spec.pod.clone(), &state.bundle);
    if debug {
        log.open(&HostPath::new("/dev/stderr"))?;
    }
    // Most containers end here: nothing else has been read, not even config.toml.
    let Some((request, config)) = plan::asked(&spec, config, log)? else { return Ok(()) };
    let start = begin();
    let (pid, kept) = match place {
        Place::Outside | Place::Here => (state.init()?, None),
        Place::Inside => {
            let (init, runtime) = above()?;
            (init, leave_device_cgroup(runtime).err())
        }
    };
    let gpus = plan::gpus(request, config, &spec.devices, log).map_err(|error| match kept {
        Some(why) => error.context(kept_inside(&why)),
        None => error,
    })?;
    let Some(gpus) = gpus else { return Ok(()) };
    give(place, pid, &Container::of(&state, &spec)?, &gpus, start, log)
}

/// When it began: a container's files have to answer in time.
pub(super) fn begin() -> Instant {
    // What the hook creates in a container is for all its users, whatever mask the engine runs with.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    Instant::now()
}

/// Gives the container what was planned; `pid` is its first process. This process ends up in the container's mount namespace.
///
/// # Errors
/// If it cannot be given; then nothing of it is there.
pub(super) fn give(
    place: Place,
    pid: i32,
    container: &Container<'_>,
    gpus: &Gpus,
    start: Instant,
    log: &mut Log,
) -> Result<()> {
    container::set_deadline(start)?;
    let open = match place {
        Place::Outside => OpenContainer::open(pid, container.rootfs)?,
        Place::Inside => OpenContainer::inside(container.rootfs)?,
        Place::Here => OpenContainer::here(container.rootfs)?,
    };
    let plan::Live { steps, rules, findings } = gpus.steps(container, &image(&open, gpus));
    findings.iter().for_each(|finding| log.finding(finding));
    // All that can fail on the host's side comes before the first thing that anybody can see.
    let prepared = inject::prepare(&steps, container.mount_label)?;
    log.step_done("container");
    // A rootless runtime cannot attach a device filter: both the "devices" controller and BPF_PROG_TYPE_CGROUP_DEVICE require
    // capabilities in the host's user namespace. So there is no filter to extend.
    if !container.process.is_rootless() {
        allow_devices(Pid::from_raw(pid), container, &rules, gpus.config().edit_cgroups, log)?;
        log.step_done("cgroup");
    }
    let finished = inject::carry_out(prepared, open, container)?;
    finished.findings.iter().for_each(|finding| log.finding(finding));
    log.created(finished.created);
    log.step_done("mounts");
    let given = format!("injected {gpus}");
    log.note(&given);
    log.end(Outcome::Given, &given);
    Ok(())
}

fn allow_devices(pid: Pid, container: &Container<'_>, rules: &[DeviceRule], edit: bool, log: &mut Log) -> Result<()> {
    if !edit {
        cgroup::forbidden(pid, rules).iter().for_each(|finding| log.finding(finding));
        return Ok(());
    }
    let member = cgroup::Member { pid, id: container.id, cgroups_path: container.cgroups_path };
    let outcome =
        cgroup::allow(member, rules).map_err(|error| classify(error, &catalog::CGROUP, cgroup::LISTED_HINT))?;
    outcome.findings.iter().for_each(|finding| log.finding(finding));
    Ok(())
}

/// The container's first process and the runtime: at createContainer those above us. Their numbers are those of the pid
/// namespace of /proc, which is still the host's.
fn above() -> Result<(i32, i32)> {
    let parent = |pid: &str| {
        proc_file::parent(pid)
            .with_context(|| format!("\"/proc/{pid}/status\" names no parent: the stage is not createContainer"))
    };
    let init = parent("self")?;
    Ok((init, parent(&init.to_string())?))
}

/// At createContainer we are in the container's device cgroup, where nobody can ask the driver. So we go to the runtime's.
fn leave_device_cgroup(runtime: i32) -> Result<()> {
    ns::enter_cgroup_ns(runtime).context("cannot enter the cgroup namespace of the runtime")?;
    cgroup::join(Pid::from_raw(runtime))
}

/// The error of a hook that runs in the container's user namespace. To enter the runtime's cgroup namespace, setns(2) requires
/// CAP_SYS_ADMIN in the user namespace that owns it, and the container's root user has that only in his own.
fn kept_inside(why: &anyhow::Error) -> Failure {
    Failure::new(
        &catalog::CGROUP,
        format!("the hook cannot leave the container's device cgroup ({})", line(why)),
        OTHER_STAGES,
    )
}

/// Podman keeps bundles below a directory that only the host's root may enter.
fn unread_inside() -> Failure {
    Failure::new(&catalog::STATE, "the hook is in the container's user namespace", OTHER_STAGES)
}

const OTHER_STAGES: &str = "have it called at another stage: precreate (Podman), createRuntime or prestart";
