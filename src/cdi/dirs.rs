//! Where an engine looks for specs, by its own configuration.

use std::path::{Path, PathBuf};

use crate::few;

use toml::de::{DeTable, DeValue};

use super::engine::Kind;

/// Where engines look that are not told otherwise, the least important first.
pub const DEFAULT: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Larger than any engine's configuration.
const MAX_SIZE: u64 = 1 << 20;

/// An engine's files, later ones over earlier ones, and the table that has `cdi_spec_dirs`.
/// containers.conf(5), crio.conf.d(5).
const fn configuration(kind: Kind) -> (&'static [&'static str], &'static [&'static str]) {
    match kind {
        Kind::Podman => (
            &[
                "/usr/share/containers/containers.conf",
                "/etc/containers/containers.conf",
                "/etc/containers/containers.conf.d",
            ],
            &["engine"],
        ),
        Kind::Crio => (&["/etc/crio/crio.conf", "/etc/crio/crio.conf.d"], &["crio", "runtime"]),
    }
}

/// The directories of an engine; `root` is the host's `/`.
#[must_use]
pub fn read(kind: Kind, root: &Path) -> Vec<PathBuf> {
    let (files, table) = configuration(kind);
    let mut dirs = DEFAULT.map(PathBuf::from).to_vec();
    for file in files.iter().flat_map(|path| files_at(&root.join(path.trim_start_matches('/')))) {
        let is_small = file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() <= MAX_SIZE);
        let text = if is_small { std::fs::read_to_string(file).unwrap_or_default() } else { String::new() };
        dirs = parse(&text, table).unwrap_or(dirs);
    }
    dirs
}

/// A file, or those in a directory of drop-ins, by name.
fn files_at(path: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(path) else { return vec![path.to_owned()] };
    few::sorted(entries.flatten().map(|entry| entry.path()).collect())
}

/// What a configuration says; `None` if it says nothing, or is none.
#[must_use]
pub fn parse(text: &str, table: &[&str]) -> Option<Vec<PathBuf>> {
    let parsed = DeTable::parse(text).ok()?;
    let mut here = parsed.get_ref();
    for name in table {
        let DeValue::Table(below) = here.get(*name)?.get_ref() else { return None };
        here = below;
    }
    let DeValue::Array(dirs) = here.get("cdi_spec_dirs")?.get_ref() else { return None };
    let dirs: Vec<_> = dirs.iter().filter_map(|dir| dir.get_ref().as_str().map(PathBuf::from)).collect();
    (!dirs.is_empty()).then_some(dirs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_stays() {
        for (text, dirs) in [
            ("[engine]\ncdi_spec_dirs = [\"/a\", \"/b\"]", Some(vec!["/a", "/b"])),
            ("[engine]\ncdi_spec_dirs = []", None),
            ("[engine]\nruntime = \"crun\"", None),
            ("cdi_spec_dirs = [\"/a\"]", None),
            ("[engine", None),
        ] {
            assert_eq!(
                parse(text, &["engine"]),
                dirs.map(|dirs| dirs.into_iter().map(PathBuf::from).collect()),
                "{text}"
            );
        }
    }

    #[test]
    fn later_files_win() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!(read(Kind::Crio, root.path()), DEFAULT.map(PathBuf::from));
        write("etc/crio/crio.conf", "[crio.runtime]\ncdi_spec_dirs = [\"/a\"]");
        write("etc/crio/crio.conf.d/10-x.conf", "[crio.runtime]\ncdi_spec_dirs = [\"/b\"]");
        write("etc/crio/crio.conf.d/20-x.conf", "[crio.runtime]\nlog_level = \"debug\"");
        assert_eq!(read(Kind::Crio, root.path()), [PathBuf::from("/b")]);
        assert_eq!(read(Kind::Podman, root.path()), DEFAULT.map(PathBuf::from));
    }
}
