//! Reads a configuration file, and replaces it atomically.

use std::fs::{DirBuilder, File, Metadata, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

use anyhow::{Context, Result, bail};

use base::read::read_limited;
use base::sys::in_root::open_host_file;

/// The size limit in bytes of a configuration file.
const MAX_SIZE: usize = 1 << 20;

/// Returns the text of a file, or `None` if it is missing.
///
/// # Errors
/// If the file cannot be read, or is not UTF-8 text.
pub(crate) fn read(path: &Path) -> Result<Option<String>> {
    let read = || {
        let (file, _) = match open_host_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        Ok(Some(String::from_utf8(read_limited(file, MAX_SIZE)?)?))
    };
    read()
        .and_then(|text| {
            // A dangling link is not a missing file: the administrator expects that its target is read.
            let is_missing = text.is_none() && path.symlink_metadata().is_ok();
            if is_missing {
                bail!("it is a link to a missing file")
            } else {
                Ok(text)
            }
        })
        .with_context(|| format!("cannot read {path:?}"))
}

/// Replaces a file atomically, and keeps its owner and mode. Creates a missing file with mode 0644, and its directory.
///
/// # Errors
/// If the path is a symbolic link or not a regular file, or if the file cannot be written. The file is then unchanged.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let replace = || {
        let old = match path.symlink_metadata() {
            // rename(2) would replace the link, and the file that it leads to would silently lose its effect.
            Ok(old) if old.is_symlink() => {
                bail!("it is a symbolic link to {:?}", std::fs::read_link(path)?)
            }
            Ok(old) if !old.is_file() => bail!("it is not a regular file"),
            Ok(old) => Some(old),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error.into()),
        };
        let dir = path
            .parent()
            .filter(|dir| !dir.as_os_str().is_empty())
            .unwrap_or_else(|| Path::new("."));
        DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
        let name = path.file_name().context("it has no file name")?;
        let temporary = dir.join(format!(".{}.{}.new", name.display(), std::process::id()));
        let written = write_new(&temporary, bytes, old.as_ref())
            .and_then(|()| std::fs::rename(&temporary, path));
        if written.is_err() {
            std::fs::remove_file(&temporary).ok();
        }
        Ok(written?)
    };
    replace().with_context(|| format!("cannot write {path:?}"))
}

#[expect(
    clippy::disallowed_methods,
    reason = "creates a new file, and follows no link"
)]
fn write_new(path: &Path, bytes: &[u8], old: Option<&Metadata>) -> io::Result<()> {
    // The content may be secret until the file has its owner and mode.
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    let mode = match old {
        Some(old) => {
            let new = file.metadata()?;
            if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
                fchown(&file, Some(old.uid()), Some(old.gid()))?;
            }
            old.mode() & 0o7777
        }
        None => 0o644,
    };
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_and_links_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/daemon.json");
        assert_eq!(read(&path).unwrap(), None);
        replace(&path, b"a").unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o644);
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        replace(&path, b"b").unwrap();
        assert_eq!(
            (
                read(&path).unwrap().as_deref(),
                path.metadata().unwrap().mode() & 0o7777
            ),
            (Some("b"), 0o640)
        );
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let error = format!("{:#}", replace(&link, b"c").unwrap_err());
        assert!(
            error.contains("it is a symbolic link to ") && error.contains("sub/daemon.json"),
            "{error}"
        );
        assert_eq!(read(&link).unwrap().as_deref(), Some("b"));
        std::fs::remove_file(&path).unwrap();
        assert!(format!("{:#}", read(&link).unwrap_err()).contains("a link to a missing file"));
        assert!(replace(dir.path(), b"").is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
