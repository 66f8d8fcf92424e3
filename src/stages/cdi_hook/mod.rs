//! Carries out the hook entries of CDI specs that NVIDIA's toolkit, device plugin and DRA driver write. The steps are the steps of
//! generated specs, with the same guarantees: ldconfig is not run, and no path leads out of the container.

pub(crate) mod entry;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};

use base::paths::ContainerPath;
use base::read::read_limited;
use base::sys::in_root::open_host_file;
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::driver::node_name::NodeName;

use super::{limits, read_stdin, run_stage};
use crate::inject;
use crate::inject::container::OpenContainer;
use crate::oci::{self, SpecView, gpu_nodes};
use crate::plan::Container;
use crate::plan::rootfs;
use crate::plan::{step::Step, steps};
use crate::record::call::Call;
use entry::{HookArgs, Verb};
use nvidia_host::programs::{CDI_HOOK, CTK};

/// Parses the command line of a hook entry, which begins with the name of NVIDIA's program. `None` if it is not a supported one.
fn parse(args: &[OsString]) -> Option<HookArgs> {
    let (called, args) = args.split_first()?;
    let name = Path::new(called).file_name().and_then(OsStr::to_str);
    let name = name.filter(|name| [CDI_HOOK, CTK].contains(name))?;
    match entry::parse(name, args.to_vec()) {
        Ok(Verb::Hook(hook)) => Some(hook),
        _ => None,
    }
}

/// Carries out the entry for the container whose state is on stdin or in the file of `--container-spec`. Exit status 0 if the
/// container may start, 1 if not.
pub(crate) fn run(hook: &HookArgs) -> ExitCode {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    run_stage(hook.name, |call| carry_out(hook, call))
}

fn carry_out(hook: &HookArgs, call: &mut Call) -> Result<()> {
    let start = Instant::now();
    let bytes = match &hook.state {
        Some(file) => read_state_file(file)
            .with_context(|| format!("cannot read the container state {file:?}"))?,
        None => read_stdin()?,
    };
    let state = oci::state::parse(&bytes)?;
    let spec = oci::spec_view::read(&state.bundle)?;
    call.name_container(&state.id, spec.pod.clone(), &state.bundle);
    call.connect();
    limits::check_inside(&spec, call)?;
    call.set_deadline(start)?;
    let container = OpenContainer::inside(&spec.rootfs)?;
    let steps = steps(hook, &container, &spec);
    let findings = inject::apply(
        inject::prepare(&steps, &spec.mount_label)?,
        container,
        &Container::new(&state, &spec)?,
    )?;
    call.findings(&findings);
    Ok(())
}

fn read_state_file(path: &Path) -> Result<Vec<u8>> {
    let (file, _) = open_host_file(path)?;
    read_limited(file, oci::MAX_JSON)
}

fn steps(hook: &HookArgs, container: &OpenContainer, spec: &SpecView) -> Vec<Step> {
    let mut edits = RootfsEdits::default();
    match hook.name {
        "create-symlinks" => {
            for (text, link) in &hook.links {
                edits.links.insert(link.clone(), text.clone());
            }
        }
        "update-ldcache" => {
            add_libraries(&mut edits, &hook.folders, container, spec);
            let mut steps = rootfs::steps(&edits, container.facts(), Vec::new());
            for entry in &spec.hooks {
                let Some(hook) = compat_hook(&entry.args) else {
                    continue;
                };
                if let Some((dir, names)) = compat_of(&hook, container) {
                    steps::prefer(&mut steps, &dir, |soname| names.contains(soname));
                }
            }
            return steps;
        }
        // update-ldcache reads this entry too. This call only adds the directory to the configuration of the image's ldconfig.
        "enable-cuda-compat" => {
            let Some((dir, _)) = compat_of(hook, container) else {
                return Vec::new();
            };
            return vec![Step::ListDirectories {
                first: vec![dir],
                others: Vec::new(),
            }];
        }
        "disable-device-node-modification" => return vec![Step::MaskParams],
        "update-application-profile" => edits.egl_devices = gpus_of(spec),
        _ => {
            let mode = hook.mode.unwrap_or(0o755);
            let mut steps = Vec::new();
            for path in &hook.paths {
                let target = path.clone();
                steps.push(Step::SetMode { target, mode });
            }
            return steps;
        }
    }
    rootfs::steps(&edits, container.facts(), Vec::new())
}

