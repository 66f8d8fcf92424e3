//! Prints JSON for terminals, and parses JSON in the library crates.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::{DeserializeOwned, Error};

use crate::report::is_hidden;

/// Returns the value as indented JSON. Text from a container must not move the cursor of a terminal, change the direction of text or
/// be invisible. serde_json escapes only C0 control characters, so this function also escapes the others that [`one_line`] escapes.
///
/// [`one_line`]: crate::report::one_line
///
/// # Errors
/// If JSON cannot represent the value: a path that is not UTF-8, or a map with keys that are not strings.
pub fn pretty(value: &impl Serialize) -> serde_json::Result<String> {
    #[expect(clippy::disallowed_methods, reason = "the only caller")]
    serde_json::to_string_pretty(value).map(escaped)
}

/// The version of the documents that commands print. It changes if a key is removed or gets another meaning, not if one is added.
pub const VERSION: u32 = 1;

/// Returns the document `{"version": 1, "NAME": CONTENT}` with a final newline.
///
/// # Errors
/// The errors of [`pretty`].
pub fn document(name: &'static str, content: &impl Serialize) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Versioned<'a, T> {
        version: u32,
        #[serde(flatten)]
        content: BTreeMap<&'static str, &'a T>,
    }
    Ok(pretty(&Versioned {
        version: VERSION,
        content: BTreeMap::from([(name, content)]),
    })? + "\n")
}

/// Parses JSON in the library crates, which do not call `serde_json::from_slice`. If rustc optimizes for size, crates share
/// instances of generic functions. The hook would get the parser of bytes from a library, with less of it inlined: 21 instead of
/// 17 instructions for each byte of config.json.
///
/// # Errors
/// If the bytes are not JSON of this type.
pub fn from_bytes<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_str(std::str::from_utf8(bytes).map_err(Error::custom)?)
}

/// The syntax of JSON is ASCII. The escaped characters can only be in a string, where both forms mean the same.
fn escaped(json: String) -> String {
    let is_plain = |byte: u8| matches!(byte, b'\n' | b' '..=b'~');
    if json.bytes().all(is_plain) || !json.contains(is_escaped) {
        return json;
    }
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if is_escaped(c) {
            // Above U+FFFF, JSON has the two units of UTF-16.
            c.encode_utf16(&mut [0; 2])
                .iter()
                .for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
        } else {
            out.push(c);
        }
    }
    out
}

/// The formatter writes newlines between values; those in strings are escaped already.
fn is_escaped(c: char) -> bool {
    c != '\n' && is_hidden(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_escaped_and_parsed_again() {
        let text =
            "a\u{9b}31m\u{202e}b\u{7f}\u{85}\u{2066}\u{200b}\u{e0041}\u{1b}\n\u{e9}€𝄞\\u009b\"";
        let json = pretty(&[text]).unwrap();
        assert_eq!(
            json,
            "[\n  \"a\\u009b31m\\u202eb\\u007f\\u0085\\u2066\\u200b\\udb40\\udc41\\u001b\\n\u{e9}€𝄞\\\\u009b\\\"\"\n]"
        );
        assert_eq!(serde_json::from_str::<Vec<String>>(&json).unwrap(), [text]);
        assert_eq!(
            document("x", &1).unwrap(),
            "{\n  \"version\": 1,\n  \"x\": 1\n}\n"
        );
        assert_eq!(pretty(&["plain"]).unwrap(), "[\n  \"plain\"\n]");
    }
}
