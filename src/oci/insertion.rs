//! Adds items to arrays of a JSON text. All other bytes are preserved: the order of keys, white space, numbers that no Rust
//! type can hold, and unknown fields.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use serde_json::value::RawValue;

/// Appends `items` to the array at `path`. A missing array, or null, is replaced with a new one: the engines' decoders treat
/// null as missing.
///
/// # Errors
/// If the text is not JSON, or a value on the path is not an object, or the last one is not an array.
pub(crate) fn append(json: &mut String, path: &[&str], items: &[Value]) -> Result<()> {
    if items.is_empty() {
        return Ok(());
    }
    let items = items
        .iter()
        .map(Value::to_string)
        .collect::<Vec<_>>()
        .join(",");
    let (place, new) =
        place(json, path, &items).with_context(|| format!("cannot add to {:?}", path.join(".")))?;
    json.reserve_exact(new.len());
    json.replace_range(place, &new);
    Ok(())
}

/// Returns the range of the text to replace, and its replacement.
fn place(json: &str, path: &[&str], items: &str) -> Result<(Range<usize>, String)> {
    let mut at = super::first_json_value::<&RawValue>(json.as_bytes())?.get();
    let mut rest = path;
    loop {
        let start = at
            .as_ptr()
            .addr()
            .checked_sub(json.as_ptr().addr())
            .context("its text was copied")?;
        let end = start.saturating_add(at.len());
        if at == "null" {
            return Ok((start..end, nested(rest, items)));
        }
        let Some((key, below)) = rest.split_first() else {
            if !at.starts_with('[') {
                bail!("it is not an array");
            }
            return at_end(at, start, items.to_owned());
        };
        // Of several equal keys, a map keeps the last one, like the decoders of the engines.
        let members: BTreeMap<String, &RawValue> = serde_json::from_str(at)?;
        match members.get(*key) {
            Some(value) => at = value.get(),
            None => {
                return at_end(
                    at,
                    start,
                    format!("{}:{}", Value::from(*key), nested(below, items)),
                );
            }
        }
        rest = below;
    }
}

/// Returns an array with these items, nested in objects with the keys of `path`.
fn nested(path: &[&str], items: &str) -> String {
    path.iter().rfold(format!("[{items}]"), |value, key| {
        format!("{{{}:{value}}}", Value::from(*key))
    })
}

