//! `cdi`: specs by which engines know the GPUs as devices.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};

use base::paths::HostPath;
use base::report::{Finding, catalog, failure, line};
use base::tree::Tree;
use cdi_spec::file::Format;
use cdi_spec::spec::Spec;
use cdi_spec::{name, registry};
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::generate::{Named, Naming, sources, spec};
use nvidia_host::cdi::lower::{NodeFacts, SpecContext};
use nvidia_host::cdi::stamp::Stamp;
use nvidia_host::config::Config;
use nvidia_host::edits::{DeviceNode, Edits, Wanted};
use nvidia_host::host::Host;
use nvidia_host::inventory::Inventory;
use nvidia_host::inventory::select::{permitted_devices, permitted_failed};

use super::status::this_user;
use super::{cdi_check, info, output};
use crate::engine::look;
use crate::log::Log;

/// What to do with specs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Write one
    Generate,
    /// Write one if the one that is there does not fit the host any more
    Refresh,
    /// Print the names of all devices
    List,
    /// Say what engines make of the specs
    Check,
}

/// The options of `cdi`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// `--output`; `-` is stdout
    pub output: Option<PathBuf>,
    /// `--format`
    pub format: Option<Format>,
    /// `--name-strategy`
    pub naming: Naming,
    /// `--vendor`
    pub vendor: String,
    /// `--class`
    pub class: String,
    /// `--additional-gids`, `--no-additional-gids`; not said: if the engines of this host read them
    pub additional_gids: Option<bool>,
    /// `--hook-path`
    pub hook_path: Option<PathBuf>,
    /// `--spec-dir`, the least important first
    pub spec_dirs: Vec<PathBuf>,
    /// What `check` is asked about; empty: all
    pub names: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            output: None,
            format: None,
            naming: Naming::default(),
            vendor: "nvidia.com".to_owned(),
            class: "gpu".to_owned(),
            additional_gids: None,
            hook_path: None,
            spec_dirs: Vec::new(),
            names: Vec::new(),
        }
    }
}

impl Options {
    /// Takes an option.
    ///
    /// # Errors
    /// If its value is wrong.
    pub fn set(&mut self, option: &str, value: OsString) -> Result<()> {
        let text = value.to_str().unwrap_or_default();
        match option {
            "additional-gids" => self.additional_gids = Some(true),
            "no-additional-gids" => self.additional_gids = Some(false),
            "output" => self.output = Some(value.into()),
            "hook-path" => self.hook_path = Some(value.into()),
            "spec-dir" => self.spec_dirs.push(value.into()),
            "format" => {
                self.format = match text {
                    "json" => Some(Format::Json),
                    "yaml" => Some(Format::Yaml),
                    _ => bail!("--format {value:?} is neither json nor yaml"),
                }
            }
            "name-strategy" => {
                self.naming = Naming { index: false, uuid: false };
                for word in text.split(',') {
                    match word {
                        "index" => self.naming.index = true,
                        "uuid" => self.naming.uuid = true,
                        _ => bail!("--name-strategy {value:?} is not made of index and uuid"),
                    }
                }
            }
            "vendor" | "class" => {
                name::check_vendor_or_class(text).map_err(|why| anyhow::anyhow!("--{option}: {why}"))?;
                if text.len() == 1 {
                    bail!("--{option}: {text:?} has one letter, and CRI-O 1.37 does not start with such a CDI spec");
                }
                let name = if option == "vendor" { &mut self.vendor } else { &mut self.class };
                text.clone_into(name);
            }
            _ => bail!("--{option} is no option of cdi"),
        }
        Ok(())
    }

    /// Where to write, `None` for stdout, and how.
    fn target(&self) -> Result<(Option<PathBuf>, Format)> {
        match &self.output {
            None => {
                let format = self.format.unwrap_or_default();
                Ok((Some(nvidia_host::cdi::default_path(format)), format))
            }
            Some(path) if path == Path::new("-") => Ok((None, self.format.unwrap_or_default())),
            Some(path) => match Format::of(path) {
                Some(format) => Ok((Some(path.clone()), self.format.unwrap_or(format))),
                None => Err(failure(
                    &catalog::COMMAND_LINE,
                    format!("engines do not read {path:?}"),
                    "name a file that ends in .json or .yaml with --output",
                )),
            },
        }
    }
}

