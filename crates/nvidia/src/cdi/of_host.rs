//! Creates the CDI spec of a host, and writes it unless another program's spec has its devices.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

use base::paths::HostPath;
use base::report::{Finding, line};
use cdi_spec::file::Format;
use cdi_spec::registry::{self, SpecFile};
use cdi_spec::spec::Spec;
use findings::catalog;

use super::entry::RootfsEdits;
use super::generate::{Named, Naming, spec};
use super::lower::SpecContext;
use super::stamp::Stamp;
use crate::config::Config;
use crate::edits::{Wanted, decide};
use crate::host::Host;
use crate::inventory::Inventory;
use crate::inventory::select::{mig_left_out, permitted_devices, permitted_failed};

/// The settings for a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The names that devices get
    pub naming: Naming,
    /// The part of the kind before the slash, `nvidia.com`
    pub vendor: String,
    /// The part of the kind after the slash, `gpu`
    pub class: String,
    /// Whether to add the groups of the nodes to the processes of containers; `None` if that depends on the engines
    pub additional_gids: Option<bool>,
    /// The program that the hook entries execute
    pub program: HostPath,
    /// The format of the file. A spec in another format is out of date.
    pub format: Format,
}

/// Creates the spec of this host. A device that does not work is left out, with a finding. Findings are appended to `findings`, even
/// if the function fails later. `engines_read_gids` is called at most once, and only if a node belongs to a group: engines that do
/// not support the field `additionalGids` reject the whole file.
///
/// # Errors
/// If the driver is missing or does not answer, or lacks a file that all containers require.
pub fn make(
    config: &Config,
    settings: &Settings,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
) -> Result<Spec> {
    let stamp = Stamp::of_host(config, settings);
    make_with(
        config,
        settings,
        engines_read_gids,
        findings,
        stamp,
        &Host::inspect_afresh(config)?,
    )
}

/// Creates the spec of a host that was already inspected, like [`make`]. Never calls NVML.
///
/// # Errors
/// If the driver lacks a file that all containers require.
pub fn of_inspected(
    config: &Config,
    settings: &Settings,
    host: &Host,
    findings: &mut Vec<Finding>,
) -> Result<Spec> {
    make_with(
        config,
        settings,
        &|| false,
        findings,
        Stamp::of_host(config, settings),
        host,
    )
}

pub(super) fn make_with(
    config: &Config,
    settings: &Settings,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
    stamp: Option<Stamp>,
    host: &Host,
) -> Result<Spec> {
    let wanted = wanted(config);
    let mut permitted = permitted_devices(&host.inventory, &config.devices);
    let facts = host.facts(&wanted, &permitted)?;
    let (common, more) = decide::common(&facts, &wanted)?;
    findings.extend(more);
    if let Some(refused) = facts.devices.wsl.as_ref().and_then(decide::refused_limits) {
        findings.push(refused);
        permitted.clear();
    }
    // A spec also names single GPUs.
    findings.extend(decide::not_isolated(&facts.devices, 1.min(permitted.len())));
    let mut devices = Vec::new();
    let mut failed: Vec<Finding> = Vec::new();
    for device in permitted {
        match decide::of_device(&facts.devices, &wanted, device) {
            Ok(edits) => devices.push(Named {
                names: settings.naming.names(device),
                edits,
            }),
            Err(error) => failed.push(left_out(line(&error))),
        }
    }
    failed.extend(
        permitted_failed(&host.inventory, &config.devices).map(|gpu| left_out(gpu.to_string())),
    );
    let complete = failed.is_empty();
    findings.extend(failed);
    findings.extend(mig_left_out(&host.inventory, &config.devices));
    findings.extend(host.findings());
    let mut nodes = devices
        .iter()
        .map(|device| &device.edits)
        .chain([&common])
        .flat_map(|edits| &edits.nodes);
    let is_for_a_group = nodes.any(|node| node.permissions.additional_gid().is_some());
    let context = SpecContext {
        driver_root: host.driver().path(),
        proc_dir: host.proc_dir(),
        program: settings.program.clone(),
        additional_gids: is_for_a_group
            && settings.additional_gids.unwrap_or_else(engines_read_gids),
        node_access: config.device_node_access,
        image: None,
    };
    let stamp = stamp.map(|mut stamp| {
        stamp.complete(&host.inventory);
        // A GPU that is not ready yet is asked again at the next refresh: no host has this stamp.
        Stamp {
            host: if complete { stamp.host } else { 0 },
            ..stamp
        }
        .to_text()
    });
    let Inventory {
        driver_version,
        cuda_version,
        ..
    } = &host.inventory;
    let cuda_compat = (config.cuda_compat && host.driver_kind().has_cuda_compat())
        .then(|| (driver_version.clone(), cuda_version.clone()));
    let kind = format!("{}/{}", settings.vendor, settings.class);
    Ok(spec(
        &kind,
        &common,
        &devices,
        &context,
        RootfsEdits {
            stamp,
            cuda_compat,
            ..RootfsEdits::of_config(config)
        },
    ))
}

