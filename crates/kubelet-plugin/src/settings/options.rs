//! The options of `run` and `check`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use super::nvidia_options::{NvidiaOption, OPTIONS};
use super::problems::invalid_option;
use super::table::{Plugin, SETTINGS, Setting};

/// The options that replace settings of config.toml.
#[derive(Args, Debug, Default)]
pub struct Options {
    /// The file of `--config`, an option of the program
    #[arg(skip)]
    pub config: Option<PathBuf>,
    /// The directory of the kubelet [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    pub kubelet_dir: Option<PathBuf>,
    /// The settings, and the options of NVIDIA's plugin
    #[command(flatten)]
    pub(super) given: Given,
}

/// The values of the given options, by name: from the table of settings, and the options of NVIDIA's plugin, which the help text does not
/// list.
#[derive(Clone, Debug, Default)]
pub(super) struct Given(BTreeMap<&'static str, Vec<String>>);

impl Given {
    /// Returns the value of an option. If it is repeated, the last one applies.
    pub(super) fn last(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.last().map(String::as_str)
    }

    /// Replaces the settings by those that are given.
    ///
    /// # Errors
    /// If an option has an invalid value.
    pub(super) fn apply(&self, plugin: &mut Plugin) -> Result<()> {
        for setting in SETTINGS {
            let Some(values) = self.0.get(setting.name) else {
                continue;
            };
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            // The unit passes a variable, which may be empty.
            if setting.name == "metrics-address" && values.last() == Some(&"") {
                continue;
            }
            setting
                .set(plugin, &values)
                .map_err(|allowed| invalid_option(setting.name, &allowed))?;
        }
        Ok(())
    }
}

fn all() -> impl Iterator<Item = Arg> {
    let settings = SETTINGS.iter().map(Setting::option);
    settings.chain(nvidias().map(NvidiaOption::flag))
}

/// Returns the options that only NVIDIA's plugin has.
pub(super) fn nvidias() -> impl Iterator<Item = &'static NvidiaOption> {
    OPTIONS.iter().filter(|option| option.is_only_nvidias())
}

impl Args for Given {
    fn augment_args(command: Command) -> Command {
        command.args(all())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut given = Self::default();
        given.update_from_arg_matches(matches)?;
        Ok(given)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        let names = SETTINGS.iter().map(|setting| setting.name);
        for name in names.chain(nvidias().map(NvidiaOption::name)) {
            if let Some(values) = matches.get_many::<String>(name) {
                self.0.insert(name, values.cloned().collect());
            }
        }
        Ok(())
    }
}
