//! The host that a container gets GPUs of, made ready first if config.toml says so.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;

use base::report::line;
use nvidia_host::config::Config;
use nvidia_host::edits::Wanted;
use nvidia_host::host::Host;
use nvidia_host::prepare::Places;
use nvidia_host::prepare::host::{Prepared, may_prepare, prepare_host};
use nvidia_host::timeouts;

use crate::log::Log;
use crate::request::GpuRequest;

/// The host, with the modules loaded and the nodes made that the request needs.
///
/// # Errors
/// If there is no driver, or it does not answer.
pub(super) fn look_prepared(request: &GpuRequest, config: &Config, log: &mut Log) -> Result<Host> {
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

/// NVML can take long, and an engine ends a hook that takes too long.
fn look(config: &Config, log: &Log) -> Result<Host> {
    Host::inspect(config, &|| log.record_so_far())
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

fn prepare_for(wanted: &Wanted, config: &Config, log: &mut Log) -> bool {
    // A failure is not reported here: the error about what is missing then is the one to read.
    let prepared = prepare(wanted, config, log).unwrap_or_default();
    prepared.done.iter().for_each(|line| log.note(line));
    prepared.failed.iter().for_each(|error| log.note(&line(error)));
    !prepared.done.is_empty()
}

/// Nodes in a driver root of its own are a driver container's, which makes them itself.
fn prepare(wanted: &Wanted, config: &Config, log: &Log) -> Result<Prepared> {
    let driver = nvidia_host::driver::open_root(&config.driver_root)?;
    let places = Places::find(driver, config.dev_root.as_ref())?;
    if places.dev.path().as_path() != Path::new("/") || !may_prepare()? {
        return Ok(Prepared::default());
    }
    log.record_so_far();
    let channels = if config.make_imex_channels { wanted.imex_channels.as_slice() } else { &[] };
    prepare_host(config, channels, timeouts::MODULES)
}
