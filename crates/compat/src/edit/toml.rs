//! Sets a value in a TOML text. All other bytes are preserved, comments included.
//!
//! Where a new line belongs is a guess: TOML has several forms for a table, and a line that looks like a header can be part of a
//! multi-line value. The result is therefore parsed again, and compared with the old values.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;
use toml::de::{DeTable, DeValue};

/// Returns the text with the TOML value `literal` at this path of keys.
///
/// # Errors
/// If the text is not TOML, or has the table in a form to which no line can be added.
pub(crate) fn set(text: &str, path: &[&str], literal: &str) -> Result<String> {
    let mut values = values(text)?;
    let wanted = values_of(&format!("x = {literal}"))
        .and_then(|mut values| values.remove(&vec!["x".to_owned()]));
    let wanted = wanted.with_context(|| format!("{literal} is not a TOML value"))?;
    let key: Vec<String> = path.iter().map(|part| (*part).to_owned()).collect();
    if values.insert(key, wanted.clone()) == Some(wanted) {
        return Ok(text.to_owned());
    }
    let attempts = attempts(text, path, literal);
    let right = attempts
        .into_iter()
        .find(|new| values_of(new).as_ref() == Some(&values));
    right.with_context(|| format!("{:?} has a form that cannot be changed", path.join(".")))
}

/// Returns the value at a path of keys, as it stands in the text.
pub(crate) fn literal<'t>(text: &'t str, path: &[&str]) -> Option<&'t str> {
    let parsed = DeTable::parse(text).ok()?;
    text.get(span(parsed.get_ref(), path)?)
}

/// Returns the keys of the table at this path whose values are not tables, with the values as they stand in the text.
pub(crate) fn entries(text: &str, path: &[&str]) -> Vec<(String, String)> {
    let Ok(parsed) = DeTable::parse(text) else {
        return Vec::new();
    };
    let Some(table) = path
        .iter()
        .try_fold(parsed.get_ref(), |table, key| table_in(table, key))
    else {
        return Vec::new();
    };
    let plain = table
        .iter()
        .filter(|(_, value)| !matches!(value.get_ref(), DeValue::Table(_)));
    plain
        .filter_map(|(key, value)| {
            Some((
                key.get_ref().to_string(),
                text.get(value.span())?.to_owned(),
            ))
        })
        .collect()
}

fn table_in<'t, 'i>(table: &'t DeTable<'i>, name: &str) -> Option<&'t DeTable<'i>> {
    match table.get(name)?.get_ref() {
        DeValue::Table(below) => Some(below),
        _ => None,
    }
}

/// Returns the place of a value in the text.
fn span(table: &DeTable<'_>, path: &[&str]) -> Option<Range<usize>> {
    let (key, tables) = path.split_last()?;
    let table = tables
        .iter()
        .try_fold(table, |table, key| table_in(table, key))?;
    table.get(*key).map(|value| value.span())
}

/// Each value with its keys.
type Values = BTreeMap<Vec<String>, String>;

fn values(text: &str) -> Result<Values> {
    let parsed =
        DeTable::parse(text).map_err(|error| anyhow!("{}", error.message().replace('\n', ", ")))?;
    let mut values = Values::new();
    collect(parsed.get_ref(), &mut Vec::new(), &mut values);
    Ok(values)
}

fn values_of(text: &str) -> Option<Values> {
    values(text).ok()
}

fn collect(table: &DeTable<'_>, path: &mut Vec<String>, values: &mut Values) {
    for (key, value) in table {
        path.push(key.get_ref().to_string());
        match value.get_ref() {
            DeValue::Table(below) => collect(below, path, values),
            value => {
                values.insert(path.clone(), plain(value));
            }
        }
        path.pop();
    }
}

/// Prints a value without its place in the text.
fn plain(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("{text:?}"),
        DeValue::Integer(number) => format!("{}:{}", number.radix(), number.as_str()),
        DeValue::Float(number) => number.as_str().to_owned(),
        DeValue::Boolean(is) => is.to_string(),
        DeValue::Datetime(time) => time.to_string(),
        DeValue::Array(items) => {
            let items: Vec<_> = items.iter().map(|item| plain(item.get_ref())).collect();
            format!("[{}]", items.join(", "))
        }
        DeValue::Table(table) => {
            let mut values = Values::new();
            collect(table, &mut Vec::new(), &mut values);
            format!("{values:?}")
        }
    }
}

