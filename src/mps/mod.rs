//! `mps`: runs the MPS daemon of a GPU and watches over it.
//!
//! The command is the service of `oci-nvidia-mps@.service`. [`machine`] decides what happens next, [`supervise`] does it, and [`after`]
//! is called when the service has ended in any way.

mod after;
mod control;
mod directory;
mod leftover;
mod machine;
mod supervise;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};

use base::report::{failure, kind_of};
use base::sys::guarded::{self, Chooser};
use base::sys::in_root::Root;
use base::sys::unix_socket;
use findings::catalog;
use nvidia_host::config::{self, Config, Limits, Sharing};
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::driver::DriverKind;
use nvidia_host::host::Host;
use nvidia_host::inventory::Gpu;
use nvidia_host::inventory::select::{Device, select};
use nvidia_host::mps;
use nvidia_host::nvml::protocol::ModeTarget;

use crate::record::call::Call;
use directory::GpuDir;
use supervise::{Daemon, Supervisor};

/// The exit status if the daemon cannot run on this host as it is configured (`EX_CONFIG` in sysexits.h): another attempt is useless.
const NOT_POSSIBLE: u8 = 78;

/// What the administrator requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The GPU: its index, UUID or bus id
    pub(crate) gpu: String,
    /// For each client, instead of the limit in config.toml
    pub(crate) memory_limit_mib: Option<u64>,
    /// For each client, instead of the limit in config.toml
    pub(crate) thread_percentage: Option<u8>,
}

/// How long another daemon may take to accept a connection
const ANSWER: Duration = Duration::from_secs(1);

/// Runs the daemon until it fails or this process is asked to stop.
///
/// # Errors
/// If the daemon fails.
pub(crate) fn run(request: &Request, config: Option<&Path>) -> Result<ExitCode> {
    let supervisor = match prepare(request, config) {
        Err(error) if kind_of(&error).is_some_and(|kind| kind.id() == catalog::MPS_START.id()) => {
            Call::default().error(&error);
            return Ok(ExitCode::from(NOT_POSSIBLE));
        }
        prepared => prepared?,
    };
    supervisor.run()?;
    Ok(ExitCode::SUCCESS)
}

/// Cleans up after the supervisor of this GPU has ended. `result` is systemd's `SERVICE_RESULT`.
///
/// # Errors
/// If config.toml is invalid, or the compute mode cannot be set.
pub(crate) fn clean_up(gpu: &str, result: &str, config: Option<&Path>) -> Result<()> {
    let (config, _) = config::read(config)?;
    after::run(&config, gpu, result)
}

/// Checks everything that can keep the daemon from running, before anything is changed.
fn prepare(request: &Request, config: Option<&Path>) -> Result<Supervisor> {
    let command = format!("sudo oci-nvidia-hook mps {}", request.gpu);
    if !nvidia_host::prepare::host::may_prepare()? {
        return Err(failure(
            &catalog::MPS_START,
            "only root of the host can set the compute mode of a GPU",
            format!("run \"{command}\""),
        ));
    }
    let (config, findings) = config::read(config)?;
    Call::default().findings(&findings);
    let limits = limits(request, &config);
    let host = Host::inspect(&config, &|| ())?;
    let gpu = gpu(&request.gpu, &host)?.clone();
    let programs = host.mps_programs()?;
    refuse_others(&config)?;
    let daemon = Daemon {
        name: request.gpu.clone(),
        gpu,
        limits,
        programs,
    };
    Supervisor::new(daemon, &config)
}

/// Returns the limits of config.toml, or those of the command line.
fn limits(request: &Request, config: &Config) -> Sharing {
    let mut limits = config.sharing;
    if request.memory_limit_mib.is_some() {
        limits.memory_limit_mib = request.memory_limit_mib;
    }
    if let Some(percentage) = request.thread_percentage {
        limits.thread_percentage = Some(percentage).filter(|percentage| *percentage < 100);
    }
    limits
}

