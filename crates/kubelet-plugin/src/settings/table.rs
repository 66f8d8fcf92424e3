//! The table of the settings: each is a key in the table `[kubelet-plugin]` of config.toml and an option with the same name.

use std::time::Duration;

use clap::{Arg, ArgAction};
use nvidia_host::config::{self, value};
use toml::de::DeValue;

use super::resources::{self, ROWS, ResourceRow};
use super::values::{Plugin, absolute, address, strategies, word};

/// A setting.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The name of the key and of the option
    pub name: &'static str,
    kind: Kind,
    /// The name of the value in the help text of the option
    value: &'static str,
    help: &'static str,
}

/// The type of a setting, and the function that sets it. The error of the function describes the allowed values.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Bool(fn(&mut Plugin, bool)),
    /// A boolean, or `auto` for `None`
    Switch(fn(&mut Plugin, Option<bool>)),
    Text(fn(&mut Plugin, &str) -> Result<(), String>),
    Texts(fn(&mut Plugin, &[&str]) -> Result<(), String>),
    Number(fn(&mut Plugin, u32) -> Result<(), String>),
    Numbers(fn(&mut Plugin, Vec<u32>)),
    Seconds(fn(&mut Plugin, Duration)),
    Rows(fn(&mut Plugin, Vec<ResourceRow>) -> Result<(), String>),
}

use Kind::{Bool, Number, Numbers, Rows, Seconds, Switch, Text, Texts};

const fn row(name: &'static str, kind: Kind, value: &'static str, help: &'static str) -> Setting {
    Setting { name, kind, value, help }
}

/// The form of a row on the command line, for error messages.
const OPTION_ROW: &str = "name=NAME,model=PATTERN[,replicas=N]";
/// The only option that may be empty: the unit passes a variable.
const METRICS_ADDRESS: &str = "metrics-address";

/// All settings, in the order of the help text.
pub const SETTINGS: [Setting; 16] = [
    row(
        "replicas",
        Number(|plugin, number| resources::replicas(number).map(|number| plugin.replicas = number)),
        "N",
        "How many containers may share a device",
    ),
    row(
        "resources",
        Rows(|plugin, rows| resources::checked(rows).map(|rows| plugin.resources = rows)),
        "ROW",
        "A resource for GPUs of a model: name=NAME,model=PATTERN[,replicas=N]. May be repeated",
    ),
    row(
        "resource-prefix",
        Text(|plugin, text| resources::prefix(text).map(|prefix| plugin.resource_prefix = prefix)),
        "PREFIX",
        "The prefix of the resources that --resources does not name",
    ),
    row(
        "mig-strategy",
        Text(|plugin, text| word(text).map(|strategy| plugin.mig_strategy = strategy)),
        "STRATEGY",
        "How MIG devices are offered: none, single or mixed",
    ),
    row(
        "allocation",
        Text(|plugin, text| word(text).map(|order| plugin.allocation = order)),
        "ORDER",
        "Which replicas containers get first: distributed or packed",
    ),
    row(
        "quiet-period",
        Seconds(|plugin, time| plugin.quiet_period = time),
        "SECONDS",
        "Seconds without an error after which a repaired GPU is offered again",
    ),
    row(
        "ignored-xids",
        Numbers(|plugin, xids| plugin.ignored_xids = xids),
        "XIDS",
        "XIDs that are errors of an application, separated by commas",
    ),
    row(
        "nvml-timeout",
        Seconds(|plugin, time| plugin.nvml_timeout = time),
        "SECONDS",
        "Seconds to wait for one call of NVML",
    ),
    row(
        "device-list-strategy",
        Texts(|plugin, names| strategies(names).map(|found| plugin.device_list_strategy = found)),
        "STRATEGIES",
        "How containers get their devices: envvar, volume-mounts, cdi-cri, cdi-annotations, host-path, separated by commas",
    ),
    row(
        "device-id-strategy",
        Text(|plugin, text| word(text).map(|strategy| plugin.device_id_strategy = strategy)),
        "STRATEGY",
        "How the devices are named for the hook: uuid or index",
    ),
    row(
        "pass-device-specs",
        Bool(|plugin, is| plugin.pass_device_specs = is),
        "BOOL",
        "Whether the engine creates the device nodes, with envvar and volume-mounts: true or false",
    ),
    row(
        "host-path",
        Text(|plugin, text| absolute(text).map(|path| plugin.host_path = path)),
        "DIR",
        "The directory that host-path mounts at /usr/local/nvidia",
    ),
    row(
        "gpu-config",
        Text(|plugin, text| absolute(text).map(|path| plugin.gpu_config = path)),
        "FILE",
        "GKE's configuration file, for host-path",
    ),
    row(
        METRICS_ADDRESS,
        Text(|plugin, text| address(text).map(|address| plugin.metrics_address = address)),
        "ADDRESS",
        "Serve metrics at this address, such as 127.0.0.1:2112 or :2112. An empty value has no effect",
    ),
    row(
        "labels",
        Switch(|plugin, is| plugin.labels = is),
        "WHEN",
        "Whether labels for Node Feature Discovery are written: auto, true or false",
    ),
    row(
        "labels-dir",
        Text(|plugin, text| absolute(text).map(|path| plugin.labels_dir = path)),
        "DIR",
        "The directory for the file with the labels",
    ),
];

