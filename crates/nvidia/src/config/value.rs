//! Values of TOML as the types of keys.

use std::time::Duration;

use toml::de::{DeArray, DeInteger};

/// Returns a list of strings, if it is one.
#[must_use]
pub fn texts<'a>(values: &'a DeArray<'_>) -> Option<Vec<&'a str>> {
    values
        .iter()
        .map(|value| value.get_ref().as_str())
        .collect()
}

/// Returns a list of numbers, if it is one.
#[must_use]
pub fn numbers(values: &DeArray<'_>) -> Option<Vec<u32>> {
    values
        .iter()
        .map(|value| value.get_ref().as_integer().and_then(number))
        .collect()
}

/// Returns a number without a sign, if it is one.
#[must_use]
pub fn number(value: &DeInteger<'_>) -> Option<u32> {
    u32::from_str_radix(value.as_str(), value.radix()).ok()
}

/// Returns seconds from 1 to 600.
#[must_use]
pub fn seconds(value: &DeInteger<'_>) -> Option<Duration> {
    number(value).and_then(in_range)
}

/// Returns a percentage from 1 to 100.
#[must_use]
pub fn percent(value: &DeInteger<'_>) -> Option<u8> {
    let percent = u8::try_from(number(value)?).ok()?;
    (1..=100).contains(&percent).then_some(percent)
}

/// Returns the duration if the number of seconds is from 1 to 600.
#[must_use]
pub fn in_range(seconds: u32) -> Option<Duration> {
    (1..=600)
        .contains(&seconds)
        .then(|| Duration::from_secs(seconds.into()))
}
