//! The stages at which a container is set up: the pipeline from the state on stdin to the injection.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use nix::unistd::Pid;

use base::paths::{ContainerPath, HostPath};
use base::read::read_limited;
use base::report::{Failure, Finding, catalog, classify, line};
use base::sys::in_root::Root;
use base::sys::{ns, proc_file};
use nvidia_host::capability::DRIVER_CAPABILITIES;
use nvidia_host::config::Config;
use nvidia_host::edits::{Edits, Wanted};
use nvidia_host::host::Host;
use nvidia_host::prepare::Places;
use nvidia_host::prepare::host::{Prepared, may_prepare, prepare_host};
use nvidia_host::timeouts;

use crate::inject::container::{self, Container};
use crate::inject::{self, cgroup, leftovers};
use crate::log::Log;
use crate::oci::device_rules::{DeviceRule, already_allowed};
use crate::oci::{self, SpecView, State};
use crate::plan::{self, Verdict};
use crate::record::Outcome;
use crate::record::created::{self, Entry};
use crate::record::store::Store;
use crate::request::asked::Asked;
use crate::request::{self, GpuRequest};

/// A container has ended: what its start created in its file system goes, and its record, unless it failed.
#[must_use]
pub fn forget() -> ExitCode {
    let state = read_stdin().and_then(|bytes| oci::state::parse(&bytes));
    if let (Ok(state), Ok(Some(store))) = (state, Store::existing()) {
        let created = store.created_in(&state.id);
        store.forget(&state.id);
        // Engines may have unmounted the root file system, and what stays does no harm.
        if let Some(created) = created {
            remove_created(&state, &created).ok();
        }
    }
    ExitCode::SUCCESS
}

fn remove_created(state: &State, created: &[Entry]) -> Result<()> {
    let spec = oci::spec_view::read(&state.bundle)?;
    container::set_deadline(Instant::now())?;
    let rootfs = Root::open(&spec.rootfs)?;
    if spec.rootfs != Path::new("/") && leftovers::is_own(&rootfs, state, &spec) {
        leftovers::remove(&rootfs, &created::merge(created.to_vec(), leftovers::mount_points(&rootfs, &spec)));
    }
    Ok(())
}

/// From where the hook sees the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
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
#[must_use]
pub fn run(place: Place, config: Option<&Path>, debug: bool) -> ExitCode {
    let mut log = Log::of(place.stage());
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
    let Some((request, config)) = read_request(&spec, config, log)? else { return Ok(()) };
    set_up_gpus(place, &state, &spec, &request, &config, log)
}

/// What the container asks for, if that is for us to give; the log is told why not.
///
/// # Errors
/// If the request or config.toml is wrong.
pub fn read_request(
    spec: &SpecView,
    config: Option<&Path>,
    log: &mut Log,
) -> Result<Option<(Box<GpuRequest>, Config)>> {
    // Most containers end here: nothing else has been read, not even config.toml.
    let Some((config, findings)) = plan::read_config(spec, config)? else { return Ok(None) };
    open_log(&config, log);
    let verdict = plan::verdict(spec, &config)?;
    if !matches!(verdict, Verdict::Nothing(_)) {
        log.keep();
    }
    findings.iter().for_each(|finding| log.finding(finding));
    match verdict {
        Verdict::Gpus(request) => {
            log.record().asked = Some(Asked::from(&*request));
            log.record().request = format!("{} asks for {}", request.asked_by, request.devices.names().join(","));
            log.step_done("request");
            return Ok(Some((request, config)));
        }
        Verdict::Nothing(reason) => log.note(&format!("nothing to do: {reason}")),
        Verdict::LeftAlone(finding) => leave_alone(&finding, log),
    }
    Ok(None)
}

/// The container starts, and the hook has done nothing.
fn leave_alone(finding: &Finding, log: &mut Log) {
    log.finding(finding);
    log.end(Outcome::LeftAlone, &finding.what);
}