/// Returns texts that may have the new value, the best one first.
fn attempts(text: &str, path: &[&str], literal: &str) -> Vec<String> {
    let Some((key, table)) = path.split_last() else {
        return Vec::new();
    };
    let line = format!("{} = {literal}\n", bare(key));
    let mut attempts = Vec::new();
    let replaced = DeTable::parse(text)
        .ok()
        .and_then(|parsed| span(parsed.get_ref(), path));
    attempts.extend(replaced.and_then(|place| {
        Some([text.get(..place.start)?, literal, text.get(place.end..)?].concat())
    }));
    let mut insert = |at: usize, new: &str| {
        let Some((before, after)) = text.split_at_checked(at) else {
            return;
        };
        let newline = if before.is_empty() || before.ends_with('\n') {
            ""
        } else {
            "\n"
        };
        attempts.push([before, newline, new, after].concat());
    };
    let mut in_table = table.is_empty();
    let mut places = Vec::new();
    let mut at = 0;
    for one in text.split_inclusive('\n') {
        let end = at + one.len();
        let header = header(one);
        if header.is_some() && in_table && table.is_empty() {
            places.push(at);
        }
        if let Some(header) = header {
            in_table = header == table;
            if in_table {
                places.push(end);
            }
        } else if in_table && is_comment_on(one, key) {
            // The default in a comment, as in the files that NVIDIA's programs write.
            insert(end, &line);
        }
        at = end;
    }
    for place in places {
        insert(place, &line);
    }
    let name: Vec<_> = table.iter().map(|part| bare(part)).collect();
    let blank = if text.trim().is_empty() { "" } else { "\n" };
    match table {
        [] => insert(text.len(), &line),
        _ => insert(text.len(), &format!("{blank}[{}]\n{line}", name.join("."))),
    }
    attempts
}

/// Returns the keys of a line such as `[a."b.c"]`. Headers of arrays of tables have other keys than any table.
fn header(line: &str) -> Option<Vec<String>> {
    let line = line.trim();
    if !line.starts_with('[') {
        return None;
    }
    let parsed = DeTable::parse(line).ok()?;
    let (mut keys, mut table) = (Vec::new(), parsed.get_ref());
    while let Some((key, value)) = table.iter().next() {
        keys.push(key.get_ref().to_string());
        match value.get_ref() {
            DeValue::Table(below) => table = below,
            _ => return Some(vec![line.to_owned()]),
        }
    }
    Some(keys)
}

/// `#key = value`
fn is_comment_on(line: &str, key: &str) -> bool {
    let rest = line
        .trim()
        .strip_prefix('#')
        .and_then(|line| line.trim_start().strip_prefix(key));
    rest.is_some_and(|rest| rest.trim_start().starts_with('='))
}

/// Returns a key, in quotes if necessary.
fn bare(key: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if !key.is_empty() && key.chars().all(is_bare) {
        key.to_owned()
    } else {
        Value::from(key).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_kept() {
        let nvidias = "#disable-require = false\n\n[nvidia-container-cli]\nenvironment = [] # none\n#no-cgroups = false\nload-kmods = true\n";
        for (old, path, literal, new) in [
            ("", &["a"][..], "1", "a = 1\n"),
            ("", &["t", "a"], "1", "[t]\na = 1\n"),
            ("a = 1 # one\n", &["a"], "[2]", "a = [2] # one\n"),
            ("[t]\nb = 1", &["t", "b"], "2", "[t]\nb = 2"),
            ("[t]\nb = 1", &["a"], "2", "a = 2\n[t]\nb = 1"),
            ("[t]\nb = 1", &["t", "a"], "2", "[t]\na = 2\nb = 1"),
            ("[t]", &["u", "a"], "2", "[t]\n\n[u]\na = 2\n"),
            ("t.b = 1\n", &["t", "a"], "2", ""),
            ("t = {b = 1}\n", &["t", "b"], "2", "t = {b = 2}\n"),
            ("t = {b = 1}\n", &["t", "a"], "2", ""),
            // A line of a value that looks like a header.
            (
                "x = '''\n[t]\n'''\n",
                &["t", "a"],
                "2",
                "x = '''\n[t]\n'''\n\n[t]\na = 2\n",
            ),
            ("[[t]]\nb = 1\n", &["t", "a"], "2", ""),
            (
                "[plugins.'io.x.v1']\n  c = 1\n",
                &["plugins", "io.x.v1", "d"],
                "true",
                "[plugins.'io.x.v1']\nd = true\n  c = 1\n",
            ),
            (
                "[plugins.'io.x.v1']\n  c = 1\n",
                &["plugins", "io.x.v1", "r", "d"],
                "true",
                "[plugins.'io.x.v1']\n  c = 1\n\n[plugins.\"io.x.v1\".r]\nd = true\n",
            ),
            (
                nvidias,
                &["disable-require"],
                "true",
                &nvidias.replace("= false\n\n", "= false\ndisable-require = true\n\n"),
            ),
            (
                nvidias,
                &["nvidia-container-cli", "no-cgroups"],
                "true",
                &nvidias.replace(
                    "no-cgroups = false\n",
                    "no-cgroups = false\nno-cgroups = true\n",
                ),
            ),
        ] {
            match set(old, path, literal) {
                Ok(text) => {
                    assert_eq!(text, new, "{old}");
                    assert_eq!(set(&text, path, literal).unwrap(), text, "a second time");
                }
                Err(error) => assert!(new.is_empty(), "{old}: {error:#}"),
            }
        }
        assert!(set("a = ", &["b"], "1").is_err());
        assert!(set("", &["b"], "x y").is_err());
    }

    #[test]
    fn values_as_they_stand_there() {
        let text = "[a.b]\nc = 'x'\nd = [1, 2]\n[a.b.e]\nf = 1\n";
        assert_eq!(literal(text, &["a", "b", "c"]), Some("'x'"));
        assert_eq!(literal(text, &["a", "x", "c"]), None);
        let list =
            [("c", "'x'"), ("d", "[1, 2]")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(entries(text, &["a", "b"]), list);
    }
}
