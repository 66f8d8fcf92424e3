//! Parses the settings of an engine that affect hooks and devices. The functions are pure.

use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::cdi::DEFAULT_DIRS;
use super::{EngineKind, Version};

/// The default hooks directory of Podman and CRI-O.
pub const HOOKS_DIR: &str = "/usr/share/containers/oci/hooks.d";
/// The second default directory of Podman as root, since version 4.8.
pub const OVERRIDE_DIR: &str = "/etc/containers/oci/hooks.d";
/// The first Podman that supports `{append = true}`, and that reads both default directories if the list is empty. With containers/common
/// 0.57, the key became a list with attributes, which is empty where the list before was not nil.
const ATTRIBUTES: Version = Version(4, 8, 0);

/// The settings of an engine that affect hooks and devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// Hooks directories, sorted by ascending priority
    pub hooks_dirs: Vec<PathBuf>,
    /// The file that sets them; `None` if they are the default
    pub hooks_from: Option<PathBuf>,
    /// Whether a later list is appended instead of replacing this one
    append: bool,
    /// `crun`, or a path; `None` for the engine's default
    pub runtime: Option<String>,
    /// Names and paths of runtimes
    pub runtime_paths: Vec<(String, PathBuf)>,
    /// `systemd` or `cgroupfs`; `None` for the engine's default
    pub cgroup_manager: Option<String>,
    /// CDI directories, sorted by ascending priority
    pub cdi_dirs: Vec<PathBuf>,
    /// The invalid file because of which the engine does not start, and why
    pub refused: Option<(PathBuf, String)>,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            hooks_dirs: vec![HOOKS_DIR.into()],
            hooks_from: None,
            append: false,
            runtime: None,
            runtime_paths: Vec::new(),
            cgroup_manager: None,
            cdi_dirs: DEFAULT_DIRS.map(PathBuf::from).to_vec(),
            refused: None,
        }
    }
}

impl EngineSettings {
    /// Adds the settings of another file.
    pub fn add(&mut self, path: &Path, text: &str, kind: &EngineKind, version: Option<Version>) {
        if matches!(kind, EngineKind::Docker) {
            return;
        }
        if let Err(why) = self.try_add(path, text, kind, version) {
            self.refused.get_or_insert_with(|| (path.to_owned(), why));
        }
    }

    fn try_add(
        &mut self,
        path: &Path,
        text: &str,
        kind: &EngineKind,
        version: Option<Version>,
    ) -> Result<(), String> {
        let parsed = DeTable::parse(text).map_err(|error| error.message().replace('\n', ", "))?;
        let is_podman = kind.is_podman();
        let names: &[&str] = if is_podman {
            &["engine"]
        } else {
            &["crio", "runtime"]
        };
        let mut table = parsed.get_ref();
        for name in names {
            let Some(below) = table_in(table, name) else {
                return Ok(());
            };
            table = below;
        }
        // These do not depend on the version, so an attribute that the version does not know comes after them.
        if let Some(dirs) = table.get("cdi_spec_dirs") {
            let list = read_list("cdi_spec_dirs", dirs.get_ref(), is_podman)?;
            if list.append != Some(true) && !list.values.is_empty() {
                self.cdi_dirs.clear();
            }
            self.cdi_dirs.extend(list.values);
        }
        if let Some(dirs) = table.get("hooks_dir") {
            let append_is_known = is_podman && has_attributes(version);
            let list = read_list("hooks_dir", dirs.get_ref(), append_is_known)?;
            self.add_hooks_dirs(path, list);
        }
        let key = if is_podman {
            "runtime"
        } else {
            "default_runtime"
        };
        let runtime = text_in(table, key);
        if runtime.as_ref().is_some_and(|name| !name.is_empty()) {
            self.runtime = runtime;
        }
        if let Some(manager) = text_in(table, "cgroup_manager") {
            self.cgroup_manager = Some(manager);
        }
        for (name, value) in table_in(table, "runtimes").into_iter().flatten() {
            let name = name.get_ref();
            self.runtime_paths.retain(|(known, _)| *known != **name);
            for path in runtime_paths(value.get_ref()) {
                self.runtime_paths.push((name.to_string(), path));
            }
        }
        Ok(())
    }

