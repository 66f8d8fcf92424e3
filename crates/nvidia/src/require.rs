//! Parses and evaluates `NVIDIA_REQUIRE_*`, the requirements of an image for the driver and the GPUs.
//!
//! In one variable a space means OR and a comma means AND: `cuda>=12.4 brand=tesla,driver>=535,driver<536`. All variables must be true.
//! The rules come from libnvidia-container, which images rely on. For example, evaluation stops as soon as the result is known, so
//! the rest of a value may be malformed.

use std::cmp::Ordering;
use std::fmt;

use anyhow::Result;

use base::report::failure;
use findings::catalog;

use crate::decimal::parse_decimal;
use crate::quotes;

/// One variable of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The name, such as `NVIDIA_REQUIRE_CUDA`
    pub variable: String,
    /// The value
    pub text: String,
}

/// The properties of one GPU and its driver. If a property is unknown (`None`), every requirement for it is met.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties {
    /// The CUDA version, such as `12.2`
    pub cuda: Option<String>,
    /// The driver version, such as `535.183.01`
    pub driver: Option<String>,
    /// The compute capability, such as `9.0`
    pub arch: Option<String>,
    /// The brand, such as `Tesla`
    pub brand: Option<String>,
}

impl fmt::Display for Properties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = [
            ("cuda", &self.cuda),
            ("driver", &self.driver),
            ("arch", &self.arch),
            ("brand", &self.brand),
        ];
        let mut separator = "";
        for (name, value) in known {
            if let Some(value) = value {
                write!(f, "{separator}{name} {value}")?;
                separator = ", ";
            }
        }
        Ok(())
    }
}

/// A malformed factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed<'a>(pub &'a str);

/// Whether the value of one variable holds. Empty terms and factors are ignored. An empty value is true.
///
/// # Errors
/// Returns the first malformed factor that the result depends on.
pub fn evaluate<'a>(text: &'a str, properties: &Properties) -> Result<bool, Malformed<'a>> {
    let mut is_empty = true;
    for term in text.split(' ') {
        if term.bytes().all(|byte| byte == b',') {
            continue;
        }
        is_empty = false;
        if all_hold(term, properties)? {
            return Ok(true);
        }
    }
    Ok(is_empty)
}

fn all_hold<'a>(term: &'a str, properties: &Properties) -> Result<bool, Malformed<'a>> {
    for factor in term.split(',') {
        if !factor.is_empty() && !holds(factor, properties)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a factor such as `cuda>=12.4` holds.
fn holds<'a>(factor: &'a str, properties: &Properties) -> Result<bool, Malformed<'a>> {
    let (name, operator, value) = split(factor).ok_or(Malformed(factor))?;
    let (known, is_version) = match name.to_ascii_lowercase().as_str() {
        "cuda" => (&properties.cuda, true),
        "driver" => (&properties.driver, true),
        "arch" => (&properties.arch, true),
        "brand" => (&properties.brand, false),
        _ => return Err(Malformed(factor)),
    };
    let matches = match operator {
        "=" => Ordering::is_eq,
        "!=" | "!" => Ordering::is_ne,
        "<" => Ordering::is_lt,
        "<=" => Ordering::is_le,
        ">" => Ordering::is_gt,
        ">=" => Ordering::is_ge,
        _ => return Err(Malformed(factor)),
    };
    let Some(known) = known else { return Ok(true) };
    if is_version {
        let order = compare_versions(known, value).ok_or(Malformed(value))?;
        return Ok(matches(order));
    }
    match operator {
        "=" => Ok(known.eq_ignore_ascii_case(value)),
        "!=" | "!" => Ok(!known.eq_ignore_ascii_case(value)),
        _ => Err(Malformed(value)), // brands have no order
    }
}

/// Splits a factor into name, operator and value.
fn split(factor: &str) -> Option<(&str, &str, &str)> {
    let (name, rest) = factor.split_at(factor.find(is_operator)?);
    let (operator, value) = rest.split_at(rest.find(|c| !is_operator(c))?);
    Some((name, operator, value))
}

fn is_operator(c: char) -> bool {
    matches!(c, '<' | '>' | '=' | '!')
}

/// Compares versions number by number; missing numbers are 0. Returns `None` if a version contains other characters than digits and
/// dots.
#[must_use]
pub fn compare_versions(a: &str, b: &str) -> Option<Ordering> {
    let is_valid = |c: u8| c.is_ascii_digit() || c == b'.';
    if !a.bytes().all(is_valid) || !b.bytes().all(is_valid) {
        return None;
    }
    let mut a = a.split('.').map(significant);
    let mut b = b.split('.').map(significant);
    loop {
        let (x, y) = (a.next(), b.next());
        if x.is_none() && y.is_none() {
            return Some(Ordering::Equal);
        }
        let (x, y) = (x.unwrap_or_default(), y.unwrap_or_default());
        // The digits are compared as text, so that no number overflows: without leading zeros, the longer one is greater.
        match x.len().cmp(&y.len()).then_with(|| x.cmp(y)) {
            Ordering::Equal => {}
            other => return Some(other),
        }
    }
}