/// Runs a verb.
#[must_use]
pub fn run(verb: Verb, options: &super::Options) -> ExitCode {
    let ran = match verb {
        Verb::Generate => generate(options),
        Verb::Refresh => refresh(options),
        Verb::List => cdi_check::list(options),
        Verb::Check => cdi_check::check(options),
    };
    ran.unwrap_or_else(|error| {
        Log::default().error(&error);
        ExitCode::FAILURE
    })
}

fn generate(options: &super::Options) -> Result<ExitCode> {
    let (path, format) = options.cdi.target()?;
    let config = info::configuration(options)?;
    let stamp = Stamp::look(&config, &options.cdi);
    let spec = spec_of(&config, &options.cdi, stamp, &Host::look_afresh(&config)?)?;
    if spec.devices.is_empty() {
        return Err(failure(
            &catalog::SPEC_EMPTY,
            "there is no GPU for containers on this host",
            "look for it with \"oci-nvidia-hook info\"; see [devices] in config.toml for those that are kept from containers",
        ));
    }
    let text = format.print(&spec)?;
    match path {
        Some(path) => {
            nvidia_host::cdi::write(&path, &text)?;
            let mut log = Log::default();
            log.report(&format!("wrote {}: {}", path.display(), summary(&spec)));
            cdi_check::doubts(&path, options).iter().for_each(|doubt| log.finding(doubt));
            Ok(ExitCode::SUCCESS)
        }
        None => Ok(output::print(&text)),
    }
}

/// The names that people type: those by UUID only where there are no others.
fn summary(spec: &Spec) -> String {
    let is_uuid = |name: &&str| name.starts_with("GPU-") || name.starts_with("MIG-");
    let (uuids, short): (Vec<_>, Vec<_>) = spec.devices.iter().map(|device| device.name.as_str()).partition(is_uuid);
    let names = if short.iter().all(|name| *name == ALL) { [uuids, short].concat() } else { short };
    let shown: Vec<_> = names.iter().take(MAX_SHOWN).map(|name| format!("{}={name}", spec.kind)).collect();
    let more = names.len().saturating_sub(shown.len());
    let rest = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{rest}", shown.join(", "))
}

/// The device that is all of the others.
const ALL: &str = "all";
/// Names of devices in a line: nodes have at most eight GPUs, or many MIG devices.
const MAX_SHOWN: usize = 9;

