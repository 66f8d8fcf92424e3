//! The state of config.toml and its drop-in files: shows that they have changed without opening them, and what is lost.
//!
//! A file that an editor has just truncated, and a file that a full disk has truncated, are empty, and an empty file is valid: it has no
//! limits. A program that follows the files therefore compares two states, and does not take what is lost for a decision.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use base::sys::file_id::FileId;

use super::files::{FILE, drop_in_dir, drop_ins};

/// What the files were at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStates {
    /// config.toml
    main: PathBuf,
    /// `None` if it is missing
    main_state: Option<FileId>,
    dir: PathBuf,
    has_dir: bool,
    /// The drop-in files, each without a state if it is a dangling link; `None` if the directory cannot be read
    drop_ins: Option<BTreeMap<PathBuf, Option<FileId>>>,
}

impl FileStates {
    /// Examines the files that [`super::read`] would read.
    #[must_use]
    pub fn take(path: Option<&Path>) -> Self {
        let main = path.unwrap_or_else(|| Path::new(FILE));
        let dir = drop_in_dir(main);
        Self {
            main_state: state(main),
            has_dir: fs::metadata(&dir).is_ok(),
            drop_ins: drop_ins(main)
                .ok()
                .map(|paths| paths.into_iter().map(with_state).collect()),
            main: main.to_owned(),
            dir,
        }
    }

    /// Returns the directories of the files, which may not exist.
    #[must_use]
    pub fn dirs(&self) -> Vec<PathBuf> {
        let mut dirs = vec![self.dir.clone()];
        dirs.extend(self.main.parent().map(Path::to_owned));
        dirs
    }

    /// Returns what is lost since an earlier state: config.toml is missing, or a file is empty that had content, or nothing is left. A
    /// removed drop-in file is not lost.
    #[must_use]
    pub fn lost_since(&self, before: &Self) -> Option<String> {
        if before.main_state.is_some() && self.main_state.is_none() {
            return Some(format!("{:?} is missing", self.main));
        }
        if self.main_state.is_none() && before.has_dir && !self.has_dir {
            return Some(format!("{:?} is missing", self.dir));
        }
        let mut emptied = self.sizes().filter(|(path, size)| {
            *size == 0 && before.sizes().any(|(old, size)| old == *path && size > 0)
        });
        emptied.next().map(|(path, _)| format!("{path:?} is empty"))
    }

    fn sizes(&self) -> impl Iterator<Item = (&PathBuf, u64)> {
        let main = std::iter::once((&self.main, &self.main_state));
        main.chain(self.drop_ins.iter().flatten())
            .filter_map(|(path, state)| Some((path, state.as_ref()?.size)))
    }
}

fn with_state(path: PathBuf) -> (PathBuf, Option<FileId>) {
    let state = state(&path);
    (path, state)
}

/// Follows links, as `read` does: the files of a Kubernetes ConfigMap are links, and an update replaces their targets.
fn state(path: &Path) -> Option<FileId> {
    FileId::at(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    struct Dir(tempfile::TempDir);

    impl Dir {
        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.path(name), text).unwrap();
        }

        fn take(&self) -> FileStates {
            FileStates::take(Some(&self.path("config.toml")))
        }
    }

    fn dir() -> Dir {
        Dir(tempfile::tempdir().unwrap())
    }

    #[test]
    fn every_change_is_seen() {
        let dir = dir();
        let mut states = vec![dir.take()];
        let mut next = |change: &dyn Fn()| {
            // Times have the resolution of the kernel's tick.
            std::thread::sleep(std::time::Duration::from_millis(20));
            change();
            let now = dir.take();
            assert_eq!(dir.take(), now, "nothing has changed");
            assert!(!states.contains(&now), "{now:?}");
            states.push(now);
        };
        next(&|| dir.write("config.toml", "a"));
        next(&|| dir.write("config.toml", "b"));
        next(&|| fs::create_dir(dir.path("config.toml.d")).unwrap());
        next(&|| dir.write("config.toml.d/1.toml", "a"));
        dir.write("new", "a");
        next(&|| fs::rename(dir.path("new"), dir.path("config.toml.d/1.toml")).unwrap());
        next(&|| symlink("2", dir.path("config.toml.d/2.toml")).unwrap());
        next(&|| dir.write("config.toml.d/2", "a"));
        next(&|| dir.write("config.toml.d/2", "b"));
        next(&|| {
            nix::sys::stat::fchmodat(
                nix::fcntl::AT_FDCWD,
                &dir.path("config.toml"),
                nix::sys::stat::Mode::S_IRUSR,
                nix::sys::stat::FchmodatFlags::FollowSymlink,
            )
            .unwrap()
        });
        next(&|| fs::rename(dir.path("config.toml.d"), dir.path("new")).unwrap());
        next(&|| dir.write("config.toml.d", ""));
        fs::remove_file(dir.path("config.toml.d")).unwrap();
        fs::rename(dir.path("new"), dir.path("config.toml.d")).unwrap();
        let before = dir.take();
        dir.write("config.toml.d/README", "a");
        assert_eq!(dir.take(), before, "not a drop-in file");
    }

    #[test]
    fn what_is_lost() {
        let dir = dir();
        let nothing = dir.take();
        dir.write("config.toml", "a");
        fs::create_dir(dir.path("config.toml.d")).unwrap();
        dir.write("config.toml.d/1.toml", "a");
        dir.write("config.toml.d/2.toml", "");
        let all = dir.take();
        assert_eq!(all.lost_since(&nothing), None);
        assert_eq!(all.lost_since(&all), None);
        assert!(
            nothing
                .lost_since(&all)
                .unwrap()
                .ends_with("config.toml\" is missing")
        );

        dir.write("config.toml.d/1.toml", "");
        assert!(
            dir.take()
                .lost_since(&all)
                .unwrap()
                .ends_with("1.toml\" is empty")
        );
        assert_eq!(dir.take().lost_since(&dir.take()), None);
        fs::remove_file(dir.path("config.toml.d/1.toml")).unwrap();
        assert_eq!(
            dir.take().lost_since(&all),
            None,
            "a drop-in file that is removed"
        );
        dir.write("config.toml", "");
        assert!(
            dir.take()
                .lost_since(&all)
                .unwrap()
                .ends_with("config.toml\" is empty")
        );
        fs::remove_file(dir.path("config.toml")).unwrap();
        assert!(
            dir.take()
                .lost_since(&all)
                .unwrap()
                .ends_with("config.toml\" is missing")
        );

        let only_dir = dir.take();
        fs::remove_file(dir.path("config.toml.d/2.toml")).unwrap();
        assert_eq!(dir.take().lost_since(&only_dir), None);
        fs::remove_dir(dir.path("config.toml.d")).unwrap();
        assert!(
            dir.take()
                .lost_since(&only_dir)
                .unwrap()
                .ends_with("config.toml.d\" is missing")
        );
        dir.write("config.toml", "a");
        assert_eq!(
            dir.take().lost_since(&all),
            None,
            "config.toml is still there"
        );
    }
}