/// Returns the GPU with this name. The limits of config.toml apply to containers only.
fn gpu<'a>(name: &str, host: &'a Host) -> Result<&'a Gpu> {
    if host.driver_kind() == DriverKind::Wsl {
        return Err(failure(
            &catalog::MPS_START,
            "the driver for WSL 2 does not support MPS",
            "use time-slicing: several containers can use a GPU without a daemon",
        ));
    }
    let names = VisibleDevices::List(vec![name.to_owned()]);
    let (devices, _) = select(
        &names,
        "the command line",
        &host.inventory,
        &Limits::default(),
    )?;
    match devices.first() {
        Some(Device::Gpu(gpu)) if !gpu.mig_enabled => Ok(gpu),
        Some(device) => Err(failure(
            &catalog::MPS_START,
            format!(
                "{} is in MIG mode, in which this program does not run MPS",
                device.gpu().uuid
            ),
            format!(
                "share its MIG devices without MPS, or leave MIG mode with \"nvidia-smi -i {} -mig 0\"",
                device.gpu().index
            ),
        )),
        None => Err(failure(
            &catalog::UNKNOWN_DEVICE,
            format!("the GPU {name:?} does not exist"),
            "\"oci-nvidia-hook info\" lists the GPUs",
        )),
    }
}

/// Refuses to start while another daemon serves the programs of this host: its server and ours could not both have a GPU.
fn refuse_others(config: &Config) -> Result<()> {
    let default = Path::new(mps::CONTAINER_DIRECTORY);
    let directory = config.mps_directory.as_deref().unwrap_or(default);
    let root = Root::open(Path::new("/"))?;
    let Ok(found) = guarded::open(&root, &directory.join("control")) else {
        return Ok(());
    };
    // What another user has created there is not a reason: that user could keep the daemon from running.
    let is_roots = found.chooser == Chooser::NoOther && found.stat.st_uid == 0;
    if !is_roots || !unix_socket::is_served(&found.path, ANSWER) {
        return Ok(());
    }
    Err(failure(
        &catalog::MPS_START,
        format!("another MPS daemon runs, with the directory {directory:?}"),
        "end it with \"echo quit | nvidia-cuda-mps-control\", and disable the service that starts it; a unit oci-nvidia-mps@GPU can share \
         each of its GPUs",
    ))
}

/// Opens the directory of a GPU and takes its lock.
fn open_dir(uuid: &str) -> Result<(GpuDir, directory::Lock)> {
    let dir = GpuDir::create(Path::new(mps::DIRECTORY), uuid)
        .with_context(|| format!("cannot create {:?}", mps::directory_of(uuid)))?;
    let lock = dir
        .lock()
        .with_context(|| format!("cannot lock a file in {:?}", mps::directory_of(uuid)))?;
    match lock {
        Some(lock) => Ok((dir, lock)),
        None => {
            let first = dir.state().and_then(|state| state.supervisor);
            let first = first.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
            Err(failure(
                &catalog::MPS_START,
                format!("process {first} already runs the MPS daemon of {uuid}"),
                "see \"systemctl list-units 'oci-nvidia-mps@*'\"",
            ))
        }
    }
}

fn target(gpu: &Gpu) -> ModeTarget {
    ModeTarget {
        uuid: gpu.uuid.clone(),
        index: Some(gpu.index),
    }
}

#[cfg(test)]
mod tests {
    use nvidia_host::mps::{FORMAT, Phase, State};

    pub(super) fn state() -> State {
        State {
            format: FORMAT,
            gpu: "GPU-1".to_owned(),
            name: Some("0".to_owned()),
            state: Phase::Ready,
            why: None,
            memory_limit_mib: Some(8192),
            active_thread_percentage: None,
            multi_user: true,
            compute_mode_before: 0,
            clients: 2,
            supervisor: Some(7),
            daemon: Some(8),
            server: Some(9),
        }
    }
}
