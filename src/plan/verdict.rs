//! Whether a container gets GPUs from this program: by config.json and config.toml, before anything of the host is looked at.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Result;

use base::report::{Finding, catalog, line};
use nvidia_host::config::{self, Config, NoGpu};
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::host;

use crate::oci::{Pod, SpecView};
use crate::request::others::{self, Other};
use crate::request::{self, Decision, GpuRequest, Hint, given};

/// What a container asks the hook for.
#[derive(Debug)]
pub(crate) enum Verdict {
    Nothing(String),
    /// Something that it may not have, or that another program gives it.
    LeftAlone(Finding),
    Gpus(Box<GpuRequest>),
}

/// Config.toml, if the request can depend on it.
///
/// # Errors
/// If it is wrong and the container asks for GPUs. One that only may ask is not stopped by it.
pub(super) fn read_config(spec: &SpecView, config: Option<&Path>) -> Result<Option<(Config, Vec<Finding>)>> {
    match request::hint(spec) {
        Hint::No => Ok(None),
        Hint::Perhaps => Ok(config::read(config).ok()),
        Hint::Yes => config::read(config).map(Some),
    }
}

/// What it asks for, under the administrator's rules.
///
/// # Errors
/// If it asks for something that does not exist, or may not be asked for.
pub(crate) fn verdict(spec: &SpecView, config: &Config) -> Result<Verdict> {
    Ok(match request::from_spec(spec, config)? {
        Decision::Nothing(reason) => Verdict::Nothing(reason),
        Decision::Refused(reason) => Verdict::LeftAlone(refused(reason, &spec.pod)),
        Decision::Gpus(request) => match set_up_by_others(spec) {
            Some(finding) => Verdict::LeftAlone(finding),
            None => Verdict::Gpus(request),
        },
    })
}

/// Why the hook does nothing. A container that asks it for nothing may have its GPUs from the engine.
pub(crate) fn nothing(reason: String, spec: &SpecView) -> String {
    match given::find(spec) {
        Some(given) => format!("{reason}, and {given}"),
        None => reason,
    }
}

/// A request that may not be made. The author of a pod reads the hint: what gives a pod a GPU is a request to the scheduler.
fn refused(reason: String, pod: &Pod) -> Finding {
    let hint = match pod.name.is_empty() {
        true => {
            "start it privileged, or set accept-nvidia-visible-devices-envvar-when-unprivileged = true in config.toml"
        }
        false => "have the scheduler give it one: resources: {limits: {nvidia.com/gpu: 1}} in the container of the pod",
    };
    Finding::of(&catalog::REFUSED, reason, hint)
}

/// A container that another program sets up.
fn set_up_by_others(spec: &SpecView) -> Option<Finding> {
    let fix = "to have this hook do it, remove the other one, or the \"--device nvidia.com/gpu=…\" option";
    Some(match others::set_up_by(spec, is_this_program)? {
        Other::Hook(by) => Finding::of(
            &catalog::OTHERS,
            format!("the container is left alone: config.json has {by}, which sets it up"),
            fix,
        ),
        Other::Files(by) => Finding::of(
            &catalog::OTHER_FILES,
            format!("the container is left alone: config.json has {by}, which another program put there"),
            fix,
        ),
    })
}

/// Whether this program is installed there, under whatever name.
fn is_this_program(path: &Path) -> bool {
    let program = inode(path);
    program.is_some() && program == inode(Path::new("/proc/self/exe"))
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).map(|file| (file.dev(), file.ino())).ok()
}

/// Whether a container starts although it cannot be given GPUs: why so.
///
/// # Errors
/// The same error, if it must not start.
pub(super) fn excuse(request: &GpuRequest, config: &Config, error: anyhow::Error) -> Result<Finding> {
    // It did not ask the hook for anything, and has what its config.json describes.
    if matches!(request.devices, VisibleDevices::Nodes(_)) {
        return Ok(Finding::of(
            &catalog::NODES_ONLY,
            format!("the container gets no driver files for its GPU nodes: {}", line(&error)),
            "oci-nvidia-hook doctor; or set NVIDIA_VISIBLE_DEVICES=void for the container, and the hook does nothing",
        ));
    }
    if config.no_gpu == NoGpu::Start && request.devices == VisibleDevices::All && host::has_no_gpu(config) {
        return Ok(Finding::of(
            &catalog::NO_GPU_HERE,
            format!("{} asks for \"all\", and there is no NVIDIA GPU on the PCI bus of this host", request.asked_by),
            "to stop such containers, set no-gpu = \"error\" in the [oci-nvidia-hook] table of config.toml",
        ));
    }
    Err(error)
}
