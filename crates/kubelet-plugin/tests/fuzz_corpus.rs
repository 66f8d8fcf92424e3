//! Runs the fuzz targets of the plugin on their committed inputs: seeds, and inputs that crashed a target. `make fuzz` searches for more.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    missing_docs,
    dead_code,
    unreachable_pub,
    reason = "tests"
)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[path = "../../../tests/fuzz/plugin_targets/mod.rs"]
mod targets;

/// The limit of `make fuzz`, whose program is optimized; the inputs here are smaller.
const LONGEST: Duration = Duration::from_secs(5);

macro_rules! replays {
    ($($target:ident),*) => {
        $(#[test]
        fn $target() {
            replay(stringify!($target), targets::$target::run);
        })*
        const NAMES: &[&str] = &[$(stringify!($target)),*];
    };
}

replays!(
    claim,
    errors_file,
    gpu_config,
    monitor,
    nri_container,
    nri_session,
    pod_resources,
    sharing_file
);

fn fuzz(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fuzz")
        .join(name)
}

fn replay(target: &str, run: fn(&[u8])) {
    let mut inputs = 0;
    for entry in std::fs::read_dir(fuzz("corpus").join(format!("plugin_{target}"))).unwrap() {
        let path = entry.unwrap().path();
        let data = std::fs::read(&path).unwrap();
        let start = Instant::now();
        if catch_unwind(AssertUnwindSafe(|| run(&data))).is_err() {
            panic!("a property does not hold for {path:?}");
        }
        let took = start.elapsed();
        assert!(took < LONGEST, "{path:?} takes {took:?}");
        inputs += 1;
    }
    assert!(inputs > 1, "{target} has no inputs");
}

/// Every fuzz target is replayed, and every replayed target is fuzzed.
#[test]
fn each_target_is_here() {
    let names = |dir: &str| {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(fuzz(dir)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            names.extend(name.strip_prefix("plugin_").map(str::to_owned));
        }
        names.sort();
        names
    };
    assert_eq!(names("fuzz_targets"), NAMES);
    assert_eq!(names("corpus"), NAMES);
    let manifest = std::fs::read_to_string(fuzz("Cargo.toml")).unwrap();
    for name in NAMES {
        let row = format!("\nname = \"plugin_{name}\"\npath = \"fuzz_targets/plugin_{name}.rs\"\n");
        assert!(manifest.contains(&row), "{name}");
    }
}