    fn add_hooks_dirs(&mut self, path: &Path, list: List) {
        self.append = list.append.unwrap_or(self.append);
        if !self.append {
            self.hooks_dirs.clear();
        }
        self.hooks_dirs.extend(list.values);
        self.hooks_from = Some(path.to_owned());
    }

    /// Replaces an empty list with the defaults that it stands for, after the last file.
    pub fn finish(&mut self, kind: &EngineKind, version: Option<Version>) {
        if self.hooks_dirs.is_empty() && *kind == EngineKind::Podman && has_attributes(version) {
            self.hooks_dirs = [HOOKS_DIR, OVERRIDE_DIR].map(PathBuf::from).to_vec();
        }
    }
}

fn has_attributes(version: Option<Version>) -> bool {
    version.is_some_and(|version| version >= ATTRIBUTES)
}

/// Returns the paths of a runtime: a list for Podman, a table for CRI-O.
fn runtime_paths(value: &DeValue<'_>) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    match value {
        DeValue::Array(list) => {
            for path in list.iter() {
                paths.extend(path.get_ref().as_str().map(PathBuf::from));
            }
        }
        DeValue::Table(runtime) => {
            let path = text_in(runtime, "runtime_path").unwrap_or_default();
            if !path.is_empty() {
                paths.push(path.into());
            }
        }
        _ => {}
    }
    paths
}

fn table_in<'t, 'i>(table: &'t DeTable<'i>, name: &str) -> Option<&'t DeTable<'i>> {
    match table.get(name)?.get_ref() {
        DeValue::Table(below) => Some(below),
        _ => None,
    }
}

fn text_in(table: &DeTable<'_>, name: &str) -> Option<String> {
    Some(table.get(name)?.get_ref().as_str()?.to_owned())
}

struct List {
    values: Vec<PathBuf>,
    /// `{append = …}` in it
    append: Option<bool>,
}

