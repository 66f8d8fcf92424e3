//! Creates the CDI specs of the devices next to the GPUs, with the kinds of NVIDIA's generator: `nvidia.com/gds=all` for a feature, and
//! `nvidia.com/imex-channel=0` for an IMEX channel. A spec file has one kind, so these specs are files next to the spec of the GPUs.
//!
//! Engines make the nodes and mounts themselves. The hook entry only compares the features with `[devices]` in config.toml, and stores the
//! stamp. The specs do not set `NVIDIA_VISIBLE_DEVICES`, so the GPUs of the container can still come from the hook.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Error, Result};

use base::report::failure;
use cdi_spec::registry;
use cdi_spec::spec::{ContainerEdits, Device, Spec};
use findings::catalog;

use super::entry::RootfsEdits;
use super::generate::ALL;
use super::lower::{SpecContext, hook, lower_for_engine};
use super::of_host::SpecWriter;
use super::stamp::Stamp;
use crate::config::Config;
use crate::driver::files::DriverFiles;
use crate::edits::{Edits, build};
use crate::feature::{Feature, Features};
use crate::host::{Driver, Roots, Source, extra_devices};

/// The class of IMEX channels.
pub const IMEX_CLASS: &str = "imex-channel";

/// Returns all classes.
pub fn classes() -> impl Iterator<Item = &'static str> {
    Feature::ALL
        .into_iter()
        .map(|feature| feature.row().name)
        .chain([IMEX_CLASS])
}

/// Returns the class with this name.
#[must_use]
pub fn class_named(name: &str) -> Option<&'static str> {
    classes().find(|class| *class == name)
}

/// Returns the file of a class next to the spec of the GPUs: `nvidia-gds.yaml`.
#[must_use]
pub fn path_of(class: &str, base: &Path) -> PathBuf {
    named(base, &format!("{}-{class}", stem(base)))
}

/// Returns the spec of the GPUs to which a file belongs: the file itself, unless its name ends in a class.
#[must_use]
pub fn base_of(path: &Path) -> PathBuf {
    let stem = stem(path);
    let base = classes().find_map(|class| stem.strip_suffix(class)?.strip_suffix('-'));
    base.map_or_else(|| path.to_owned(), |base| named(path, base))
}

