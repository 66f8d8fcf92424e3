//! What becomes of a container, decided and not yet done: what the hook, `precreate` and `explain` have in common.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Result;

use base::paths::{ContainerPath, HostPath};
use base::report::{Finding, catalog, failure, line};
use base::sys::ns;
use nvidia_host::capability::Capability;
use nvidia_host::cdi::lower::NodeFacts;
use nvidia_host::config::{self, Config, NoGpu};
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::driver::compat;
use nvidia_host::edits::placement::RootfsFacts;
use nvidia_host::edits::{DeviceNode, Edits};
use nvidia_host::host::{self, Host};
use nvidia_host::inventory::select::Device;

use crate::lower::access::{self, Process};
use crate::lower::live::{self, Step};
use crate::oci::{Pod, SpecView};
use crate::request::others::{self, Other};
use crate::request::{self, Decision, GpuRequest, Hint, given};
use crate::select;

/// What a container asks the hook for.
#[derive(Debug)]
pub enum Verdict {
    /// Nothing, for this reason.
    Nothing(String),
    /// Something that it may not have, or that another program gives it.
    LeftAlone(Finding),
    /// These.
    Gpus(Box<GpuRequest>),
}

/// Config.toml, if the request can depend on it.
///
/// # Errors
/// If it is wrong and the container asks for GPUs. One that only may ask is not stopped by it.
pub fn read_config(spec: &SpecView, config: Option<&Path>) -> Result<Option<(Config, Vec<Finding>)>> {
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
pub fn verdict(spec: &SpecView, config: &Config) -> Result<Verdict> {
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
#[must_use]
pub fn nothing(reason: String, spec: &SpecView) -> String {
    match given::of(spec) {
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
    let is_us = |path: &Path| {
        let file = |path: &Path| std::fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
        file(path).is_some_and(|program| file(Path::new("/proc/self/exe")) == Some(program))
    };
    let fix = "to have this hook do it, remove the other one, or the \"--device nvidia.com/gpu=…\" option";
    Some(match others::set_up_by(spec, is_us)? {
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

/// The devices that it gets, and what is done for them. Findings are added as they are made, also before an error.
///
/// # Errors
/// If it cannot have what it asks for, or something is missing that it cannot do without.
pub fn edits<'h>(
    host: &'h Host,
    request: &GpuRequest,
    config: &Config,
    findings: &mut Vec<Finding>,
) -> Result<(Vec<Device<'h>>, Edits)> {
    let request = with_names(request, host);
    let (devices, more) = select::decide(&request, &host.inventory, config)?;
    findings.extend(more);
    let (edits, more) = host.edits(&request.wanted()?, &devices)?;
    findings.extend(more);
    Ok((devices, edits))
}

/// The same request, with the UUIDs of the GPUs and MIG devices that it was given the nodes of.
fn with_names(request: &GpuRequest, host: &Host) -> GpuRequest {
    let VisibleDevices::Nodes(nodes) = &request.devices else { return request.clone() };
    GpuRequest { devices: VisibleDevices::List(host.names_of(nodes)), ..request.clone() }
}

/// The steps that it takes in the container. `compat` looks for the image's CUDA compatibility libraries, for a driver
/// and a CUDA version of the host.
pub fn steps(
    edits: &Edits,
    facts: RootfsFacts,
    (request, config, host): (&GpuRequest, &Config, &Host),
    compat: impl FnOnce(&ContainerPath, &str, &str) -> BTreeSet<OsString>,
) -> (Vec<Step>, Option<Finding>) {
    let mut steps = match request.omit.node_mounts {
        true => live::lower(&Edits { nodes: Vec::new(), ..edits.clone() }, facts),
        false => live::lower(edits, facts),
    };
    let wanted = config.cuda_compat && request.capabilities.has(Capability::Compute);
    let Some(dir) = ContainerPath::new(compat::DIR).filter(|_| wanted) else { return (steps, None) };
    let names = compat(&dir, &host.inventory.driver_version, &host.inventory.cuda_version);
    live::prefer(&mut steps, &dir, |soname| names.contains(soname));
    let finding = (!names.is_empty()).then(|| {
        Finding::of(
            &catalog::IMAGE_CUDA,
            format!("the CUDA compatibility libraries of the image in \"/{}\" are used", compat::DIR.trim_matches('/')),
            "to use the host's, set cuda-compat-mode = \"disabled\" in config.toml",
        )
    });
    (steps, finding)
}

/// Has device nodes created that the container's process could not open as they are on the host; what there is to say where
/// that cannot be done: a user namespace of ours may not create any, and without cgroups nothing else would limit their use.
///
/// # Errors
/// If our user namespace cannot be read.
pub fn access(steps: &mut [Step], edits: &Edits, spec: &SpecView, config: &Config) -> Result<Option<Finding>> {
    let is_rootless = ns::in_user_namespace()?;
    let process = Process::of(spec, is_rootless);
    let mut nodes = NodeFacts::of_nodes(std::iter::once(edits));
    // The runtime creates these, for this container.
    let is_given = |node: &&DeviceNode| spec.devices.iter().any(|device| device.path == node.path.absolute());
    for node in edits.nodes.iter().filter(is_given) {
        nodes.remove(&node.source);
    }
    if config.edit_cgroups && !is_rootless {
        access::create_own(steps, &process, &nodes);
    }
    Ok(process.finding(access::inaccessible(steps, &process, &nodes)))
}

/// Whether a container starts although it cannot be given GPUs: why so.
///
/// # Errors
/// The same error, if it must not start.
pub fn excuse(request: &GpuRequest, config: &Config, error: anyhow::Error) -> Result<Finding> {
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

/// The program that the hook entries of config.json and of CDI specs start: this one, unless another is named.
///
/// # Errors
/// If its path is not absolute.
pub fn hook_program(named: Option<&Path>) -> Result<HostPath> {
    let path = match named {
        Some(path) => path.to_owned(),
        None => std::env::current_exe()?,
    };
    if !path.is_absolute() {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!("the program {path:?} is no absolute path"),
            "name it so with --hook-path",
        ));
    }
    Ok(HostPath::new(path))
}
