//! Inspects the host, and first loads kernel modules and creates device nodes if config.toml allows that.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;

use base::report::line;
use nvidia_host::config::Config;
use nvidia_host::edits::Wanted;
use nvidia_host::host::{Host, Roots};
use nvidia_host::prepare::host::{Prepared, may_prepare, prepare_host};
use nvidia_host::timeouts;

use crate::plan::request::GpuRequest;
use crate::record::call::Call;

/// Returns the host, after the modules that the request needs were loaded and its nodes created.
///
/// # Errors
/// If the driver is missing or does not respond.
pub(super) fn inspect_prepared(request: &GpuRequest, config: &Config, call: &mut Call) -> Result<Host> {
    if !config.load_kmods {
        return inspect(config, call);
    }
    let wanted = request.wanted()?;
    if is_bare(config)? {
        prepare_for(&wanted, config, call);
        return inspect(config, call);
    }
    let began = Instant::now();
    let host = inspect(config, call);
    // Only the inventory shows whether nodes of a new GPU or MIG device are missing.
    let is_complete = host.as_ref().is_ok_and(|host| !host.lacks_nodes(&wanted));
    let took = began.elapsed();
    if is_complete || !prepare_for(&wanted, config, call) {
        return host;
    }
    // NVML is queried a second time. The timeout applies to both queries together.
    inspect(&Config { nvml_timeout: timeouts::left_for_nvml(config.nvml_timeout, took), ..config.clone() }, call)
}

/// Inspects the host. NVML can take long, and engines kill a hook that takes too long, so the record is written before.
fn inspect(config: &Config, call: &Call) -> Result<Host> {
    Host::inspect(config, &|| call.record_so_far())
}

/// Reports whether nodes or links of the driver are missing, as they can be after boot. systemd finds devices by the links in
/// /dev/char: runc before 1.1.7 does not pass a device without a link to systemd, and a daemon-reload removes the access to it.
/// This costs three lookups.
fn is_bare(config: &Config) -> Result<bool> {
    if config.driver_root.as_path() != Path::new("/") {
        return Ok(false);
    }
    let driver = nvidia_host::driver::open_root(&config.driver_root)?;
    let exists = |name: &str| driver.locate(Path::new(name)).is_ok();
    Ok(!["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/char/195:255"].into_iter().all(exists))
}

fn prepare_for(wanted: &Wanted, config: &Config, call: &mut Call) -> bool {
    // A failure is only logged: the later error about the missing node or module is more helpful.
    let prepared = prepare(wanted, config, call).unwrap_or_default();
    prepared.done.iter().for_each(|line| call.note(line));
    prepared.failed.iter().for_each(|error| call.note(&line(error)));
    !prepared.done.is_empty()
}

/// Loads modules and creates nodes. Not for a driver root other than /: its driver container creates them.
fn prepare(wanted: &Wanted, config: &Config, call: &Call) -> Result<Prepared> {
    if Roots::open_to_prepare(config)?.dev.path().as_path() != Path::new("/") || !may_prepare()? {
        return Ok(Prepared::default());
    }
    call.record_so_far();
    let channels = if config.make_imex_channels { wanted.imex_channels.as_slice() } else { &[] };
    prepare_host(config, channels, timeouts::MODULES)
}
