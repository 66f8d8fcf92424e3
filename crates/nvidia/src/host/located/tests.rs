use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::capability::{self, Capability};
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

    fn cache(&self, roots: &Roots, start: SystemTime, capabilities: Capabilities) -> LocatedCache {
        let dir = Some(self.run_dir());
        LocatedCache::open_in(dir, start, roots, &self.config, VERSION, capabilities).unwrap()
    }

    /// Returns the name of the file of these capabilities.
    fn file(&self, capabilities: Capabilities) -> String {
        let roots = Roots::open(&self.config).unwrap();
        self.cache(&roots, SystemTime::now(), capabilities).name
    }

    /// Returns the sorted names in the run-time directory.
    fn names(&self) -> Vec<String> {
        let mut names = self.run_dir().all_names().unwrap();
        names.sort();
        names
    }

    /// Starts a container at a time at which all changes have settled.
    fn start(&self, capabilities: Capabilities) -> Found {
        self.start_at(SystemTime::now() + Duration::from_secs(3), capabilities)
    }

    fn start_at(&self, time: SystemTime, capabilities: Capabilities) -> Found {
        let roots = Roots::open(&self.config).unwrap();
        let cache = self.cache(&roots, time, capabilities);
        let linker_cache = roots.linker_cache(&self.config);
        let search = roots.search(&linker_cache, VERSION, &self.config);
        let library = cache.management_library().or_else(|| {
            let library = locate::management_library(&search)?;
            Some(library.source)
        });
        if let Some(files) = cache.files() {
            return Found {
                library,
                files: Ok(files),
                searched: false,
            };
        }
        let files = locate::locate(&search, capabilities, &self.config.driver_files);
        if let (Ok((files, findings)), Some(library)) = (&files, &library) {
            cache.store(&roots, library, (files, findings));
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
    words("compute,utility")
}

fn words(value: &str) -> Capabilities {
    let supported = Capabilities::new(&Capability::ALL);
    capability::parse(Some(value), false, supported).unwrap()
}

/// Returns the words for each set of capabilities, in the order of [`Capability::ALL`] and in the reverse order.
fn all_words() -> Vec<[String; 2]> {
    let mut all = Vec::new();
    for bits in 1..1_u32 << Capability::ALL.len() {
        let mut names = Vec::new();
        for (index, capability) in Capability::ALL.into_iter().enumerate() {
            if bits & 1 << index != 0 {
                names.push(capability.name());
            }
        }
        let forward = names.join(",");
        names.reverse();
        all.push([forward, names.join(",")]);
    }
    all
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
    let sets = ["compute,utility", "utility", "all"].map(words);
    let read = |name: &str| scene.run_dir().read(name, MAX_SIZE).unwrap().unwrap();
    let mut stored = Vec::new();
    for set in sets {
        let first = scene.start(set);
        assert!(first.searched && first.library.is_some());
        let name = scene.file(set);
        stored.push((read(&name), name, first));
        assert_eq!(scene.names().len(), stored.len());
    }
    for (bytes, name, _) in &stored {
        assert_eq!(read(name), *bytes, "another set has changed it");
    }
    // No file depends on another one.
    for (set, (bytes, name, first)) in std::iter::zip(sets, stored) {
        for other in scene.names() {
            scene.run_dir().remove(&other).unwrap();
        }
        scene.run_dir().replace(&name, &bytes).unwrap();
        let expected = Found {
            searched: false,
            ..first
        };
        assert_eq!(scene.start(set), expected);
    }
}

#[test]
fn equal_sets_in_other_words_share_a_file() {
    let scene = Scene::new();
    let mut names = Vec::new();
    for [forward, reverse] in all_words() {
        let name = scene.file(words(&forward));
        for same in [reverse, format!(" {forward}, {forward},")] {
            assert_eq!(scene.file(words(&same)), name, "{same:?}");
        }
        names.push(name);
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 127);
    assert!(scene.start(words("compute,utility")).searched);
    assert!(!scene.start(words("utility , compute,utility")).searched);
}

/// A user who requests all sets that there are can neither fill the directory nor displace the set of most images.
#[test]
fn sixteen_sets_are_stored() {
    let scene = Scene::new();
    assert!(scene.start(usual()).searched);
    let mut last = Vec::new();
    for [forward, reverse] in all_words() {
        for value in [forward, reverse] {
            scene.start(words(&value));
            assert!(!scene.start(words(&value)).searched, "{value}");
            // The times of tmpfs have the resolution of the kernel's tick.
            std::thread::sleep(Duration::from_millis(5));
            let file = scene.file(words(&value));
            last.retain(|name| *name != file);
            last.push(file);
        }
        assert!(scene.names().len() <= MAX_SETS);
        assert!(!scene.start(usual()).searched);
    }
    last.retain(|name| *name != scene.file(usual()));
    let mut newest = last.split_off(last.len() - (MAX_SETS - 1));
    newest.push(scene.file(usual()));
    newest.sort();
    assert_eq!(scene.names(), newest);
}

/// Each driver root has its own file, which counts as well.
#[test]
fn roots_have_files_of_their_own() {
    let (mut scene, other) = (Scene::new(), Scene::new());
    scene.start(usual());
    let first = scene.file(usual());
    scene.config = other.config.clone();
    assert_ne!(scene.file(usual()), first);
    assert!(scene.start(usual()).searched);
    assert_eq!(scene.names().len(), 2);
}

#[test]
fn only_files_of_this_cache_are_removed() {
    let scene = Scene::new();
    let others = [
        "containers",
        "inventory-0123456789abcdef",
        "located.lock",
        "relocated",
        "version-podman",
    ];
    for name in others {
        scene.run_dir().replace(name, b"text").unwrap();
    }
    for [forward, _] in all_words().into_iter().take(20) {
        scene.start(words(&forward));
    }
    let mut names = scene.names();
    assert_eq!(names.len(), MAX_SETS + others.len());
    names.retain(|name| others.contains(&name.as_str()));
    assert_eq!(names, others);
}

/// A start that finds the stored result examines no other file, so it costs the same whatever others have stored.
#[test]
fn a_start_that_reads_changes_nothing() {
    let scene = Scene::new();
    scene.start(usual());
    let before = scene.names();
    assert!(!scene.start(usual()).searched);
    assert_eq!(scene.names(), before);
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
    let cache = scene.cache(&roots, SystemTime::now(), usual());
    assert!(cache.is_for(VERSION, usual()));
    assert!(!cache.is_for("570.87", usual()));
    assert!(!cache.is_for(VERSION, words("utility")));
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
fn a_damaged_or_foreign_file_is_not_used() {
    let scene = Scene::new();
    let expected = scene.start(usual());
    scene.start(words("utility"));
    let (name, dir) = (scene.file(usual()), scene.run_dir());
    let bytes = dir.read(&name, MAX_SIZE).unwrap().unwrap();
    let mut damaged = bytes.clone();
    damaged[bytes.len() - 20] ^= 1;
    let text = String::from_utf8(bytes.clone()).unwrap();
    let of_another_set = dir.read(&scene.file(words("utility")), MAX_SIZE);
    for (what, bytes) in [
        ("damaged", damaged),
        ("cut off", bytes[..bytes.len() / 2].to_vec()),
        ("empty", Vec::new()),
        ("too large", vec![b' '; 2 << 20]),
        (
            "the format of an earlier build",
            text.replacen("located 2", "located 1", 1).into(),
        ),
        (
            "another kind",
            text.replacen("located 2", "inventory 6", 1).into(),
        ),
        ("another set", of_another_set.unwrap().unwrap()),
    ] {
        dir.replace(&name, &bytes).unwrap();
        assert_eq!(scene.start(usual()), expected, "{what}");
        assert!(!scene.start(usual()).searched, "{what}");
    }
    type Foreign = fn(&Path);
    let foreign: [(&str, Foreign); 4] = [
        ("a link", |path| symlink("/etc/passwd", path).unwrap()),
        ("a hard link", |path| {
            let other = path.with_file_name("other");
            fs::write(&other, "text").unwrap();
            fs::hard_link(other, path).unwrap();
        }),
        ("a file that others can write", |path| {
            fs::write(path, "text").unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap();
        }),
        ("a directory", |path| fs::create_dir(path).unwrap()),
    ];
    for (what, make) in foreign {
        dir.remove(&name).unwrap();
        make(&scene.run.path().join("oci-nvidia-hook").join(&name));
        assert_eq!(scene.start(usual()), expected, "{what}");
        let again = scene.start(usual());
        assert_eq!(again.files, expected.files, "{what}");
        assert_eq!(again.searched, what == "a directory", "{what}");
    }
}

/// A start without a run-time directory, and one whose directory cannot be written.
#[test]
fn without_a_directory_each_start_searches() {
    let scene = Scene::new();
    let expected = scene.start(usual());
    scene.run_dir().remove(&scene.file(usual())).unwrap();
    // The directory is removed while it is open.
    let (roots, dir) = (Roots::open(&scene.config).unwrap(), scene.run_dir());
    fs::remove_dir(scene.run.path().join("oci-nvidia-hook")).unwrap();
    let later = SystemTime::now() + Duration::from_secs(3);
    let cache =
        LocatedCache::open_in(Some(dir), later, &roots, &scene.config, VERSION, usual()).unwrap();
    assert_eq!(cache.management_library(), None);
    let (files, findings) = expected.files.unwrap();
    cache.store(&roots, &expected.library.unwrap(), (&files, &findings));
    assert!(cache.write(b"").is_err());
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

    /// After any change, a start finds what a search finds, for each set of capabilities.
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
        let sets = ["compute,utility", "all"].map(words);
        for set in sets {
            scene.start(set);
        }
        for (change, name) in changes {
            std::thread::sleep(TICK);
            change.apply(scene.host.path(), name);
            for set in sets {
                let (found, expected) = (scene.start(set), scene.search(set));
                prop_assert_eq!(&found.files, &expected.files);
                prop_assert_eq!(&found.library, &expected.library);
                let again = scene.start(set);
                prop_assert_eq!(&again.files, &expected.files);
            }
        }
    }
}