fn read_list(name: &str, value: &DeValue<'_>, append_is_known: bool) -> Result<List, String> {
    let DeValue::Array(items) = value else {
        return Err(format!("{name} is not a list"));
    };
    let mut list = List {
        values: Vec::new(),
        append: None,
    };
    for item in items.iter() {
        match item.get_ref() {
            DeValue::String(text) => list.values.push(text.as_ref().into()),
            DeValue::Table(attributes) if append_is_known => {
                match attributes.get("append").map(|is| is.get_ref()) {
                    Some(DeValue::Boolean(is)) => list.append = Some(*is),
                    _ => return Err(format!("{name} has a table without append = true or false")),
                }
            }
            DeValue::Table(_) => {
                return Err(format!("this version does not support a table in {name}"));
            }
            _ => return Err(format!("{name} is not a list of strings")),
        }
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(kind: &EngineKind, version: Version, texts: &[&str]) -> EngineSettings {
        let mut settings = EngineSettings::default();
        for (number, text) in texts.iter().enumerate() {
            settings.add(Path::new(&format!("/{number}")), text, kind, Some(version));
        }
        settings.finish(kind, Some(version));
        settings
    }

    #[test]
    fn hooks_dirs_of_several_files() {
        let (a, b) = (
            "[engine]\nhooks_dir = [\"/a\"]",
            "[engine]\nhooks_dir = [\"/b\"]",
        );
        let more = "[engine]\nhooks_dir = [\"/c\", {append = true}]";
        for (version, texts, dirs) in [
            (Version(4, 3, 1), &[][..], &[HOOKS_DIR][..]),
            (Version(4, 3, 1), &[a], &["/a"]),
            (Version(4, 3, 1), &[a, b], &["/b"]),
            (Version(4, 3, 1), &["[engine]\nhooks_dir = []"], &[]),
            (
                Version(4, 8, 0),
                &["[engine]\nhooks_dir = []"],
                &[HOOKS_DIR, OVERRIDE_DIR],
            ),
            (Version(4, 7, 2), &["[engine]\nhooks_dir = []"], &[]),
            (Version(4, 8, 0), &[more], &[HOOKS_DIR, "/c"]),
            (Version(5, 0, 0), &[a, more, b], &["/a", "/c", "/b"]), // it stays
            (
                Version(5, 0, 0),
                &[more, "[engine]\nhooks_dir = [\"/b\", {append = false}]"],
                &["/b"],
            ),
        ] {
            let found = settings(&EngineKind::Podman, version, texts);
            assert_eq!(
                found.hooks_dirs,
                dirs.iter().map(PathBuf::from).collect::<Vec<_>>(),
                "{version} {texts:?}"
            );
            assert_eq!(found.refused, None);
            let last = texts.len().checked_sub(1);
            assert_eq!(
                found.hooks_from,
                last.map(|last| PathBuf::from(format!("/{last}")))
            );
        }
    }

    #[test]
    fn files_that_an_engine_refuses() {
        for (kind, version, text, why) in [
            (
                EngineKind::Podman,
                Version(4, 7, 2),
                "[engine]\nhooks_dir = [\"/c\", {append = true}]",
                "does not support a table",
            ),
            (
                EngineKind::Podman,
                Version(5, 0, 0),
                "[engine]\nhooks_dir = \"/c\"",
                "is not a list",
            ),
            (
                EngineKind::Podman,
                Version(5, 0, 0),
                "[engine]\nhooks_dir = [3]",
                "is not a list of strings",
            ),
            (
                EngineKind::Crio,
                Version(1, 30, 0),
                "[crio.runtime]\nhooks_dir = [{append = true}]",
                "does not support a table",
            ),
            (EngineKind::Podman, Version(5, 0, 0), "[engine", ""),
        ] {
            let (path, text) = settings(&kind, version, &[text]).refused.unwrap();
            assert!(path == Path::new("/0") && text.contains(why), "{text}");
        }
    }

    #[test]
    fn the_other_keys() {
        let podman = "[engine]\nruntime = \"crun\"\ncgroup_manager = \"cgroupfs\"\ncdi_spec_dirs = [\"/cdi\"]\n\
                      [engine.runtimes]\ncrun = [\"/opt/crun\", \"/usr/bin/crun\"]";
        let found = settings(
            &EngineKind::Podman,
            Version(5, 0, 0),
            &[podman, "[engine]\nruntime = \"\""],
        );
        assert_eq!(found.runtime.as_deref(), Some("crun"));
        assert_eq!(found.cgroup_manager.as_deref(), Some("cgroupfs"));
        assert_eq!(found.cdi_dirs, [PathBuf::from("/cdi")]);
        assert_eq!(
            found.runtime_paths[0],
            ("crun".to_owned(), PathBuf::from("/opt/crun"))
        );
        let crio = "[crio.runtime]\ndefault_runtime = \"runc\"\nhooks_dir = [\"/h\"]\n\
                    [crio.runtime.runtimes.runc]\nruntime_path = \"/usr/sbin/runc\"\n\
                    [crio.runtime.runtimes.crun]\nruntime_path = \"\"";
        let found = settings(&EngineKind::Crio, Version(1, 30, 0), &[crio]);
        assert_eq!(found.runtime.as_deref(), Some("runc"));
        assert_eq!(found.hooks_dirs, [PathBuf::from("/h")]);
        assert_eq!(
            found.runtime_paths,
            [("runc".to_owned(), PathBuf::from("/usr/sbin/runc"))]
        );
        // CRI-O ignores Podman's tables.
        assert_eq!(
            settings(&EngineKind::Crio, Version(1, 30, 0), &[podman]),
            EngineSettings::default()
        );
    }

    proptest::proptest! {
        /// No text of a configuration file causes a panic.
        #[test]
        fn no_text_ends_the_program(
            key in proptest::sample::select(vec!["hooks_dir", "cdi_spec_dirs", "runtime", "runtimes", "cgroup_manager"]),
            value in "[0-9a-z\\[\\]{}\"=,\n ]{0,40}",
            text in "\\PC{0,64}",
        ) {
            for kind in [EngineKind::Podman, EngineKind::Crio] {
                for text in [&text, &format!("[engine]\n{key} = {value}"), &format!("[crio.runtime]\n{key} = {value}")] {
                    EngineSettings::default().add(Path::new("/x"), text, &kind, Some(Version(5, 0, 0)));
                }
            }
        }
    }
}
