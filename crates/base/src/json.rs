//! JSON that this program writes for people who read it in a terminal, and that it reads in libraries.

use serde::de::{DeserializeOwned, Error};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::report::moves_text;

/// Pretty-printed. Texts of containers cannot move a terminal's cursor, or turn the direction of what is read: serde_json
/// escapes C0 control characters only, so C1 and those of Unicode's bidirectional algorithm are escaped here.
///
/// # Errors
/// If the value cannot be JSON: a path that is not UTF-8, a map whose keys are no texts.
pub fn pretty(value: &impl Serialize) -> serde_json::Result<String> {
    #[expect(clippy::disallowed_methods, reason = "this is the one place")]
    serde_json::to_string_pretty(value).map(escaped)
}

/// The version of the documents that commands print. It changes if a key is removed or gets another meaning, not if one is added.
pub const VERSION: u32 = 1;

/// A document of one part, with the version: `{"version": 1, "NAME": CONTENT}` and a final newline.
///
/// # Errors
/// As [`pretty`].
pub fn document(name: &'static str, content: &impl Serialize) -> serde_json::Result<String> {
    struct Document<T>(&'static str, T);
    impl<T: Serialize> Serialize for Document<&T> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut map = serializer.serialize_map(Some(2))?;
            map.serialize_entry("version", &VERSION)?;
            map.serialize_entry(self.0, self.1)?;
            map.end()
        }
    }
    Ok(pretty(&Document(name, content))? + "\n")
}

/// Parses JSON as text, for the libraries. Only the hook parses bytes, because config.json may be long: where rustc optimizes for
/// size, crates share instances of generic functions, so the parser of bytes would be that of the first library that has one, and
/// less of it would be inlined (21 instructions for each byte of config.json instead of 17).
///
/// # Errors
/// If it is not JSON of this type.
pub fn from_bytes<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_str(std::str::from_utf8(bytes).map_err(Error::custom)?)
}

/// JSON itself is ASCII: what is escaped can only be in a text, where both forms mean the same.
fn escaped(json: String) -> String {
    // New lines are the formatter's own.
    let is_hidden = |c: char| c != '\n' && moves_text(c);
    if !json.contains(is_hidden) {
        return json;
    }
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if is_hidden(c) {
            out.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_hidden_is_escaped_and_read_again() {
        let text = "a\u{9b}31m\u{202e}b\u{7f}\u{85}\u{2066}\u{200f}\u{1b}\n\u{e9}€𝄞\\u009b\"";
        let json = pretty(&[text]).unwrap();
        assert_eq!(json, "[\n  \"a\\u009b31m\\u202eb\\u007f\\u0085\\u2066\\u200f\\u001b\\n\u{e9}€𝄞\\\\u009b\\\"\"\n]");
        assert_eq!(serde_json::from_str::<Vec<String>>(&json).unwrap(), [text]);
        assert_eq!(document("x", &1).unwrap(), "{\n  \"version\": 1,\n  \"x\": 1\n}\n");
        assert_eq!(pretty(&["plain"]).unwrap(), "[\n  \"plain\"\n]");
    }
}
