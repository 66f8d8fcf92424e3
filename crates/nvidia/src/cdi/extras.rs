//! Creates the CDI specs of the devices next to the GPUs, with the kinds of NVIDIA's generator: `nvidia.com/gds=all` for a feature, and
//! `nvidia.com/imex-channel=0` for an IMEX channel. A spec file has one kind, so these specs are files next to the spec of the GPUs.
//!
//! Engines make the nodes and mounts themselves. The hook entry only compares the features with `[devices]` in config.toml, and stores the
//! stamp. The specs do not set `NVIDIA_VISIBLE_DEVICES`, so the GPUs of the container can still come from the hook.

use std::path::{Path, PathBuf};

use anyhow::{Error, Result};

use base::report::{Finding, failure};
use cdi_spec::registry;
use cdi_spec::spec::{ContainerEdits, Device, Spec};
use findings::catalog;

use super::entry::RootfsEdits;
use super::generate::ALL;
use super::lower::{SpecContext, hook, lower_for_engine};
use super::of_host::{Settings, put};
use super::stamp::Stamp;
use crate::config::Config;
use crate::driver::files::DriverFiles;
use crate::edits::{DeviceNode, Edits, build};
use crate::feature::{Feature, Features};
use crate::host::{Host, Roots, beside};

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

/// Returns the specs for this host. A class without devices has none. `stamp` is that of the host. Findings are appended to `findings`.
///
/// # Errors
/// If a root of the driver cannot be opened.
pub fn make(
    config: &Config,
    settings: &Settings,
    stamp: &Stamp,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
) -> Result<Vec<ClassSpec>> {
    let stamp = Stamp {
        host: 0,
        mig: None,
        ..stamp.clone()
    }
    .to_text();
    let roots = Roots::open(config)?;
    let mut found: Vec<Group> = Vec::new();
    for feature in Feature::ALL
        .into_iter()
        .filter(|feature| !config.devices.denied_features.has(*feature))
    {
        let nodes = nodes_of(beside::nodes(&roots.dev, feature));
        if nodes.is_empty() {
            continue;
        }
        let beside::Parts {
            files: placed,
            directories,
            findings: more,
        } = beside::parts(&roots.driver, feature);
        findings.extend(more);
        let edits = build::common(
            &DriverFiles {
                placed,
                ..DriverFiles::default()
            },
            directories,
            nodes,
            None,
        );
        let devices = vec![(ALL.to_owned(), edits)];
        found.push(Group {
            class: feature.row().name,
            features: [feature].into_iter().collect(),
            devices,
        });
    }
    if !config.ignore_imex_channels {
        let channels = beside::imex_channels(&roots).into_iter();
        let channels = channels.map(|(number, node)| {
            (
                number.to_string(),
                Edits {
                    nodes: vec![node],
                    ..Edits::default()
                },
            )
        });
        found.push(Group {
            class: IMEX_CLASS,
            features: Features::EMPTY,
            devices: channels.collect(),
        });
    }
    let found = found.into_iter().filter(|group| !group.devices.is_empty());
    let specs = found.map(
        |Group {
             class,
             features,
             devices,
         }| {
            let mut nodes = devices.iter().flat_map(|(_, edits)| &edits.nodes);
            let is_for_a_group = nodes.any(|node| node.permissions.additional_gid().is_some());
            let context = SpecContext {
                driver_root: roots.driver.path(),
                proc_dir: None,
                program: settings.program.clone(),
                additional_gids: is_for_a_group
                    && settings.additional_gids.unwrap_or_else(engines_read_gids),
                node_access: config.device_node_access,
                image: None,
            };
            let entry = RootfsEdits {
                stamp: Some(stamp.clone()),
                features,
                ..RootfsEdits::of_config(config)
            };
            (
                class,
                spec(
                    &format!("{}/{class}", settings.vendor),
                    devices,
                    &context,
                    &entry,
                ),
            )
        },
    );
    Ok(specs.collect())
}

/// Returns the spec of one class. Findings are appended to `findings`.
///
/// # Errors
/// If the driver is not loaded, or this host has no such devices for containers.
pub fn make_class(
    class: &str,
    config: &Config,
    settings: &Settings,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
) -> Result<Spec> {
    let Some(stamp) = Stamp::of_host(config, settings) else {
        // This has the reason.
        Host::inspect_afresh(config)?;
        return Err(empty(
            "this host has no GPU".to_owned(),
            "run \"oci-nvidia-hook doctor\"".to_owned(),
        ));
    };
    let specs = make(config, settings, &stamp, engines_read_gids, findings)?;
    let spec = specs.into_iter().find(|(of, _)| *of == class);
    Ok(spec.ok_or_else(|| without_devices(class, config))?.1)
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

fn nodes_of(nodes: Vec<(String, DeviceNode)>) -> Vec<DeviceNode> {
    nodes.into_iter().map(|(_, node)| node).collect()
}

/// Creates a spec of these devices and of `all`.
fn spec(
    kind: &str,
    devices: Vec<(String, Edits)>,
    context: &SpecContext,
    entry: &RootfsEdits,
) -> Spec {
    let device = |(name, edits): (String, Edits)| Device {
        name,
        container_edits: lower_for_engine(&edits, context).sort(),
        ..Device::default()
    };
    let mut devices: Vec<_> = devices.into_iter().map(device).collect();
    devices.extend(Device::merged(&devices, ALL).ok().flatten());
    let container_edits = ContainerEdits {
        hooks: hook(entry, context).into_iter().collect(),
        ..ContainerEdits::default()
    };
    Spec {
        kind: kind.to_owned(),
        devices,
        container_edits,
        ..Spec::default()
    }
    .simplify()
    .with_minimum_version()
}

/// Brings the files next to the spec of the GPUs up to date: creates and replaces those that differ, and removes ours of a class without
/// devices. Without the spec of the GPUs or a stamp of the host, it removes all of ours. Returns the files that were written.
///
/// # Errors
/// If a file cannot be written or removed.
pub fn refresh(
    base: &Path,
    stamp: Option<Stamp>,
    config: &Config,
    settings: &Settings,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
) -> Result<Vec<(PathBuf, Spec)>> {
    let specs = match stamp.filter(|_| rustix::fs::lstat(base).is_ok()) {
        Some(stamp) => make(config, settings, &stamp, engines_read_gids, findings)?,
        None => Vec::new(),
    };
    update(specs, &|class| path_of(class, base), settings, findings)
}

/// Creates and replaces the files that differ from these specs, and removes ours of other classes. Returns the files that were written.
///
/// # Errors
/// If a file cannot be written or removed.
pub fn update(
    mut specs: Vec<ClassSpec>,
    path_of: &dyn Fn(&str) -> PathBuf,
    settings: &Settings,
    findings: &mut Vec<Finding>,
) -> Result<Vec<(PathBuf, Spec)>> {
    let mut written = Vec::new();
    for class in classes() {
        let path = path_of(class);
        let old = registry::read_spec(&path).ok();
        let made = specs
            .iter()
            .position(|(of, _)| *of == class)
            .map(|at| specs.swap_remove(at).1);
        let is_ours = old.as_ref().and_then(Stamp::from_spec).is_some();
        match made {
            Some(spec) if old.as_ref() != Some(&spec) => {
                let is_written = put(&path, &spec, settings, old.is_some(), findings)?;
                written.extend(is_written.then_some((path, spec)));
            }
            None if is_ours => std::fs::remove_file(&path)?,
            // The file is current. Without a stamp, another program wrote it.
            _ => {}
        }
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

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
