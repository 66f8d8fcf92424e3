use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::capability::Capability;
use crate::cdi::stamp::tests::{host, write};
use crate::driver::elf::tests::of_this_machine;
use crate::driver::locate;

const VERSION: &str = "570.86";
/// Longer than the clock of file systems stands still before Linux 6.13.
const TICK: Duration = Duration::from_millis(20);

type Result = std::result::Result<(DriverFiles, Vec<Finding>), String>;

/// A host, and a run-time directory.
struct Scene {
    host: tempfile::TempDir,
    config: Config,
    run: tempfile::TempDir,
}

/// What a start finds, and whether it searched.
#[derive(Debug, PartialEq)]
struct Found {
    library: Option<HostPath>,
    files: Result,
    searched: bool,
}

impl Scene {
    fn new() -> Self {
        let (host, config) = host();
        write(host.path(), "usr/bin/nvidia-smi", "");
        write(host.path(), "lib/firmware/nvidia/570.86/gsp_ga10x.bin", "");
        fs::create_dir_all(host.path().join("etc")).unwrap();
        symlink("usr/lib", host.path().join("lib64")).unwrap();
        let run = tempfile::tempdir().unwrap();
        Self { host, config, run }
    }

    fn run_dir(&self) -> RunDir {
        RunDir::open_in(self.run.path()).unwrap()
    }

    fn cache(&self, roots: &Roots, start: SystemTime) -> LocatedCache {
        let dir = Some(self.run_dir());
        LocatedCache::open_in(dir, start, roots, &self.config, VERSION).unwrap()
    }

    /// Starts a container at a time at which all changes have settled.
    fn start(&self, capabilities: Capabilities) -> Found {
        self.start_at(SystemTime::now() + Duration::from_secs(3), capabilities)
    }

    fn start_at(&self, time: SystemTime, capabilities: Capabilities) -> Found {
        let roots = Roots::open(&self.config).unwrap();
        let cache = self.cache(&roots, time);
        let linker_cache = roots.linker_cache(&self.config);
        let search = roots.search(&linker_cache, VERSION, &self.config);
        let library = cache.management_library().or_else(|| {
            let library = locate::management_library(&search)?;
            Some(library.source)
        });
        if let Some(files) = cache.files(VERSION, capabilities) {
            return Found {
                library,
                files: Ok(files),
                searched: false,
            };
        }
        let files = locate::locate(&search, capabilities, &self.config.driver_files);
        if let (Ok((files, findings)), Some(library)) = (&files, &library) {
            cache.store(&roots, library, VERSION, capabilities, (files, findings));
        }
        Found {
            library,
            files: files.map_err(|error| base::report::line(&error)),
            searched: true,
        }
    }

    /// Returns what a start without a stored result finds.
    fn search(&self, capabilities: Capabilities) -> Found {
        let empty = tempfile::tempdir().unwrap();
        let scene = Self {
            host: tempfile::tempdir().unwrap(),
            config: self.config.clone(),
            run: empty,
        };
        scene.start(capabilities)
    }
}

fn usual() -> Capabilities {
    Capabilities::new(&[Capability::Compute, Capability::Utility])
}

#[test]
fn a_later_start_finds_the_same_without_a_search() {
    let scene = Scene::new();
    let first = scene.start(usual());
    assert!(first.searched && first.library.is_some());
    let (files, _) = first.files.as_ref().unwrap();
    assert_eq!(files.libraries.len(), 2);
    assert!(!files.binaries.is_empty() && !files.placed.is_empty());
    let second = scene.start(usual());
    let expected = Found {
        searched: false,
        ..first
    };
    assert_eq!(second, expected);
}

#[test]
fn each_set_of_capabilities_has_its_own_result() {
    let scene = Scene::new();
    let sets = [
        usual(),
        Capabilities::new(&[Capability::Utility]),
        Capabilities::new(&Capability::ALL),
    ];
    let first = sets.map(|set| scene.start(set));
    assert!(first.iter().all(|found| found.searched));
    for (set, first) in std::iter::zip(sets, first) {
        let again = scene.start(set);
        assert_eq!((again.searched, again.files), (false, first.files));
    }
}

