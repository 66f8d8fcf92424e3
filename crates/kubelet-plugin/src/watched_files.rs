//! Files and directories in the state in which they were used: what follows from them is made again when one has changed.

use std::path::{Path, PathBuf};

use base::sys::file_id::FileId;

/// The files, each without a state if it could not be examined.
#[derive(Clone, Debug, Default)]
pub(crate) struct WatchedFiles(Vec<(PathBuf, Option<FileId>)>);

impl WatchedFiles {
    /// Examines these files.
    pub(crate) fn of(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let mut files = Self::default();
        for path in paths {
            files.add(path);
        }
        files
    }

    /// Examines one more file.
    pub(crate) fn add(&mut self, path: PathBuf) {
        let state = FileId::at(&path).ok();
        self.0.push((path, state));
    }

    /// Returns the file that was added first.
    pub(crate) fn first(&self) -> Option<&Path> {
        self.0.first().map(|(path, _)| path.as_path())
    }

    /// Returns the states that the files have now.
    pub(crate) fn states(&self) -> Vec<Option<FileId>> {
        self.0
            .iter()
            .map(|(path, _)| FileId::at(path).ok())
            .collect()
    }

    /// Whether all of them are in the same state.
    pub(crate) fn are_the_same(&self) -> bool {
        let mut files = self.0.iter();
        files.all(|(path, state)| FileId::at(path).ok() == *state)
    }
}
