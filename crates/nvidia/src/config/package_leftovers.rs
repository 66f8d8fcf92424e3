//! Finds settings in files next to config.toml that package managers have saved, or have not installed. The hook does not read these
//! files.

use std::path::{Path, PathBuf};

use anyhow::Result;
use toml::de::{DeTable, DeValue};

use base::sys::in_root::open_host_file;

use super::files::{MAX_SIZE, drop_in_dir, drop_ins};
use super::schema::{self, Meaning};
use super::{Config, PLUGIN, set, value};

/// What rpm and dpkg append to the name of a configuration file: rpm saves the administrator's file as `.rpmsave` or `.rpmorig`, dpkg as
/// `.dpkg-old`; the package's file becomes `.rpmnew`, `.dpkg-dist` or `.dpkg-new`.
const SUFFIXES: [&str; 6] = [
    "rpmsave",
    "rpmorig",
    "rpmnew",
    "dpkg-old",
    "dpkg-dist",
    "dpkg-new",
];

/// A file with settings that are not in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackageLeftover {
    /// `config.toml.rpmsave`
    pub path: PathBuf,
    /// The keys, as `table.key`, with values that are not in force
    pub keys: Vec<String>,
}

/// Returns the saved files next to this config.toml and its drop-in files, without those whose settings are all in force, and without
/// those that cannot be read or are not TOML.
#[must_use]
pub fn package_leftovers(main: &Path) -> Vec<PackageLeftover> {
    let mut current: Vec<String> = read(main).into_iter().collect();
    for path in drop_ins(main).unwrap_or_default() {
        current.extend(read(&path));
    }
    let mut paths = paths_in(&drop_in_dir(main));
    if let Some(dir) = main.parent() {
        paths.extend(paths_in(dir));
        paths.retain(|path| path.parent() != Some(dir) || path.with_extension("") == main);
    }
    paths.retain(|path| is_leftover(path));
    paths.sort();
    let mut leftovers = Vec::new();
    for path in paths {
        let Ok(text) = read(&path) else { continue };
        let keys = not_in_force(&text, &current);
        if !keys.is_empty() {
            leftovers.push(PackageLeftover { path, keys });
        }
    }
    leftovers
}

fn paths_in(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn is_leftover(path: &Path) -> bool {
    let suffix = path.extension().unwrap_or_default();
    SUFFIXES.iter().any(|known| suffix == *known)
}

fn read(path: &Path) -> Result<String> {
    let (file, _) = open_host_file(path)?;
    let bytes = base::read::read_limited(file, MAX_SIZE)?;
    Ok(String::from_utf8(bytes)?)
}

/// A key with its value, and the value's text.
struct Setting<'t> {
    key: String,
    value: &'t DeValue<'t>,
    text: &'t str,
}

/// Returns the keys of a file whose values differ from those in `current`, the texts of the files that are read, and from the defaults.
fn not_in_force(saved: &str, current: &[String]) -> Vec<String> {
    let tables: Vec<_> = current
        .iter()
        .filter_map(|text| Some((text.as_str(), DeTable::parse(text).ok()?)))
        .collect();
    let mut in_force = Vec::new();
    for (text, table) in &tables {
        collect("", table.get_ref(), text, &mut in_force);
    }
    let mut config = Config::default();
    for setting in &in_force {
        if let Some(key) = schema::find(&setting.key) {
            // An invalid value is an error of its own.
            set(&mut config, key, setting.value).ok();
        }
    }
    let Ok(table) = DeTable::parse(saved) else {
        return Vec::new();
    };
    let mut settings = Vec::new();
    collect("", table.get_ref(), saved, &mut settings);
    settings.retain(|setting| differs(setting, &config, &in_force));
    settings.into_iter().map(|setting| setting.key).collect()
}

fn differs(setting: &Setting<'_>, config: &Config, in_force: &[Setting<'_>]) -> bool {
    let same_key = || in_force.iter().filter(|other| other.key == setting.key);
    match (
        schema::find(&setting.key).map(|key| (key, key.meaning)),
        setting.value,
    ) {
        // The device plugin knows the meaning of its keys.
        (None, _) => !same_key().any(|other| other.text == setting.text),
        (Some((_, Meaning::Unused(_))), _) => false,
        // Lists of several files are appended to each other.
        (Some((_, Meaning::Texts(_))), DeValue::Array(values)) => {
            let lists = same_key().filter_map(|other| value::texts(other.value.as_array()?));
            let known: Vec<&str> = lists.flatten().collect();
            value::texts(values)
                .is_some_and(|values| values.iter().any(|value| !known.contains(value)))
        }
        (Some((key, _)), value) => {
            let mut changed = config.clone();
            set(&mut changed, key, value).is_ok() && changed != *config
        }
    }
}