/// Returns the setting with this name.
#[must_use]
pub(super) fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

impl Setting {
    /// Returns the option. Of an option that is repeated, the last value applies, or all of a list.
    pub(super) fn option(&self) -> Arg {
        let arg = Arg::new(self.name).long(self.name).value_name(self.value).help(self.help);
        match self.kind {
            Bool(_) => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
            Texts(_) | Numbers(_) | Rows(_) => arg.action(ArgAction::Append),
            _ => arg.overrides_with(self.name),
        }
    }

    /// Sets the value of an option, or that of an option or a variable of NVIDIA's plugin: lists are separated by commas.
    ///
    /// # Errors
    /// The allowed values.
    pub(super) fn set_texts(&self, plugin: &mut Plugin, values: &[&str]) -> Result<(), String> {
        let text = values.last().copied().unwrap_or_default();
        let kind = self.kind;
        match kind {
            Bool(set) => set(plugin, truth(text)?),
            Switch(set) if text == "auto" => set(plugin, None),
            Switch(set) => set(plugin, Some(truth(text).map_err(|_| kind.allowed())?)),
            Text(_) if text.is_empty() && self.name == METRICS_ADDRESS => {}
            Text(set) => set(plugin, text)?,
            Texts(set) => set(plugin, &entries(values))?,
            Number(set) => set(plugin, text.parse().map_err(|_| kind.allowed())?)?,
            Numbers(set) => set(plugin, numbers(values).ok_or_else(|| kind.allowed())?),
            Seconds(set) => {
                set(plugin, text.parse().ok().and_then(value::in_range).ok_or_else(|| kind.allowed())?);
            }
            Rows(set) => set(plugin, rows(values.iter().map(|text| ResourceRow::parse(text)), OPTION_ROW)?)?,
        }
        Ok(())
    }

    /// Sets the value of a key in config.toml.
    ///
    /// # Errors
    /// The allowed values.
    fn set_value(&self, plugin: &mut Plugin, value: &DeValue<'_>) -> Result<(), String> {
        let invalid = || self.kind.allowed();
        match (self.kind, value) {
            (Bool(set), DeValue::Boolean(is)) => set(plugin, *is),
            (Switch(set), DeValue::Boolean(is)) => set(plugin, Some(*is)),
            (Switch(set), DeValue::String(text)) if text == "auto" => set(plugin, None),
            (Text(set), DeValue::String(text)) => set(plugin, text)?,
            (Texts(set), DeValue::Array(list)) => set(plugin, &value::texts(list).ok_or_else(invalid)?)?,
            (Number(set), DeValue::Integer(number)) => set(plugin, value::number(number).ok_or_else(invalid)?)?,
            (Numbers(set), DeValue::Array(list)) => set(plugin, value::numbers(list).ok_or_else(invalid)?),
            (Seconds(set), DeValue::Integer(number)) => set(plugin, value::seconds(number).ok_or_else(invalid)?),
            (Rows(set), DeValue::Array(list)) => {
                set(plugin, rows(list.iter().map(|value| ResourceRow::read(value.get_ref())), ROWS)?)?;
            }
            _ => return Err(invalid()),
        }
        Ok(())
    }
}

/// Collects the rows of `resources`, which must have this form.
fn rows(rows: impl Iterator<Item = Result<ResourceRow, String>>, form: &str) -> Result<Vec<ResourceRow>, String> {
    rows.collect::<Result<_, _>>().map_err(|why| format!("{form}, and {why}"))
}

/// Returns the entries of lists that are separated by commas.
fn entries<'a>(values: &[&'a str]) -> Vec<&'a str> {
    values.iter().flat_map(|value| value.split(',')).map(str::trim).filter(|entry| !entry.is_empty()).collect()
}

fn numbers(values: &[&str]) -> Option<Vec<u32>> {
    entries(values).into_iter().map(|entry| entry.parse().ok()).collect()
}

impl Kind {
    /// Describes the values of this type, for errors.
    fn allowed(self) -> String {
        let allowed = match self {
            Bool(_) => "true or false",
            Switch(_) => "true, false or \"auto\"",
            Text(_) => "a string in quotes",
            Texts(_) => "a list of strings in quotes",
            Number(_) => "a number",
            Numbers(_) => "a list of numbers",
            Seconds(_) => "a number of seconds from 1 to 600",
            Rows(_) => "a list of tables",
        };
        allowed.to_owned()
    }
}

/// The words for false that Go programs accept.
pub(super) const OFF: &[&str] = &["false", "0", "f", "F", "FALSE", "False"];

/// Parses the words for a boolean that Go programs accept.
fn truth(value: &str) -> Result<bool, String> {
    match value {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        value if OFF.contains(&value) => Ok(false),
        _ => Err("true or false".to_owned()),
    }
}

impl config::Table for Plugin {
    fn keys(&self) -> Option<Vec<&'static str>> {
        Some(SETTINGS.iter().map(|setting| setting.name).collect())
    }

    fn set(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        find(key).map_or(Ok(()), |setting| setting.set_value(self, value))
    }
}
