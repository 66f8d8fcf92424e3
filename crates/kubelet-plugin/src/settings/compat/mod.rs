//! Accepts the options, variables and configuration files of the device plugins of NVIDIA and GKE. Pure, apart from [`Inputs::gather`]
//! and [`read_gke`].
//!
//! Command line > environment > configuration file > config.toml > default. A setting that has no effect here is a finding.

mod document;
mod gke;
mod nvidia_file;
mod options;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use base::report::{Finding, catalog, failure};
use clap::{Arg, ArgAction, ArgMatches, Command};
use nvidia_host::config::Config;
use nvidia_host::config::kubelet_plugin::MigStrategy;

pub use gke::apply as apply_gke;
pub use options::truth;
use options::{CONFIG_FILE, Effect, NvidiaOption, OPTIONS};

/// The size limit of a configuration file in bytes.
const MAX_SIZE: usize = 1 << 20;

/// The settings.
#[derive(Clone, Debug, Default)]
pub struct Target {
    /// Those in config.toml
    pub config: Config,
    /// The directory of the kubelet
    pub kubelet_dir: Option<PathBuf>,
}

/// The options of NVIDIA's plugin that are not options of this program, by their first name. The help text does not list them.
#[derive(Clone, Debug, Default)]
pub struct Flags(BTreeMap<&'static str, String>);

impl clap::Args for Flags {
    fn augment_args(command: Command) -> Command {
        let others = OPTIONS.iter().filter(|option| option.is_foreign_flag());
        others.fold(command, |command, option| {
            let (name, aliases) = option.names.split_first().unwrap_or((&"", &[]));
            let arg = Arg::new(*name).long(*name).aliases(aliases).hide(true).action(ArgAction::Set);
            command.arg(match option.is_switch {
                true => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
                false => arg,
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for option in OPTIONS.iter().filter(|option| option.is_foreign_flag()) {
            let value = matches.get_one::<String>(option.name());
            self.0.extend(value.map(|value| (option.name(), value.clone())));
        }
        Ok(())
    }
}

/// The settings in NVIDIA's form.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    flags: BTreeMap<&'static str, String>,
    variables: BTreeMap<&'static str, String>,
    /// The configuration file and its text
    file: Option<(PathBuf, String)>,
}

impl Inputs {
    /// Adds NVIDIA's variables and configuration file to the flags.
    ///
    /// # Errors
    /// If the file cannot be read.
    #[allow(
        clippy::disallowed_methods,
        reason = "the variables are set by the administrator, in the unit or the manifest"
    )]
    pub fn gather(flags: &Flags) -> Result<Self> {
        let variables =
            OPTIONS.iter().filter_map(|option| Some((option.variable, std::env::var(option.variable).ok()?)));
        let mut inputs = Self { flags: flags.0.clone(), variables: variables.collect(), file: None };
        // An empty variable is an unset one, as in manifests with optional values.
        inputs.variables.retain(|name, value| !name.is_empty() && !value.is_empty());
        let path = inputs.flags.get(CONFIG_FILE.name()).or_else(|| inputs.variables.get(CONFIG_FILE.variable));
        if let Some(path) = path.map(PathBuf::from) {
            let text = read(&path).with_context(|| {
                failure_of(format!("cannot read the configuration {path:?}"), "correct --config-file")
            })?;
            inputs.file = Some((path, text));
        }
        Ok(inputs)
    }

    /// Returns the defaults: those of NVIDIA's plugin if anything is in NVIDIA's form.
    #[must_use]
    pub fn defaults(&self) -> Config {
        let mut config = Config::default();
        if !self.flags.is_empty() || !self.variables.is_empty() {
            config.kubelet_plugin.mig_strategy = MigStrategy::None;
        }
        config
    }

    /// Applies the settings.
    ///
    /// # Errors
    /// If one has an invalid value. The error names its place and the allowed values.
    pub fn apply(&self, target: &mut Target) -> Result<Vec<Finding>> {
        let mut findings = match &self.file {
            Some((path, text)) => nvidia_file::apply(target, path, text)?,
            None => Vec::new(),
        };
        for (option, value) in self.variables_of() {
            let error = |allowed| {
                let what =
                    format!("the environment variable {} has an invalid value; it must be {allowed}", option.variable);
                failure_of(what, &format!("correct {}", option.variable))
            };
            findings.extend(set(target, option, option.variable, value).map_err(error)?);
        }
        for (option, value) in self.flags_of() {
            let name = option.name();
            let error = |allowed| {
                let what = format!("--{name} has an invalid value; it must be {allowed}");
                failure(&catalog::COMMAND_LINE, what, format!("correct --{name}"))
            };
            findings.extend(set(target, option, &format!("--{name}"), value).map_err(error)?);
        }
        Ok(findings)
    }

    fn variables_of(&self) -> impl Iterator<Item = (&'static NvidiaOption, &str)> {
        OPTIONS.iter().filter_map(|option| Some((option, self.variables.get(option.variable)?.as_str())))
    }

    fn flags_of(&self) -> impl Iterator<Item = (&'static NvidiaOption, &str)> {
        OPTIONS.iter().filter_map(|option| Some((option, self.flags.get(option.name())?.as_str())))
    }
}

/// Applies an option. `place` names it in a finding.
fn set(target: &mut Target, option: &NvidiaOption, place: &str, value: &str) -> Result<Option<Finding>, String> {
    match option.effect {
        Effect::Ours(set) | Effect::Sets(set) => set(target, value).map(|()| None),
        Effect::Other { harmless, .. } if harmless.contains(&value) => Ok(None),
        Effect::Other { why, .. } => Ok(Some(no_effect(place, why))),
        Effect::Nothing => Ok(None),
    }
}

fn no_effect(place: &str, why: &str) -> Finding {
    Finding::new(&catalog::PLUGIN_NO_EFFECT, format!("{place} has no effect: {why}"), "remove it")
}

fn failure_of(what: String, fix: &str) -> anyhow::Error {
    failure(&catalog::PLUGIN_CONFIG, what, fix.to_owned())
}

/// Reads GKE's configuration file, if it exists.
///
/// # Errors
/// If it cannot be read.
pub fn read_gke(path: &Path) -> Result<Option<String>> {
    match read(path) {
        Err(error)
            if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::NotFound) =>
        {
            Ok(None)
        }
        text => text
            .map(Some)
            .with_context(|| failure_of(format!("cannot read the configuration {path:?}"), "correct gpu-config")),
    }
}

fn read(path: &Path) -> Result<String> {
    Ok(String::from_utf8(base::read::read_limited(std::fs::File::open(path)?, MAX_SIZE)?)?)
}
