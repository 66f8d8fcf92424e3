//! Detects known keys in the wrong table. Lines that are appended to a file belong to its last table. A limit that is pasted there has
//! no effect, and engines do not show warnings, so a misplaced key is an error.

use std::path::Path;

use toml::de::DeValue;

use base::nearest::nearest_by;
use base::report::failure;
use findings::catalog;

use super::schema;
use super::{last, line_of};

/// The table that a key or a table belongs to; empty for the part above the first table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place(String);

/// Returns the table that the unknown key `name` of the table `prefix` belongs to, or `None` if it is unknown everywhere. `known` are the
/// keys that have an effect.
pub(super) fn place_of(
    known: &[String],
    prefix: &str,
    name: &str,
    value: &DeValue<'_>,
) -> Option<Place> {
    match value {
        // [oci-nvidia-hook.devices] instead of [devices], and [device] with keys of [devices].
        DeValue::Table(below) => {
            let table = if prefix.is_empty() {
                nearest_by(name, tables(known), |table| table)?
            } else {
                tables(known).find(|table| *table == name)?
            };
            for key in below.keys() {
                let name = format!("{table}.{}", key.get_ref());
                if known.contains(&name) || schema::find(&name).is_some() {
                    return Some(Place(table.to_owned()));
                }
            }
            None
        }
        _ => {
            let key = known.iter().find(|key| last(key) == name)?;
            Some(Place(table(key).to_owned()))
        }
    }
}

/// The top-level tables that have keys.
fn tables(known: &[String]) -> impl Iterator<Item = &str> {
    known
        .iter()
        .map(|key| table(key))
        .filter(|table| !table.is_empty() && !table.contains('.'))
}

fn table(key: &str) -> &str {
    key.rsplit_once('.').map_or("", |(table, _)| table)
}

/// Returns the error for a misplaced key or table, which starts at byte `at`.
pub(super) fn error(
    text: &str,
    path: &Path,
    key: &str,
    place: &Place,
    value: &DeValue<'_>,
    at: usize,
) -> anyhow::Error {
    let line = line_of(text, at);
    let (table, name) = key.rsplit_once('.').unwrap_or(("", key));
    let here = if table.is_empty() {
        "above the first table".to_owned()
    } else {
        format!("in the table [{table}]")
    };
    let belongs = match (place.0.as_str(), header(text, "")) {
        ("", Some(first)) => format!("above the first table, which begins in line {first}"),
        ("", None) => "above the first table".to_owned(),
        (table, _) => format!("in the table [{table}]"),
    };
    let hint = match value {
        DeValue::Table(_) => format!("write [{}] instead of [{key}]", place.0),
        _ => format!("{}{}", move_it(text, line, &place.0), drop_in(path)),
    };
    failure(
        &catalog::CONFIG,
        format!("{path:?} line {line}: {name} is unknown {here}; it belongs {belongs}"),
        hint,
    )
}

/// Returns the number of the line that begins the table, or any table if the name is empty.
fn header(text: &str, table: &str) -> Option<usize> {
    let start = match table {
        "" => "[".to_owned(),
        table => format!("[{table}]"),
    };
    let mut lines = text.lines();
    let before = lines.position(|line| line.trim_start().starts_with(&start))?;
    Some(before + 1)
}

/// Returns an instruction that moves a line into the table.
fn move_it(text: &str, line: usize, table: &str) -> String {
    match (table, header(text, table)) {
        ("", Some(first)) => format!("move line {line} above line {first}"),
        ("", None) => format!("move line {line} to the beginning of the file"),
        (table, Some(begin)) => format!("move line {line} below line {begin}, which is [{table}]"),
        (table, None) => {
            format!("move line {line} to the end of the file, below a new line [{table}]")
        }
    }
}

/// Returns the other place for the line: a drop-in file, unless the file is one.
fn drop_in(path: &Path) -> String {
    let is_main = path.extension() == Some("toml".as_ref())
        && path.parent().is_none_or(|dir| dir.extension().is_none());
    match is_main {
        true => format!(
            ", or write it into the separate file {}.d/50-local.toml",
            path.display()
        ),
        false => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::tables;
    use crate::config::parse;
    use base::report::render;
    use std::path::Path;

    const SHIPPED: &str = include_str!("../../../../config/config.toml");
    /// A table below another one is not a place: its name without the outer table would be another table.
    #[test]
    fn only_top_level_tables_are_places() {
        let known = ["devices.allow", "outer.inner.key", "key-above"].map(str::to_owned);
        assert_eq!(tables(&known).collect::<Vec<_>>(), ["devices"]);
    }

    const LOCK: &str = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n";

    fn refused(text: &str, path: &str) -> String {
        render(&parse(text, Path::new(path)).unwrap_err())
    }

    #[test]
    fn a_lock_at_the_end_of_the_shipped_file() {
        let text = format!("{SHIPPED}{LOCK}");
        let lines = text.lines().count();
        let first = text.lines().position(|line| line.starts_with('[')).unwrap() + 1;
        assert_eq!(
            refused(&text, "/etc/x/config.toml"),
            format!(
                "\"/etc/x/config.toml\" line {lines}: accept-nvidia-visible-devices-envvar-when-unprivileged is unknown in \
                 the table [oci-nvidia-hook]; it belongs above the first table, which begins in line {first} (ONH-005)\n\
                 hint: move line {lines} above line {first}, or write it into the separate file /etc/x/config.toml.d/50-local.toml"
            )
        );
        let (config, findings) = parse(&format!("{LOCK}{SHIPPED}"), Path::new("/c.toml")).unwrap();
        assert!(!config.accept_envvar_when_unprivileged && findings.is_empty());
    }

    #[test]
    fn keys_and_tables_elsewhere() {
        for (text, says, hint) in [
            (
                "no-cgroups = true",
                "line 1: no-cgroups is unknown above the first table; it belongs in the table [nvidia-container-cli]",
                "move line 1 to the end of the file, below a new line [nvidia-container-cli]",
            ),
            (
                "[driver]\nroot = \"/x\"",
                "line 2: root is unknown in the table [driver]; it belongs in the table [nvidia-container-cli]",
                "move line 2 to the end of the file, below a new line [nvidia-container-cli]",
            ),
            (
                "[devices]\n[nvidia-container-cli]\ndeny = [\"0\"]",
                "deny is unknown in the table [nvidia-container-cli]; it belongs in the table [devices]",
                "move line 3 below line 1, which is [devices]",
            ),
            (
                "[oci-nvidia-hook.devices]\ndeny = [\"0\"]",
                "line 1: devices is unknown in the table [oci-nvidia-hook]; it belongs in the table [devices]",
                "write [devices] instead of [oci-nvidia-hook.devices]",
            ),
            (
                "[device]\ndeny = [\"0\"]",
                "line 1: device is unknown above the first table; it belongs in the table [devices]",
                "write [devices] instead of [device]",
            ),
        ] {
            let refused = refused(text, "/etc/x/config.toml.d/50.toml");
            assert!(refused.contains(says), "{refused}");
            assert!(
                refused.ends_with(&format!("\nhint: {hint}")),
                "it is a drop-in file already: {refused}"
            );
        }
        // Of NVIDIA's stack, and of who knows what.
        for text in [
            "[nvidia-container-runtime]\ndebug = \"/x\"",
            "[elsewhere]\ndeny = 1",
            "[device]\nx = 1",
            "path = 1",
            "[oci-nvidia-hook.device]\ndeny = [\"0\"]",
        ] {
            parse(text, Path::new("/c.toml")).unwrap();
        }
    }
}