/// Opens the configured log. Losing it is no reason to stop a container.
pub fn open_log(config: &Config, log: &mut Log) {
    if let Some(path) = &config.debug
        && !log.is_open()
        && let Err(error) = log.open(path)
    {
        log.finding(&Finding::of(&catalog::NO_LOG, line(&error), "check debug in config.toml"));
    }
}

fn read_stdin() -> Result<Vec<u8>> {
    read_limited(std::io::stdin().lock(), oci::MAX_JSON).context("cannot read the container state on stdin")
}

/// The host, and what the container gets of it; what there is to say about that is in the log. `None` if it gets nothing,
/// and starts all the same.
///
/// # Errors
/// If there is no driver, or something is missing that the container cannot do without.
pub fn look(request: &GpuRequest, config: &Config, log: &mut Log) -> Result<Option<(Host, Edits)>> {
    match find(request, config, log) {
        Ok(found) => Ok(Some(found)),
        Err(error) => {
            leave_alone(&plan::excuse(request, config, error)?, log);
            Ok(None)
        }
    }
}

fn find(request: &GpuRequest, config: &Config, log: &mut Log) -> Result<(Host, Edits)> {
    let host = look_prepared(request, config, log)?;
    log.record().driver.clone_from(&host.inventory.driver_version);
    log.step_done("driver");
    let mut findings = Vec::new();
    let decided = plan::edits(&host, request, config, &mut findings);
    findings.iter().for_each(|finding| log.finding(finding));
    let (devices, edits) = decided?;
    log.record().devices = devices.iter().map(ToString::to_string).collect();
    log.step_done("files");
    Ok((host, edits))
}

/// Gives the container what it asks for. This process ends up in the container's mount namespace.
///
/// # Errors
/// If it cannot be given; then nothing of it is there.
pub fn set_up_gpus(
    place: Place,
    state: &State,
    spec: &SpecView,
    request: &GpuRequest,
    config: &Config,
    log: &mut Log,
) -> Result<()> {
    let start = Instant::now();
    // What we create in a container is for all its users, whatever mask the engine runs with.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let (pid, kept) = match place {
        Place::Outside | Place::Here => (state.init()?, None),
        Place::Inside => {
            let (init, runtime) = above()?;
            (init, leave_device_cgroup(runtime).err())
        }
    };
    let looked = look(request, config, log).map_err(|error| match kept {
        Some(why) => error.context(kept_inside(&why)),
        None => error,
    })?;
    let Some((host, edits)) = looked else { return Ok(()) };

    container::set_deadline(start)?;
    let container = match place {
        Place::Outside => Container::open(pid, &spec.rootfs)?,
        Place::Inside => Container::inside(&spec.rootfs)?,
        Place::Here => Container::here(&spec.rootfs)?,
    };
    let facts = container.facts();
    facts.finding().iter().for_each(|finding| log.finding(finding));
    let compat = |dir: &ContainerPath, driver: &str, cuda: &str| container.compat_libraries(dir, driver, cuda);
    let (mut steps, finding) = plan::steps(&edits, facts, (request, config, &host), compat);
    finding.iter().for_each(|finding| log.finding(finding));
    plan::access(&mut steps, &edits, spec, config)?.iter().for_each(|finding| log.finding(finding));
    // All that can fail on the host's side comes before the first thing that anybody can see.
    let plan = inject::prepare(&steps, &spec.mount_label)?;
    log.step_done("container");
    // In a user namespace nothing filters devices, and nobody may write cgroups of the host.
    if !ns::in_user_namespace()? {
        let (pid, rules) = (Pid::from_raw(pid), rules_to_add(&edits, spec));
        let findings = if config.edit_cgroups {
            // Without a bundle the process was named on the command line.
            let cgroups_path = (!state.bundle.as_os_str().is_empty()).then_some(spec.cgroups_path.as_str());
            let member = cgroup::Member { pid, id: &state.id, cgroups_path };
            cgroup::allow(member, &rules)
                .map_err(|error| classify(error, &catalog::CGROUP, cgroup::LISTED_HINT))?
                .findings
        } else {
            cgroup::forbidden(pid, &rules).into_iter().collect()
        };
        findings.iter().for_each(|finding| log.finding(finding));
        log.step_done("cgroup");
    }
    let finished = inject::carry_out(plan, container, state, spec)?;
    finished.findings.iter().for_each(|finding| log.finding(finding));
    log.created(finished.created);
    log.step_done("mounts");
    let given = format!("injected {}", in_words(&edits, &host, request));
    log.note(&given);
    log.end(Outcome::Given, &given);
    Ok(())
}

