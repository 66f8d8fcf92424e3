//! What the answers of a tree are based on: the directories in which names were looked up, and the files that were read. While they are
//! unchanged, a later process gets the same answers without searching again.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, OFlags, Stat, Statx};
use serde::{Deserialize, Serialize};

use super::{Tree, is_missing, lock};
use crate::sys::file_id::{FileId, Inode};
use crate::sys::mount::statmount::{Id, id_of};

/// The state of a file or directory. It differs after each change of the names in a directory or of the content of a file.
///
/// The identity of the file does not suffice: images of file systems can have the same times everywhere, and one of them can
/// replace another in a mount (systemd-sysext). The id of a mount is not reused before the next boot.
///
/// Kernels before 6.8 reuse it, and nothing else shows that a file system has stayed mounted. A copy of an ext4 image with one name less,
/// mounted on the same loop device, differed neither in the id of the mount nor in device, inode number, size and times of the directory
/// (`a_replaced_image_is_noticed` in tests/it/cache.rs). The file system of `/` is no exception: a soft reboot of systemd replaces it, and
/// keeps /run and the boot id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    mount: u64,
    file: FileId,
}

impl State {
    /// Returns `None` if the kernel does not report unique ids of mounts.
    fn new(stat: &Statx) -> Option<Self> {
        let Some(Id::Unique(mount)) = id_of(stat) else {
            return None;
        };
        Some(Self {
            mount,
            file: FileId::from(stat),
        })
    }
}

/// A file or directory that was consulted, by the path that the caller gave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Consulted {
    /// Nothing exists at this path.
    Absent(PathBuf),
    /// Something exists, and was in this state.
    Present(PathBuf, State),
    /// A file of the kernel with this content, whose state says nothing about it.
    Kernel(PathBuf, Vec<u8>),
}

/// What a search below a tree was based on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Basis(Vec<Consulted>);

/// The lookups of a tree that records them.
#[derive(Debug, Default)]
pub(super) struct Lookups {
    absent: Vec<PathBuf>,
    present: Vec<Found>,
    kernel: Vec<(PathBuf, Vec<u8>)>,
    /// Whether an answer depends on something that is not recorded
    is_incomplete: bool,
}

/// A directory or a file that a lookup found.
#[derive(Debug)]
struct Found {
    path: PathBuf,
    inode: Inode,
}

impl Lookups {
    /// Records that a directory or a file with this state was found.
    pub(super) fn found(&mut self, path: &Path, stat: &Stat) {
        self.present.push(Found {
            path: path.to_owned(),
            inode: Inode::from(stat),
        });
    }

    pub(super) fn kernel_file(&mut self, path: &Path, content: &[u8]) {
        self.kernel.push((path.to_owned(), content.to_owned()));
    }

    /// Records that an answer depends on more than this type can express.
    pub(super) const fn unrecorded(&mut self) {
        self.is_incomplete = true;
    }

    pub(super) fn failed(&mut self, path: &Path, error: &io::Error) {
        if is_missing(error) {
            self.absent.push(path.to_owned());
        } else {
            self.is_incomplete = true;
        }
    }
}

impl Basis {
    /// Whether everything is still as it was.
    #[must_use]
    pub fn is_unchanged(&self, tree: &Tree) -> bool {
        self.0.iter().all(|consulted| match consulted {
            // A link in the tree can lead to a file that exists only in the tree, so this path is followed as the search did.
            Consulted::Absent(path) => {
                let opened = tree.as_root().open_at(path, OFlags::PATH);
                opened.is_err_and(|error| is_missing(&error))
            }
            Consulted::Present(path, known) => {
                state(tree, path).is_ok_and(|state| state == Some(*known))
            }
            Consulted::Kernel(path, content) => {
                let now = tree.read_kernel_file(path);
                now.is_ok_and(|now| now == *content)
            }
        })
    }

    fn add(&mut self, consulted: Consulted) {
        if !self.0.contains(&consulted) {
            self.0.push(consulted);
        }
    }
}

impl Tree {
    /// Returns a tree of the same directory that records its lookups for [`Self::basis`].
    #[must_use]
    pub fn recording(&self) -> Self {
        self.anew(Some(Lookups::default()))
    }

