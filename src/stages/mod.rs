//! The stages at which an engine or a runtime calls the hook. Each stage reads its input, makes a plan with [`crate::plan`],
//! and carries it out.

pub(crate) mod cdi_hook;
pub(crate) mod configure;
pub(crate) mod decide;
pub(crate) mod edit_config;
pub(crate) mod host;
pub(crate) mod limits;
pub(crate) mod poststop;
pub(crate) mod prestart;
pub(crate) mod removed;
pub(crate) mod rootfs;
mod shared;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};

use base::read::read_limited;
use base::report::line;
use base::sys::proc_file;
use nvidia_host::config::Config;

use crate::inject::container::OpenContainer;
use crate::oci::{self, State};
use crate::plan::{Gpus, Image};
use crate::record::call::Call;
use crate::record::log_file;

/// Opens the configured log file. A failure is a finding and does not stop the container.
pub(crate) fn open_log(config: &Config, call: &mut Call) {
    if let Some(path) = &config.debug
        && !call.is_open()
        && let Err(error) = call.open(path)
    {
        call.finding(&log_file::finding(line(&error)));
    }
}

/// Runs a stage. Exit status 0 if the container may start, 1 if not.
fn run_stage(name: &'static str, stage: impl FnOnce(&mut Call) -> Result<()>) -> ExitCode {
    let mut call = Call::for_stage(name);
    match stage(&mut call) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            call.fail(&error);
            ExitCode::FAILURE
        }
    }
}

fn read_stdin() -> Result<Vec<u8>> {
    read_limited(std::io::stdin().lock(), oci::MAX_JSON)
        .context("cannot read the container state on stdin")
}

/// Reads the container state on stdin. Returns the text too.
fn read_state() -> Result<(Vec<u8>, State)> {
    let bytes = read_stdin()?;
    let mut state = oci::state::parse(&bytes)?;
    // crun up to 1.28 reports its working directory as the bundle. For a container with a user namespace and device nodes, that is "/",
    // because setns(2) to a mount namespace changes the working directory (`prepare_and_send_dev_mounts`).
    if state.bundle == Path::new("/")
        && let Some(bundle) = bundle_of_runtime()
    {
        state.bundle = bundle;
    }
    Ok((bytes, state))
}

/// Returns the bundle in the arguments of the runtime, which starts the hook.
fn bundle_of_runtime() -> Option<PathBuf> {
    let runtime = rustix::process::getppid()?;
    oci::state::bundle_argument(&proc_file::read(format!("/proc/{runtime}/cmdline")).ok()?)
}

/// Returns the facts about the container's image that the plan needs.
pub(crate) fn image(container: &OpenContainer, gpus: &Gpus) -> Image {
    let libraries = gpus.compat_libraries();
    let compat =
        libraries.and_then(|(dir, driver, cuda)| container.compat_libraries(&dir, driver, cuda));
    Image {
        facts: container.facts(),
        compat: compat.unwrap_or_default(),
    }
}