/// A host without GPUs, and one whose spec still fits, is left as it is, and nothing is said: this runs at boot, and
/// whenever something may have changed. Without --create a host that has no spec gets none: two files with the same devices
/// are a conflict, and whether there is to be one is the administrator's choice.
fn refresh(options: &super::Options) -> Result<ExitCode> {
    let (Some(path), format) = options.cdi.target()? else {
        return Err(failure(
            &catalog::COMMAND_LINE,
            "\"cdi refresh\" needs a file",
            "name it with --output, or use \"cdi generate\"",
        ));
    };
    if !options.create && rustix::fs::lstat(&path).is_err() {
        return Ok(ExitCode::SUCCESS);
    }
    let config = info::configuration(options)?;
    // What comes while this runs starts no second run: systemd has one of a service at a time.
    for _ in 0..TRIES {
        if !refresh_once(&path, format, &config, &options.cdi)? {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A host that changes faster is seen at its next change.
const TRIES: u32 = 3;

/// Whether the host changed meanwhile.
fn refresh_once(path: &Path, format: Format, config: &Config, options: &Options) -> Result<bool> {
    let old = registry::read_spec(path).ok();
    let old_stamp = old.as_ref().and_then(Stamp::of);
    // Looked at before the driver is: what changes meanwhile makes the new spec old, and is seen next time.
    let before = Stamp::look(config, options);
    let mut stamp = before.clone();
    let mut host = None;
    // The kernel does not show which MIG devices there are.
    if let Some(stamp) = stamp.as_mut().filter(|stamp| stamp.mig.is_some()) {
        stamp.complete(&host.insert(Host::look_afresh(config)?).inventory);
    }
    let is_there = |path: &&str| rustix::fs::lstat(*path).is_ok();
    if let (Some(old), Some(stamp)) = (&old, &stamp)
        && old_stamp.as_ref() == Some(stamp)
        && sources(old).iter().all(is_there)
    {
        return Ok(false);
    }
    let spec = match (stamp, host) {
        (None, _) => Spec::default(),
        (stamp, Some(host)) => spec_of(config, options, stamp, &host)?,
        (stamp, None) => spec_of(config, options, stamp, &Host::look_afresh(config)?)?,
    };
    if !spec.devices.is_empty() {
        nvidia_host::cdi::write(path, &format.print(&spec)?)?;
    } else if old_stamp.is_some() {
        // It speaks of GPUs that are gone. A spec of another program's is not ours to remove.
        std::fs::remove_file(path)?;
    }
    Ok(Stamp::look(config, options) != before)
}

/// The spec of this host. A device that cannot be given is left out, and said.
fn spec_of(config: &Config, options: &Options, stamp: Option<Stamp>, host: &Host) -> Result<Spec> {
    let wanted = wanted(config);
    let (common, mut findings) = host.common_edits(&wanted)?;
    let mut devices = Vec::new();
    for device in permitted_devices(&host.inventory, &config.devices) {
        match host.device_edits(&wanted, device) {
            Ok(edits) => devices.push(Named { names: options.naming.names(device), edits }),
            Err(error) => findings.push(left_out(line(&error))),
        }
    }
    findings.extend(permitted_failed(&host.inventory, &config.devices).map(|failed| left_out(failed.to_string())));
    findings.extend(host.findings());
    let complete = !findings.iter().any(|finding| finding.kind == &catalog::SPEC_LACKS_GPU);
    let nodes = nodes(devices.iter().map(|device| &device.edits).chain([&common]));
    let is_for_a_group = nodes.values().any(|node| node.additional_gid().is_some());
    let facts = SpecContext {
        driver_root: host.driver().path(),
        proc_dir: host.proc_dir(),
        program: program(options)?,
        nodes,
        additional_gids: is_for_a_group && options.additional_gids.unwrap_or_else(engines_read_gids),
        image: None,
    };
    let mut log = Log::default();
    findings.iter().for_each(|finding| log.finding(finding));
    let kind = format!("{}/{}", options.vendor, options.class);
    // A GPU that is not ready yet is asked again at the next refresh: no host has this stamp.
    let stamp = stamp.map(|mut stamp| {
        stamp.complete(&host.inventory);
        Stamp { rest: if complete { stamp.rest } else { 0 }, ..stamp }.to_text()
    });
    let Inventory { driver_version, cuda_version, .. } = &host.inventory;
    let cuda_compat = config.cuda_compat.then(|| (driver_version.clone(), cuda_version.clone()));
    Ok(spec(&kind, &common, &devices, &facts, RootfsEdits { stamp, cuda_compat, ..RootfsEdits::default() }))
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

/// An engine that does not know this field refuses the whole file.
fn engines_read_gids() -> bool {
    Tree::open(&HostPath::new("/")).is_ok_and(|host| look::all_read_cdi(&host, this_user(), "0.7.0"))
}

/// This program: what engines start.
pub(super) fn program(options: &Options) -> Result<HostPath> {
    let path = match &options.hook_path {
        Some(path) => path.clone(),
        None => std::env::current_exe()?,
    };
    if !path.is_absolute() {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!("the program {path:?} is no absolute path"),
            "name it so with --hook-path",
        ));
    }
    Ok(HostPath::new(path))
}

/// What the nodes of these edits are like.
pub(super) fn nodes<'a>(edits: impl Iterator<Item = &'a Edits>) -> BTreeMap<HostPath, NodeFacts> {
    let look = |node: &DeviceNode| {
        let stat = rustix::fs::lstat(node.source.as_path()).ok()?;
        Some((node.source.clone(), NodeFacts::of(&stat)))
    };
    BTreeMap::from_iter(edits.flat_map(|edits| &edits.nodes).filter_map(look))
}
