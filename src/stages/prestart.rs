//! The stages prestart and createRuntime, at which the container already has a process.

use std::mem::ManuallyDrop;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use nix::unistd::Pid;

use base::paths::HostPath;
use base::report::{classify, failure};
use findings::catalog;
use nvidia_host::config::{Config, DeniedDevices};

use super::{decide, image, poststop, read_state, run_stage};
use crate::cgroup::{self, DeviceAccess};
use crate::inject;
use crate::inject::container::OpenContainer;
use crate::oci;
use crate::oci::device_rules::DeviceRule;
use crate::plan::request;
use crate::plan::{self, Container, Gpus};
use crate::record::call::Call;

/// The namespaces in which the hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Namespaces {
    /// prestart, createRuntime: the runtime's; the process of the container is known
    OfRuntime,
    /// configure without a process: only the mount namespace is the container's
    MountOnly,
}

/// Sets up the container whose state is on stdin. Exit status 0 if it may start, 1 if not. `debug` logs to stderr regardless of
/// config.toml.
pub(crate) fn run(config: Option<&Path>, debug: bool) -> ExitCode {
    run_stage("prestart", |call| set_up(config, debug, call))
}

fn set_up(config: Option<&Path>, debug: bool, call: &mut Call) -> Result<()> {
    let (bytes, state) = read_state()?;
    if state.has_ended {
        // A hook file with the stages prestart and poststop passes the same arguments at both.
        poststop::note_end(&state);
        return Ok(());
    }
    call.record().pid = state.pid;
    let spec = oci::spec_view::read_if(&state.bundle, request::may_ask).inspect_err(|_| {
        // The state names the container, so that the record of the failure can be found.
        call.name_container(
            &state.id,
            oci::state::pod(&bytes, &state.bundle),
            &state.bundle,
        );
    })?;
    call.name_container(&state.id, spec.pod.clone(), &state.bundle);
    if debug {
        call.open(&HostPath::new("/dev/stderr"))?;
    }
    let Some((request, config)) = decide::request(&spec, config, call)? else {
        return Ok(());
    };
    let start = begin();
    let pid = state.init()?;
    let gpus = decide::gpus_for(request, config, &spec.devices, call)?;
    // The process exits soon, and the kernel then closes the directories of the host and frees the memory in two calls.
    let Some(gpus) = gpus.map(ManuallyDrop::new) else {
        return Ok(());
    };
    let container = Container::new(&state, &spec)?;
    set_up_container(Namespaces::OfRuntime, pid, &container, &gpus, start, call)
}

/// Prepares the process and returns the start time, for the deadline of the container's files.
pub(super) fn begin() -> Instant {
    // All users of a container must be able to read files that the hook creates, whatever the engine's umask is.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    Instant::now()
}

/// Carries out the plan for the container whose init process is `pid`. This process stays in the container's mount namespace.
///
/// # Errors
/// If the setup fails; it is then undone.
pub(super) fn set_up_container(
    namespaces: Namespaces,
    pid: i32,
    container: &Container<'_>,
    gpus: &Gpus,
    start: Instant,
    call: &mut Call,
) -> Result<()> {
    call.set_deadline(start)?;
    let open = match namespaces {
        Namespaces::OfRuntime => OpenContainer::open(pid, &container.spec.rootfs)?,
        Namespaces::MountOnly => OpenContainer::here(&container.spec.rootfs)?,
    };
    let plan::Live {
        steps,
        rules,
        findings,
    } = gpus.steps(container, &image(&open, gpus));
    call.findings(&findings);
    // Everything on the host that can fail comes before the first visible change.
    let prepared = inject::prepare(&steps, &container.spec.mount_label)?;
    call.step_done("container");
    // A rootless runtime cannot attach a device filter: both the "devices" controller and BPF_PROG_TYPE_CGROUP_DEVICE require
    // capabilities in the host's user namespace. So there is no filter to extend.
    if !container.process.is_rootless() {
        allow_devices(Pid::from_raw(pid), container, &rules, gpus.config(), call)?;
        call.step_done("cgroup");
    }
    let findings = inject::apply(prepared, open, container)?;
    call.findings(&findings);
    call.step_done("mounts");
    let given = format!("injected {gpus}");
    call.given(&given);
    Ok(())
}

/// Lets the container open the devices.
///
/// # Errors
/// If its cgroup denies one of them in the end, unless config.toml permits that.
fn allow_devices(
    pid: Pid,
    container: &Container<'_>,
    rules: &[DeviceRule],
    config: &Config,
    call: &mut Call,
) -> Result<()> {
    let member = cgroup::Member {
        pid,
        id: container.id,
        cgroups_path: container.cgroups_path,
    };
    let grant = if config.edit_cgroups {
        cgroup::allow(member, rules)
            .map_err(|error| classify(error, &catalog::CGROUP, cgroup::LISTED_HINT))?
    } else {
        cgroup::examine(pid, rules)
    };
    let is_error =
        grant.access == DeviceAccess::Denied && config.denied_devices == DeniedDevices::Error;
    let mut findings = grant.findings.into_iter();
    let cause = if is_error { findings.next() } else { None };
    for finding in findings {
        call.finding(&finding);
    }
    match cause {
        Some(cause) => Err(failure(
            &catalog::CGROUP,
            format!(
                "the container's device cgroup denies the GPUs: {}",
                cause.what
            ),
            cause.fix,
        )),
        None => Ok(()),
    }
}
