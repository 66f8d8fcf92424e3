//! Measures the pure parts of a container start, and the search for the driver files: `cargo bench --bench pure`.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "a program for developers, which ends at the first surprise"
)]

use std::ffi::OsString;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use base::paths::HostPath;
use base::tree::Tree;
use nvidia_host::config::{Config, Limits};
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::driver::DriverKind;
use nvidia_host::driver::ldcache::{self, Arch, Cache, CacheFormat, NewEntry};
use nvidia_host::driver::libraries::{LinkerCache, Search};
use nvidia_host::driver::locate;
use nvidia_host::inventory::select::select;
use nvidia_host::inventory::{BusId, Gpu, Inventory};
use oci_nvidia_hook::testing::oci::{insertion, spec_view};
use oci_nvidia_hook::testing::plan::request::{Decision, from_spec};

/// The duration of a batch of calls, long enough for the clock, and the number of batches.
const BATCH: Duration = Duration::from_millis(5);
const BATCHES: usize = 40;

fn main() {
    let small = spec(200);
    let large = spec(10_000);
    for (name, text) in [("of usual size", &small), ("of 1 MB", &large)] {
        let name = |what: &str| format!("config.json {name} ({} KB), {what}", text.len() / 1000);
        let here = Path::new("/bundle");
        measure(&name("no request"), || {
            spec_view::parse_if(
                text.as_bytes(),
                here,
                oci_nvidia_hook::testing::plan::request::may_ask,
            )
            .unwrap()
            .env
            .len()
        });
        measure(&name("parsed completely"), || {
            spec_view::parse(text.as_bytes(), here)
                .unwrap()
                .mounts
                .len()
        });
        let items = [serde_json::json!({"destination": "/x"})];
        measure(&name("a mount added"), || {
            let mut text = text.clone();
            insertion::append(&mut text, &["mounts"], &items).unwrap();
            text.len()
        });
    }

    let inventory = inventory(8);
    let limits = Limits::default();
    measure("selection of 8 GPUs", || {
        select(&VisibleDevices::All, "x", &inventory, &limits)
            .unwrap()
            .0
            .len()
    });

    let ours: Vec<(OsString, PathBuf)> = (0..30)
        .map(|n| {
            (
                format!("libnvidia-{n}.so.1").into(),
                format!("/usr/lib64/libnvidia-{n}.so.1").into(),
            )
        })
        .collect();
    let ours: Vec<_> = ours
        .iter()
        .map(|(name, path)| NewEntry {
            name,
            path,
            arch: Arch::native(),
        })
        .collect();
    for count in [0, 500, 2000, 5000] {
        let theirs: Vec<(OsString, PathBuf)> = (0..count)
            .map(|n| {
                (
                    format!("libmany{n:05}.so.1").into(),
                    format!("/usr/lib64/libmany{n:05}.so.1").into(),
                )
            })
            .collect();
        let theirs: Vec<_> = theirs
            .iter()
            .map(|(name, path)| NewEntry {
                name,
                path,
                arch: Arch::native(),
            })
            .collect();
        let mut cache = Cache::empty(CacheFormat::New);
        cache.merge(&theirs);
        let bytes = cache.to_bytes().unwrap();
        measure(&format!("ld.so.cache of {count}, parsed"), || {
            ldcache::parse(&bytes).unwrap().entries().len()
        });
        measure(
            &format!("ld.so.cache of {count}, parsed, merged, written"),
            || {
                let mut cache = ldcache::parse(&bytes).unwrap();
                cache.merge(&ours);
                cache.to_bytes().unwrap().len()
            },
        );
    }

    let dir = tempfile::tempdir().unwrap();
    let make = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-driver/make-root");
    let root = dir.path().join("root");
    let made = Command::new(make)
        .arg(&root)
        .args(["--no-dev", "--build"])
        .arg(dir.path().join("build"))
        .status();
    assert!(made.unwrap().success());
    let root = Tree::open(&HostPath::new(&root)).unwrap();
    let asked = |capabilities: &str| {
        let env = [
            "NVIDIA_VISIBLE_DEVICES=all".to_owned(),
            format!("NVIDIA_DRIVER_CAPABILITIES={capabilities}"),
        ];
        let text = serde_json::json!({"root": {"path": "/r"}, "process": {"env": env}}).to_string();
        let spec = spec_view::parse(text.as_bytes(), Path::new("/b")).unwrap();
        let Decision::Gpus(request) = from_spec(&spec, &Config::default()).unwrap() else {
            return None;
        };
        Some(request.capabilities)
    };
    measure("host's linker cache read", || {
        LinkerCache::of(&root, None).missing().is_some()
    });
    let cache = LinkerCache::of(&root, None);
    let search = Search {
        root: &root,
        cache: &cache,
        version: "535.183.01",
        dirs: &[],
        kind: DriverKind::Linux,
    };
    for capabilities in ["compute,utility", "all"] {
        let asked = asked(capabilities).unwrap();
        let name = format!("driver files found, {capabilities}");
        measure(&name, || {
            locate::locate(&search, asked, &[])
                .unwrap()
                .0
                .libraries
                .len()
        });
    }
}

/// Prints the median time of one call.
fn measure<T>(name: &str, mut call: impl FnMut() -> T) {
    let mut count: u32 = 1;
    loop {
        let start = Instant::now();
        (0..count).for_each(|_| drop(black_box(call())));
        if start.elapsed() >= BATCH {
            break;
        }
        count *= 2;
    }
    let mut times: Vec<_> = (0..BATCHES)
        .map(|_| {
            let start = Instant::now();
            (0..count).for_each(|_| drop(black_box(call())));
            start.elapsed() / count
        })
        .collect();
    times.sort();
    println!(
        "{name:<60} {:>10.2} µs",
        times[BATCHES / 2].as_secs_f64() * 1e6
    );
}

/// A config.json with this number of mounts.
fn spec(mounts: u32) -> String {
    let mount = |n: u32| serde_json::json!({"destination": format!("/m/{n:041}"), "source": "/s", "options": ["ro"]});
    let mounts: Vec<_> = (0..mounts).map(mount).collect();
    let process = serde_json::json!({"args": ["sh"], "env": ["PATH=/bin"]});
    serde_json::json!({"ociVersion": "1.0.2", "process": process, "root": {"path": "/r"}, "mounts": mounts}).to_string()
}

fn inventory(gpus: u32) -> Inventory {
    let gpu = |index: u32| Gpu {
        index,
        minor: index,
        uuid: format!("GPU-{index:08}"),
        bus_id: BusId {
            domain: 0,
            bus: index + 1,
            device: 0,
        },
        model: "NVIDIA H100 80GB HBM3".to_owned(),
        compute_capability: "9.0".to_owned(),
        brand: "Tesla".to_owned(),
        mig_enabled: false,
        mig_devices: Vec::new(),
        unlisted_mig: Vec::new(),
    };
    Inventory {
        gpus: (0..gpus).map(gpu).collect(),
        ..Inventory::default()
    }
}
