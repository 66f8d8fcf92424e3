//! Spec files: their two formats, and writing one so that no engine ever reads half of it.

use std::fs::{DirBuilder, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::spec::Spec;
use super::{decode, yaml};
use crate::error::Failure;
use crate::finding::catalog;

/// NVIDIA's name for it: a spec of nvidia-ctk is replaced, where one of another name would be in conflict with it.
pub const DEFAULT_NAME: &str = "nvidia";

/// How a spec is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// `.json`
    Json,
    /// `.yaml`
    #[default]
    Yaml,
}

impl Format {
    /// Of a file with this name; `None` if engines would not read it.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "json" => Some(Self::Json),
            "yaml" => Some(Self::Yaml),
            _ => None,
        }
    }

    /// The file that is written where none is named.
    #[must_use]
    pub fn default_path(self) -> PathBuf {
        let extension = match self {
            Self::Json => "json",
            Self::Yaml => "yaml",
        };
        Path::new("/var/run/cdi").join(DEFAULT_NAME).with_extension(extension)
    }

    /// The text of a spec.
    ///
    /// # Errors
    /// None that a spec can cause.
    pub fn print(self, spec: &Spec) -> Result<String> {
        let value = serde_json::to_value(spec)?;
        Ok(match self {
            Self::Json => crate::json::pretty(&value)? + "\n",
            Self::Yaml => yaml::print(&value),
        })
    }
}

/// Reads a spec as engines do: a JSON file is YAML too.
///
/// # Errors
/// If it is no YAML, or has a field that CDI does not have.
pub fn parse(bytes: &[u8]) -> Result<Spec> {
    let value = yaml::parse(std::str::from_utf8(bytes)?).map_err(anyhow::Error::msg)?;
    decode::spec(value).map_err(anyhow::Error::msg)
}

/// Writes it at once, readable for everybody; its directory is made if necessary.
///
/// # Errors
/// If that is not possible; then what was there before still is.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let write = || -> Result<()> {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
        let name = path.file_name().context("it has no file name")?;
        // Engines read *.json and *.yaml only.
        let temporary = dir.join(format!(".{}.{}.new", name.display(), std::process::id()));
        let written = write_new(&temporary, text).and_then(|()| Ok(std::fs::rename(&temporary, path)?));
        if written.is_err() {
            std::fs::remove_file(&temporary).ok();
        }
        written
    };
    write().with_context(|| {
        Failure::new(
            &catalog::SPEC_FILE,
            format!("cannot write {path:?}"),
            "run it as root, or name a file with --output",
        )
    })
}

fn write_new(path: &Path, text: &str) -> Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(0o644).open(path)?;
    // Whatever the umask is: rootless Podman reads it too.
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.write_all(text.as_bytes())?;
    Ok(file.sync_all()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cdi::spec::{ContainerEdits, Device};

    fn spec() -> Spec {
        let edits = ContainerEdits { env: vec!["A=yes".into(), "B=1: # x".into()], ..ContainerEdits::default() };
        let devices = ["0", "1:0", "all"].map(|name| Device {
            name: name.into(),
            container_edits: edits.clone(),
            ..Device::default()
        });
        Spec { cdi_version: "0.5.0".into(), kind: "nvidia.com/gpu".into(), devices: devices.into(), ..Spec::default() }
    }

    #[test]
    fn both_formats_say_the_same() {
        for format in [Format::Json, Format::Yaml] {
            assert_eq!(parse(format.print(&spec()).unwrap().as_bytes()).unwrap(), spec(), "{format:?}");
        }
        // To engines a name that is a number is none.
        assert!(Format::Yaml.print(&spec()).unwrap().contains("name: \"0\"\n"));
    }

    #[test]
    fn a_file_is_replaced_at_once_and_readable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/cdi/nvidia.yaml");
        write(&path, "old").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let open = File::open(&path).unwrap();
        write(&path, "new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::io::read_to_string(open).unwrap(), "old", "who reads it now reads the old one");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o644);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_cannot_be_written_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("nvidia.yaml")).unwrap();
        let text = crate::error::render(&write(&dir.path().join("nvidia.yaml"), "x").unwrap_err());
        assert!(text.starts_with("cannot write \""), "{text}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
