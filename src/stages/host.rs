//! Inspects the host, and first loads kernel modules and creates device nodes if config.toml allows that.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;

use base::report::{Finding, kind_of, line};
use findings::catalog;
use nvidia_host::config::Config;
use nvidia_host::driver::nodes::{CAPS, DeviceNode};
use nvidia_host::edits::Wanted;
use nvidia_host::host::{Cached, Driver, Host, Roots, Source};
use nvidia_host::prepare::host::{Preparation, Prepared, foresee, may_prepare, prepare_host};
use nvidia_host::timeouts;

use crate::oci::spec_view::LinuxDevice;
use crate::plan::request::GpuRequest;
use crate::plan::{self, Provided};
use crate::record::call::Call;

/// Returns the host, after the modules that the request needs were loaded and its nodes created.
///
/// # Errors
/// If the driver is missing or does not respond.
pub(super) fn inspect_prepared(
    request: &GpuRequest,
    config: &Config,
    call: &mut Call,
) -> Result<Host> {
    if !config.load_kmods {
        return inspect(request, config, call);
    }
    let wanted = request.wanted()?;
    if is_bare(config)? {
        prepare_for(&wanted, config, call);
        return inspect(request, config, call);
    }
    let began = Instant::now();
    let host = inspect(request, config, call);
    let took = began.elapsed();
    if is_complete(&host, &wanted) || !prepare_for(&wanted, config, call) {
        return host;
    }
    // NVML is queried a second time. The timeout applies to both queries together.
    inspect(
        request,
        &Config {
            nvml_timeout: timeouts::left_for_nvml(config.nvml_timeout, took),
            ..config.clone()
        },
        call,
    )
}

/// Prepares the host after a decision that failed, and returns it as it is then. `None` if the preparation does not concern the error, or
/// changed nothing. Only the decision examines the type and the number of each node.
///
/// # Errors
/// If the driver is missing or does not respond.
pub(super) fn repair(
    error: &anyhow::Error,
    request: &GpuRequest,
    config: &Config,
    call: &mut Call,
) -> Result<Option<Host>> {
    if !is_about_a_wrong_node(error) || !config.load_kmods {
        return Ok(None);
    }
    if !prepare_for(&request.wanted()?, config, call) {
        return Ok(None);
    }
    inspect(request, config, call).map(Some)
}

fn is_about_a_wrong_node(error: &anyhow::Error) -> bool {
    kind_of(error).is_some_and(|kind| kind.id() == catalog::NODE_WRONG.id())
}

/// What a start would do, for `plan` and `doctor`, which change nothing.
pub(crate) struct PredictedStart {
    /// What the hook would do on the host first
    pub prepares: Preparation,
    /// The decision; `None` if NVML would report something else after the preparation
    pub decided: Option<Result<(Provided, Host)>>,
}

/// Returns what a start would do for the request of a container whose config.json lists the device nodes `listed`. Adds findings.
///
/// # Errors
/// If the request is invalid, or a driver root cannot be opened.
pub(crate) fn expect(
    request: &GpuRequest,
    config: &Config,
    listed: &[LinuxDevice],
    findings: &mut Vec<Finding>,
) -> Result<PredictedStart> {
    let host = inspect_for(request, config, &|| ());
    let wanted = request.wanted()?;
    let may_prepare = config.load_kmods && prepares(config)?;
    if may_prepare && (is_bare(config)? || !is_complete(&host, &wanted)) {
        return expect_prepared(host, request, config, listed, findings);
    }
    let mut first = Vec::new();
    let decided = decide(host, request, config, listed, &mut first);
    if let Err(error) = &decided
        && may_prepare
        && is_about_a_wrong_node(error)
    {
        let host = inspect_for(request, config, &|| ());
        return expect_prepared(host, request, config, listed, findings);
    }
    findings.extend(first);
    Ok(PredictedStart {
        prepares: Preparation::default(),
        decided: Some(decided),
    })
}

