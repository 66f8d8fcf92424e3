//! The configuration file of NVIDIA's device plugin, `version: v1`.

use std::path::Path;

use anyhow::Result;
use base::report::Finding;
use serde_json::Value;

use super::document::{Document, below};
use super::nvidia_options::{Effect, OPTIONS};
use super::resources::{self, ResourceRow, TimeSlicing};
use super::values::{Plugin, Settings};

/// The prefix of resources in this file that have none.
const PREFIX: &str = "nvidia.com";
const MPS: &str = "MPS is not supported";

/// Applies the text of a file. `path` is only used in messages.
pub(super) fn apply(settings: &mut Settings, path: &Path, text: &str) -> Result<Vec<Finding>> {
    let (mut file, root) = Document::parse(path, text)?;
    if root.get("version").and_then(Value::as_str) != Some("v1") {
        return Err(file.invalid(&["version"], "\"v1\""));
    }
    for (name, value) in file.map(&["version"], &root)? {
        match name {
            "version" => {}
            "flags" => flags(&mut file, settings, &["flags"], "", value)?,
            "resources" => resources(&mut file, &mut settings.plugin, value)?,
            "sharing" => sharing(&mut file, &mut settings.plugin, value)?,
            "imex" => imex(&mut file, value)?,
            name => file.unknown(&[name]),
        }
    }
    Ok(file.findings)
}

/// Applies the options. `prefix` is that of the keys in [`OPTIONS`].
fn flags(file: &mut Document<'_>, settings: &mut Settings, at: &[&str], prefix: &str, value: &Value) -> Result<()> {
    for (name, value) in file.map(at, value)? {
        let key = below(at, name);
        let known = OPTIONS.iter().find(|option| !option.key.is_empty() && option.key == format!("{prefix}{name}"));
        match (name, known) {
            // Options of gpu-feature-discovery, which reads the same file
            ("gfd", _) => {}
            ("plugin", _) if prefix.is_empty() => flags(file, settings, &key, "plugin.", value)?,
            (_, None) => file.unknown(&key),
            (_, Some(_)) if value.is_null() => {}
            (_, Some(option)) => {
                let text =
                    scalar(value).ok_or_else(|| file.invalid(&key, "a string, a boolean or a list of strings"))?;
                let finding = option.set(settings, "", &text).map_err(|allowed| file.invalid(&key, &allowed))?;
                if let (Some(_), Effect::Other { why, .. }) = (finding, option.effect) {
                    file.no_effect(&key, why);
                }
            }
        }
    }
    Ok(())
}

/// Returns a value as on the command line.
fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        Value::Array(list) => Some(list.iter().map(Value::as_str).collect::<Option<Vec<_>>>()?.join(",")),
        Value::Null | Value::Object(_) => None,
    }
}

fn resources(file: &mut Document<'_>, plugin: &mut Plugin, value: &Value) -> Result<()> {
    for (name, value) in file.map(&["resources"], value)? {
        let key = ["resources", name];
        match name {
            "gpus" => {
                let mut rows = Vec::new();
                for (at, row) in file.list(&key, value)?.iter().enumerate() {
                    rows.push(model(file, &below(&key, &at.to_string()), row)?);
                }
                plugin.resources = resources::checked(rows).map_err(|allowed| file.invalid(&key, &allowed))?;
            }
            "mig" if file.list(&key, value)?.is_empty() => {}
            "mig" => file.no_effect(&key, "MIG devices have the name of their profile"),
            _ => file.unknown(&key),
        }
    }
    Ok(())
}

fn model(file: &mut Document<'_>, at: &[&str], value: &Value) -> Result<ResourceRow> {
    let mut row = ResourceRow::default();
    for (name, value) in file.map(at, value)? {
        let key = below(at, name);
        match name {
            "name" => row.name = with_prefix(file.text(&key, value)?),
            "pattern" => file.text(&key, value)?.clone_into(&mut row.model),
            _ => file.unknown(&key),
        }
    }
    Ok(row)
}

fn with_prefix(name: &str) -> String {
    if name.contains('/') { name.to_owned() } else { format!("{PREFIX}/{name}") }
}

fn sharing(file: &mut Document<'_>, plugin: &mut Plugin, value: &Value) -> Result<()> {
    for (name, value) in file.map(&["sharing"], value)? {
        let key = ["sharing", name];
        match name {
            "timeSlicing" => time_slicing(file, plugin, &key, value)?,
            "mps" if file.map(&key, value)?.is_empty() => {}
            "mps" => file.no_effect(&key, MPS),
            _ => file.unknown(&key),
        }
    }
    Ok(())
}

fn time_slicing(file: &mut Document<'_>, plugin: &mut Plugin, at: &[&str], value: &Value) -> Result<()> {
    let (mut rename_all, mut refuse_several) = (false, false);
    let mut rows = Vec::new();
    for (name, value) in file.map(at, value)? {
        let key = below(at, name);
        match name {
            "renameByDefault" => rename_all = file.truth(&key, value)?,
            "failRequestsGreaterThanOne" => refuse_several = file.truth(&key, value)?,
            "resources" => {
                for (number, row) in file.list(&key, value)?.iter().enumerate() {
                    rows.push(shared(file, &below(&key, &number.to_string()), row)?);
                }
            }
            _ => file.unknown(&key),
        }
    }
    plugin.several_replicas = !rows.is_empty() && !refuse_several;
    for mut row in rows {
        row.rename = row.rename.or_else(|| rename_all.then(|| format!("{}.shared", row.name)));
        plugin.time_slicing.push(row);
    }
    Ok(())
}

fn shared(file: &mut Document<'_>, at: &[&str], value: &Value) -> Result<TimeSlicing> {
    let mut row = TimeSlicing { name: String::new(), rename: None, replicas: 0 };
    for (name, value) in file.map(at, value)? {
        let key = below(at, name);
        match name {
            "name" => row.name = with_prefix(file.text(&key, value)?),
            "rename" if value.is_null() => {}
            "rename" => row.rename = Some(with_prefix(file.text(&key, value)?)),
            "replicas" => row.replicas = file.number(&key, value)?,
            "devices" if value.as_str() == Some("all") => {}
            "devices" => file.no_effect(&key, "all devices of the resource are shared"),
            _ => file.unknown(&key),
        }
    }
    row.check().map_err(|(name, allowed)| file.invalid(&below(at, name), &allowed))?;
    Ok(row)
}

fn imex(file: &mut Document<'_>, value: &Value) -> Result<()> {
    for (name, value) in file.map(&["imex"], value)? {
        let is_empty = matches!(value, Value::Null | Value::Bool(false)) || value.as_array().is_some_and(Vec::is_empty);
        if !is_empty {
            file.no_effect(&["imex", name], "IMEX channels are requested with NVIDIA_IMEX_CHANNELS");
        }
    }
    Ok(())
}
