//! Sets a value in a JSON text. All other bytes are preserved: order of keys, white space and unknown fields.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use serde_json::value::RawValue;

/// Returns the text with `value` at this path of keys. Missing objects are added. An empty text is an empty object.
///
/// # Errors
/// If the text is not JSON, or a value on the path is not an object.
pub(crate) fn set(text: &str, path: &[&str], value: &Value) -> Result<String> {
    let text = if text.trim().is_empty() { "{}\n" } else { text };
    let root: &RawValue = serde_json::from_str(text)?;
    let mut at = root.get();
    for (depth, key) in path.iter().enumerate() {
        // Of several equal keys, a map keeps the last one, like the decoder of Docker.
        let members: BTreeMap<String, &RawValue> =
            serde_json::from_str(at).ok().with_context(|| {
                format!(
                    "{:?} is not an object",
                    path.get(..depth).unwrap_or_default().join(".")
                )
            })?;
        let Some(member) = members.get(*key) else {
            let rest = path.get(depth..).unwrap_or_default();
            return add(text, at, members.is_empty(), rest, depth + 1, value);
        };
        at = member.get();
    }
    if serde_json::from_str::<Value>(at).is_ok_and(|old| old == *value) {
        return Ok(text.to_owned());
    }
    splice(
        text,
        offset(text, at)?,
        at.len(),
        &pretty(value, path.len()),
    )
}

/// Adds the first key of `path` to the end of the object `at`, whose members have this depth.
fn add(
    text: &str,
    at: &str,
    is_empty: bool,
    path: &[&str],
    depth: usize,
    value: &Value,
) -> Result<String> {
    let Some((first, below)) = path.split_first() else {
        bail!("the path is empty")
    };
    let nested = below
        .iter()
        .rfold(value.clone(), |value, key| serde_json::json!({*key: value}));
    let inner = at
        .get(1..at.len().saturating_sub(1))
        .context("it is not an object")?;
    let after = offset(text, at)? + 1 + inner.trim_end().len();
    let (comma, end) = if is_empty {
        ("", format!("\n{}", indent(depth - 1)))
    } else {
        (",", String::new())
    };
    let replaced = if is_empty { inner.len() } else { 0 };
    let start = if is_empty {
        offset(text, at)? + 1
    } else {
        after
    };
    let new = format!(
        "{comma}\n{}{}: {}{end}",
        indent(depth),
        Value::from(*first),
        pretty(&nested, depth)
    );
    splice(text, start, replaced, &new)
}

fn indent(depth: usize) -> String {
    "    ".repeat(depth)
}

/// Prints a value over several lines, whose first line stands in an object of this depth.
fn pretty(value: &Value, depth: usize) -> String {
    let Value::Object(members) = value else {
        return value.to_string();
    };
    let line = |(key, value): (&String, &Value)| {
        format!(
            "\n{}{}: {}",
            indent(depth + 1),
            Value::from(key.as_str()),
            pretty(value, depth + 1)
        )
    };
    let lines: Vec<_> = members.iter().map(line).collect();
    format!("{{{}\n{}}}", lines.join(","), indent(depth))
}

/// Returns the offset of a part of the text.
fn offset(text: &str, part: &str) -> Result<usize> {
    part.as_ptr()
        .addr()
        .checked_sub(text.as_ptr().addr())
        .context("its text was copied")
}

fn splice(text: &str, at: usize, len: usize, new: &str) -> Result<String> {
    let (before, rest) = text.split_at_checked(at).context("its text was copied")?;
    let (_, after) = rest.split_at_checked(len).context("its text was copied")?;
    Ok([before, new, after].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_rest_is_kept() {
        for (old, path, value, new) in [
            (
                "",
                &["features", "cdi"][..],
                json!(true),
                "{\n    \"features\": {\n        \"cdi\": true\n    }\n}\n",
            ),
            ("{}", &["a"], json!(1), "{\n    \"a\": 1\n}"),
            (
                "{ \"z\": 1.0,\n  \"features\" : {\"x\":true} ,\"b\":2 }\n",
                &["features", "cdi"],
                json!(true),
                "{ \"z\": 1.0,\n  \"features\" : {\"x\":true,\n        \"cdi\": true} ,\"b\":2 }\n",
            ),
            (
                "{\"features\": {\"cdi\": false}}",
                &["features", "cdi"],
                json!(true),
                "{\"features\": {\"cdi\": true}}",
            ),
            (
                "{\"features\": {\"cdi\": true}}",
                &["features", "cdi"],
                json!(true),
                "{\"features\": {\"cdi\": true}}",
            ),
            (
                "{\"runtimes\": {\"nvidia\": {\"args\":[],\n \"path\":\"a\"}}}",
                &["runtimes", "nvidia", "path"],
                json!("b"),
                "{\"runtimes\": {\"nvidia\": {\"args\":[],\n \"path\":\"b\"}}}",
            ),
        ] {
            let text = set(old, path, &value).unwrap();
            assert_eq!(text, new, "{old}");
            serde_json::from_str::<Value>(&text).unwrap();
            assert_eq!(set(&text, path, &value).unwrap(), text, "a second time");
        }
        for (old, why) in [
            ("{", "EOF"),
            ("[]", "is not an object"),
            ("{\"features\": 3}", "\"features\" is not an object"),
        ] {
            let error = format!(
                "{:#}",
                set(old, &["features", "cdi"], &json!(true)).unwrap_err()
            );
            assert!(error.contains(why), "{old}: {error}");
        }
    }
}