#[test]
fn another_search_has_another_result() {
    let mut scene = Scene::new();
    assert!(scene.start(usual()).searched);
    let config = scene.config.clone();
    type Change = fn(&mut Config);
    let changes: [Change; 3] = [
        |config| config.library_dirs.push("/usr/lib".into()),
        |config| config.driver_files.push("/usr/bin/nvidia-smi".into()),
        |config| config.ldcache = Some(HostPath::new("/etc/other.cache")),
    ];
    for change in changes {
        change(&mut scene.config);
        assert!(scene.start(usual()).searched);
        scene.config = config.clone();
        assert!(scene.start(usual()).searched, "it was replaced");
        assert!(!scene.start(usual()).searched);
    }
    let roots = Roots::open(&scene.config).unwrap();
    let cache = scene.cache(&roots, SystemTime::now());
    assert!(cache.files("570.87", usual()).is_none());
}

#[test]
fn a_host_that_is_being_changed_is_searched() {
    let scene = Scene::new();
    for _ in 0..2 {
        assert!(scene.start_at(SystemTime::now(), usual()).searched);
    }
}

#[test]
fn an_error_is_not_stored() {
    let scene = Scene::new();
    assert!(scene.start(usual()).files.is_ok());
    let cuda = scene.host.path().join("usr/lib/driver/libcuda.so.570.86");
    std::thread::sleep(TICK);
    fs::write(&cuda, "").unwrap();
    for _ in 0..2 {
        let found = scene.start(usual());
        assert!(found.searched && found.files.is_err(), "{found:?}");
    }
    fs::write(&cuda, of_this_machine()).unwrap();
    assert!(scene.start(usual()).files.is_ok());
}

#[test]
fn a_damaged_file_is_not_used() {
    let scene = Scene::new();
    scene.start(usual());
    let roots = Roots::open(&scene.config).unwrap();
    let name = scene.cache(&roots, SystemTime::now()).name;
    let dir = scene.run_dir();
    let mut bytes = dir.read(&name, MAX_SIZE).unwrap().unwrap();
    let last = bytes.len() - 20;
    bytes[last] ^= 1;
    dir.replace(&name, &bytes).unwrap();
    assert!(scene.start(usual()).searched);
    assert!(!scene.start(usual()).searched);
}

/// What can happen to a name on a host.
#[derive(Clone, Copy, Debug)]
enum Change {
    Library,
    Empty,
    LinkToLibrary,
    LinkToDirectory,
    Directory,
    Removed,
}

const NAMES: [&str; 12] = [
    "usr/lib/driver/libcuda.so.570.86",
    "usr/lib/driver/libcuda.so.1",
    "usr/lib/driver/libnvidia-ml.so.570.86",
    "usr/lib/driver/libnvidia-cfg.so.570.86",
    "usr/lib/driver",
    "usr/lib/other",
    "usr/bin/nvidia-smi",
    "usr/local/bin",
    "usr/local/bin/nvidia-smi",
    "lib/firmware/nvidia/570.86/gsp_tu10x.bin",
    "lib/firmware",
    "etc/ld.so.cache",
];

impl Change {
    fn apply(self, root: &Path, name: &str) {
        let path = root.join(name);
        if fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir()) {
            fs::remove_dir_all(&path).unwrap();
        } else {
            fs::remove_file(&path).ok();
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).ok();
        }
        match self {
            Self::Library => drop(fs::write(path, of_this_machine())),
            Self::Empty => drop(fs::write(path, "")),
            Self::LinkToLibrary => drop(symlink("/usr/lib/driver/libcuda.so.570.86", path)),
            Self::LinkToDirectory => drop(symlink("/usr/lib/other", path)),
            Self::Directory => drop(fs::create_dir(path)),
            Self::Removed => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// After any change, a start finds what a search finds.
    #[test]
    fn a_stored_result_is_what_a_search_finds(
        changes in prop::collection::vec(
            (
                prop::sample::select(vec![
                    Change::Library,
                    Change::Empty,
                    Change::LinkToLibrary,
                    Change::LinkToDirectory,
                    Change::Directory,
                    Change::Removed,
                ]),
                prop::sample::select(NAMES.to_vec()),
            ),
            1..8,
        )
    ) {
        let scene = Scene::new();
        scene.start(usual());
        for (change, name) in changes {
            std::thread::sleep(TICK);
            change.apply(scene.host.path(), name);
            let (found, expected) = (scene.start(usual()), scene.search(usual()));
            prop_assert_eq!(&found.files, &expected.files);
            prop_assert_eq!(&found.library, &expected.library);
            let again = scene.start(usual());
            prop_assert_eq!(&again.files, &expected.files);
        }
    }
}
