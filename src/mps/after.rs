//! Cleans up after a supervisor, which may have been killed: `ExecStopPost=` of its unit.
//!
//! The unit has `KillMode=process`, so the daemon still runs here, with its limits. The GPU is closed before the daemon is killed.

use std::path::Path;

use anyhow::{Context, Result};

use base::sys::stdio;
use nvidia_host::config::Config;
use nvidia_host::host::mode_process;
use nvidia_host::mps::{self, Phase, State};
use nvidia_host::nvml::compute_mode::ComputeMode;
use nvidia_host::nvml::protocol::ModeTarget;

use super::directory::GpuDir;
use super::leftover;
use super::machine::Public;

/// What is left to do.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Todo {
    /// The administrator stopped the daemon: the GPU gets its mode back.
    Restore(ComputeMode),
    /// The daemon failed: the GPU stays closed until the next supervisor has started.
    Close(String),
}

/// Cleans up after the supervisor of the GPU with this name. `result` is systemd's `SERVICE_RESULT`.
///
/// # Errors
/// If the compute mode cannot be set.
pub(super) fn run(config: &Config, name: &str, result: &str) -> Result<()> {
    let dirs = GpuDir::all(Path::new(mps::DIRECTORY))
        .with_context(|| format!("cannot read {:?}", mps::DIRECTORY))?;
    for dir in dirs {
        let Some(state) = dir.state() else {
            continue;
        };
        if state.gpu == name || state.name.as_deref() == Some(name) {
            clean_up(config, &dir, state, result)?;
        }
    }
    Ok(())
}

fn clean_up(config: &Config, dir: &GpuDir, mut state: State, result: &str) -> Result<()> {
    // Another supervisor of the GPU runs.
    let Some(_lock) = dir.lock()? else {
        return Ok(());
    };
    let todo = decide(&state, result);
    let mode = match &todo {
        Todo::Restore(mode) => *mode,
        Todo::Close(why) => {
            Public::Failed(why.clone()).write_to(&mut state);
            dir.publish(&state)?;
            ComputeMode::Prohibited
        }
    };
    if todo == Todo::Restore(mode) {
        leftover::end(&dir.pipe());
    }
    let set = set_mode(config, &state, mode);
    leftover::end(&dir.pipe());
    set?;
    if todo == Todo::Restore(mode) {
        dir.remove_state()?;
    }
    Ok(())
}

fn set_mode(config: &Config, state: &State, mode: ComputeMode) -> Result<()> {
    // Any GPU may have got the index since.
    let target = ModeTarget {
        uuid: state.gpu.clone(),
        index: None,
    };
    mode_process(config, &target)?.set(mode)?;
    stdio::offer_stderr(&format!(
        "set the compute mode of {} to {}\n",
        state.gpu,
        mode.name()
    ));
    Ok(())
}

fn decide(state: &State, result: &str) -> Todo {
    if result == "success" || state.state == Phase::Stopping {
        let before = ComputeMode::from_number(state.compute_mode_before);
        return Todo::Restore(before.unwrap_or(ComputeMode::Default));
    }
    let why = match &state.why {
        Some(why) => why.clone(),
        None => format!("its supervisor was ended ({result})"),
    };
    Todo::Close(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_is_restored_after_a_stop_only() {
        let state = |phase, why: Option<&str>| State {
            state: phase,
            why: why.map(str::to_owned),
            compute_mode_before: 3,
            ..super::super::tests::state()
        };
        let restore = Todo::Restore(ComputeMode::ExclusiveProcess);
        let close = |why: &str| Todo::Close(why.to_owned());
        for (state, result, todo) in [
            (state(Phase::Ready, None), "success", restore.clone()),
            (state(Phase::Stopping, None), "timeout", restore),
            (
                state(Phase::Ready, None),
                "signal",
                close("its supervisor was ended (signal)"),
            ),
            (state(Phase::Failed, Some("x")), "exit-code", close("x")),
        ] {
            assert_eq!(decide(&state, result), todo);
        }
    }
}
