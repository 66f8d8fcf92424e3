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
pub(super) struct Document<'a> {
    path: &'a Path,
    text: &'a str,
    /// What has no effect
    pub(super) findings: Vec<Finding>,
}

impl<'a> Document<'a> {
    /// Parses a text. `path` is only used in messages.
    pub(super) fn parse(path: &'a Path, text: &'a str) -> Result<(Self, Value)> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let value = yaml::parse(text)
            .map_err(|why| invalid_config(format!("{path:?} {why}"), &format!("correct the syntax of {path:?}")))?;
        Ok((Self { path, text, findings: Vec::new() }, value))
    }

    fn line(&self, key: &[&str]) -> usize {
        yaml::line_of(self.text, key).unwrap_or(1)
    }

    /// Returns the error for a key with an invalid value.
    pub(super) fn invalid(&self, key: &[&str], allowed: &str) -> Error {
        let (path, line) = (self.path, self.line(key));
        invalid_config(
            format!("{path:?} line {line}: {} has an invalid value; it must be {allowed}", key.join(".")),
            &format!("correct line {line} of {path:?}"),
        )
    }

    /// Reports a key that has no effect.
    pub(super) fn no_effect(&mut self, key: &[&str], why: &str) {
        let place = format!("{:?} line {}: {}", self.path, self.line(key), key.join("."));
        self.findings.push(no_effect(&place, why));
    }

    /// Reports an unknown key.
    pub(super) fn unknown(&mut self, key: &[&str]) {
        self.no_effect(key, "the key is unknown");
    }

    /// Returns the entries of a map, in the order of their names. An empty value has none.
    pub(super) fn map<'v>(&self, key: &[&str], value: &'v Value) -> Result<Vec<(&'v str, &'v Value)>> {
        match value {
            Value::Object(map) => Ok(map.iter().map(|(name, value)| (name.as_str(), value)).collect()),
            Value::Null => Ok(Vec::new()),
            _ => Err(self.invalid(key, "a map")),
        }
    }

    /// Returns the entries of a list. An empty value has none.
    pub(super) fn list<'v>(&self, key: &[&str], value: &'v Value) -> Result<&'v [Value]> {
        match value {
            Value::Array(list) => Ok(list),
            Value::Null => Ok(&[]),
            _ => Err(self.invalid(key, "a list")),
        }
    }

    /// Returns a string.
    pub(super) fn text<'v>(&self, key: &[&str], value: &'v Value) -> Result<&'v str> {
        value.as_str().ok_or_else(|| self.invalid(key, "a string"))
    }

    /// Returns a boolean.
    pub(super) fn truth(&self, key: &[&str], value: &Value) -> Result<bool> {
        value.as_bool().ok_or_else(|| self.invalid(key, "true or false"))
    }

    /// Returns a number.
    pub(super) fn number(&self, key: &[&str], value: &Value) -> Result<u32> {
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        number.ok_or_else(|| self.invalid(key, "a number"))
    }
}

/// Reads a configuration file.
pub(super) fn read(path: &Path) -> Result<String> {
    Ok(String::from_utf8(base::read::read_limited(std::fs::File::open(path)?, MAX_SIZE)?)?)
}

/// Returns a key and one more step.
pub(super) fn below<'a>(key: &[&'a str], step: &'a str) -> Vec<&'a str> {
    [key, &[step]].concat()
}