/// What a container gets, for the log.
#[must_use]
pub fn in_words(edits: &Edits, host: &Host, request: &GpuRequest) -> String {
    format!(
        "{} files and {} device nodes of driver {} for {}={}",
        edits.files.len(),
        edits.nodes.len(),
        host.inventory.driver_version,
        DRIVER_CAPABILITIES,
        request.capabilities
    )
}

/// The host, with the modules loaded and the nodes made that the request needs.
fn look_prepared(request: &GpuRequest, config: &Config, log: &mut Log) -> Result<Host> {
    fn look(config: &Config, log: &Log) -> Result<Host> {
        Host::look(config, &|| log.record_so_far())
    }
    if !config.load_kmods {
        return look(config, log);
    }
    let wanted = request.wanted()?;
    if is_bare(config)? {
        prepare_for(&wanted, config, log);
        return look(config, log);
    }
    let began = Instant::now();
    let host = look(config, log);
    // A GPU that was plugged in later, a MIG device that was just made: only now is it known what the request needs of them.
    let is_complete = host.as_ref().is_ok_and(|host| !host.lacks_nodes(&wanted));
    let asking = began.elapsed();
    if is_complete || !prepare_for(&wanted, config, log) {
        return host;
    }
    // NVML is asked a second time. Both together may take as long as once.
    look(&Config { nvml_timeout: timeouts::left_for_nvml(config.nvml_timeout, asking), ..config.clone() }, log)
}

/// Right after boot nothing may have made the driver's nodes yet, or the links by which systemd knows devices: runc before
/// 1.1.7 does not list a device without one to systemd, and a daemon-reload takes it away. Three looks, where they exist.
fn is_bare(config: &Config) -> Result<bool> {
    if config.driver_root.as_path() != Path::new("/") {
        return Ok(false);
    }
    let driver = nvidia_host::driver::open_root(&config.driver_root)?;
    let exists = |name: &str| driver.locate(Path::new(name)).is_ok();
    Ok(!["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/char/195:255"].into_iter().all(exists))
}

/// Returns whether anything was done. Nodes in a driver root of its own are a driver container's, which makes them itself.
fn prepare_for(wanted: &Wanted, config: &Config, log: &mut Log) -> bool {
    let prepare = || -> Result<_> {
        let driver = nvidia_host::driver::open_root(&config.driver_root)?;
        let places = Places::of(driver, config.dev_root.as_ref())?;
        if places.dev.path().as_path() != Path::new("/") || !may_prepare()? {
            return Ok(Prepared::default());
        }
        log.record_so_far();
        let channels = if config.make_imex_channels { wanted.imex_channels.clone() } else { Vec::new() };
        prepare_host(config, &channels, timeouts::MODULES)
    };
    // A failure is not reported here: the error about what is missing then is the one to read.
    let prepared = prepare().unwrap_or_default();
    prepared.done.iter().for_each(|line| log.note(line));
    prepared.failed.iter().for_each(|error| log.note(&line(error)));
    !prepared.done.is_empty()
}

/// A device rule for each node, but for those that config.json allows already: what the runtime gave stays the
/// runtime's, and survives what it does later.
fn rules_to_add(edits: &Edits, spec: &SpecView) -> Vec<DeviceRule> {
    let rules = edits.nodes.iter().map(|node| DeviceRule { major: node.major, minor: node.minor });
    rules.filter(|rule| !already_allowed(&spec.device_rules, *rule)).collect()
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

/// A root user of a user namespace may not.
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
