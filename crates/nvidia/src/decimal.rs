//! Parses decimal numbers in names and in requests.

/// Parses a number that consists of digits only: `u32::from_str` would accept `+1`.
#[must_use]
pub fn parse_decimal(word: &str) -> Option<u32> {
    if !word.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    word.parse().ok()
}