fn stem(path: &Path) -> String {
    path.file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Returns the path with another name and the same extension. The name can contain dots.
fn named(path: &Path, name: &str) -> PathBuf {
    path.with_file_name(format!(
        "{name}.{}",
        path.extension().unwrap_or_default().to_string_lossy()
    ))
}

/// The devices of a spec.
struct Group {
    class: &'static str,
    /// The features that `[devices]` can deny
    features: Features,
    /// Their names and edits
    devices: Vec<(String, Edits)>,
}

/// A spec, and its class.
pub type ClassSpec = (&'static str, Spec);

impl SpecWriter<'_> {
    /// Returns the specs of the devices next to the GPUs. A class without devices has none. `stamp` is the host's.
    ///
    /// # Errors
    /// If a root of the driver cannot be opened.
    pub fn make_extra(&mut self, stamp: &Stamp) -> Result<Vec<ClassSpec>> {
        let stamp = Stamp {
            host: 0,
            mig: None,
            ..stamp.clone()
        };
        let roots = self.roots()?;
        let mut groups = self.features(&roots);
        if !self.config.ignore_imex_channels {
            groups.extend(imex_channels(&roots));
        }
        let mut specs = Vec::new();
        for group in groups {
            let edits = group.devices.iter().map(|(_, edits)| edits);
            let context = self.context(roots.driver.path(), None, edits);
            let entry = RootfsEdits {
                stamp: Some(stamp.to_text()),
                features: group.features,
                ..RootfsEdits::of_config(self.config)
            };
            let kind = format!("{}/{}", self.settings.vendor, group.class);
            specs.push((group.class, spec(kind, group.devices, &context, &entry)));
        }
        Ok(specs)
    }

    fn features(&mut self, roots: &Roots) -> Vec<Group> {
        let mut groups = Vec::new();
        for feature in permitted_features(self.config) {
            let mut nodes = Vec::new();
            for (_, node) in extra_devices::nodes(&roots.dev, feature) {
                nodes.push(node);
            }
            if nodes.is_empty() {
                continue;
            }
            let parts = extra_devices::parts(&roots.driver, feature);
            self.findings.extend(parts.findings);
            let files = DriverFiles {
                placed: parts.files,
                ..DriverFiles::default()
            };
            let edits = build::common(&files, parts.directories, nodes, None);
            groups.push(Group {
                class: feature.row().name,
                features: [feature].into_iter().collect(),
                devices: vec![(ALL.to_owned(), edits)],
            });
        }
        groups
    }

    /// Returns the spec of one class.
    ///
    /// # Errors
    /// If the driver is not loaded, or this host has no such devices for containers.
    pub fn make_class(&mut self, class: &str) -> Result<Spec> {
        let Some(taken) = self.stamp() else {
            // This fails too, with an error that names the cause.
            Driver::find(self.config)?.host(Source::Nvml)?;
            return Err(empty(
                "this host has no GPU".to_owned(),
                "run \"oci-nvidia-hook doctor\"".to_owned(),
            ));
        };
        for (of, spec) in self.make_extra(&taken.stamp)? {
            if of == class {
                return Ok(spec);
            }
        }
        Err(without_devices(class, self.config))
    }

    /// Brings the files next to the spec of the GPUs up to date: creates and replaces those that differ, and removes ours of a class
    /// without devices. Without the spec of the GPUs or a stamp of the host, it removes all of ours. Returns the files that were written.
    ///
    /// # Errors
    /// If a file cannot be written or removed.
    pub fn refresh_extra(
        &mut self,
        base: &Path,
        stamp: Option<&Stamp>,
    ) -> Result<Vec<(PathBuf, Spec)>> {
        let specs = match stamp {
            Some(stamp) if rustix::fs::lstat(base).is_ok() => self.make_extra(stamp)?,
            _ => Vec::new(),
        };
        self.update_extra(specs, &|class| path_of(class, base))
    }

    /// Creates and replaces the files that differ from these specs, and removes ours of other classes. Returns the files that were
    /// written.
    ///
    /// # Errors
    /// If a file cannot be written or removed.
    pub fn update_extra(
        &mut self,
        specs: Vec<ClassSpec>,
        path_of: &dyn Fn(&str) -> PathBuf,
    ) -> Result<Vec<(PathBuf, Spec)>> {
        let mut written = Vec::new();
        let mut specs: BTreeMap<_, _> = specs.into_iter().collect();
        for class in classes() {
            let path = path_of(class);
            let old = registry::read_spec(&path).ok();
            // Without a stamp, another program wrote the file.
            let is_ours = old.as_ref().and_then(Stamp::from_spec).is_some();
            match specs.remove(class) {
                Some(spec) if old.as_ref() != Some(&spec) => {
                    if self.put(&path, &spec, old.is_some())? {
                        written.push((path, spec));
                    }
                }
                None if is_ours => std::fs::remove_file(&path)?,
                Some(_) | None => {}
            }
        }
        Ok(written)
    }
}

/// Returns the features that `[devices]` does not deny.
fn permitted_features(config: &Config) -> Vec<Feature> {
    let mut features = Feature::ALL.to_vec();
    features.retain(|feature| !config.devices.denied_features.has(*feature));
    features
}

fn imex_channels(roots: &Roots) -> Option<Group> {
    let mut devices = Vec::new();
    for (number, node) in extra_devices::imex_channels(roots) {
        let edits = Edits {
            nodes: vec![node],
            ..Edits::default()
        };
        devices.push((number.to_string(), edits));
    }
    if devices.is_empty() {
        return None;
    }
    Some(Group {
        class: IMEX_CLASS,
        features: Features::EMPTY,
        devices,
    })
}

fn without_devices(class: &str, config: &Config) -> Error {
    match Feature::from_name(class) {
        Some(feature) if config.devices.denied_features.has(feature) => empty(
            format!("[devices] in config.toml denies {class:?} to containers"),
            format!("remove {class:?} from deny in config.toml"),
        ),
        Some(feature) => empty(
            format!("this host has no devices of {}", feature.row().title),
            feature.how_to_get_nodes(),
        ),
        None if config.ignore_imex_channels => empty(
            "config.toml ignores requests for IMEX channels".to_owned(),
            "remove ignore-imex-channel-requests from [features] in config.toml".to_owned(),
        ),
        None => empty(
            "this host has no IMEX channel".to_owned(),
            "run \"oci-nvidia-hook prepare --imex-channel 0\" as root".to_owned(),
        ),
    }
}

fn empty(what: String, fix: String) -> Error {
    failure(&catalog::SPEC_EMPTY, what, fix)
}

/// Creates a spec of these devices and of `all`.
fn spec(
    kind: String,
    devices: Vec<(String, Edits)>,
    context: &SpecContext,
    entry: &RootfsEdits,
) -> Spec {
    let mut named = Vec::new();
    for (name, edits) in devices {
        named.push(Device {
            name,
            container_edits: lower_for_engine(&edits, context).sort(),
            ..Device::default()
        });
    }
    named.extend(Device::merged(&named, ALL).ok().flatten());
    let container_edits = ContainerEdits {
        hooks: hook(entry, context).into_iter().collect(),
        ..ContainerEdits::default()
    };
    Spec {
        kind,
        devices: named,
        container_edits,
        ..Spec::default()
    }
    .simplify()
    .with_minimum_version()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cdi::stamp::tests as stamp;
    use base::paths::HostPath;
    use cdi_spec::file::Format;

    use super::super::generate::Naming;
    use super::super::of_host::Settings;

    #[test]
    fn denied_features_have_no_spec() {
        let mut config = Config::default();
        assert_eq!(permitted_features(&config), Feature::ALL);
        config.devices.denied_features = [Feature::Gds].into_iter().collect();
        let permitted = permitted_features(&config);
        assert_eq!(permitted.len(), Feature::ALL.len() - 1);
        assert!(!permitted.contains(&Feature::Gds));
    }

    /// A file without a stamp belongs to the administrator, even if its name is the name of our file.
    #[test]
    fn specs_of_others_stay() {
        let (dir, config) = stamp::host();
        let settings = Settings {
            naming: Naming::default(),
            vendor: "nvidia.com".to_owned(),
            class: "gpu".to_owned(),
            additional_gids: None,
            program: HostPath::new("/p"),
            format: Format::Json,
        };
        let mut writer = SpecWriter::new(&config, &settings, || false);
        let context = writer.context(HostPath::new("/"), None, [].into_iter());
        let base = dir.path().join("nvidia.json");
        for (stamp, stays) in [
            (None, true),
            (Some("driver=1,boot=b,host=7,files=8"), false),
        ] {
            let entry = RootfsEdits {
                stamp: stamp.map(str::to_owned),
                ..RootfsEdits::default()
            };
            let devices = vec![("all".to_owned(), Edits::default())];
            let mut spec = spec("nvidia.com/gdrcopy".to_owned(), devices, &context, &entry);
            spec.devices[0].container_edits.env = vec!["A=b".to_owned()];
            let path = path_of("gdrcopy", &base);
            std::fs::write(&path, Format::Json.print(&spec).unwrap()).unwrap();
            assert!(registry::read_spec(&path).is_ok(), "{spec:?}");
            let written = writer.update_extra(Vec::new(), &|class| path_of(class, &base));
            assert!(written.unwrap().is_empty());
            assert_eq!(std::fs::metadata(&path).is_ok(), stays, "{stamp:?}");
        }
    }

    #[test]
    fn files_next_to_the_spec_of_the_gpus() {
        for (class, base, path) in [
            (
                "gds",
                "/var/run/cdi/nvidia.yaml",
                "/var/run/cdi/nvidia-gds.yaml",
            ),
            (
                "gds",
                "/cdi/k8s.nvidia.com-gpu.json",
                "/cdi/k8s.nvidia.com-gpu-gds.json",
            ),
            (
                "imex-channel",
                "/etc/cdi/x.json",
                "/etc/cdi/x-imex-channel.json",
            ),
        ] {
            assert_eq!(path_of(class, Path::new(base)), Path::new(path));
            assert_eq!(base_of(Path::new(path)), Path::new(base));
            assert_eq!(base_of(Path::new(base)), Path::new(base));
        }
    }
}