/// Adds the settings of a table and of the tables in it. Unknown keys have no effect in any file.
fn collect<'t>(
    prefix: &str,
    table: &'t DeTable<'t>,
    text: &'t str,
    settings: &mut Vec<Setting<'t>>,
) {
    for (name, value) in table {
        let name = name.get_ref();
        let key = if prefix.is_empty() {
            name.to_string()
        } else {
            format!("{prefix}.{name}")
        };
        match value.get_ref() {
            below if schema::find(&key).is_some() || prefix == PLUGIN => {
                let text = text.get(value.span()).unwrap_or_default();
                settings.push(Setting {
                    key,
                    value: below,
                    text,
                });
            }
            DeValue::Table(below) if schema::is_table(&key) || key == PLUGIN => {
                collect(&key, below, text, settings)
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_not_in_force() {
        let saved = "disable-require = true\nsupported-driver-capabilities = \"compute,utility\"\nnonsense = 1\n\
                     [nvidia-container-cli]\nload-kmods = true\nldconfig = \"@/sbin/ldconfig\"\nroot = \"/run/nvidia/driver\"\n\
                     [devices]\nallow = [\"0\", \"1\"]\n[kubelet-plugin]\nreplicas = 4\n";
        for (current, keys) in [
            (
                &[][..],
                &[
                    "devices.allow",
                    "disable-require",
                    "kubelet-plugin.replicas",
                    "nvidia-container-cli.root",
                    "supported-driver-capabilities",
                ][..],
            ),
            (&[saved], &[]),
            // Written in other words, and in several files.
            (
                &[
                    "disable-require=true\nsupported-driver-capabilities = \"utility, compute\"\n[devices]\nallow = ['1']\n\
                     [nvidia-container-cli]\nroot = '/run/nvidia/driver'",
                    "[devices]\nallow = ['0']\n[kubelet-plugin]\nreplicas = 4",
                ],
                &[],
            ),
            (
                &[
                    saved,
                    "disable-require = false\n[nvidia-container-cli]\nload-kmods = false\n[kubelet-plugin]\nreplicas = 4",
                ],
                &["disable-require", "nvidia-container-cli.load-kmods"],
            ),
        ] {
            let current: Vec<_> = current.iter().map(|text| (*text).to_owned()).collect();
            let mut found = not_in_force(saved, &current);
            found.sort();
            assert_eq!(found, keys, "{current:?}");
        }
        assert_eq!(not_in_force("disable-require = ", &[]), [""; 0]);
        assert_eq!(
            not_in_force(include_str!("../../../../config/config.toml"), &[]),
            [""; 0]
        );
    }

    #[test]
    fn files_of_package_managers() {
        let dir = tempfile::tempdir().unwrap();
        let main = dir.path().join("config.toml");
        let drop_ins = dir.path().join("config.toml.d");
        std::fs::create_dir(&drop_ins).unwrap();
        let setting = "disable-require = true";
        let mut expected: Vec<_> = SUFFIXES
            .iter()
            .map(|suffix| dir.path().join(format!("config.toml.{suffix}")))
            .collect();
        expected.push(drop_ins.join("50.toml.rpmsave"));
        for path in &expected {
            std::fs::write(path, setting).unwrap();
        }
        for other in ["config.toml.bak", "other.toml.rpmsave", "config.rpmsave"] {
            std::fs::write(dir.path().join(other), setting).unwrap();
        }
        expected.sort();
        let found = package_leftovers(&main);
        assert!(
            found.iter().all(|saved| saved.keys == ["disable-require"]),
            "{found:?}"
        );
        assert_eq!(
            found
                .into_iter()
                .map(|saved| saved.path)
                .collect::<Vec<_>>(),
            expected
        );
        std::fs::write(drop_ins.join("50.toml"), setting).unwrap();
        assert_eq!(package_leftovers(&main), []);
    }
}
