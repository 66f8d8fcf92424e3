//! Updates the CDI specs of a host when the driver or the GPUs have changed.

use std::path::Path;

use anyhow::{Error, Result};

use base::report::failure;
use cdi_spec::registry;
use cdi_spec::spec::Spec;
use findings::catalog;

use super::compare::{HostView, Parts, differences};
use super::entry::RootfsEdits;
use super::generate::sources;
use super::of_host::{GPU_CLASS, SpecWriter};
use super::stamp::{Stamp, Taken};
use crate::driver::diagnosis;
use crate::host::{Driver, DriverParts, Roots, Source};

/// How often the spec is created again if the host changes in the meantime.
const TRIES: u32 = 3;

impl SpecWriter<'_> {
    /// Creates the spec file again if it is out of date, and removes it if the host has no GPU any more. The specs of other devices
    /// follow it. This is repeated if the host changes in the meantime, because systemd does not start a service again while it runs.
    ///
    /// # Errors
    /// If the spec cannot be created, see [`Self::make`], and if the file cannot be written or removed.
    pub fn refresh(&mut self, path: &Path) -> Result<()> {
        let mut taken = self.stamp();
        let mut stamp = stamp_of(taken.as_ref());
        for _ in 0..TRIES {
            if !self.refresh_once(path, taken)? {
                break;
            }
            taken = self.stamp();
            let after = stamp_of(taken.as_ref());
            if after == stamp {
                break;
            }
            stamp = after;
        }
        if self.settings.class == GPU_CLASS {
            self.refresh_extra(path, stamp.as_ref())?;
        }
        Ok(())
    }

    /// Updates the file once. The stamp of the host was taken first: a change in the meantime makes the new spec out of date. Returns
    /// whether the file was out of date and has been updated.
    fn refresh_once(&mut self, path: &Path, taken: Option<Taken>) -> Result<bool> {
        let old = registry::read_spec(path).ok().map(OldSpec::from);
        if let Some(taken) = &taken
            && let Some(mismatch) = taken.parts.mismatch(self.config, None)
        {
            self.refuse(path, old, &taken.parts)?;
            self.findings.push(mismatch);
            return Ok(false);
        }
        let spec = match taken {
            Some(taken) => match self.make_unless_current(old.as_ref(), taken)? {
                Some(spec) => spec,
                None => return Ok(false),
            },
            None => Spec::default(),
        };
        let is_ours = old.as_ref().is_some_and(|old| old.stamp.is_some());
        if let Some(old) = &old
            && old.spec.kind != self.settings.kind()
            && (is_ours || !spec.devices.is_empty())
        {
            return Err(other_kind(path, &old.spec.kind));
        }
        if !spec.devices.is_empty() {
            return self.put(path, &spec, old.is_some());
        }
        if is_ours {
            // The spec lists GPUs that do not exist any more. Without a stamp, another program wrote it, and it stays.
            std::fs::remove_file(path)?;
        }
        Ok(true)
    }

    /// Changes our spec between an update of the driver and the load of the new module: no spec can be right in this state. The files of the
    /// old driver are gone, and a runtime that cannot mount one names a missing file. Without mounts, it reaches the hook entry, which
    /// refuses the container and names the cause.
    fn refuse(&self, path: &Path, old: Option<OldSpec>, parts: &DriverParts) -> Result<()> {
        let version = diagnosis::version_of_libraries(&parts.search(self.config));
        let (Some(old), Some(version)) = (old, version) else {
            return Ok(());
        };
        if old.stamp.is_none() {
            return Ok(());
        }
        let spec = refusing(old.spec.clone(), &version);
        if spec == old.spec {
            return Ok(());
        }
        super::write(path, &self.settings.format.print(&spec)?)
    }

    /// Creates the spec, or returns `None` if the old one has the stamp of the host.
    fn make_unless_current(&mut self, old: Option<&OldSpec>, taken: Taken) -> Result<Option<Spec>> {
        let Taken {
            mut stamp,
            parts,
            located,
        } = taken;
        let roots = parts.roots.clone();
        let is_current = |stamp: &Stamp| old.is_some_and(|old| old.is_current(stamp, &roots));
        // Only NVML shows the UUIDs of MIG devices.
        if stamp.mig.is_none() && is_current(&stamp) {
            return Ok(None);
        }
        let host = Driver::of_parts(parts, self.config)?.host(Source::Nvml)?;
        stamp.complete(&host.inventory);
        if stamp.mig.is_some() && is_current(&stamp) {
            return Ok(None);
        }
        self.make_with(Some(stamp), located, &host).map(Some)
    }
}

/// The spec that a refresh found.
struct OldSpec {
    spec: Spec,
    /// `None` if another program wrote the spec
    stamp: Option<Stamp>,
}

impl From<Spec> for OldSpec {
    fn from(spec: Spec) -> Self {
        let stamp = Stamp::from_spec(&spec);
        Self { spec, stamp }
    }
}

impl OldSpec {
    /// Whether this spec was created for a host with this stamp, all its files still exist, and nobody changed its nodes.
    fn is_current(&self, stamp: &Stamp, roots: &Roots) -> bool {
        if !self.stamp.as_ref().is_some_and(|own| own.is_current(stamp)) {
            return false;
        }
        let mut parts = Vec::new();
        for device in &self.spec.devices {
            parts.push(Parts::of_spec(&self.spec, &device.container_edits));
        }
        let view = HostView::examine(&parts, roots, None);
        for path in sources(&self.spec) {
            let is_examined = view.nodes.contains_key(Path::new(path));
            if !is_examined && rustix::fs::lstat(path).is_err() {
                return false;
            }
        }
        parts
            .iter()
            .all(|parts| differences(parts, &view).is_empty())
    }
}

/// Returns the spec without mounts, for a driver of this version, which is not loaded.
fn refusing(mut spec: Spec, version: &str) -> Spec {
    spec.container_edits.mounts.clear();
    for device in &mut spec.devices {
        device.container_edits.mounts.clear();
    }
    for hook in &mut spec.container_edits.hooks {
        let Some(mut entry) = RootfsEdits::from_entry(&hook.args) else {
            continue;
        };
        let stamp = entry.stamp.as_deref().and_then(Stamp::parse);
        if let Some(mut stamp) = stamp {
            version.clone_into(&mut stamp.driver);
            entry.stamp = Some(stamp.to_text());
            hook.args = entry.to_args().unwrap_or_default();
        }
    }
    spec
}

fn stamp_of(taken: Option<&Taken>) -> Option<Stamp> {
    Some(taken?.stamp.clone())
}

/// Containers store the names of their devices. With another kind of the spec, they could not start again.
fn other_kind(path: &Path, kind: &str) -> Error {
    failure(
        &catalog::SPEC_FILE,
        format!("cannot replace {path:?}, which has devices of the kind {kind:?}"),
        "name another file with --output, or that kind with --vendor and --class",
    )
}

#[cfg(test)]
mod tests {
    use super::super::stamp::tests as stamp;
    use super::*;
    use base::paths::HostPath;
    use cdi_spec::file::Format;
    use cdi_spec::spec::{ContainerEdits, Device, Hook};

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