/// Returns what a start would do that prepares this host first.
fn expect_prepared(
    host: Result<Host>,
    request: &GpuRequest,
    config: &Config,
    listed: &[LinuxDevice],
    findings: &mut Vec<Finding>,
) -> Result<PredictedStart> {
    let wanted = request.wanted()?;
    let prepares = foresee(config, imex_channels(&wanted, config))?;
    // NVML lists GPUs and MIG devices only with their nodes, and nothing without /dev/nvidiactl.
    let is_of_mig = |node: &DeviceNode| node.path.absolute().starts_with(CAPS);
    let is_unknown = !prepares.modules.is_empty()
        || prepares.nodes.values().any(is_of_mig)
        || !prepares.is_empty() && host.as_ref().map_or(true, Host::has_closed_gpus);
    if is_unknown {
        return Ok(PredictedStart {
            prepares,
            decided: None,
        });
    }
    let host = host.map(|host| host.with_nodes(prepares.changed_nodes()));
    let decided = decide(host, request, config, listed, findings);
    Ok(PredictedStart {
        prepares,
        decided: Some(decided),
    })
}

fn decide(
    host: Result<Host>,
    request: &GpuRequest,
    config: &Config,
    listed: &[LinuxDevice],
    findings: &mut Vec<Finding>,
) -> Result<(Provided, Host)> {
    let host = host?;
    let provided = plan::decide(request, config, &host, listed, findings)?;
    Ok((provided, host))
}

/// Whether the host has all nodes that the request needs, and NVML can open them. Only the inventory shows whether nodes of a new GPU or
/// MIG device are missing.
fn is_complete(host: &Result<Host>, wanted: &Wanted) -> bool {
    match host {
        Ok(host) => !host.lacks_nodes(wanted),
        Err(_) => false,
    }
}

/// Inspects the host. NVML can take long, and engines kill a hook that takes too long, so the record is written before.
fn inspect(request: &GpuRequest, config: &Config, call: &Call) -> Result<Host> {
    inspect_for(request, config, &|| call.record_so_far())
}

/// Inspects the host, without NVML if the request does not depend on it. Calls `slow` before NVML.
fn inspect_for(request: &GpuRequest, config: &Config, slow: &dyn Fn()) -> Result<Host> {
    let driver = Driver::find_cached(config, request.capabilities)?;
    if !request.needs_nvml()
        && let Some(inventory) = driver.known()
    {
        return driver.host(Source::Given(inventory));
    }
    driver.host(Source::Cache(Cached {
        names: request.only_devices(config),
        slow,
    }))
}

/// Reports whether nodes or links of the driver are missing, as they can be after boot. systemd finds devices by the links in
/// /dev/char: runc before 1.1.7 does not pass a device without a link to systemd, and a daemon-reload removes the access to it.
/// This costs three lookups.
fn is_bare(config: &Config) -> Result<bool> {
    if config.driver_root.as_path() != Path::new("/") {
        return Ok(false);
    }
    let driver = nvidia_host::driver::open_root(&config.driver_root)?;
    for path in ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/char/195:255"] {
        if driver.locate(Path::new(path)).is_err() {
            return Ok(true);
        }
    }
    Ok(false)
}

fn prepare_for(wanted: &Wanted, config: &Config, call: &mut Call) -> bool {
    // A failure is only logged: the later error about the missing node or module is more helpful.
    let prepared = prepare(wanted, config, call).unwrap_or_default();
    for done in &prepared.done {
        call.note(done);
    }
    for error in &prepared.failed {
        call.note(&line(error));
    }
    !prepared.done.is_empty()
}

/// Loads modules and creates nodes.
fn prepare(wanted: &Wanted, config: &Config, call: &Call) -> Result<Prepared> {
    if !prepares(config)? {
        return Ok(Prepared::default());
    }
    call.record_so_far();
    prepare_host(config, imex_channels(wanted, config), timeouts::MODULES)
}

/// Whether the hook prepares this host. It leaves a driver root other than / to its driver container.
fn prepares(config: &Config) -> Result<bool> {
    Ok(Roots::open_to_prepare(config)?.dev.path().as_path() == Path::new("/") && may_prepare()?)
}

/// Returns the IMEX channels whose nodes the hook makes.
fn imex_channels<'w>(wanted: &'w Wanted, config: &Config) -> &'w [u32] {
    if config.make_imex_channels {
        &wanted.imex_channels
    } else {
        &[]
    }
}
