//! Runs the fuzz targets on their committed inputs: seeds, and inputs that crashed a target. `make fuzz` searches for more. The targets of
//! the kubelet plugin, which have the prefix `plugin_`, are run by its tests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::support::{read, source};

#[path = "../fuzz/targets/mod.rs"]
mod targets;

/// The limit of `make fuzz`, whose program is optimized; the inputs here are smaller.
const LONGEST: Duration = Duration::from_secs(5);

macro_rules! targets {
    ($($target:ident),*) => {
        tests! {
            &[] => each_target_is_here, $($target = replay(stringify!($target), targets::$target::run)),*;
        }
        const NAMES: &[&str] = &[$(stringify!($target)),*];
    };
}

targets!(
    cached_inventory,
    capabilities,
    cdi_spec,
    cgroup,
    command_line,
    compat_note,
    config,
    container_path,
    device_program,
    device_rules,
    devices,
    driver_proc,
    elf,
    engine_settings,
    error_text,
    hook_file,
    inventory,
    journal,
    ldcache,
    ldconf,
    mig_minors,
    record,
    require,
    spec,
    state
);

fn replay(target: &str, run: fn(&[u8])) {
    let mut inputs = 0;
    for entry in std::fs::read_dir(source("tests/fuzz/corpus").join(target)).unwrap() {
        let path = entry.unwrap().path();
        let data = std::fs::read(&path).unwrap();
        let start = Instant::now();
        if catch_unwind(AssertUnwindSafe(|| run(&data))).is_err() {
            panic!("a property does not hold for {path:?}");
        }
        assert!(
            start.elapsed() < LONGEST,
            "{path:?} takes {:?}",
            start.elapsed()
        );
        inputs += 1;
    }
    assert!(inputs > 1, "{target} has no inputs");
}

/// Every fuzz target is replayed, and every replayed target is fuzzed.
fn each_target_is_here() {
    let names = |dir: &str| {
        let entries = std::fs::read_dir(source(dir))
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let mut names: Vec<_> = entries
            .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        names.retain(|name| !name.starts_with("plugin_"));
        names.sort();
        names
    };
    assert_eq!(names("tests/fuzz/fuzz_targets"), NAMES);
    assert_eq!(names("tests/fuzz/corpus"), NAMES);
    let manifest = read(source("tests/fuzz/Cargo.toml"));
    for name in NAMES {
        assert!(
            manifest.contains(&format!(
                "\nname = \"{name}\"\npath = \"fuzz_targets/{name}.rs\"\n"
            )),
            "{name}"
        );
    }
}
