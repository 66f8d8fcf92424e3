//! Command lines and values as Go programs parse them: runtimes and NVIDIA's toolkit are written in Go.

use std::ffi::OsStr;

/// Splits an option into name and value; `None` for another word. Go's flags have one or two dashes.
#[must_use]
pub fn flag(word: &OsStr) -> Option<(&str, Option<&str>)> {
    let flag = word.to_str()?.strip_prefix('-')?;
    if flag.is_empty() {
        return None;
    }
    let flag = flag.strip_prefix('-').unwrap_or(flag);
    Some(match flag.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (flag, None),
    })
}

/// Parses a boolean as `strconv.ParseBool` does.
#[must_use]
pub fn parse_bool(value: &str) -> Option<bool> {
    match value {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags() {
        for (word, expected) in [
            ("-log", Some(("log", None))),
            ("--log=/x=y", Some(("log", Some("/x=y")))),
            ("--", Some(("", None))),
            ("-", None),
            ("create", None),
            ("", None),
        ] {
            assert_eq!(flag(OsStr::new(word)), expected, "{word}");
        }
    }

    #[test]
    fn booleans() {
        for (word, expected) in [
            ("t", Some(true)),
            ("True", Some(true)),
            ("0", Some(false)),
            ("FALSE", Some(false)),
            ("tRUE", None),
            ("", None),
        ] {
            assert_eq!(parse_bool(word), expected, "{word}");
        }
    }
}
