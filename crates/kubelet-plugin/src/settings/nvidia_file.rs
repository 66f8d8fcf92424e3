//! The configuration file of NVIDIA's device plugin, `version: v1`.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use base::report::Finding;
use serde_json::Value;

use super::document::{ConfigDocument, is_empty, leaves};
use super::nvidia_options::{Effect, OPTIONS};
use super::resources::{self, LIST, ResourceRow, SharedResource};
use super::table::{Plugin, Settings};
use super::values::SharingStrategy;

/// The prefix of resources in this file that have none.
const PREFIX: &str = "nvidia.com";

/// The rows of the lists and the options that apply to all rows. They depend on each other, so they take effect at the end of the file.
#[derive(Default)]
struct Lists {
    models: BTreeMap<usize, ResourceRow>,
    time_slicing: Section,
    mps: Section,
}

/// A section of `sharing`.
#[derive(Default)]
struct Section {
    rows: BTreeMap<usize, SharedResource>,
    rename_all: bool,
    refuse_several: bool,
}

/// Applies the text of a file. `path` is only used in messages.
pub fn apply(settings: &mut Settings, path: &Path, text: &str) -> Result<Vec<Finding>> {
    let (mut file, root) = ConfigDocument::parse(path, text)?;
    if root.get("version").and_then(Value::as_str) != Some("v1") {
        return Err(file.invalid(&["version"], "\"v1\""));
    }
    let mut lists = Lists::default();
    for (keys, value) in leaves(&root) {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        if let Some(expected) = expected_value(&keys) {
            if is_empty(value) {
                continue;
            }
            return Err(file.invalid(&keys, expected));
        }
        match *keys {
            // Options of gpu-feature-discovery, which reads the same file
            ["version"] | ["flags", "gfd", ..] => {}
            ["flags", "plugin", name, ..] => {
                let name = format!("plugin.{name}");
                flag(&mut file, settings, &keys, 3, &name, value)?;
            }
            ["flags", name, ..] => flag(&mut file, settings, &keys, 2, name, value)?,
            ["resources", "mig"] | ["imex", _] if is_empty(value) => {}
            ["resources", "gpus", ..] => lists.add_model(&mut file, &keys, value)?,
            ["resources", "mig", ..] => {
                let why = "MIG devices have the name of their profile";
                file.no_effect(&["resources", "mig"], why);
            }
            ["sharing", "timeSlicing", ref below @ ..] => {
                lists.time_slicing.add(&mut file, &keys, below, value)?;
            }
            ["sharing", "mps", "failRequestsGreaterThanOne"] => {
                // NVIDIA's plugin refuses several replicas in any case (api/config/v1/config.go).
                if !file.truth(&keys, value)? {
                    file.no_effect(
                        &keys,
                        "a container gets one replica of a GPU that MPS shares",
                    );
                }
            }
            ["sharing", "mps", ref below @ ..] => {
                lists.mps.add(&mut file, &keys, below, value)?;
            }
            ["imex", _] if *value == Value::Bool(false) => {}
            ["imex", name, ..] => {
                let why = "IMEX channels are requested with NVIDIA_IMEX_CHANNELS";
                file.no_effect(&["imex", name], why);
            }
            _ => file.unknown(&keys),
        }
    }
    lists.apply(settings, &mut file)?;
    Ok(file.findings)
}

/// Returns what a key must have as its value if it groups other keys.
fn expected_value(keys: &[&str]) -> Option<&'static str> {
    match keys {
        ["flags" | "resources" | "sharing" | "imex"]
        | ["flags", "plugin"]
        | ["sharing", "timeSlicing" | "mps"] => Some("a map"),
        ["resources", "gpus"] | ["sharing", "timeSlicing" | "mps", "resources"] => {
            Some("a list of maps")
        }
        _ => None,
    }
}

impl Lists {
    /// Adds a value below `resources.gpus`.
    fn add_model(
        &mut self,
        file: &mut ConfigDocument<'_>,
        keys: &[&str],
        value: &Value,
    ) -> Result<()> {
        let ["resources", "gpus", number, ref key @ ..] = *keys else {
            return Ok(());
        };
        let row = self.models.entry(number.parse()?).or_default();
        match key {
            ["name"] => row.name = with_prefix(file.text(keys, value)?),
            ["pattern"] => file.text(keys, value)?.clone_into(&mut row.model),
            _ => file.unknown(keys),
        }
        Ok(())
    }

