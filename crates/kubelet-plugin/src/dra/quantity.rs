//! Reads quantities of the API, such as `8Gi`. Pure.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Returns a quantity of bytes, without the part of a byte.
///
/// # Errors
/// If the text is not a quantity, is negative, or has more bytes than there can be.
pub(super) fn bytes(quantity: &Quantity) -> Result<u64, String> {
    let Quantity(text) = quantity;
    parse(text).ok_or_else(|| format!("{text:?} is not a quantity of memory"))
}

fn parse(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, suffix) = text.split_at(end.unwrap_or(text.len()));
    let factor = factor(suffix)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if number.is_empty() || number == "." || fraction.contains('.') {
        return None;
    }
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let scale = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    u64::try_from(digits.checked_mul(factor)? / scale).ok()
}

/// Returns the number of bytes of a unit: binary (`Ki`), decimal (`k`) or an exponent (`e3`).
fn factor(suffix: &str) -> Option<u128> {
    if let Some(exponent) = suffix.strip_prefix(['e', 'E'])
        && !exponent.is_empty()
        && exponent != "i"
    {
        return 10_u128.checked_pow(exponent.parse().ok()?);
    }
    if suffix.is_empty() {
        return Some(1);
    }
    let binary = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    if let Some(power) = binary.iter().position(|unit| *unit == suffix) {
        return 1024_u128.checked_pow(u32::try_from(power).ok()? + 1);
    }
    let power = ["k", "M", "G", "T", "P", "E"]
        .iter()
        .position(|unit| *unit == suffix)?;
    1000_u128.checked_pow(u32::try_from(power).ok()? + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities() {
        for (text, expected) in [
            ("0", Some(0)),
            ("8Gi", Some(8 << 30)),
            ("1.5Gi", Some(3 << 29)),
            ("8G", Some(8_000_000_000)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("1Ei", Some(1 << 60)),
            ("2e9", Some(2_000_000_000)),
            ("2E3", Some(2000)),
            (".5k", Some(500)),
            ("16Ei", None),
            ("", None),
            (".", None),
            ("Gi", None),
            ("-1", None),
            ("1.2.3", None),
            ("1 Gi", None),
            ("8GB", None),
            ("1e", None),
            ("1e-3", None),
            ("1e99", None),
            ("99999999999999999999999999999999999999999999", None),
            ("é", None),
        ] {
            assert_eq!(parse(text), expected, "{text:?}");
        }
    }
}
