//! Decides whether a container with a device of the running plugin gets the files of the driver.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cdi_spec::spec::Spec;
use plugin_api::control::{Offered, Unanswered};

use super::report::Verdict;
use crate::cdi_specs;
use crate::node::host::is_in_pod;
use crate::settings::Settings;
use crate::settings::values::DeviceListStrategy;
use crate::strategy::Choice;

/// The directories below `host-path` in which programs find libraries: images for GKE have them in LD_LIBRARY_PATH.
const LIBRARY_DIRS: [&str; 2] = ["lib64", "lib"];

/// How the files of the driver come into containers of the device plugin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delivery<'a> {
    pub(super) settings: &'a Settings,
    pub(super) choice: &'a Choice,
    pub(super) running: &'a Offered,
    /// Why the driver lacks a file that each container needs; `None` if it lacks none
    pub(super) driver: Option<&'a str>,
}

impl Delivery<'_> {
    /// Decides for a container with one of these devices, by UUID.
    pub(super) fn verdict(&self, uuids: &BTreeSet<&str>) -> Verdict {
        if let Some(finding) = self.choice.finding() {
            return Verdict::fails(finding.what);
        }
        let strategies = &self.choice.strategies;
        if self.choice.uses_cdi() {
            if let Some(why) = spec_problem(self.running, uuids) {
                return Verdict::fails(why);
            }
            return match &self.choice.unknown_cdi {
                Some(why) => Verdict::unknown(why),
                None => Verdict::starts(),
            };
        }
        if strategies.contains(&DeviceListStrategy::HostPath) {
            return of_host_path(&self.settings.plugin.host_path);
        }
        if let Some(why) = self.refusal() {
            return Verdict::fails(why);
        }
        match &self.choice.without_hook {
            Some(why) => Verdict::unknown(why),
            None => Verdict::starts(),
        }
    }

    /// Returns why the hook does not set up the containers that name their GPUs with these strategies.
    fn refusal(&self) -> Option<String> {
        let common = &self.settings.common;
        let has = |strategy| self.choice.strategies.contains(&strategy);
        if has(DeviceListStrategy::VolumeMounts) && !common.accept_volume_mounts {
            let key = "accept-nvidia-visible-devices-as-volume-mounts";
            return Some(format!("{key} in config.toml is false"));
        }
        if !has(DeviceListStrategy::VolumeMounts) && !common.accept_envvar_when_unprivileged {
            let key = "accept-nvidia-visible-devices-envvar-when-unprivileged";
            return Some(format!(
                "{key} in config.toml is false, and the pod is not privileged"
            ));
        }
        self.driver.map(str::to_owned)
    }
}

fn of_host_path(dir: &Path) -> Verdict {
    for name in LIBRARY_DIRS {
        if fs::metadata(dir.join(name).join("libcuda.so.1")).is_ok() {
            return Verdict::starts();
        }
    }
    Verdict::fails(format!("{dir:?} (host-path) has no \"lib64/libcuda.so.1\""))
}

/// Returns the directory of our CDI specs: the one of the running plugin, or else the default.
pub(super) fn spec_dir(offered: &Result<Offered, Unanswered>) -> PathBuf {
    if let Ok(running) = offered
        && let Some(spec) = &running.spec
        && let Some(dir) = spec.parent()
    {
        return dir.to_owned();
    }
    PathBuf::from(cdi_specs::DIR)
}

/// Returns why an engine does not start a container with these devices of the running plugin, although the kubelet has them.
pub(super) fn spec_problem(running: &Offered, uuids: &BTreeSet<&str>) -> Option<String> {
    let path = running.spec.as_ref()?;
    let Some(spec) = cdi_specs::read_ours(path) else {
        return Some(format!("the CDI spec {path:?} is missing or invalid"));
    };
    for uuid in uuids {
        let mut devices = spec.devices.iter();
        if !devices.any(|device| device.name == *uuid) {
            return Some(format!("the CDI spec {path:?} has no device {uuid:?}"));
        }
    }
    // A pod does not see the programs of the node.
    if is_in_pod() {
        return None;
    }
    let program = missing_program(&spec)?;
    Some(format!(
        "the program {program:?}, which the CDI spec starts, is missing; install the package oci-nvidia-hook"
    ))
}

/// Returns a program of the spec that a runtime cannot start.
fn missing_program(spec: &Spec) -> Option<String> {
    let devices = spec.devices.iter().map(|device| &device.container_edits);
    for edits in devices.chain([&spec.container_edits]) {
        for hook in &edits.hooks {
            let program = fs::metadata(&hook.path);
            let is_program =
                program.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
            if !is_program {
                return Some(hook.path.clone());
            }
        }
    }
    None
}
