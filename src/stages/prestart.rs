//! The stages prestart, createRuntime and createContainer, at which the container already has a process.

use std::mem::ManuallyDrop;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use nix::unistd::Pid;

use base::paths::HostPath;
use base::report::{Failure, classify, failure, line};
use base::sys::{ns, proc_file};
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
use records::Outcome;

/// The namespaces in which the hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Namespaces {
    /// prestart, createRuntime: the runtime's; the state contains the container's process id
    OfRuntime,
    /// createContainer: the container's, before pivot_root(2)
    OfContainer,
    /// configure without a process: only the mount namespace is the container's
    MountOnly,
}

impl Namespaces {
    const fn stage(self) -> &'static str {
        match self {
            Self::OfRuntime => "prestart",
            Self::OfContainer => "createContainer",
            Self::MountOnly => "configure",
        }
    }
}

/// Sets up the container whose state is on stdin. Exit status 0 if it may start, 1 if not. `debug` logs to stderr regardless of
/// config.toml.
pub(crate) fn run(namespaces: Namespaces, config: Option<&Path>, debug: bool) -> ExitCode {
    run_stage(namespaces.stage(), |call| {
        set_up(namespaces, config, debug, call)
    })
}

fn set_up(
    namespaces: Namespaces,
    config: Option<&Path>,
    debug: bool,
    call: &mut Call,
) -> Result<()> {
    let (bytes, state) = read_state()?;
    if state.has_ended {
        // A hook file with the stages prestart and poststop passes the same arguments at both.
        poststop::note_end(&state);
        return Ok(());
    }
    call.record().pid = state.pid;
    let spec = oci::spec_view::read_if(&state.bundle, request::may_ask).map_err(|error| {
        // The state names the container, so that the record of the failure can be found.
        call.name_container(
            &state.id,
            oci::state::pod(&bytes, &state.bundle),
            &state.bundle,
        );
        match namespaces {
            Namespaces::OfContainer if ns::in_user_namespace().unwrap_or_default() => {
                error.context(unreadable_in_user_namespace())
            }
            _ => error,
        }
    })?;
    call.name_container(&state.id, spec.pod.clone(), &state.bundle);
    if debug {
        call.open(&HostPath::new("/dev/stderr"))?;
    }
    let Some((request, config)) = decide::request(&spec, config, call)? else {
        return Ok(());
    };
    let start = begin();
    let (pid, cgroup_error) = match namespaces {
        Namespaces::OfRuntime | Namespaces::MountOnly => (state.init()?, None),
        Namespaces::OfContainer => {
            let (init, runtime) = init_and_runtime()?;
            (init, leave_device_cgroup(runtime).err())
        }
    };
    let gpus =
        decide::gpus_for(request, config, &spec.devices, call).map_err(
            |error| match cgroup_error {
                Some(why) => error.context(cannot_leave_cgroup(&why)),
                None => error,
            },
        )?;
    // The process exits soon, and the kernel then closes the directories of the host and frees the memory in two calls.
    let Some(gpus) = gpus.map(ManuallyDrop::new) else {
        return Ok(());
    };
    set_up_container(
        namespaces,
        pid,
        &Container::new(&state, &spec)?,
        &gpus,
        start,
        call,
    )
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
        Namespaces::OfContainer => OpenContainer::inside(&container.spec.rootfs)?,
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
    call.note(&given);
    call.end(Outcome::Given, &given);
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

/// Returns the container's init process and the runtime: at createContainer the parent and grandparent of the hook. The process
/// ids belong to the pid namespace of /proc, which is still the host's.
fn init_and_runtime() -> Result<(i32, i32)> {
    let init = parent("self")?;
    Ok((init, parent(&init.to_string())?))
}

fn parent(pid: &str) -> Result<i32> {
    proc_file::parent(pid).with_context(|| {
        format!("\"/proc/{pid}/status\" lists no parent process: the stage is not createContainer")
    })
}

/// Moves the hook from the container's device cgroup to the runtime's. At createContainer it starts in the container's, which
/// denies access to the driver.
fn leave_device_cgroup(runtime: i32) -> Result<()> {
    ns::enter_cgroup_ns(runtime).context("cannot enter the cgroup namespace of the runtime")?;
    cgroup::join(Pid::from_raw(runtime))
}

/// The error for a hook that runs in the container's user namespace: setns(2) to the runtime's cgroup namespace requires
/// CAP_SYS_ADMIN in the user namespace that owns it, which the container's root user lacks.
fn cannot_leave_cgroup(why: &anyhow::Error) -> Failure {
    Failure::new(
        &catalog::CGROUP,
        format!(
            "the hook cannot leave the container's device cgroup ({})",
            line(why)
        ),
        OTHER_STAGES,
    )
}

/// The error for a hook in a user namespace that cannot read config.json: Podman's bundles are in a directory that only the
/// host's root may enter.
fn unreadable_in_user_namespace() -> Failure {
    Failure::new(
        &catalog::STATE,
        "the hook is in the container's user namespace",
        OTHER_STAGES,
    )
}

const OTHER_STAGES: &str =
    "have it called at another stage: precreate (Podman), createRuntime or prestart";
