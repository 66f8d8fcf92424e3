//! A configuration file as a tree of values, with the places of its keys for messages.

use std::path::Path;

use anyhow::{Error, Result};
use base::report::Finding;
use cdi_spec::yaml;
use serde_json::Value;

use super::problems::{invalid_config, no_effect};

/// The size limit of a configuration file in bytes.
const MAX_SIZE: usize = 1 << 20;

/// A YAML or JSON document.
pub(super) struct ConfigDocument<'a> {
    path: &'a Path,
    text: &'a str,
    /// What has no effect
    pub(super) findings: Vec<Finding>,
}

impl<'a> ConfigDocument<'a> {
    /// Parses a text. `path` is only used in messages.
    pub(super) fn parse(path: &'a Path, text: &'a str) -> Result<(Self, Value)> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let value = yaml::parse(text).map_err(|why| invalid_config(format!("{path:?} {why}")))?;
        Ok((
            Self {
                path,
                text,
                findings: Vec::new(),
            },
            value,
        ))
    }

    /// Returns the line of a key. A key of an alias or a merge key is not in the text, so it has the line of the key above.
    fn line(&self, key: &[&str]) -> usize {
        let mut key = key;
        loop {
            if let Some(line) = yaml::line_of(self.text, key) {
                return line;
            }
            let Some((_, above)) = key.split_last() else {
                return 1;
            };
            key = above;
        }
    }

    /// Returns the error for a key with an invalid value.
    pub(super) fn invalid(&self, key: &[&str], allowed: &str) -> Error {
        let (path, line) = (self.path, self.line(key));
        invalid_config(format!(
            "{path:?} line {line}: {} has an invalid value; it must be {allowed}",
            key.join(".")
        ))
    }

    /// Reports a key that has no effect.
    pub(super) fn no_effect(&mut self, key: &[&str], why: &str) {
        let place = format!("{:?} line {}: {}", self.path, self.line(key), key.join("."));
        let finding = no_effect(&place, why);
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    /// Reports an unknown key.
    pub(super) fn unknown(&mut self, key: &[&str]) {
        self.no_effect(key, "the key is unknown");
    }

    /// Returns a string.
    pub(super) fn text<'v>(&self, key: &[&str], value: &'v Value) -> Result<&'v str> {
        value.as_str().ok_or_else(|| self.invalid(key, "a string"))
    }

    /// Returns a boolean.
    pub(super) fn truth(&self, key: &[&str], value: &Value) -> Result<bool> {
        value
            .as_bool()
            .ok_or_else(|| self.invalid(key, "true or false"))
    }

    /// Returns a number.
    pub(super) fn number(&self, key: &[&str], value: &Value) -> Result<u32> {
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        number.ok_or_else(|| self.invalid(key, "a number"))
    }
}

/// Reads a configuration file.
#[expect(
    clippy::disallowed_methods,
    reason = "the administrator names the file"
)]
pub(super) fn read(path: &Path) -> Result<String> {
    Ok(String::from_utf8(base::read::read_limited(
        std::fs::File::open(path)?,
        MAX_SIZE,
    )?)?)
}

/// Returns the values of a document that contain no keys, with their keys: texts, numbers, booleans, lists of them, and what is empty.
pub(super) fn leaves(root: &Value) -> Vec<(Vec<String>, &Value)> {
    let mut found = Vec::new();
    collect(root, &mut Vec::new(), &mut found);
    found
}

fn collect<'v>(
    value: &'v Value,
    keys: &mut Vec<String>,
    found: &mut Vec<(Vec<String>, &'v Value)>,
) {
    let below: Vec<(String, &Value)> = match value {
        Value::Object(map) => map
            .iter()
            .map(|(key, value)| (key.clone(), value))
            .collect(),
        Value::Array(list) if list.iter().any(Value::is_object) => list
            .iter()
            .enumerate()
            .map(|(number, value)| (number.to_string(), value))
            .collect(),
        _ => Vec::new(),
    };
    if below.is_empty() {
        found.push((keys.clone(), value));
    }
    for (key, value) in below {
        keys.push(key);
        collect(value, keys, found);
        keys.pop();
    }
}

/// Whether a value is missing, or a map or a list without entries.
pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}
