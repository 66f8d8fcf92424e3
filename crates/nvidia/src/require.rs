//! Parses and evaluates `NVIDIA_REQUIRE_*`, the requirements of an image for the driver and the GPUs.
//!
//! In one variable a space means OR and a comma means AND: `cuda>=12.4 brand=tesla,driver>=535,driver<536`. All variables must be true.
//! The rules are those of libnvidia-container, which images rely on. For example, evaluation stops as soon as the result is known, so
//! the rest of a value may be malformed.

use std::cmp::Ordering;
use std::fmt;

use anyhow::Result;

use base::report::{catalog, failure};

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
        let known = [("cuda", &self.cuda), ("driver", &self.driver), ("arch", &self.arch), ("brand", &self.brand)];
        let known = known.iter().filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)));
        f.write_str(&known.collect::<Vec<_>>().join(", "))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Property {
    Cuda,
    Driver,
    Arch,
    Brand,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

/// `cuda>=12.4`
#[derive(Clone, Debug, PartialEq, Eq)]
struct Factor<'a> {
    property: Property,
    operator: Operator,
    value: &'a str,
}

/// A disjunction of conjunctions. A malformed factor is an error only if the evaluation reaches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expression<'a>(Vec<Vec<Result<Factor<'a>, Malformed<'a>>>>);

/// A malformed factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed<'a>(pub &'a str);

/// Parses the value of one variable. Empty terms and factors are ignored. An empty value is true.
#[must_use]
pub fn parse(text: &str) -> Expression<'_> {
    let terms = text.split(' ').filter(|term| !term.is_empty());
    Expression(terms.map(|term| term.split(',').filter(|f| !f.is_empty()).map(parse_factor).collect()).collect())
}

fn parse_factor(text: &str) -> Result<Factor<'_>, Malformed<'_>> {
    let is_operator = |c: char| matches!(c, '<' | '>' | '=' | '!');
    let parts = || {
        let start = text.find(is_operator)?;
        let (name, rest) = text.split_at(start);
        let end = rest.find(|c| !is_operator(c))?;
        let (operator, value) = rest.split_at(end);
        let property = match name.to_ascii_lowercase().as_str() {
            "cuda" => Property::Cuda,
            "driver" => Property::Driver,
            "arch" => Property::Arch,
            "brand" => Property::Brand,
            _ => return None,
        };
        let operator = match operator {
            "=" => Operator::Equal,
            "!=" | "!" => Operator::NotEqual,
            "<" => Operator::Less,
            "<=" => Operator::LessOrEqual,
            ">" => Operator::Greater,
            ">=" => Operator::GreaterOrEqual,
            _ => return None,
        };
        Some(Factor { property, operator, value })
    };
    parts().ok_or(Malformed(text))
}

impl<'a> Expression<'a> {
    /// Whether the requirement is met.
    ///
    /// # Errors
    /// Returns the first malformed factor that the result depends on.
    pub fn evaluate(&self, properties: &Properties) -> Result<bool, Malformed<'a>> {
        let mut terms = self.0.iter().filter(|term| !term.is_empty()).peekable();
        if terms.peek().is_none() {
            return Ok(true);
        }
        for term in terms {
            let mut holds = true;
            for factor in term {
                holds = factor.clone()?.evaluate(properties)?;
                if !holds {
                    break;
                }
            }
            if holds {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl<'a> Factor<'a> {
    fn evaluate(&self, properties: &Properties) -> Result<bool, Malformed<'a>> {
        let (known, is_version) = match self.property {
            Property::Cuda => (&properties.cuda, true),
            Property::Driver => (&properties.driver, true),
            Property::Arch => (&properties.arch, true),
            Property::Brand => (&properties.brand, false),
        };
        let Some(known) = known else { return Ok(true) };
        let ordering = if is_version {
            compare_versions(known, self.value).ok_or(Malformed(self.value))?
        } else {
            match self.operator {
                Operator::Equal | Operator::NotEqual => {}
                _ => return Err(Malformed(self.value)), // brands have no order
            }
            if known.eq_ignore_ascii_case(self.value) { Ordering::Equal } else { Ordering::Less }
        };
        Ok(match self.operator {
            Operator::Equal => ordering.is_eq(),
            Operator::NotEqual => ordering.is_ne(),
            Operator::Less => ordering.is_lt(),
            Operator::LessOrEqual => ordering.is_le(),
            Operator::Greater => ordering.is_gt(),
            Operator::GreaterOrEqual => ordering.is_ge(),
        })
    }
}

/// Compares versions number by number; missing numbers are 0. Returns `None` if a version contains other characters than digits and
/// dots.
#[must_use]
pub fn compare_versions(a: &str, b: &str) -> Option<Ordering> {
    let plain = |text: &str| text.bytes().all(|c| c.is_ascii_digit() || c == b'.');
    if !plain(a) || !plain(b) {
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
    let text = text.split_once(['-', '+']).map_or(text, |(version, _)| version);
    let numbers: Vec<_> = text.split('.').collect();
    if numbers.len() > 3 {
        return None;
    }
    let number = |digits: &&str| {
        let plain = !digits.is_empty() && digits.bytes().all(|c| c.is_ascii_digit());
        if plain { digits.parse::<u32>().ok() } else { None }
    };
    let numbers: Vec<u32> = numbers.iter().map(number).collect::<Option<_>>()?;
    Some((*numbers.first()?, numbers.get(1).copied().unwrap_or(0)))
}

/// Checks a requirement for each of `gpus`: (name for messages, properties).
///
/// # Errors
/// If a GPU does not meet the requirement, or the requirement is malformed.
pub fn check(requirement: &Requirement, gpus: &[(String, Properties)]) -> Result<()> {
    let Requirement { variable, text } = requirement;
    let expression = parse(text);
    for (name, properties) in gpus {
        match expression.evaluate(properties) {
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
                return Err(failure(
                    &catalog::BAD_REQUIREMENT,
                    format!("{variable}={text:?} is malformed at {part:?}"),
                    "write terms like cuda>=12.4, driver>=535, arch>=8.0 or brand=tesla; a comma means and, a space means or",
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

    fn holds(text: &str) -> Result<bool, Malformed<'_>> {
        parse(text).evaluate(&Properties {
            cuda: Some("12.2".into()),
            driver: Some("535.183.01".into()),
            arch: Some("9.0".into()),
            brand: Some("Tesla".into()),
        })
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
            assert_eq!(holds(text), expected, "{text}");
        }
    }

    #[test]
    fn both_sides_are_named() {
        let requirement = Requirement { variable: "NVIDIA_REQUIRE_CUDA".into(), text: "cuda>=13.0".into() };
        let has = Properties { cuda: Some("12.2".into()), driver: Some("535.1".into()), ..Properties::default() };
        let text = base::report::render(&check(&requirement, &[("GPU 0".into(), has)]).unwrap_err());
        assert!(
            text.starts_with(
                "the image requires NVIDIA_REQUIRE_CUDA=\"cuda>=13.0\", but GPU 0 has cuda 12.2, driver 535.1"
            ),
            "{text}"
        );
        let requirement = Requirement { variable: "NVIDIA_REQUIRE_X".into(), text: "cuda>>1".into() };
        let text = base::report::render(&check(&requirement, &[("x".into(), Properties::default())]).unwrap_err());
        assert!(
            text.starts_with("NVIDIA_REQUIRE_X=\"cuda>>1\" is malformed at \"cuda>>1\" (ONH-035)\nhint: "),
            "{text}"
        );
    }

    proptest! {
        #[test]
        fn never_panics(text in ".{0,80}") {
            holds(&text).ok();
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
