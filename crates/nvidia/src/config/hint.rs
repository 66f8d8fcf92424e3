//! Hints for files that are not TOML, and for invalid values. The error already names the file, the line and the allowed values, so a
//! hint suggests what to write instead, or names the page that describes the key.

use toml::de::DeValue;

use base::nearest::nearest;

/// Returns the hint for a value of `key` that is not one of the `allowed`.
pub(super) fn for_value(key: &str, value: &DeValue<'_>, allowed: &str) -> String {
    match value.as_str().and_then(|text| meant(text, allowed)) {
        Some(meant) => format!("did you mean {meant}?"),
        None => format!("\"man oci-nvidia-hook.toml\" describes {key} and its default"),
    }
}

/// Returns the allowed value that was probably meant: a boolean in quotes, or a quoted word with a similar name.
fn meant<'a>(text: &str, allowed: &'a str) -> Option<std::borrow::Cow<'a, str>> {
    if allowed.starts_with("true") {
        return match text.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" | "1" => Some("true, without quotes".into()),
            "false" | "no" | "off" | "0" => Some("false, without quotes".into()),
            _ => None,
        };
    }
    let words = allowed.split('"').skip(1).step_by(2);
    let lower = text.to_ascii_lowercase();
    nearest(&lower, words).map(|word| format!("\"{word}\"").into())
}

/// Returns the hint for a file that is not TOML, from the message of the parser.
pub(super) fn for_syntax(message: &str) -> &'static str {
    match message.starts_with("duplicate key") {
        true => {
            "remove one of the lines: a key may occur only once in its table, and a table only once in the file"
        }
        false => "the file must be TOML: one key = value on each line, and strings in quotes",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use toml::de::DeTable;

    fn hint(line: &str, allowed: &str) -> String {
        let table = DeTable::parse(line).unwrap();
        let (key, value) = table.get_ref().iter().next().unwrap();
        for_value(key.get_ref(), value.get_ref(), allowed)
    }

    #[test]
    fn a_hint_adds_to_the_error() {
        const BOOL: &str = "true or false";
        const WORDS: &str = "\"enforce\", \"warn\" or \"off\"";
        let page = "\"man oci-nvidia-hook.toml\" describes k and its default";
        for (line, allowed, expected) in [
            ("k = \"Yes\"", BOOL, "did you mean true, without quotes?"),
            (
                "k = \"false\"",
                "true, false or \"auto\"",
                "did you mean false, without quotes?",
            ),
            ("k = \"maybe\"", BOOL, page),
            ("k = 1", BOOL, page),
            ("k = \"warning\"", WORDS, page),
            ("k = \"wran\"", WORDS, "did you mean \"warn\"?"),
            ("k = \"Enforced\"", WORDS, "did you mean \"enforce\"?"),
            ("k = \"maybe\"", WORDS, page),
            ("k = 0", "a number of seconds from 1 to 600", page),
        ] {
            assert_eq!(hint(line, allowed), expected, "{line}");
        }
        assert!(for_syntax("duplicate key").contains("only once"));
        assert!(for_syntax("expected =").contains("must be TOML"));
    }
}
