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
pub(super) fn place_of(known: &[String], prefix: &str, name: &str, value: &DeValue<'_>) -> Option<Place> {
    match value {
        // [oci-nvidia-hook.devices] instead of [devices], and [device] with keys of [devices].
        DeValue::Table(below) => {
            let named = tables(known).find(|table| *table == name && !prefix.is_empty());
            let nearest = || nearest_by(name, tables(known), |table| table).filter(|_| prefix.is_empty());
            let has_key = |table: &&str| {
                let mut names = below.keys().map(|key| format!("{table}.{}", key.get_ref()));
                names.any(|name| known.contains(&name) || schema::find(&name).is_some())
            };
            named.or_else(nearest).filter(has_key).map(|table| Place(table.to_owned()))
        }
        _ => known.iter().find(|key| last(key) == name).map(|key| Place(table(key).to_owned())),
    }
}

/// The top-level tables that have keys.
fn tables(known: &[String]) -> impl Iterator<Item = &str> {
    known.iter().map(|key| table(key)).filter(|table| !table.is_empty() && !table.contains('.'))
}

fn table(key: &str) -> &str {
    key.rsplit_once('.').map_or("", |(table, _)| table)
}

/// Returns the error for a misplaced key, which starts at byte `at`.
pub(super) fn error(text: &str, path: &Path, key: &str, place: &Place, at: usize) -> anyhow::Error {
    let line = line_of(text, at);
    let (table, name) = key.rsplit_once('.').unwrap_or(("", key));
    let here = if table.is_empty() { "above the first table".to_owned() } else { format!("in the table [{table}]") };
    let first = text.lines().position(|line| line.trim_start().starts_with('['));
    let belongs = match (place.0.as_str(), first) {
        ("", Some(first)) => format!("above the first table, which begins in line {}", first + 1),
        ("", None) => "above the first table".to_owned(),
        (table, _) => format!("in the table [{table}]"),
    };
    let drop_in =
        match path.extension() == Some("toml".as_ref()) && path.parent().is_none_or(|dir| dir.extension().is_none()) {
            true => format!(", or write it into a file of its own, {}.d/50-local.toml", path.display()),
            false => String::new(),
        };
    failure(
        &catalog::CONFIG,
        format!("{path:?} line {line}: {name} is unknown {here}; it belongs {belongs}"),
        format!("move line {line}{drop_in}"),
    )
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
                 hint: move line {lines}, or write it into a file of its own, /etc/x/config.toml.d/50-local.toml"
            )
        );
        let (config, findings) = parse(&format!("{LOCK}{SHIPPED}"), Path::new("/c.toml")).unwrap();
        assert!(!config.accept_envvar_when_unprivileged && findings.is_empty());
    }

    #[test]
    fn keys_and_tables_elsewhere() {
        for (text, says) in [
            (
                "no-cgroups = true",
                "line 1: no-cgroups is unknown above the first table; it belongs in the table [nvidia-container-cli]",
            ),
            (
                "[driver]\nroot = \"/x\"",
                "line 2: root is unknown in the table [driver]; it belongs in the table [nvidia-container-cli]",
            ),
            (
                "[nvidia-container-cli]\ndeny = [\"0\"]",
                "deny is unknown in the table [nvidia-container-cli]; it belongs in the table [devices]",
            ),
            (
                "[oci-nvidia-hook.devices]\ndeny = [\"0\"]",
                "line 1: devices is unknown in the table [oci-nvidia-hook]; it belongs in the table [devices]",
            ),
            (
                "[device]\ndeny = [\"0\"]",
                "line 1: device is unknown above the first table; it belongs in the table [devices]",
            ),
        ] {
            let refused = refused(text, "/etc/x/config.toml.d/50.toml");
            assert!(refused.contains(says) && refused.contains("\nhint: move line "), "{refused}");
            assert!(!refused.contains("50-local"), "it is one already: {refused}");
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
