//! What becomes of a GPU when its daemon has ended, in any way: `ExecStopPost=` of the unit. A GPU that config.toml shares is closed, and
//! any other gets the mode DEFAULT back.
//!
//! The unit has `KillMode=process`, so the daemon still runs here with its limits if the supervisor was killed. The GPU is closed first,
//! then the daemon is killed, and only after that files are written: nothing that can fail for another reason precedes the first two.

use std::path::Path;

use anyhow::{Context, Result};
use base::paths::HostPath;
use base::report::line;
use nvidia_host::config::{self, Config};
use nvidia_host::host::{Host, mode_process};
use nvidia_host::inventory::limits::is_shared;
use nvidia_host::mps::{self, Phase, State};
use nvidia_host::nvml::compute_mode::ComputeMode;
use nvidia_host::nvml::protocol::ModeTarget;

use super::cgroup::UnitCgroup;
use super::directory::{self, GpuDir};
use super::note;

/// What is known about a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    /// Whether config.toml shares it; `None` if config.toml is invalid, or the driver does not list the GPU
    is_shared: Option<bool>,
    /// Whether it was shared since this boot, so that its mode is ours
    was_shared: bool,
}

impl Known {
    fn of(uuid: &str, config: Option<&Config>) -> Self {
        Self {
            is_shared: config.and_then(|config| shares(config, uuid)),
            was_shared: directory::has_state(Path::new(mps::DIRECTORY), uuid),
        }
    }

    /// Returns the mode that the GPU gets, or `None` if this program has not set its mode and must not.
    fn mode(self) -> Option<ComputeMode> {
        match (self.is_shared, self.was_shared) {
            (Some(true), _) | (None, true) => Some(ComputeMode::Prohibited),
            (Some(false), true) => Some(ComputeMode::Default),
            (Some(false) | None, false) => None,
        }
    }
}

fn shares(config: &Config, uuid: &str) -> Option<bool> {
    if config.sharing.mps_gpus.is_empty() {
        return Some(false);
    }
    let host = Host::inspect(config, &|| ()).ok()?;
    let mut gpus = host.inventory.gpus.iter();
    let gpu = gpus.find(|gpu| gpu.uuid == uuid)?;
    Some(is_shared(&config.sharing, gpu))
}

/// Closes or opens the GPU whose unit has ended, kills what is left of the daemon, and leaves the reason. `result` is systemd's
/// `SERVICE_RESULT`.
///
/// # Errors
/// If the compute mode cannot be set, or a process does not end.
pub(super) fn end(uuid: &str, file: Option<&Path>, result: &str) -> Result<()> {
    let config = config::read(file).map(|(config, _)| config);
    let mode = Known::of(uuid, config.as_ref().ok()).mode();
    let set = match mode {
        Some(mode) => set_mode(&usable(config.as_ref().ok(), uuid), uuid, mode),
        None => Ok(()),
    };
    let killed = match UnitCgroup::of_gpu(uuid) {
        Ok(Some(cgroup)) => cgroup.kill_others(),
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    if let Some(mode) = mode
        && let Err(error) = write(uuid, mode, result)
    {
        note(&format!(
            "cannot write the state of {uuid}: {}",
            line(&error)
        ));
    }
    set?;
    killed.context("cannot end the processes of the MPS daemon")
}

/// Returns config.toml or, while that is invalid, the driver root that the supervisor used.
fn usable(config: Option<&Config>, uuid: &str) -> Config {
    if let Some(config) = config {
        return config.clone();
    }
    let mut found = Config::default();
    let dir = GpuDir::create(Path::new(mps::DIRECTORY), uuid).ok();
    let state = dir.and_then(|dir| dir.state());
    if let Some(root) = state.and_then(|state| state.driver_root) {
        found.driver_root = HostPath::new(root);
    }
    found
}

fn set_mode(config: &Config, uuid: &str, mode: ComputeMode) -> Result<()> {
    // Any GPU may have got the index since.
    let target = ModeTarget {
        uuid: uuid.to_owned(),
        index: None,
    };
    mode_process(config, &target)?.set(mode)?;
    note(&format!(
        "set the compute mode of {uuid} to {}",
        mode.name()
    ));
    Ok(())
}

/// Writes the reason why no daemon runs, unless the supervisor has written it. Removes the state of a GPU that is not shared.
fn write(uuid: &str, mode: ComputeMode, result: &str) -> Result<()> {
    let dir = GpuDir::create(Path::new(mps::DIRECTORY), uuid)?;
    if mode == ComputeMode::Default {
        return Ok(dir.remove_state()?);
    }
    let before = dir.state();
    let mut state = before.unwrap_or_else(|| State::new(uuid, Phase::Starting));
    if state.state != Phase::Failed || state.why.is_none() {
        state.why = Some(match result {
            "success" => "its unit was stopped".to_owned(),
            result => format!("its supervisor was ended ({result})"),
        });
    }
    state.state = Phase::Failed;
    (state.clients, state.supervisor, state.daemon, state.server) = (0, None, None, None);
    dir.publish(&state)?;
    Ok(())
}

/// Gives the mode DEFAULT to GPUs that were shared since this boot and have no supervisor: to those that config.toml does not share any more,
/// or to all of them.
///
/// # Errors
/// The first error. The others are printed.
pub(super) fn restore(file: Option<&Path>, all: bool) -> Result<()> {
    let base = Path::new(mps::DIRECTORY);
    let uuids = directory::uuids(base).with_context(|| format!("cannot read {base:?}"))?;
    if uuids.is_empty() {
        return Ok(());
    }
    let config = match config::read(file) {
        Ok((config, _)) => Some(config),
        Err(error) if all => {
            note(&line(&error));
            None
        }
        Err(error) => return Err(error),
    };
    let mut result = Ok(());
    for uuid in uuids {
        if let Err(error) = restore_one(base, &uuid, config.as_ref(), all) {
            note(&line(&error));
            result = Err(error);
        }
    }
    result
}

fn restore_one(base: &Path, uuid: &str, config: Option<&Config>, all: bool) -> Result<()> {
    let dir = GpuDir::create(base, uuid)?;
    let is_unshared = || Known::of(uuid, config).mode() == Some(ComputeMode::Default);
    if dir.is_supervised() || !all && !is_unshared() {
        return Ok(());
    }
    set_mode(&usable(config, uuid), uuid, ComputeMode::Default)?;
    Ok(dir.remove_state()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_decides_and_not_how_the_unit_ended() {
        let closed = Some(ComputeMode::Prohibited);
        for (is_shared, was_shared, mode) in [
            (Some(true), false, closed),
            (Some(true), true, closed),
            (Some(false), true, Some(ComputeMode::Default)),
            (Some(false), false, None),
            // config.toml is invalid, or the driver does not list the GPU
            (None, true, closed),
            (None, false, None),
        ] {
            let known = Known {
                is_shared,
                was_shared,
            };
            assert_eq!(known.mode(), mode, "{known:?}");
        }
    }
}
