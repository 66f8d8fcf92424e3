//! The CDI spec of a host: made from its driver and its GPUs, and made again once they have changed.

use std::path::Path;

use anyhow::Result;

use base::paths::HostPath;
use base::report::{Finding, catalog, line};
use cdi_spec::file::Format;
use cdi_spec::registry;
use cdi_spec::spec::Spec;

use super::entry::RootfsEdits;
use super::generate::{Named, Naming, sources, spec};
use super::lower::{NodeFacts, SpecContext};
use super::stamp::Stamp;
use crate::config::Config;
use crate::edits::{Wanted, decide};
use crate::host::Host;
use crate::inventory::Inventory;
use crate::inventory::select::{mig_left_out, permitted_devices, permitted_failed};

/// What the administrator chooses about a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The names that devices get
    pub naming: Naming,
    /// The part of the kind before the slash, `nvidia.com`
    pub vendor: String,
    /// The part of the kind after the slash, `gpu`
    pub class: String,
    /// Whether processes are put into the groups that own the nodes; `None`: if all engines of this host can
    pub additional_gids: Option<bool>,
    /// The program that the spec's hook entries start
    pub program: HostPath,
    /// How the file is written. It is of no other use than that a spec in another format counts as out of date.
    pub format: Format,
}

/// The spec of this host. A device that cannot be given is left out, with a finding. Findings are added as they are made,
/// also before an error. `engines_read_gids` is called at most once, and only if a node belongs to a group: engines that do not
/// know the field `additionalGids` refuse the whole file.
///
/// # Errors
/// If there is no driver, it does not answer, or a part is missing without which no container works.
pub fn make(
    config: &Config,
    settings: &Settings,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
) -> Result<Spec> {
    let stamp = Stamp::of_host(config, settings);
    make_with(config, settings, engines_read_gids, findings, stamp, &Host::inspect_afresh(config)?)
}

fn make_with(
    config: &Config,
    settings: &Settings,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
    stamp: Option<Stamp>,
    host: &Host,
) -> Result<Spec> {
    let wanted = wanted(config);
    let permitted = permitted_devices(&host.inventory, &config.devices);
    let facts = host.facts(&wanted, &permitted)?;
    let (common, more) = decide::common(&facts, &wanted)?;
    findings.extend(more);
    let mut devices = Vec::new();
    let mut failed: Vec<Finding> = Vec::new();
    for device in permitted {
        match decide::of_device(&facts.devices, &wanted, device) {
            Ok(edits) => devices.push(Named { names: settings.naming.names(device), edits }),
            Err(error) => failed.push(left_out(line(&error))),
        }
    }
    failed.extend(permitted_failed(&host.inventory, &config.devices).map(|gpu| left_out(gpu.to_string())));
    let complete = failed.is_empty();
    findings.extend(failed);
    findings.extend(mig_left_out(&host.inventory, &config.devices));
    findings.extend(host.findings());
    let nodes = NodeFacts::of_nodes(devices.iter().map(|device| &device.edits).chain([&common]));
    let is_for_a_group = nodes.values().any(|node| node.additional_gid().is_some());
    let context = SpecContext {
        driver_root: host.driver().path(),
        proc_dir: host.proc_dir(),
        program: settings.program.clone(),
        nodes,
        additional_gids: is_for_a_group && settings.additional_gids.unwrap_or_else(engines_read_gids),
        image: None,
    };
    let stamp = stamp.map(|mut stamp| {
        stamp.complete(&host.inventory);
        // A GPU that is not ready yet is asked again at the next refresh: no host has this stamp.
        Stamp { rest: if complete { stamp.rest } else { 0 }, ..stamp }.to_text()
    });
    let Inventory { driver_version, cuda_version, .. } = &host.inventory;
    let cuda_compat = config.cuda_compat.then(|| (driver_version.clone(), cuda_version.clone()));
    let kind = format!("{}/{}", settings.vendor, settings.class);
    Ok(spec(&kind, &common, &devices, &context, RootfsEdits { stamp, cuda_compat, ..RootfsEdits::default() }))
}

/// All of the driver: a spec knows no container that could ask for less.
fn wanted(config: &Config) -> Wanted {
    Wanted { capabilities: config.supported_driver_capabilities, gpus: true, ..Wanted::default() }
}

fn left_out(what: String) -> Finding {
    Finding::of(
        &catalog::SPEC_LACKS_GPU,
        what,
        "look at it with \"nvidia-smi -q\" and \"journalctl -k\" on the host, then run \"oci-nvidia-hook cdi refresh\"",
    )
}

/// A host that changes more often while its spec is made is left as it is until its next change.
const TRIES: u32 = 3;

/// Makes the spec file anew unless it fits the host, and removes it where the host has no GPU any more. Repeated if the host
/// changed meanwhile: systemd starts no second run of a service while one runs.
///
/// # Errors
/// Those of [`make`], and if the file cannot be written or removed.
pub fn refresh(
    path: &Path,
    config: &Config,
    settings: &Settings,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
) -> Result<()> {
    for _ in 0..TRIES {
        if !refresh_once(path, config, settings, engines_read_gids, findings)? {
            break;
        }
    }
    Ok(())
}

/// Whether the host changed meanwhile.
fn refresh_once(
    path: &Path,
    config: &Config,
    settings: &Settings,
    engines_read_gids: &dyn Fn() -> bool,
    findings: &mut Vec<Finding>,
) -> Result<bool> {
    let old = registry::read_spec(path).ok();
    let old_stamp = old.as_ref().and_then(Stamp::of);
    // Looked at before the driver is: what changes meanwhile makes the new spec old, and is seen next time.
    let before = Stamp::of_host(config, settings);
    let mut stamp = before.clone();
    let mut host = None;
    // The kernel does not show which MIG devices there are.
    if let Some(stamp) = stamp.as_mut().filter(|stamp| stamp.mig.is_some()) {
        stamp.complete(&host.insert(Host::inspect_afresh(config)?).inventory);
    }
    let is_there = |path: &&str| rustix::fs::lstat(*path).is_ok();
    if let (Some(old), Some(stamp)) = (&old, &stamp)
        && old_stamp.as_ref() == Some(stamp)
        && sources(old).iter().all(is_there)
    {
        return Ok(false);
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
        super::write(path, &settings.format.print(&spec)?)?;
    } else if old_stamp.is_some() {
        // It speaks of GPUs that are gone. A spec of another program's is not ours to remove.
        std::fs::remove_file(path)?;
    }
    Ok(Stamp::of_host(config, settings) != before)
}
