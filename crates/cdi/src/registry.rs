//! Finds the specs of a host by the rules of the library that the engines share: which files they read, and which file wins if two
//! define the same device.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use base::debug;

use super::file::{self, Format};
use super::spec::{Device, Spec};

/// The size limit in bytes. The spec of a host with 16 GPUs has a two-hundredth of it.
const MAX_SPEC: u64 = 64 << 20;

/// A file in a spec directory.
#[derive(Clone, Debug)]
pub struct SpecFile {
    /// The path of the file
    pub path: PathBuf,
    /// The index of its directory in the list. A later directory wins.
    pub priority: usize,
    /// Whether all users can read it, which rootless Podman needs
    pub for_everybody: bool,
    /// The content, or why engines do not read the file
    pub spec: Result<Spec, String>,
}

/// The result of a lookup of a qualified name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The file with this index defines the device
    In(usize),
    /// These two files of one directory define the device, so engines reject it
    Conflict(usize, usize),
}

/// Reads all files in these directories. The last directory has the highest priority.
#[must_use]
pub fn read(dirs: &[PathBuf]) -> Vec<SpecFile> {
    let mut files = Vec::new();
    for (priority, dir) in dirs.iter().enumerate() {
        for path in paths(dir) {
            files.push(read_file(path, priority));
        }
    }
    files
}

/// Returns the sorted paths of the files in a spec directory that engines read, or none if it cannot be read. Engines ignore all names
/// that do not end in .json or .yaml, such as those of backups, locks and editors.
#[must_use]
pub fn paths(dir: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let Ok(entries) = std::fs::read_dir(dir) else {
        return paths;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if Format::from_path(&path).is_some() && !path.is_dir() {
            paths.push(path);
        }
    }
    paths.sort();
    paths
}

fn read_file(path: PathBuf, priority: usize) -> SpecFile {
    let mode = path
        .metadata()
        .map(|metadata| metadata.permissions().mode())
        .unwrap_or_default();
    SpecFile {
        priority,
        for_everybody: mode & 0o004 != 0,
        spec: read_spec(&path),
        path,
    }
}

/// Reads and checks a spec file.
///
/// # Errors
/// Why engines reject the file.
pub fn read_spec(path: &Path) -> Result<Spec, String> {
    let bytes = read_bytes(path).map_err(|error| error.to_string())?;
    debug::log(|| format!("read the CDI spec {path:?}"));
    let spec = file::parse(&bytes)?;
    spec.check()?;
    Ok(spec)
}

/// Whether a spec file contains one of these texts. A file that cannot be read contains none.
#[must_use]
pub fn has_any(path: &Path, texts: &[&str]) -> bool {
    let bytes = read_bytes(path).unwrap_or_default();
    match std::str::from_utf8(&bytes) {
        Ok(content) => texts.iter().any(|text| content.contains(text)),
        Err(_) => false, // not a spec
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "engines read these directories, so users cannot write to them"
)]
fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    let mut bytes = Vec::new();
    let read = file.take(MAX_SPEC + 1).read_to_end(&mut bytes)?;
    if u64::try_from(read).is_ok_and(|read| read > MAX_SPEC) {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("larger than {} MiB", MAX_SPEC >> 20),
        ));
    }
    Ok(bytes)
}

/// Looks up every qualified name that the files define.
#[must_use]
pub fn resolve(files: &[SpecFile]) -> BTreeMap<String, Found> {
    let priority_of = |number: usize| Some(files.get(number)?.priority);
    let mut found: BTreeMap<String, Found> = BTreeMap::new();
    for (number, file) in files.iter().enumerate() {
        let Ok(spec) = &file.spec else { continue };
        for device in &spec.devices {
            let name = format!("{}={}", spec.kind, device.name);
            let definition = match found.get(&name) {
                // A conflict remains, even if a directory with higher priority defines the device.
                Some(Found::Conflict(..)) => continue,
                Some(Found::In(old)) if priority_of(*old) == Some(file.priority) => {
                    Found::Conflict(*old, number)
                }
                _ => Found::In(number),
            };
            found.insert(name, definition);
        }
    }
    found
}