fn significant(digits: &str) -> &str {
    digits.trim_start_matches('0')
}

/// Parses `CUDA_VERSION` of an old image: up to three numbers of 32 bits, with an optional prefix `v` and a suffix such as `-rc1`.
#[must_use]
pub fn parse_cuda_version(text: &str) -> Option<(u32, u32)> {
    let text = text.strip_prefix('v').unwrap_or(text);
    let version = text.split(['-', '+']).next().unwrap_or(text);
    let mut numbers = Vec::new();
    for word in version.split('.') {
        numbers.push(parse_decimal(word)?);
    }
    match numbers.as_slice() {
        [major] => Some((*major, 0)),
        [major, minor] | [major, minor, _] => Some((*major, *minor)),
        _ => None,
    }
}

/// Checks a requirement for each of `gpus`: (name for messages, properties).
///
/// # Errors
/// If a GPU does not meet the requirement, or the requirement is malformed.
pub fn check(requirement: &Requirement, gpus: &[(String, Properties)]) -> Result<()> {
    let Requirement { variable, text } = requirement;
    for (name, properties) in gpus {
        match evaluate(text, properties) {
            Ok(true) => {}
            Ok(false) => {
                return Err(failure(
                    &catalog::REQUIREMENT,
                    format!("the image requires {variable}={text:?}, but {name} has {properties}"),
                    "update the host's driver, use an image for an earlier CUDA version, or set \
                     NVIDIA_DISABLE_REQUIRE=true in the container",
                ));
            }
            Err(Malformed(part)) => {
                let fix = quotes::fix(text).unwrap_or(
                    "write terms like cuda>=12.4, driver>=535, arch>=8.0 or brand=tesla; a comma means and, a space means or",
                );
                return Err(failure(
                    &catalog::BAD_REQUIREMENT,
                    format!("{variable}={text:?} is malformed at {part:?}"),
                    fix,
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn holds_here(text: &str) -> Result<bool, Malformed<'_>> {
        let properties = Properties {
            cuda: Some("12.2".into()),
            driver: Some("535.183.01".into()),
            arch: Some("9.0".into()),
            brand: Some("Tesla".into()),
        };
        evaluate(text, &properties)
    }

    #[test]
    fn space_is_or_and_comma_is_and() {
        for (text, expected) in [
            ("", Ok(true)),
            ("cuda>=99 arch>=9", Ok(true)),
            ("cuda>=99,arch>=9", Ok(false)),
            ("cuda>=12,nonsense", Err(Malformed("nonsense"))),
            ("cuda>=12 nonsense", Ok(true)),
            ("cuda>=12.2.0.0", Ok(true)),
            ("cuda>=99999999999999999999999", Ok(false)),
        ] {
            assert_eq!(holds_here(text), expected, "{text}");
        }
    }

    #[test]
    fn both_sides_are_named() {
        let requirement = Requirement {
            variable: "NVIDIA_REQUIRE_CUDA".into(),
            text: "cuda>=13.0".into(),
        };
        let has = Properties {
            cuda: Some("12.2".into()),
            driver: Some("535.1".into()),
            ..Properties::default()
        };
        let text =
            base::report::render(&check(&requirement, &[("GPU 0".into(), has)]).unwrap_err());
        assert!(
            text.starts_with(
                "the image requires NVIDIA_REQUIRE_CUDA=\"cuda>=13.0\", but GPU 0 has cuda 12.2, driver 535.1"
            ),
            "{text}"
        );
        let requirement = Requirement {
            variable: "NVIDIA_REQUIRE_X".into(),
            text: "cuda>>1".into(),
        };
        let text = base::report::render(
            &check(&requirement, &[("x".into(), Properties::default())]).unwrap_err(),
        );
        assert!(
            text.starts_with(
                "NVIDIA_REQUIRE_X=\"cuda>>1\" is malformed at \"cuda>>1\" (ONH-035)\nhint: "
            ),
            "{text}"
        );
    }

    proptest! {
        #[test]
        fn never_panics(text in ".{0,80}") {
            holds_here(&text).ok();
            prop_assert!(parse_cuda_version(&text).is_none_or(|_| text.starts_with(|c: char| c == 'v' || c.is_ascii_digit())));
        }

        #[test]
        fn versions_are_ordered(a in "[0-9]{1,4}(\\.[0-9]{1,4}){0,3}", b in "[0-9]{1,4}(\\.[0-9]{1,4}){0,3}") {
            let (ab, ba) = (compare_versions(&a, &b).unwrap(), compare_versions(&b, &a).unwrap());
            prop_assert_eq!(ab, ba.reverse());
            prop_assert_eq!(compare_versions(&a, &format!("{a}.0.0")), Some(Ordering::Equal));
        }
    }
}