/// Returns the insertion after the last entry of the array or object `text`, which begins at offset `start`.
fn at_end(text: &str, start: usize, more: String) -> Result<(Range<usize>, String)> {
    let (open, _) = text
        .split_at_checked(text.len().saturating_sub(1))
        .context("it is empty")?;
    let kept = open.trim_end().len();
    let at = start.saturating_add(kept);
    Ok((at..at, if kept == 1 { more } else { format!(",{more}") }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn append(json: &str, path: &[&str], items: &[Value]) -> Result<String> {
        let mut text = json.to_owned();
        super::append(&mut text, path, items)?;
        Ok(text)
    }

    #[test]
    fn other_bytes_are_preserved() {
        let items = [json!(1), json!({"x": "y"})];
        for (text, path, expected) in [
            ("{}", &["a"][..], r#"{"a":[1,{"x":"y"}]}"#),
            ("{}", &["a", "b"], r#"{"a":{"b":[1,{"x":"y"}]}}"#),
            (
                " { \"z\" : 1e400 }\n",
                &["a"],
                " { \"z\" : 1e400,\"a\":[1,{\"x\":\"y\"}] }\n",
            ),
            (r#"{"a":[]}"#, &["a"], r#"{"a":[1,{"x":"y"}]}"#),
            (
                r#"{"a":null,"b":18446744073709551616}"#,
                &["a"],
                r#"{"a":[1,{"x":"y"}],"b":18446744073709551616}"#,
            ),
            (r#"{"a":null}"#, &["a", "b"], r#"{"a":{"b":[1,{"x":"y"}]}}"#),
            (
                "{\"b\":{\"a\": [ 0.10\n ],\"c\":1}}",
                &["b", "a"],
                "{\"b\":{\"a\": [ 0.10,1,{\"x\":\"y\"}\n ],\"c\":1}}",
            ),
            (r#"{"\u0061":[0]}"#, &["a"], r#"{"\u0061":[0,1,{"x":"y"}]}"#),
            (
                r#"{"a":[0],"a":[2]} rest"#,
                &["a"],
                r#"{"a":[0],"a":[2,1,{"x":"y"}]} rest"#,
            ),
        ] {
            assert_eq!(append(text, path, &items).unwrap(), expected, "{text}");
            assert_eq!(append(text, path, &[]).unwrap(), text);
        }
    }

    #[test]
    fn a_value_of_another_type_is_an_error() {
        for (text, path, says) in [
            ("", &["a"][..], "cannot add to \"a\": it is empty"),
            ("{", &["a"], "EOF"),
            ("[1", &[], "EOF"),
            (r#"{"a":{}}"#, &["a"], "it is not an array"),
            (r#"{"a":"x"}"#, &["a"], "it is not an array"),
            (
                r#"{"a":[]}"#,
                &["a", "b"],
                "cannot add to \"a.b\": invalid type",
            ),
            (
                r#"{"a":3}"#,
                &["a", "b"],
                "cannot add to \"a.b\": invalid type",
            ),
        ] {
            let text = base::report::render(&append(text, path, &[json!(1)]).unwrap_err());
            assert!(text.contains(says), "{text}");
        }
    }

    /// Values as texts, with numbers that lose something in any Rust type.
    fn any_json() -> impl Strategy<Value = String> {
        let number = prop_oneof![
            "-?[1-9][0-9]{0,30}",
            "-?[0-9]\\.[0-9]{1,25}(e[+-]?[0-9]{1,4})?",
            Just("0".to_owned()),
            Just("1E+400".to_owned()),
        ];
        let text = prop_oneof![
            "\"[a-c ]{0,4}\"",
            Just(r#""\u00e9\ud83d\ude00\/""#.to_owned())
        ];
        let leaf = prop_oneof![
            number,
            text,
            Just("null".to_owned()),
            Just("true".to_owned())
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            let members = prop::collection::btree_map("[a-c]", inner.clone(), 0..4);
            let object = members.prop_map(|members| {
                let members: Vec<_> = members
                    .iter()
                    .map(|(key, value)| format!("\"{key}\" : {value}"))
                    .collect();
                format!("{{{}\n}}", members.join(" ,"))
            });
            let array = prop::collection::vec(inner, 0..4)
                .prop_map(|items| format!("[{}\t]", items.join(", ")));
            prop_oneof![object, array]
        })
    }

    proptest! {
        /// The change is one insertion into the text.
        #[test]
        fn one_piece_is_put_in(json in any_json(), path in prop::collection::vec("[a-c]", 0..4)) {
            let path: Vec<_> = path.iter().map(String::as_str).collect();
            if let Ok(longer) = append(&json, &path, &[json!("new")]) {
                serde_json::from_str::<&RawValue>(&longer).unwrap();
                prop_assert!(longer.contains("\"new\""));
                let start = longer.bytes().zip(json.bytes()).take_while(|(a, b)| a == b).count();
                let end = longer.bytes().rev().zip(json.bytes().rev()).take_while(|(a, b)| a == b).count();
                let null_is_gone = json.len().saturating_sub(start + end) <= "null".len();
                prop_assert!(start + end >= json.len() || null_is_gone, "{json}\n{longer}");
                if start + end < json.len() {
                    prop_assert!(json[start..].starts_with("null"), "{json}\n{longer}");
                }
                let twice = append(&longer, &path, &[json!("new")]).unwrap();
                prop_assert!(twice.len() == longer.len() + ",\"new\"".len(), "now it is an array with one item at least");
            }
        }
    }
}
