//! Decides from config.json and config.toml whether a container gets GPUs, before the host is inspected.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Result;

use base::report::{Finding, line};
use findings::catalog;
use nvidia_host::config::{self, Config};
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::request::{allow_without_gpu as allow_on_host, misspelled};

use records::Pod;

use crate::oci::SpecView;
use crate::plan::engine_devices;
use crate::plan::other_setup::{self, OtherSetup};
use crate::plan::request::{self, Decision, GpuRequest, Hint};

/// The request of a container, checked against config.toml.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// The container requests nothing, for this reason.
    Nothing(String),
    /// The request is not allowed, or another program meets it.
    Unchanged(Finding),
    Gpus(Box<GpuRequest>),
}

/// Reads config.toml if the request can depend on it. Returns also the findings about the file and about variables of the container.
///
/// # Errors
/// If config.toml is invalid and the container requests GPUs. A container that only may request GPUs starts.
pub(crate) fn read_config(
    spec: &SpecView,
    config: Option<&Path>,
) -> Result<Option<(Config, Vec<Finding>)>> {
    let read = match request::hint(spec) {
        Hint::No => return Ok(None),
        Hint::Perhaps => config::read(config).ok(),
        Hint::Yes => Some(config::read(config)?),
    };
    Ok(read.map(|(config, mut findings)| {
        findings.extend(misspelled::findings((&spec.env).into()));
        (config, findings)
    }))
}

/// Decides about the request of a container.
///
/// # Errors
/// If the request is invalid.
pub(crate) fn verdict(spec: &SpecView, config: &Config) -> Result<Verdict> {
    Ok(match request::from_spec(spec, config)? {
        Decision::Nothing(reason) => Verdict::Nothing(reason),
        Decision::Refused(reason) => Verdict::Unchanged(refused(reason, &spec.pod)),
        Decision::Gpus(request) => match set_up_by_others(spec) {
            Some(finding) => Verdict::Unchanged(finding),
            None => Verdict::Gpus(request),
        },
    })
}

/// Returns why the hook does nothing, with the GPUs that the engine gave to the container.
pub(crate) fn nothing(reason: String, spec: &SpecView) -> String {
    match engine_devices::find(spec) {
        Some(given) => format!("{reason}, and {given}"),
        None => reason,
    }
}

/// Returns the finding for a request that config.toml does not allow. The author of a pod reads the hint, and must request GPUs from
/// the scheduler.
fn refused(reason: String, pod: &Pod) -> Finding {
    let hint = if pod.name.is_empty() {
        "request the GPUs by their CDI names, such as \"--device nvidia.com/gpu=all\"; if all users may request GPUs with \
         variables, set accept-nvidia-visible-devices-envvar-when-unprivileged = true in config.toml"
    } else {
        "request a GPU from the scheduler: resources: {limits: {nvidia.com/gpu: 1}} in the container of the pod"
    };
    Finding::new(&catalog::REFUSED, reason, hint)
}

/// Returns the finding for a container that another program sets up.
fn set_up_by_others(spec: &SpecView) -> Option<Finding> {
    let fix = "to use this hook, remove the other hook, or start the container without \"--device nvidia.com/gpu=…\"";
    Some(match other_setup::set_up_by(spec, is_this_program)? {
        OtherSetup::Hook(by) => Finding::new(
            &catalog::OTHERS,
            format!("the container is left unchanged: config.json contains {by}, which sets it up"),
            fix,
        ),
        OtherSetup::Files(by) => Finding::new(
            &catalog::OTHER_FILES,
            format!(
                "the container is left unchanged: config.json contains {by}, which another program added"
            ),
            fix,
        ),
    })
}

/// Returns whether the file is this program, under any name.
fn is_this_program(path: &Path) -> bool {
    let program = inode(path);
    program.is_some() && program == inode(Path::new("/proc/self/exe"))
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    let file = std::fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

/// Returns the finding for a container that starts although the hook cannot give it GPUs.
///
/// # Errors
/// The given error, if the container must not start.
pub(crate) fn allow_without_gpu(
    request: &GpuRequest,
    config: &Config,
    error: anyhow::Error,
) -> Result<Finding> {
    // The engine or a device plugin added the device nodes. The container works without the driver files, like without the hook.
    if matches!(request.devices, VisibleDevices::Nodes(_)) {
        return Ok(Finding::new(
            &catalog::NODES_ONLY,
            format!(
                "the container gets no driver files for its GPU nodes: {}",
                line(&error)
            ),
            "run \"oci-nvidia-hook doctor\"; to disable the hook for the container, set NVIDIA_VISIBLE_DEVICES=void",
        ));
    }
    allow_on_host(request, config, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::spec_view::parse;

    /// The NRI plugin has added the CDI devices before the hook runs. A device plugin's mounts are still there.
    #[test]
    fn a_container_that_the_nri_plugin_set_up_is_left_alone() {
        let program = std::env::current_exe().unwrap();
        let text = serde_json::json!({
            "root": {"path": "/r"},
            "process": {"env": ["CUDA_VERSION=12.2", "NVIDIA_VISIBLE_DEVICES=void"]},
            "mounts": [
                {"type": "bind", "source": "/usr/lib64/libcuda.so.1", "destination": "/usr/lib64/libcuda.so.1"},
                {"type": "bind", "source": "/dev/null", "destination": "/var/run/nvidia-container-devices/GPU-1"},
            ],
            "hooks": {"createRuntime": [{"path": program, "args": ["oci-nvidia-hook", "rootfs"]}]},
            "linux": {"devices": [
                {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0},
                {"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255},
            ]},
        });
        let spec = parse(text.to_string().as_bytes(), Path::new("/b")).unwrap();
        assert!(matches!(
            verdict(&spec, &Config::default()).unwrap(),
            Verdict::Nothing(_)
        ));
        let mounts = Config {
            accept_volume_mounts: true,
            ..Config::default()
        };
        let found = verdict(&spec, &mounts).unwrap();
        assert!(
            matches!(&found, Verdict::Unchanged(finding) if finding.kind.id() == catalog::OTHERS.id()),
            "{found:?}"
        );
    }
}