/// Returns a request for the whole driver, because a spec is independent of containers.
fn wanted(config: &Config) -> Wanted {
    Wanted {
        capabilities: config.supported_driver_capabilities,
        gpus: true,
        ..Wanted::default()
    }
}

fn left_out(what: String) -> Finding {
    Finding::new(
        &catalog::SPEC_LACKS_GPU,
        what,
        "see \"nvidia-smi -q\" and \"journalctl -k\" on the host, then run \"oci-nvidia-hook cdi refresh\"",
    )
}

/// The default class. Specs of other devices belong to a spec with it.
pub const GPU_CLASS: &str = "gpu";

/// Returns the other specs in the directory of `path` with devices of the same names. Engines use neither of two such definitions, while a
/// spec in another directory has a different priority.
fn others_in_directory(path: &Path, spec: &Spec) -> Vec<SpecFile> {
    let names: BTreeSet<_> = spec.devices.iter().map(|device| &device.name).collect();
    let is_other = |file: &SpecFile| {
        let other = file
            .spec
            .as_ref()
            .ok()
            .filter(|other| other.kind == spec.kind);
        file.path != path
            && other.is_some_and(|other| {
                other
                    .devices
                    .iter()
                    .any(|device| names.contains(&device.name))
            })
    };
    let dirs = Vec::from_iter(path.parent().map(Path::to_path_buf));
    registry::read(&dirs).into_iter().filter(is_other).collect()
}

/// Whether this program wrote the file in place of `path`, with the other format.
fn is_earlier(other: &SpecFile, path: &Path) -> bool {
    other.path.file_stem() == path.file_stem()
        && other
            .spec
            .as_ref()
            .is_ok_and(|spec| Stamp::from_spec(spec).is_some())
}

/// Returns the finding about a spec that is not created, because another program's spec has its devices.
fn left_to(path: &Path, other: &Path) -> Finding {
    Finding::new(
        &catalog::SPEC_CONFLICT,
        format!("{path:?} is not created, because {other:?} has devices of the same names"),
        format!(
            "to use the new spec instead, run \"rm {}\" and \"oci-nvidia-hook cdi generate\"",
            other.display()
        ),
    )
}

/// Writes a spec. Returns `false` if that would be a new file, and another program's spec has its devices.
pub(super) fn put(
    path: &Path,
    spec: &Spec,
    settings: &Settings,
    replaces: bool,
    findings: &mut Vec<Finding>,
) -> Result<bool> {
    let others = others_in_directory(path, spec);
    let (earlier, others): (Vec<_>, Vec<_>) = others
        .into_iter()
        .partition(|other| is_earlier(other, path));
    if let (false, Some(other)) = (replaces, others.first()) {
        findings.push(left_to(path, &other.path));
        return Ok(false);
    }
    super::write(path, &settings.format.print(spec)?)?;
    for earlier in earlier {
        std::fs::remove_file(earlier.path)?;
    }
    Ok(true)
}
