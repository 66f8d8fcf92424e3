//! `prepare`: modules loaded and device nodes made, at boot or before the first container.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use base::paths::HostPath;
use base::report::{catalog, failure};
use base::sys::{ns, process};
use nvidia_host::config::{self, Config};
use nvidia_host::device_id::imex_channel;
use nvidia_host::host::Host;
use nvidia_host::prepare::{self, Places, make_node};

use super::{Options, output};
use crate::log::Log;

/// How long the driver's modules may take to load. A module of 100 MB from a slow disk takes seconds.
pub const AT_BOOT: Duration = Duration::from_secs(180);

/// What was done on a host, and what failed.
#[derive(Debug, Default)]
pub struct Prepared {
    /// A line for each module and node
    pub done: Vec<String>,
    /// What could not be done, without which containers get no GPU, or not the one that they ask for
    pub failed: Vec<anyhow::Error>,
    /// Whether the driver is loaded now
    pub is_loaded: bool,
}

/// Prepares the host, and prints what was done.
#[must_use]
pub fn run(options: &Options) -> ExitCode {
    let mut log = Log::default();
    let prepared = match run_as_root(options) {
        Ok(prepared) => prepared,
        Err(error) => {
            log.error(&error);
            return ExitCode::FAILURE;
        }
    };
    let printed = output::print(&prepared.done.iter().flat_map(|line| [line.as_str(), "\n"]).collect::<String>());
    prepared.failed.iter().for_each(|error| log.error(error));
    if prepared.failed.is_empty() { printed } else { ExitCode::FAILURE }
}

fn run_as_root(options: &Options) -> Result<Prepared> {
    let (mut config, _) = config::read(options.config.as_deref())?;
    if let Some(root) = &options.root {
        config.driver_root = HostPath::new(root);
    }
    let channels = options.selection.imex_channels.iter().map(|channel| imex_channel(channel));
    let channels = channels.collect::<Result<Vec<_>>>()?;
    if !may_prepare()? {
        return Err(failure(
            &catalog::NOT_ROOT,
            "only root of the host can make device nodes",
            "run \"sudo oci-nvidia-hook prepare\"",
        ));
    }
    let mut prepared = prepare_host(&config, &channels, AT_BOOT)?;
    // Without a driver there is nothing to ask: a host without GPUs boots as well.
    if prepared.is_loaded && prepared.failed.is_empty() {
        // The first container need not wait for NVML then.
        prepared.failed.extend(Host::look_afresh(&config).err());
    }
    Ok(prepared)
}

/// Whether this process can load modules and make nodes.
///
/// # Errors
/// If the user namespace cannot be determined.
pub fn may_prepare() -> Result<bool> {
    Ok(rustix::process::geteuid().is_root() && !ns::in_user_namespace()?)
}

/// Loads the modules and makes the nodes that are missing, these IMEX channels among them. A failure does not stop the
/// rest. All modules together may take as long as `patience`.
///
/// # Errors
/// If a driver root cannot be opened.
pub fn prepare_host(config: &Config, channels: &[u32], patience: Duration) -> Result<Prepared> {
    let places = Places::of(nvidia_host::driver::open_root(&config.driver_root)?, config.dev_root.as_ref())?;
    let mut prepared = Prepared::default();
    // A driver root of its own is a container's that loads modules itself.
    if config.driver_root.as_path() == Path::new("/") {
        load_modules(&places, patience, &mut prepared);
    }
    let facts = places.look();
    prepared.is_loaded = facts.policy.is_some();
    for node in prepare::plan(&facts, channels) {
        match make_node::carry_out(&places.dev.path(), &node) {
            Ok(true) => prepared.done.push(format!("made {node}")),
            Ok(false) => {}
            Err(error) => prepared.failed.push(error),
        }
    }
    prepared.failed.extend(channels.iter().filter_map(|channel| prepare::no_such_channel(&facts, *channel)));
    Ok(prepared)
}

fn load_modules(places: &Places, patience: Duration, prepared: &mut Prepared) {
    let program = places.driver.read(Path::new("/proc/sys/kernel/modprobe")).unwrap_or_default();
    let program = String::from_utf8_lossy(&program).trim().to_owned();
    let program = if program.is_empty() { "/sbin/modprobe" } else { &program };
    let end = Instant::now() + patience;
    for module in prepare::missing_modules(&places.look()) {
        let left = end.saturating_duration_since(Instant::now());
        if !left.is_zero() && process::run_modprobe(Path::new(program), module, left).unwrap_or(false) {
            prepared.done.push(format!("loaded {module}"));
            continue;
        }
        prepared.done.push(format!("could not load {module}"));
        prepared.failed.extend(prepare::not_loaded(program, module));
    }
}
