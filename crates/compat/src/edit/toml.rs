//! Sets a value in a TOML text. All other bytes are preserved, comments included.

use anyhow::{Context, Result, anyhow, ensure};
use toml_edit::{DocumentMut, Item, Table, TableLike, TomlError, Value};

/// Returns the text with the TOML value `literal` at this path of keys.
///
/// # Errors
/// If the text is not TOML, or has an array of tables or a plain value at a part of the path.
pub(crate) fn set(text: &str, path: &[&str], literal: &str) -> Result<String> {
    let mut document = parse(text)?;
    let value: Value = literal
        .parse()
        .with_context(|| format!("{literal} is not a TOML value"))?;
    let is_without_values = document.is_empty();
    if is_without_values {
        document = DocumentMut::new();
    }
    put(document.as_table_mut(), path, value)
        .with_context(|| format!("{:?} has a form that cannot be changed", path.join(".")))?;
    let new = document.to_string();
    if !is_without_values {
        return Ok(new);
    }
    // A file with comments only: they are its head.
    let newline = if text.is_empty() || text.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    Ok([text, newline, &new].concat())
}

fn put(table: &mut dyn TableLike, path: &[&str], value: Value) -> Result<()> {
    let (key, tables) = path.split_last().context("a key is missing")?;
    let mut table = table;
    for name in tables {
        table = table
            .entry(name)
            .or_insert_with(new_table)
            .as_table_like_mut()
            .context("a part of the key is not a table")?;
    }
    match table.get_mut(key) {
        None => {
            table.insert(key, Item::Value(value));
        }
        Some(Item::Value(old)) => {
            ensure!(!old.is_inline_table(), "it is a table");
            // The spaces around a value, and a comment behind it.
            let decor = old.decor().clone();
            *old = value;
            *old.decor_mut() = decor;
        }
        Some(_) => anyhow::bail!("it is a table"),
    }
    Ok(())
}

/// Returns a table that gets a header only if it has values: `[a.b.c]` implies `[a]` and `[a.b]`.
fn new_table() -> Item {
    let mut table = Table::new();
    table.set_implicit(true);
    Item::Table(table)
}

/// Returns the value at a path of keys, as it stands in the text.
pub(crate) fn literal(text: &str, path: &[&str]) -> Option<String> {
    let document = parse(text).ok()?;
    let mut item = document.as_item();
    for key in path {
        item = item.get(key)?;
    }
    Some(text_of(item.as_value()?))
}

/// Returns the keys of the table at this path whose values are not tables, with the values as they stand in the text.
pub(crate) fn entries(text: &str, path: &[&str]) -> Vec<(String, String)> {
    let Ok(document) = parse(text) else {
        return Vec::new();
    };
    let mut item = document.as_item();
    for key in path {
        let Some(below) = item.get(key) else {
            return Vec::new();
        };
        item = below;
    }
    let mut entries = Vec::new();
    for (key, item) in item.as_table_like().into_iter().flat_map(TableLike::iter) {
        if let Some(value) = item.as_value().filter(|value| !value.is_inline_table()) {
            entries.push((key.to_owned(), text_of(value)));
        }
    }
    entries
}

fn text_of(value: &Value) -> String {
    let mut value = value.clone();
    value.decor_mut().clear();
    value.to_string()
}

fn parse(text: &str) -> Result<DocumentMut> {
    text.parse()
        .map_err(|error: TomlError| anyhow!("{}", error.message().replace('\n', ", ")))
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
            ("[t]\nb = 1", &["t", "b"], "2", "[t]\nb = 2\n"),
            (
                "# head\n\n# second",
                &["t", "a"],
                "1",
                "# head\n\n# second\n[t]\na = 1\n",
            ),
            ("[t]\nb = 1", &["a"], "2", "a = 2\n[t]\nb = 1\n"),
            ("[t]\nb = 1", &["t", "a"], "2", "[t]\nb = 1\na = 2\n"),
            ("[t]", &["u", "a"], "2", "[t]\n\n[u]\na = 2\n"),
            ("t.b = 1\n", &["t", "a"], "2", "t.b = 1\nt.a = 2\n"),
            ("t = {b = 1}\n", &["t", "b"], "2", "t = {b = 2}\n"),
            ("t = {b = 1}\n", &["t", "a"], "2", "t = {b = 1, a = 2 }\n"),
            ("t = 1\n", &["t", "a"], "2", ""),
            ("[t]\na = 1\n", &["t"], "2", ""),
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
                "[plugins.'io.x.v1']\n  c = 1\nd = true\n",
            ),
            (
                "[plugins.'io.x.v1']\n  c = 1\n",
                &["plugins", "io.x.v1", "r", "d"],
                "true",
                "[plugins.'io.x.v1']\n  c = 1\n\n[plugins.'io.x.v1'.r]\nd = true\n",
            ),
            (
                nvidias,
                &["disable-require"],
                "true",
                &format!("disable-require = true\n{nvidias}"),
            ),
            (
                nvidias,
                &["nvidia-container-cli", "no-cgroups"],
                "true",
                &format!("{nvidias}no-cgroups = true\n"),
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
        assert_eq!(literal(text, &["a", "b", "c"]), Some("'x'".to_owned()));
        assert_eq!(literal(text, &["a", "x", "c"]), None);
        let list =
            [("c", "'x'"), ("d", "[1, 2]")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(entries(text, &["a", "b"]), list);
    }
}
