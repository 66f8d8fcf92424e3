//! `cdi`: specs by which engines know the GPUs as devices.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};

use base::paths::HostPath;
use base::report::{catalog, failure};
use base::tree::Tree;
use cdi_spec::file::Format;
use cdi_spec::name;
use cdi_spec::spec::Spec;
use nvidia_host::cdi::generate::Naming;
use nvidia_host::cdi::of_host::{self, Settings};

use super::status::this_user;
use super::{cdi_check, info, output};
use crate::engine::look;
use crate::log::Log;
use crate::plan::hook_program;

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

    /// What the spec is made with.
    fn settings(&self, format: Format) -> Result<Settings> {
        Ok(Settings {
            naming: self.naming,
            vendor: self.vendor.clone(),
            class: self.class.clone(),
            additional_gids: self.additional_gids,
            program: hook_program(self.hook_path.as_deref())?,
            format,
        })
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
    let settings = options.cdi.settings(format)?;
    let mut findings = Vec::new();
    let spec = of_host::make(&config, &settings, &engines_read_gids, &mut findings);
    let mut log = Log::default();
    findings.iter().for_each(|finding| log.finding(finding));
    let spec = spec?;
    if spec.devices.is_empty() {
        return Err(failure(
            &catalog::SPEC_EMPTY,
            "there is no GPU for containers on this host",
            "look for it with \"oci-nvidia-hook info\"; see [devices] in config.toml for those that are kept from containers",
        ));
    }
    let text = format.print(&spec)?;
    let Some(path) = path else { return Ok(output::print(&text)) };
    nvidia_host::cdi::write(&path, &text)?;
    log.report(&format!("wrote {}: {}", path.display(), summary(&spec)));
    cdi_check::doubts(&path, options).iter().for_each(|doubt| log.finding(doubt));
    Ok(ExitCode::SUCCESS)
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
    let settings = options.cdi.settings(format)?;
    let mut findings = Vec::new();
    let refreshed = of_host::refresh(&path, &config, &settings, &engines_read_gids, &mut findings);
    let mut log = Log::default();
    findings.iter().for_each(|finding| log.finding(finding));
    refreshed.map(|()| ExitCode::SUCCESS)
}

/// An engine that does not know this field refuses the whole file.
fn engines_read_gids() -> bool {
    Tree::open(&HostPath::new("/")).is_ok_and(|host| look::all_read_cdi(&host, this_user(), "0.7.0"))
}