/// Adds the libraries that the engine mounted in these directories, with a link for each SONAME, as ldconfig would do. The
/// image's own libraries there are already in its linker cache.
fn add_libraries(
    edits: &mut RootfsEdits,
    folders: &[ContainerPath],
    container: &OpenContainer,
    spec: &SpecView,
) {
    for mount in spec.mounts.iter().filter(|mount| mount.is_bind()) {
        let Some(path) = ContainerPath::new(&mount.destination) else {
            continue;
        };
        let Some(dir) = path.parent().filter(|dir| folders.contains(dir)) else {
            continue;
        };
        let Some((arch, soname)) = container.library(&path) else {
            continue;
        };
        let Some(link) = dir.join(&soname) else {
            continue;
        };
        if link != path {
            edits.links.insert(link.clone(), path.file_name().into());
        }
        edits.libraries.insert((arch, link));
    }
}

/// Parses an enable-cuda-compat entry of the container.
fn compat_hook(args: &[String]) -> Option<HookArgs> {
    let args: Vec<_> = args.iter().map(OsString::from).collect();
    let hook = parse(&args)?;
    if hook.name != "enable-cuda-compat" {
        return None;
    }
    Some(hook)
}

/// Returns the directory and file names of the image's compatibility libraries, if they must be used with this driver.
fn compat_of(
    hook: &HookArgs,
    container: &OpenContainer,
) -> Option<(ContainerPath, std::collections::BTreeSet<OsString>)> {
    let dir = hook.compat_dir()?;
    if hook.host_driver.is_empty() {
        return None;
    }
    let names = container.compat_libraries(&dir, &hook.host_driver, &hook.host_cuda)?;
    Some((dir, names))
}

/// Returns a mask of the container's GPUs: bit N is `/dev/nvidiaN`.
fn gpus_of(spec: &SpecView) -> u64 {
    let mut mask = 0;
    for node in gpu_nodes(spec).gpus() {
        if let NodeName::Gpu(minor) = node.name {
            mask |= 1_u64.checked_shl(minor).unwrap_or_default();
        }
    }
    mask
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::spec_view;

    #[test]
    fn gpus_and_compatibility_hooks_of_config_json() {
        let text = r#"{"root":{"path":"/r"},"process":{},
            "linux":{"devices":[{"path":"/dev/nvidia0","type":"c","major":195,"minor":0},
              {"path":"/dev/nvidiactl","type":"c","major":195,"minor":255},
              {"path":"/dev/nvidia64","type":"c","major":195,"minor":64}]},
            "mounts":[{"type":"bind","destination":"/dev/nvidia3","source":"/dev/nvidia3"}],
            "hooks":{"createContainer":[
              {"path":"/usr/bin/nvidia-ctk","args":["nvidia-ctk","hook","enable-cuda-compat","--host-driver-version=535.1"]},
              {"path":"/usr/bin/nvidia-ctk","args":["nvidia-ctk","hook","update-ldcache","--folder","/usr/lib64"]},
              {"path":"/usr/bin/other","args":["other","enable-cuda-compat","--host-driver-version=1"]}]}}"#;
        let spec = spec_view::parse(text.as_bytes(), Path::new("/b")).unwrap();
        assert_eq!(gpus_of(&spec), 0b1001);
        let hooks = spec.hooks.iter().map(|entry| compat_hook(&entry.args));
        let versions: Vec<_> = hooks
            .map(|hook| hook.map(|hook| hook.host_driver))
            .collect();
        assert_eq!(versions, [Some("535.1".to_owned()), None, None]);
    }
}
