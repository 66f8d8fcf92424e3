//! The configuration file of NVIDIA's device plugin, `version: v1`.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use base::report::Finding;
use serde_json::Value;

use super::document::{Document, is_empty, leaves};
use super::nvidia_options::{Effect, OPTIONS};
use super::resources::{self, LIST, ResourceRow, TimeSlicing};
use super::table::Settings;

/// The prefix of resources in this file that have none.
const PREFIX: &str = "nvidia.com";

/// Applies the text of a file. `path` is only used in messages.
pub(super) fn apply(settings: &mut Settings, path: &Path, text: &str) -> Result<Vec<Finding>> {
    let (mut file, root) = Document::parse(path, text)?;
    if root.get("version").and_then(Value::as_str) != Some("v1") {
        return Err(file.invalid(&["version"], "\"v1\""));
    }
    let mut models: BTreeMap<usize, ResourceRow> = BTreeMap::new();
    let mut slices: BTreeMap<usize, TimeSlicing> = BTreeMap::new();
    let (mut rename_all, mut refuse_several) = (false, false);
    for (keys, value) in leaves(&root) {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        match *keys {
            // Options of gpu-feature-discovery, which reads the same file
            ["version"] | ["flags", "gfd", ..] => {}
            ["flags" | "resources" | "sharing" | "imex"]
            | ["flags", "plugin"]
            | ["sharing", "timeSlicing"]
            | ["resources", "gpus" | "mig"]
            | ["sharing", "mps"]
            | ["sharing", "timeSlicing", "resources"]
                if is_empty(value) => {}
            ["flags" | "resources" | "sharing" | "imex"]
            | ["flags", "plugin"]
            | ["sharing", "timeSlicing"] => {
                return Err(file.invalid(&keys, "a map"));
            }
            ["resources", "gpus"] | ["sharing", "timeSlicing", "resources"] => {
                return Err(file.invalid(&keys, "a list of maps"));
            }
            ["flags", "plugin", name, ..] => flag(
                &mut file,
                settings,
                &keys,
                3,
                &format!("plugin.{name}"),
                value,
            )?,
            ["flags", name, ..] => flag(&mut file, settings, &keys, 2, name, value)?,
            ["resources", "gpus", number, ref key @ ..] => {
                let row = models.entry(number.parse()?).or_default();
                match key {
                    ["name"] => row.name = with_prefix(file.text(&keys, value)?),
                    ["pattern"] => file.text(&keys, value)?.clone_into(&mut row.model),
                    _ => file.unknown(&keys),
                }
            }
            ["resources", "mig", ..] => {
                file.no_effect(
                    &["resources", "mig"],
                    "MIG devices have the name of their profile",
                );
            }
            ["sharing", "timeSlicing", "renameByDefault"] => {
                rename_all = file.truth(&keys, value)?
            }
            ["sharing", "timeSlicing", "failRequestsGreaterThanOne"] => {
                refuse_several = file.truth(&keys, value)?
            }
            ["sharing", "timeSlicing", "resources", number, ref key @ ..] => {
                let row = slices.entry(number.parse()?).or_default();
                match key {
                    ["name"] => row.name = with_prefix(file.text(&keys, value)?),
                    ["rename"] if value.is_null() => {}
                    ["rename"] => row.rename = Some(with_prefix(file.text(&keys, value)?)),
                    ["replicas"] => row.replicas = file.number(&keys, value)?,
                    ["devices"] if value.as_str() == Some("all") => {}
                    ["devices", ..] => {
                        let devices = keys.get(..5).unwrap_or_default();
                        file.no_effect(devices, "all devices of the resource are shared");
                    }
                    _ => file.unknown(&keys),
                }
            }
            ["sharing", "mps", ..] => file.no_effect(&["sharing", "mps"], "MPS is not supported"),
            ["imex", _] if is_empty(value) || *value == Value::Bool(false) => {}
            ["imex", name, ..] => {
                file.no_effect(
                    &["imex", name],
                    "IMEX channels are requested with NVIDIA_IMEX_CHANNELS",
                );
            }
            _ => file.unknown(&keys),
        }
    }
    if !models.is_empty() {
        let checked = resources::checked(models.into_values().map(Ok), LIST);
        settings.plugin.resources =
            checked.map_err(|allowed| file.invalid(&["resources", "gpus"], &allowed))?;
    }
    settings.plugin.several_replicas = !slices.is_empty() && !refuse_several;
    for (number, mut row) in slices {
        let at = number.to_string();
        row.check().map_err(|(name, allowed)| {
            file.invalid(
                &["sharing", "timeSlicing", "resources", &at, name],
                &allowed,
            )
        })?;
        row.rename = row
            .rename
            .or_else(|| rename_all.then(|| format!("{}.shared", row.name)));
        settings.plugin.time_slicing.push(row);
    }
    Ok(file.findings)
}

/// Applies an option, which is the first `depth` of these keys. `key` is that in [`OPTIONS`].
fn flag(
    file: &mut Document<'_>,
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
