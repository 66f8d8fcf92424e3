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
use super::stamp::{Stamp, Taken};
use crate::config::Config;
use crate::edits::{Edits, Wanted, decide};
use crate::host::{Driver, Host, Roots, Source, SpecFiles};
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

impl Settings {
    /// Returns the kind of the devices.
    #[must_use]
    pub fn kind(&self) -> String {
        format!("{}/{}", self.vendor, self.class)
    }
}

/// Creates and writes the CDI specs of this host.
#[derive(Debug)]
pub struct SpecWriter<'a> {
    pub(super) config: &'a Config,
    pub(super) settings: &'a Settings,
    /// Engines that do not support the field `additionalGids` reject the whole file. This is called at most once for a spec, and only if a
    /// node belongs to a group.
    engines_read_gids: fn() -> bool,
    /// The roots of the driver, once they are open
    roots: Option<Roots>,
    /// The findings so far. They are complete up to the point at which a function failed.
    pub findings: Vec<Finding>,
}

impl<'a> SpecWriter<'a> {
    /// Returns a writer without findings.
    #[must_use]
    pub const fn new(
        config: &'a Config,
        settings: &'a Settings,
        engines_read_gids: fn() -> bool,
    ) -> Self {
        Self {
            config,
            settings,
            engines_read_gids,
            roots: None,
            findings: Vec::new(),
        }
    }

    /// Takes the stamp of this host, see [`Stamp::of_host`].
    pub(super) fn stamp(&mut self) -> Option<Taken> {
        let taken = Taken::of_host(self.config, self.settings)?;
        self.roots = Some(taken.parts.roots.clone());
        Some(taken)
    }

    /// Returns the roots of the driver. They stay open.
    pub(super) fn roots(&mut self) -> Result<Roots> {
        if let Some(roots) = &self.roots {
            return Ok(roots.clone());
        }
        let roots = Roots::open(self.config)?;
        self.roots = Some(roots.clone());
        Ok(roots)
    }

    /// Creates the spec of this host. A device that does not work is left out, with a finding.
    ///
    /// # Errors
    /// If the driver is missing or does not answer, or lacks a file that all containers require.
    pub fn make(&mut self) -> Result<Spec> {
        let Some(taken) = self.stamp() else {
            let host = Driver::find(self.config)?.host(Source::Nvml)?;
            return self.make_with(None, None, &host);
        };
        let host = Driver::of_parts(taken.parts, self.config)?.host(Source::Nvml)?;
        self.make_with(Some(taken.stamp), taken.located, &host)
    }

    /// Creates the spec of a host that was already inspected, like [`Self::make`]. Never calls NVML.
    ///
    /// # Errors
    /// If the driver lacks a file that all containers require.
    pub fn make_of(&mut self, host: &Host) -> Result<Spec> {
        match self.stamp() {
            Some(Taken { stamp, located, .. }) => self.make_with(Some(stamp), located, host),
            None => self.make_with(None, None, host),
        }
    }

    /// Creates the spec with the stamp of the host, and with the files that were located for the stamp.
    pub(super) fn make_with(
        &mut self,
        stamp: Option<Stamp>,
        located: Option<SpecFiles>,
        host: &Host,
    ) -> Result<Spec> {
        let config = self.config;
        let wanted = wanted(config);
        let mut permitted = permitted_devices(&host.inventory, &config.devices);
        let facts = host.facts_for_spec(located, &wanted, &permitted)?;
        let (common, more) = decide::common(&facts, &wanted)?;
        self.findings.extend(more);
        if let Some(refused) = facts.devices.wsl.as_ref().and_then(decide::refused_limits) {
            self.findings.push(refused);
            permitted.clear();
        }
        // A spec also names single GPUs.
        let not_isolated = decide::not_isolated(&facts.devices, 1.min(permitted.len()));
        self.findings.extend(not_isolated);
        let mut devices = Vec::new();
        let mut failed: Vec<Finding> = Vec::new();
        for device in permitted {
            match decide::of_device(&facts.devices, &wanted, device) {
                Ok(edits) => devices.push(Named {
                    names: self.settings.naming.names(device),
                    uuid: device.uuid().to_owned(),
                    edits,
                }),
                Err(error) => failed.push(left_out(line(&error))),
            }
        }
        for gpu in permitted_failed(&host.inventory, &config.devices) {
            failed.push(left_out(gpu.to_string()));
        }
        let stamp = stamp.map(|stamp| stamp_text(stamp, host, failed.is_empty()));
        self.findings.extend(failed);
        self.add_findings_of(host);
        let edits = devices.iter().map(|device| &device.edits);
        let context = self.context(
            host.driver().path(),
            host.proc_dir(),
            edits.chain([&common]),
        );
        let entry = RootfsEdits {
            stamp,
            cuda_compat: cuda_compat(config, host),
            ..RootfsEdits::of_config(config)
        };
        Ok(spec(
            &self.settings.kind(),
            &common,
            &devices,
            &context,
            entry,
        ))
    }

