//! Parses the values of settings. A value of an option or a key consists of texts: one, or the entries of a list; of an option that is
//! repeated, the last text applies. The error of each function describes the allowed values.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use nvidia_host::config::value;
use nvidia_host::feature::{Feature, Features};

use super::values::{DeviceListStrategy, MetricsNames, enumerated, names_of};

/// Returns the text of a setting with one value.
pub(super) fn last<'a>(values: &[&'a str]) -> &'a str {
    values.last().copied().unwrap_or_default()
}

/// Parses the name of a value.
pub(super) fn word<T: ValueEnum>(values: &[&str]) -> Result<T, String> {
    match T::from_str(last(values), false) {
        Ok(value) => Ok(value),
        Err(_) => Err(names_of::<T>("or")),
    }
}

/// Parses the names of `device-list-strategy`.
pub(super) fn strategies(values: &[&str]) -> Result<Vec<DeviceListStrategy>, String> {
    let found: Vec<_> = words(values)?;
    if found.contains(&DeviceListStrategy::HostPath) && found.len() > 1 {
        let list = list_of::<DeviceListStrategy>();
        return Err(format!("{list}, and \"host-path\" alone"));
    }
    Ok(found)
}

/// Parses the entries of `metrics-names`.
pub(super) fn metrics_names(values: &[&str]) -> Result<Vec<MetricsNames>, String> {
    words(values)
}

/// Parses the names of values.
fn words<T: ValueEnum>(values: &[&str]) -> Result<Vec<T>, String> {
    let mut found = Vec::new();
    for name in values {
        let value = T::from_str(name, false).map_err(|_| list_of::<T>())?;
        found.push(value);
    }
    Ok(found)
}

/// Parses the names of features.
pub(super) fn features(values: &[&str]) -> Result<Features, String> {
    let found: Option<Features> = values.iter().map(|name| Feature::from_name(name)).collect();
    found.ok_or_else(|| {
        let names = Feature::ALL.map(|feature| format!("{:?}", feature.row().name));
        format!("a list of {}", enumerated(&names, "and"))
    })
}

fn list_of<T: ValueEnum>() -> String {
    format!("a list of {}", names_of::<T>("and"))
}

/// Parses a number of seconds from 1 to 600.
pub(super) fn seconds(values: &[&str]) -> Result<Duration, String> {
    let time = last(values).parse().ok().and_then(value::in_range);
    time.ok_or_else(|| "a number of seconds from 1 to 600".to_owned())
}

/// Parses numbers without a sign.
pub(super) fn numbers(values: &[&str]) -> Result<Vec<u32>, String> {
    let mut found = Vec::new();
    for value in values {
        let number = value.parse().map_err(|_| "a list of numbers".to_owned())?;
        found.push(number);
    }
    Ok(found)
}

/// Parses an absolute path.
pub(super) fn absolute(values: &[&str]) -> Result<PathBuf, String> {
    let path = PathBuf::from(last(values));
    if !path.is_absolute() {
        return Err("an absolute path".to_owned());
    }
    Ok(path)
}

/// Parses an absolute path, or an empty text.
pub(super) fn optional_path(values: &[&str]) -> Result<Option<PathBuf>, String> {
    if last(values).is_empty() {
        Ok(None)
    } else {
        absolute(values).map(Some)
    }
}

/// Takes a text, which may be empty.
#[allow(clippy::unnecessary_wraps, reason = "the type of these functions")]
pub(super) fn optional_text(values: &[&str]) -> Result<Option<String>, String> {
    let text = last(values);
    if text.is_empty() {
        return Ok(None);
    }
    Ok(Some(text.to_owned()))
}

/// Parses the name of a driver for claims: a domain name in lower case of at most 63 letters.
pub(super) fn driver_name(values: &[&str]) -> Result<String, String> {
    let name = last(values);
    let is_label = |label: &str| {
        let is_letter = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let ends = (label.as_bytes().first(), label.as_bytes().last());
        let has_ends = matches!(ends, (Some(a), Some(b)) if is_letter(a) && is_letter(b));
        has_ends && label.bytes().all(|byte| is_letter(&byte) || byte == b'-')
    };
    let is_valid = name.len() <= 63 && name.split('.').all(is_label);
    if is_valid {
        Ok(name.to_owned())
    } else {
        Err("a domain name in lower case, at most 63 letters".to_owned())
    }
}

/// Parses an address for metrics. `:2112` is port 2112 on all addresses. An empty text disables metrics.
pub(super) fn address(values: &[&str]) -> Result<Option<SocketAddr>, String> {
    let text = last(values);
    if text.is_empty() {
        return Ok(None);
    }
    if let Some(port) = text.strip_prefix(':')
        && let Ok(port) = port.parse::<u16>()
    {
        return Ok(Some((Ipv6Addr::UNSPECIFIED, port).into()));
    }
    if let Ok(address) = text.parse() {
        return Ok(Some(address));
    }
    let allowed =
        "an address with a port, such as \"127.0.0.1:2112\", or \":2112\" for all addresses";
    Err(allowed.to_owned())
}

/// The words for false that Go programs accept.
pub(super) const OFF: &[&str] = &["false", "0", "f", "F", "FALSE", "False"];

/// Parses the words for a boolean that Go programs accept.
pub(super) fn truth(values: &[&str]) -> Result<bool, String> {
    base::go::parse_bool(last(values)).ok_or_else(|| "true or false".to_owned())
}

/// Parses a boolean, or `auto`.
pub(super) fn switch(values: &[&str]) -> Result<Option<bool>, String> {
    match last(values) {
        "auto" => Ok(None),
        text => match truth(&[text]) {
            Ok(value) => Ok(Some(value)),
            Err(_) => Err("true, false or \"auto\"".to_owned()),
        },
    }
}
