//! Accepts the options, variables and configuration file of NVIDIA's device plugin.
//!
//! Command line > environment > configuration file > config.toml > default. A setting that has no effect here is a finding.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use base::report::{Failure, Finding};
use findings::catalog;

use super::document::read;
use super::nvidia_file;
use super::nvidia_options::OPTIONS;
use super::options::{Given, nvidias};
use super::problems::{invalid_config, invalid_option};
use super::table::Settings;
use super::values::MigStrategy;

/// The settings in NVIDIA's form.
#[derive(Clone, Debug, Default)]
pub(super) struct Inputs {
    pub(super) given: Given,
    pub(super) variables: BTreeMap<&'static str, String>,
    /// The configuration file and its text
    pub(super) file: Option<(PathBuf, String)>,
}

impl Inputs {
    /// Reads the environment and the configuration file. `given` are the options on the command line.
    ///
    /// # Errors
    /// If the file cannot be read.
    #[allow(
        clippy::disallowed_methods,
        reason = "the variables are set by the administrator, in the unit or the manifest"
    )]
    pub(super) fn gather(given: &Given) -> Result<Self> {
        let mut inputs = Self {
            given: given.clone(),
            ..Self::default()
        };
        for option in OPTIONS {
            if let Ok(value) = std::env::var(option.variable) {
                inputs.variables.insert(option.variable, value);
            }
        }
        // An empty variable is an unset one, as in manifests with optional values.
        inputs
            .variables
            .retain(|name, value| !name.is_empty() && !value.is_empty());
        let variable = inputs.variables.get("CONFIG_FILE").map(String::as_str);
        let path = given.last("config-file").or(variable);
        if let Some(path) = path.map(PathBuf::from) {
            let text = read(&path).with_context(|| {
                Failure::new(
                    &catalog::PLUGIN_CONFIG,
                    format!("cannot read the configuration {path:?}"),
                    "name the file of NVIDIA's device plugin with --config-file or CONFIG_FILE, or omit both",
                )
            })?;
            inputs.file = Some((path, text));
        }
        Ok(inputs)
    }

    /// Returns the defaults of NVIDIA's plugin if anything is in NVIDIA's form, and otherwise our defaults.
    #[must_use]
    pub(super) fn defaults(&self) -> Settings {
        let mut settings = Settings::default();
        let mut flags = nvidias().filter_map(|option| self.given.last(option.name()));
        if flags.next().is_some() || !self.variables.is_empty() {
            settings.plugin.mig_strategy = MigStrategy::None;
        }
        settings
    }

    /// Applies the settings.
    ///
    /// # Errors
    /// If one has an invalid value. The error names its place and the allowed values.
    pub(super) fn apply(&self, settings: &mut Settings) -> Result<Vec<Finding>> {
        let mut findings = match &self.file {
            Some((path, text)) => nvidia_file::apply(settings, path, text)?,
            None => Vec::new(),
        };
        for option in OPTIONS {
            let Some(value) = self.variables.get(option.variable) else {
                continue;
            };
            let finding = option
                .set(settings, option.variable, value)
                .map_err(|allowed| {
                    let what = format!(
                        "the environment variable {} has an invalid value; it must be {allowed}",
                        option.variable
                    );
                    invalid_config(what)
                });
            findings.extend(finding?);
        }
        for option in nvidias() {
            let Some(value) = self.given.last(option.name()) else {
                continue;
            };
            let finding = option.set(settings, &format!("--{}", option.name()), value);
            findings.extend(finding.map_err(|allowed| invalid_option(option.name(), &allowed))?);
        }
        Ok(findings)
    }
}