    /// Adds what the inspection of the host found.
    fn add_findings_of(&mut self, host: &Host) {
        let not_named = mig_left_out(&host.inventory, &self.config.devices);
        self.findings.extend(not_named);
        for finding in host.findings() {
            // The search for the files may have reported it.
            if !self.findings.contains(&finding) {
                self.findings.push(finding);
            }
        }
    }

    /// Returns the context of a spec with these edits.
    pub(super) fn context<'e>(
        &self,
        driver_root: HostPath,
        proc_dir: Option<HostPath>,
        edits: impl Iterator<Item = &'e Edits>,
    ) -> SpecContext {
        let mut nodes = edits.flat_map(|edits| &edits.nodes);
        let is_for_a_group = nodes.any(|node| node.permissions.additional_gid().is_some());
        let configured = self.settings.additional_gids;
        SpecContext {
            driver_root,
            proc_dir,
            program: self.settings.program.clone(),
            additional_gids: is_for_a_group && configured.unwrap_or_else(self.engines_read_gids),
            node_access: self.config.device_node_access,
            image: None,
        }
    }

    /// Writes a spec. Returns `false` if that would be a new file, and another program's spec has its devices.
    pub(super) fn put(&mut self, path: &Path, spec: &Spec, replaces: bool) -> Result<bool> {
        let mut earlier = Vec::new();
        for other in others_in_directory(path, spec) {
            if is_earlier(&other, path) {
                earlier.push(other.path);
            } else if !replaces {
                self.findings.push(left_to(path, &other.path));
                return Ok(false);
            }
        }
        super::write(path, &self.settings.format.print(spec)?)?;
        for earlier in earlier {
            std::fs::remove_file(earlier)?;
        }
        Ok(true)
    }
}

/// Completes a stamp. `is_complete` states whether the spec has all permitted devices.
fn stamp_text(mut stamp: Stamp, host: &Host, is_complete: bool) -> String {
    stamp.complete(&host.inventory);
    if !is_complete {
        // No host has this stamp, so the next refresh asks again: the GPU may be ready then.
        stamp.host = 0;
    }
    stamp.to_text()
}

/// Returns the versions of the driver and of CUDA with which the compatibility libraries of images are compared.
fn cuda_compat(config: &Config, host: &Host) -> Option<(String, String)> {
    if !config.cuda_compat || !host.driver_kind().has_cuda_compat() {
        return None;
    }
    let Inventory {
        driver_version,
        cuda_version,
        ..
    } = &host.inventory;
    Some((driver_version.clone(), cuda_version.clone()))
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
    let dirs = Vec::from_iter(path.parent().map(Path::to_path_buf));
    let mut others = registry::read(&dirs);
    others.retain(|file| {
        file.path != path
            && file.spec.as_ref().is_ok_and(|other| {
                let mut devices = other.devices.iter();
                other.kind == spec.kind && devices.any(|device| names.contains(&device.name))
            })
    });
    others
}

/// Whether this program wrote the file in place of `path`, with the other format.
fn is_earlier(other: &SpecFile, path: &Path) -> bool {
    other.path.file_stem() == path.file_stem()
        && matches!(&other.spec, Ok(spec) if Stamp::from_spec(spec).is_some())
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
