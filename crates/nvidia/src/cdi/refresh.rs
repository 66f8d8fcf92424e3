//! Updates the CDI specs of a host when the driver or the GPUs have changed.

use std::path::Path;

use anyhow::Result;

use base::report::Finding;
use cdi_spec::registry;
use cdi_spec::spec::Spec;

use super::extras;
use super::generate::sources;
use super::of_host::{GPU_CLASS, Settings, make_with, put};
use super::stamp::Stamp;
use crate::config::Config;
use crate::host::Host;

/// How often the spec is created again if the host changes in the meantime.
const TRIES: u32 = 3;

/// Creates the spec file again if it is out of date, and removes it if the host has no GPU any more. The specs of other devices follow
/// it. This is repeated if the host changes in the meantime, because systemd does not start a service again while it runs.
///
/// # Errors
/// If the spec cannot be created, see [`super::of_host::make`], and if the file cannot be written or removed.
pub fn refresh(
    path: &Path,
    config: &Config,
    settings: &Settings,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
) -> Result<()> {
    let mut stamp = None;
    for _ in 0..TRIES {
        let changed;
        (stamp, changed) = refresh_once(path, config, settings, engines_read_gids, findings)?;
        if !changed {
            break;
        }
    }
    if settings.class == GPU_CLASS {
        extras::refresh(path, stamp, config, settings, engines_read_gids, findings)?;
    }
    Ok(())
}

/// Updates the file once. Returns the last stamp of the host, and whether the host has changed in the meantime.
fn refresh_once(
    path: &Path,
    config: &Config,
    settings: &Settings,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
) -> Result<(Option<Stamp>, bool)> {
    let old = registry::read_spec(path).ok();
    let old_stamp = old.as_ref().and_then(Stamp::from_spec);
    // The stamp is taken first, so that a change in the meantime makes the new spec out of date.
    let before = Stamp::of_host(config, settings);
    let mut stamp = before.clone();
    let mut host = None;
    // Only NVML shows the UUIDs of MIG devices.
    if let Some(stamp) = stamp.as_mut().filter(|stamp| stamp.mig.is_some()) {
        stamp.complete(&host.insert(Host::inspect_afresh(config)?).inventory);
    }
    let exists = |path: &&str| rustix::fs::lstat(*path).is_ok();
    if let (Some(old), Some(stamp)) = (&old, &stamp)
        && old_stamp.as_ref() == Some(stamp)
        && sources(old).iter().all(exists)
    {
        return Ok((before, false));
    }
    let spec = match stamp {
        None => Spec::default(),
        stamp => {
            let host = match host {
                Some(host) => host,
                None => Host::inspect_afresh(config)?,
            };
            make_with(config, settings, engines_read_gids, findings, stamp, &host)?
        }
    };
    if !spec.devices.is_empty() {
        if !put(path, &spec, settings, old.is_some(), findings)? {
            return Ok((before, false));
        }
    } else if old_stamp.is_some() {
        // The spec lists GPUs that do not exist any more. Without a stamp, another program wrote it, and it stays.
        std::fs::remove_file(path)?;
    }
    let after = Stamp::of_host(config, settings);
    let changed = after != before;
    Ok((after, changed))
}

#[cfg(test)]
mod tests {
    use super::super::stamp::tests as stamp;
    use super::*;
    use base::paths::HostPath;
    use cdi_spec::file::Format;
    use cdi_spec::spec::{ContainerEdits, Device, Hook};

    use super::super::entry::RootfsEdits;
    use super::super::generate::Naming;

    /// Without GPUs, a spec of ours lists GPUs that no longer exist.
    #[test]
    fn only_our_specs_are_removed() {
        let (dir, config) = stamp::host();
        std::fs::remove_dir_all(dir.path().join("proc/driver/nvidia/gpus")).unwrap();
        let path = dir.path().join("nvidia.json");
        let ours = RootfsEdits {
            stamp: Some("driver=1,boot=b,host=7,files=8".to_owned()),
            ..RootfsEdits::default()
        };
        for (args, stays) in [
            (vec!["nvidia-ctk".to_owned()], true),
            (ours.to_args().unwrap(), false),
        ] {
            let hook = Hook {
                hook_name: "createContainer".to_owned(),
                path: "/p".to_owned(),
                args,
                ..Hook::default()
            };
            let container_edits = ContainerEdits {
                hooks: vec![hook],
                ..ContainerEdits::default()
            };
            let edits = ContainerEdits {
                env: vec!["A=b".to_owned()],
                ..ContainerEdits::default()
            };
            let devices = vec![Device {
                name: "all".to_owned(),
                container_edits: edits,
                ..Device::default()
            }];
            let kind = "nvidia.com/gpu".to_owned();
            let spec = Spec {
                kind,
                devices,
                container_edits,
                ..Spec::default()
            }
            .with_minimum_version();
            std::fs::write(&path, Format::Json.print(&spec).unwrap()).unwrap();
            let settings = Settings {
                naming: Naming::default(),
                vendor: "nvidia.com".to_owned(),
                class: "gpu".to_owned(),
                additional_gids: None,
                program: HostPath::new("/p"),
                format: Format::Json,
            };
            refresh(&path, &config, &settings, &|| false, &mut Vec::new()).unwrap();
            assert_eq!(std::fs::metadata(&path).is_ok(), stays, "{spec:?}");
        }
    }
}
