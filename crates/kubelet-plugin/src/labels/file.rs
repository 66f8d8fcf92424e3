//! Keeps the file with the labels of the node up to date, and removes it at the end.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use base::report::line;

/// The name of the file. Node Feature Discovery ignores names that begin with a dot, as those of temporary files.
const NAME: &str = "oci-nvidia-kubelet-plugin";

/// The file. Dropping it removes the file from the disk.
#[derive(Debug)]
pub struct File {
    dir: PathBuf,
    /// Whether the directory is created
    creates: bool,
    /// The last error, which is reported once
    error: Option<String>,
}

impl File {
    /// Describes the file in this directory. With `creates`, the directory is created; otherwise nothing is written without it.
    #[must_use]
    pub fn new(dir: &Path, creates: bool) -> Self {
        Self {
            dir: dir.to_owned(),
            creates,
            error: None,
        }
    }

    /// Writes these lines if the file does not contain them, or removes it if the list is empty.
    ///
    /// # Errors
    /// An error that is not the same as the last time. The file is written at the next call.
    pub fn update(&mut self, lines: &[String]) -> Result<(), String> {
        let result = self
            .try_update(lines)
            .map_err(|error| format!("cannot write {:?}: {}", self.path(), line(&error.into())));
        let before = std::mem::replace(&mut self.error, result.clone().err());
        if self.error == before { Ok(()) } else { result }
    }

    fn path(&self) -> PathBuf {
        self.dir.join(NAME)
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "only root can write to the directory of Node Feature Discovery"
    )]
    fn try_update(&self, lines: &[String]) -> io::Result<()> {
        if lines.is_empty() {
            return remove(&self.path());
        }
        let text: String = lines.iter().flat_map(|line| [line, "\n"]).collect();
        if fs::read(self.path()).is_ok_and(|old| old == text.as_bytes()) {
            return Ok(());
        }
        if !self.creates && !self.dir.is_dir() {
            return Ok(());
        }
        // Node Feature Discovery does not run as root, and reads the old lines or the new ones.
        cdi_spec::file::write(&self.path(), &text)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // The directory may be read-only or gone.
        remove(&self.path()).ok();
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_file_follows_the_lines() {
        let dir = tempfile::tempdir().unwrap();
        let features = dir.path().join("features.d");
        let lines = |lines: &[&str]| {
            lines
                .iter()
                .map(|line| (*line).to_owned())
                .collect::<Vec<_>>()
        };
        let mut file = File::new(&features, false);
        file.update(&lines(&["a=1"])).unwrap();
        assert!(fs::metadata(&features).is_err(), "nothing reads it");
        fs::create_dir(&features).unwrap();
        file.update(&lines(&["a=1", "b=2"])).unwrap();
        let read = || fs::read_to_string(features.join(NAME)).unwrap();
        assert_eq!(read(), "a=1\nb=2\n");
        assert_eq!(
            fs::metadata(features.join(NAME))
                .unwrap()
                .permissions()
                .mode()
                & 0o777,
            0o644
        );
        // Another program removes it.
        fs::remove_file(features.join(NAME)).unwrap();
        file.update(&lines(&["a=1"])).unwrap();
        assert_eq!(read(), "a=1\n");
        file.update(&[]).unwrap();
        assert_eq!(fs::read_dir(&features).unwrap().count(), 0);
        file.update(&lines(&["a=1"])).unwrap();
        drop(file);
        assert_eq!(fs::read_dir(&features).unwrap().count(), 0);
    }

    #[test]
    fn an_error_is_reported_once() {
        let dir = tempfile::tempdir().unwrap();
        let features = dir.path().join("features.d");
        fs::write(&features, "not a directory").unwrap();
        let mut file = File::new(&features, true);
        let error = file.update(&["a=1".to_owned()]).unwrap_err();
        assert!(
            error.contains("features.d/oci-nvidia-kubelet-plugin"),
            "{error}"
        );
        assert_eq!(file.update(&["a=1".to_owned()]), Ok(()));
        fs::remove_file(&features).unwrap();
        file.update(&["a=1".to_owned()]).unwrap();
        assert!(fs::metadata(features.join(NAME)).is_ok());
    }
}
