//! Updates the CDI specs of a host when the driver or the GPUs have changed.

use std::path::Path;

use anyhow::Result;

use cdi_spec::registry;
use cdi_spec::spec::Spec;

use super::generate::sources;
use super::of_host::{GPU_CLASS, SpecWriter};
use super::stamp::Stamp;
use crate::host::Host;

/// How often the spec is created again if the host changes in the meantime.
const TRIES: u32 = 3;

impl SpecWriter<'_> {
    /// Creates the spec file again if it is out of date, and removes it if the host has no GPU any more. The specs of other devices
    /// follow it. This is repeated if the host changes in the meantime, because systemd does not start a service again while it runs.
    ///
    /// # Errors
    /// If the spec cannot be created, see [`Self::make`], and if the file cannot be written or removed.
    pub fn refresh(&mut self, path: &Path) -> Result<()> {
        let mut stamp = None;
        for _ in 0..TRIES {
            let before = self.stamp();
            stamp = self.refresh_once(path, before.clone())?;
            if stamp == before {
                break;
            }
        }
        if self.settings.class == GPU_CLASS {
            self.refresh_extra(path, stamp.as_ref())?;
        }
        Ok(())
    }

    /// Updates the file once. `before` is the stamp of the host, which is taken first: a change in the meantime makes the new spec out of
    /// date. Returns the last stamp of the host.
    fn refresh_once(&mut self, path: &Path, before: Option<Stamp>) -> Result<Option<Stamp>> {
        let old = registry::read_spec(path).ok();
        let old_stamp = old.as_ref().and_then(Stamp::from_spec);
        let mut stamp = before.clone();
        let mut host = None;
        if let Some(stamp) = &mut stamp
            && stamp.mig.is_some()
        {
            // Only NVML shows the UUIDs of MIG devices.
            let host = host.insert(Host::inspect_afresh(self.config)?);
            stamp.complete(&host.inventory);
        }
        if let (Some(old), Some(_)) = (&old, &stamp)
            && old_stamp == stamp
            && sources(old)
                .iter()
                .all(|path| rustix::fs::lstat(*path).is_ok())
        {
            return Ok(before);
        }
        let spec = match (stamp, host) {
            (None, _) => Spec::default(),
            (stamp, Some(host)) => self.make_with(stamp, &host)?,
            (stamp, None) => self.make_with(stamp, &Host::inspect_afresh(self.config)?)?,
        };
        if !spec.devices.is_empty() {
            if !self.put(path, &spec, old.is_some())? {
                return Ok(before);
            }
        } else if old_stamp.is_some() {
            // The spec lists GPUs that do not exist any more. Without a stamp, another program wrote it, and it stays.
            std::fs::remove_file(path)?;
        }
        Ok(self.stamp())
    }
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
    use super::super::of_host::Settings;

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
            let mut writer = SpecWriter::new(&config, &settings, || false);
            writer.refresh(&path).unwrap();
            assert_eq!(std::fs::metadata(&path).is_ok(), stays, "{spec:?}");
        }
    }
}