    /// Checks the rows, and adds them to the settings.
    fn apply(self, settings: &mut Settings, file: &mut ConfigDocument<'_>) -> Result<()> {
        let plugin = &mut settings.plugin;
        if !self.models.is_empty() {
            let checked = resources::checked(self.models.into_values().map(Ok), LIST);
            plugin.resources =
                checked.map_err(|allowed| file.invalid(&["resources", "gpus"], &allowed))?;
        }
        let time_slicing = &self.time_slicing;
        plugin.several_replicas = !time_slicing.rows.is_empty() && !time_slicing.refuse_several;
        self.time_slicing
            .apply(plugin, file, SharingStrategy::TimeSlicing)?;
        self.mps.apply(plugin, file, SharingStrategy::Mps)
    }
}

impl Section {
    /// Adds a value. `below` are the keys below the section.
    fn add(
        &mut self,
        file: &mut ConfigDocument<'_>,
        keys: &[&str],
        below: &[&str],
        value: &Value,
    ) -> Result<()> {
        let (number, key) = match *below {
            ["renameByDefault"] => {
                self.rename_all = file.truth(keys, value)?;
                return Ok(());
            }
            ["failRequestsGreaterThanOne"] => {
                self.refuse_several = file.truth(keys, value)?;
                return Ok(());
            }
            ["resources", number, ref key @ ..] => (number, key),
            _ => {
                file.unknown(keys);
                return Ok(());
            }
        };
        let row = self.rows.entry(number.parse()?).or_default();
        match key {
            ["name"] => row.name = with_prefix(file.text(keys, value)?),
            ["rename"] if value.is_null() => {}
            ["rename"] => row.rename = Some(with_prefix(file.text(keys, value)?)),
            ["replicas"] => row.replicas = file.number(keys, value)?,
            ["devices"] if value.as_str() == Some("all") => {}
            ["devices", ..] => {
                let devices = keys.get(..5).unwrap_or_default();
                file.no_effect(devices, "all devices of the resource are shared");
            }
            _ => file.unknown(keys),
        }
        Ok(())
    }

    /// Checks the rows, and adds them to the settings.
    fn apply(
        self,
        plugin: &mut Plugin,
        file: &mut ConfigDocument<'_>,
        strategy: SharingStrategy,
    ) -> Result<()> {
        let section = match strategy {
            SharingStrategy::TimeSlicing => "timeSlicing",
            SharingStrategy::Mps => "mps",
        };
        for (number, mut row) in self.rows {
            row.strategy = strategy;
            let number = number.to_string();
            let place = ["sharing", section, "resources", &number];
            if let Err((name, allowed)) = row.check() {
                return Err(file.invalid(&[&place[..], &[name]].concat(), &allowed));
            }
            let mut rows = plugin.shared_resources.iter();
            match rows.find(|other| other.name == row.name) {
                Some(other) if other.strategy != strategy => {
                    let keys = [&place[..], &["name"]].concat();
                    let allowed = "a resource that is not in sharing.timeSlicing too";
                    return Err(file.invalid(&keys, allowed));
                }
                Some(_) => {
                    let why = format!("an earlier entry is about {:?}", row.name);
                    file.no_effect(&place, &why);
                    continue;
                }
                None => {}
            }
            if row.rename.is_none() && self.rename_all {
                row.rename = Some(format!("{}.shared", row.name));
            }
            plugin.shared_resources.push(row);
        }
        Ok(())
    }
}

/// Applies an option, which is the first `depth` of these keys. `key` is its name in [`OPTIONS`].
fn flag(
    file: &mut ConfigDocument<'_>,
    settings: &mut Settings,
    keys: &[&str],
    depth: usize,
    key: &str,
    value: &Value,
) -> Result<()> {
    let (at, below) = keys.split_at_checked(depth).unwrap_or((keys, &[]));
    let Some(option) = OPTIONS
        .iter()
        .find(|option| !option.key.is_empty() && option.key == key)
    else {
        file.unknown(at);
        return Ok(());
    };
    if value.is_null() {
        return Ok(());
    }
    let text = scalar(value).filter(|_| below.is_empty());
    let text = text.ok_or_else(|| file.invalid(at, "a string, a boolean or a list of strings"))?;
    let finding = option
        .set(settings, "", &text)
        .map_err(|allowed| file.invalid(at, &allowed))?;
    if let (Some(_), Effect::Other { why, .. }) = (finding, option.effect) {
        file.no_effect(at, why);
    }
    Ok(())
}

/// Returns a value as on the command line.
fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        Value::Array(list) => Some(
            list.iter()
                .map(Value::as_str)
                .collect::<Option<Vec<_>>>()?
                .join(","),
        ),
        Value::Null | Value::Object(_) => None,
    }
}

fn with_prefix(name: &str) -> String {
    if name.contains('/') {
        name.to_owned()
    } else {
        format!("{PREFIX}/{name}")
    }
}