    /// Returns what the lookups were based on. `start` is a time before the first of them. `None` if the tree does not record them, if
    /// something changed shortly before or since then, or if an answer depends on more than directories and files.
    #[must_use]
    pub fn basis(&self, start: SystemTime) -> Option<Basis> {
        let lookups = lock(self.0.lookups.as_ref()?);
        if lookups.is_incomplete || !self.troubles().is_empty() {
            return None;
        }
        let mut basis = Basis::default();
        for path in &lookups.absent {
            basis.add(Consulted::Absent(path.clone()));
        }
        for found in &lookups.present {
            let state = state(self, &found.path).ok()??;
            // The path may lead to another file than at the lookup.
            if state.file.inode != found.inode || !state.file.is_settled(start) {
                return None;
            }
            basis.add(Consulted::Present(found.path.clone(), state));
        }
        for (path, content) in &lookups.kernel {
            basis.add(Consulted::Kernel(path.clone(), content.clone()));
        }
        drop(lookups);
        // Now each change since `start` shows.
        basis.is_unchanged(self).then_some(basis)
    }
}

/// Returns the state of the file at `path` after links, or `None` if the kernel reports too little of it. Absolute links lead out of the
/// tree here, which takes a third of the system calls: the states of files outside differ from those of the files that were consulted.
fn state(tree: &Tree, path: &Path) -> io::Result<Option<State>> {
    let below = match path.strip_prefix("/") {
        Ok(below) if below.as_os_str().is_empty() => Path::new("."),
        Ok(below) => below,
        Err(_) => path,
    };
    let asked = FileId::ASKED | Id::ASKED;
    let stat = rustix::fs::statx(tree.as_root(), below, AtFlags::empty(), asked)?;
    Ok(State::new(&stat))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::HostPath;
    use crate::sys::file_id::SETTLED;
    use rustix::fs::StatxFlags;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::time::{Duration, UNIX_EPOCH};

    /// A time after which everything has settled, so that no test has to wait.
    fn later() -> SystemTime {
        SystemTime::now() + 2 * SETTLED
    }

    /// A library behind two links, a directory that is missing, and a file that is read.
    struct Scene(tempfile::TempDir);

    impl Scene {
        fn new() -> Self {
            let scene = Self(tempfile::tempdir().unwrap());
            for dir in ["etc", "usr/lib64", "usr/lib32", "usr/share", "alternatives"] {
                fs::create_dir_all(scene.path(dir)).unwrap();
            }
            for file in ["etc/cache", "usr/lib64/libcuda.so.535", "usr/lib32/other"] {
                fs::write(scene.path(file), "content").unwrap();
            }
            symlink("usr/lib64", scene.path("lib")).unwrap();
            symlink("/alternatives/cuda", scene.path("usr/lib64/libcuda.so.1")).unwrap();
            symlink("/lib/libcuda.so.535", scene.path("alternatives/cuda")).unwrap();
            scene
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn tree(&self) -> Tree {
            Tree::open(&HostPath::new(self.0.path())).unwrap()
        }

        /// Searches as for a driver, and returns what the answers were based on.
        fn search(&self, start: SystemTime) -> Option<Basis> {
            let tree = self.tree().recording();
            let library = tree.linked_file(Path::new("/lib/libcuda.so.1"));
            assert!(library.is_ok_and(|library| library.is_some()));
            assert!(tree.regular_file(Path::new("/usr/local/bin/tool")).is_err());
            assert!(tree.regular_file(Path::new("/usr/share/none")).is_err());
            tree.read(Path::new("/etc/cache")).unwrap();
            tree.basis(start)
        }
    }

    #[test]
    fn each_change_on_which_an_answer_depends_shows() {
        type Change = fn(&Scene);
        let changes: [(&str, Change); 12] = [
            ("a file is added", |scene| {
                fs::write(scene.path("usr/share/none"), "").unwrap();
            }),
            ("a file is removed", |scene| {
                fs::remove_file(scene.path("usr/lib64/libcuda.so.535")).unwrap();
            }),
            ("a file is replaced", |scene| {
                fs::rename(
                    scene.path("usr/lib32/other"),
                    scene.path("usr/lib64/libcuda.so.535"),
                )
                .unwrap();
            }),
            ("a link in another directory is changed", |scene| {
                fs::remove_file(scene.path("alternatives/cuda")).unwrap();
                symlink("/usr/lib32/other", scene.path("alternatives/cuda")).unwrap();
            }),
            ("a link on the path is changed", |scene| {
                fs::remove_file(scene.path("lib")).unwrap();
                symlink("usr/lib32", scene.path("lib")).unwrap();
            }),
            ("a link on the path is removed", |scene| {
                fs::remove_file(scene.path("lib")).unwrap();
            }),
            ("a directory is replaced", |scene| {
                fs::rename(scene.path("usr/share"), scene.path("usr/old")).unwrap();
                fs::create_dir(scene.path("usr/share")).unwrap();
            }),
            ("a missing directory is created", |scene| {
                fs::create_dir_all(scene.path("usr/local/bin")).unwrap();
            }),
            ("a file is in its place", |scene| {
                fs::create_dir_all(scene.path("usr/local")).unwrap();
                fs::write(scene.path("usr/local/bin"), "").unwrap();
            }),
            ("the file that was read has other content", |scene| {
                fs::write(scene.path("etc/cache"), "CONTENT").unwrap();
            }),
            ("a link to a file in the tree is added", |scene| {
                fs::create_dir_all(scene.path("usr/local")).unwrap();
                symlink("/usr/lib32", scene.path("usr/local/bin")).unwrap();
            }),
            ("the file that was read is missing", |scene| {
                fs::remove_file(scene.path("etc/cache")).unwrap();
            }),
        ];
        for (what, change) in changes {
            let scene = Scene::new();
            let basis = scene.search(later()).unwrap();
            assert!(basis.is_unchanged(&scene.tree()), "before: {what}");
            // Before Linux 6.13, the clock of file systems stands still for up to 10 ms.
            std::thread::sleep(Duration::from_millis(20));
            change(&scene);
            assert!(!basis.is_unchanged(&scene.tree()), "{what}");
        }
    }

    #[test]
    fn other_changes_do_not_matter() {
        let scene = Scene::new();
        let basis = scene.search(later()).unwrap();
        fs::write(scene.path("usr/lib32/more"), "").unwrap();
        fs::create_dir(scene.path("usr/local")).unwrap();
        fs::write(scene.path("usr/lib64/libcuda.so.535"), "more content").unwrap();
        assert!(basis.is_unchanged(&scene.tree()));
        let text = serde_json::to_string(&basis).unwrap();
        let read: Basis = serde_json::from_str(&text).unwrap();
        assert_eq!(read, basis);
    }

    #[test]
    fn what_has_just_changed_is_no_basis() {
        let scene = Scene::new();
        assert_eq!(scene.search(SystemTime::now()), None);
        assert_eq!(scene.search(UNIX_EPOCH), None);
    }

    #[test]
    fn answers_that_depend_on_more_have_no_basis() {
        let scene = Scene::new();
        symlink("lib/.", scene.path("dot")).unwrap();
        symlink("loop", scene.path("loop")).unwrap();
        for path in ["/dot", "/loop", "/"] {
            let tree = scene.tree().recording();
            tree.locate(Path::new(path)).ok();
            assert_eq!(tree.basis(later()), None, "{path}");
        }
        let tree = scene.tree();
        tree.locate(Path::new("/etc/cache")).unwrap();
        assert_eq!(tree.basis(later()), None, "it does not record");
    }

    #[test]
    fn without_unique_ids_of_mounts_there_is_no_state() {
        let scene = Scene::new();
        let asked = FileId::ASKED | Id::ASKED;
        let path = scene.path("etc");
        let mut stat = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), asked).unwrap();
        // What Linux 5.8 answers, and what earlier kernels answer.
        for mask in [StatxFlags::MNT_ID, StatxFlags::empty()] {
            stat.stx_mask = (FileId::ASKED | mask).bits();
            assert_eq!(State::new(&stat), None, "{mask:?}");
        }
    }

    /// The kernel does not change the times of its files when their content changes.
    #[test]
    fn files_of_the_kernel_are_read_again() {
        let scene = Scene::new();
        let tree = scene.tree().recording();
        tree.read_kernel_text(Path::new("/etc/cache")).unwrap();
        let basis = tree.basis(later()).unwrap();
        assert!(basis.is_unchanged(&scene.tree()));
        fs::write(scene.path("etc/cache"), "CONTENT").unwrap();
        assert!(!basis.is_unchanged(&scene.tree()));
    }

    /// A directory that changes between the lookup and the end of the search.
    #[test]
    fn a_change_during_the_search_shows() {
        let scene = Scene::new();
        let tree = scene.tree().recording();
        tree.linked_file(Path::new("/lib/libcuda.so.1")).unwrap();
        fs::remove_file(scene.path("lib")).unwrap();
        symlink("usr/lib32", scene.path("lib")).unwrap();
        assert_eq!(tree.basis(later()), None);
    }
}