/// Returns the device with this qualified name in a spec.
#[must_use]
pub fn device<'a>(spec: &'a Spec, name: &str) -> Option<&'a Device> {
    let (kind, name) = name.split_once('=')?;
    spec.devices
        .iter()
        .find(|device| kind == spec.kind && device.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of two directories: (directory, file, device).
    fn found(files: &[(&str, &str, &str)]) -> BTreeMap<String, Found> {
        let dir = tempfile::tempdir().unwrap();
        for (subdir, name, device) in files {
            std::fs::create_dir_all(dir.path().join(subdir)).unwrap();
            let text = format!(
                r#"{{"cdiVersion": "0.3.0", "kind": "a.b/c",
                     "devices": [{{"name": "{device}", "containerEdits": {{"env": ["A=b"]}}}}]}}"#
            );
            std::fs::write(dir.path().join(subdir).join(name), text).unwrap();
        }
        let files = read(&["etc", "run", "nowhere"].map(|subdir| dir.path().join(subdir)));
        resolve(&files)
    }

    #[test]
    fn the_later_directory_wins() {
        let found = found(&[
            ("etc", "x.json", "d"),
            ("run", "x.yaml", "d"),
            ("run", "y.yaml", "e"),
        ]);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (&found["a.b/c=d"], &found["a.b/c=e"]),
            (&Found::In(1), &Found::In(2))
        );
    }

    #[test]
    fn two_files_of_one_directory_are_in_conflict() {
        for files in [
            &[("run", "x.json", "d"), ("run", "y.json", "d")][..],
            &[
                ("run", "x.json", "d"),
                ("run", "y.json", "d"),
                ("run", "z.json", "d"),
            ],
            &[
                ("etc", "x.json", "d"),
                ("etc", "y.json", "d"),
                ("run", "z.json", "d"),
            ],
        ] {
            assert_eq!(found(files)["a.b/c=d"], Found::Conflict(0, 1), "{files:?}");
        }
    }

    #[test]
    fn other_files_and_subdirectories_are_not_read() {
        assert!(found(&[("run", "x.yml", "d"), ("run/sub", "x.json", "d")]).is_empty());
    }

    #[test]
    fn names_that_engines_ignore_are_no_broken_specs() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            ".k8s.gpu.nvidia.com.lock",
            "nvidia.yaml.bak",
            "nvidia.yaml.rpmnew",
            "nvidia.yaml~",
            ".nvidia.yaml.swp",
            "nvidia.yml",
            "README",
        ] {
            std::fs::write(dir.path().join(name), "not a spec").unwrap();
        }
        std::fs::write(dir.path().join("broken.yaml"), "not a spec").unwrap();
        let files = read(&[dir.path().to_owned()]);
        let names: Vec<_> = files.iter().map(|file| file.path.file_name()).collect();
        assert_eq!(names, [Some("broken.yaml".as_ref())]);
    }

    #[test]
    fn why_a_file_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        for (text, says) in [
            ("cdiVersion: a: b", "line 1: "),
            (
                "cdiVersion: 0.5.0\nkind: a.b/c\nkind: a.b/d\n",
                "duplicate key",
            ),
            ("cdiVersion: 0.5.0\nbogus: 1\n", "unknown field \"bogus\""),
            ("", "the file is empty"),
            ("cdiVersion: 0.5.0\nkind: a.b/c\n", "no devices"),
        ] {
            let path = dir.path().join("x.yaml");
            std::fs::write(&path, text).unwrap();
            let why = read_spec(&path).unwrap_err();
            assert!(why.contains(says), "{text:?}: {why}");
        }
        assert!(
            read_spec(&dir.path().join("none.yaml"))
                .unwrap_err()
                .contains("No such file")
        );
        std::fs::create_dir(dir.path().join("dir.yaml")).unwrap();
        assert!(read_spec(&dir.path().join("dir.yaml")).is_err());
    }
}
