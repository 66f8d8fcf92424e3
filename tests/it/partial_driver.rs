//! Drivers of which a part is not installed, such as a driver for graphics only. Each mode gives the parts that exist.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::edit_config::spec;
use crate::support::{HOOK, Ran, read, run, scratch, shell, write_file};

tests! {
    NEEDS => each_part_alone;
}

const ALL: [&str; 2] = [
    "NVIDIA_VISIBLE_DEVICES=all",
    "NVIDIA_DRIVER_CAPABILITIES=all",
];
const ML: &str = "libnvidia-ml";

/// Returns the names of the driver's libraries without their versions: "libcuda".
fn libraries(fake: &FakeDriver) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for name in fake.file_names() {
        if let Some((stem, _)) = name.split_once(".so.535.183.01") {
            names.insert(stem.to_owned());
        }
    }
    names
}

/// Returns those of the libraries that a text of mounts names.
fn named<'n>(text: &str, all: &'n BTreeSet<String>) -> BTreeSet<&'n str> {
    let is_named = |stem: &&String| text.contains(&format!("/{stem}.so.535.183.01"));
    all.iter().filter(is_named).map(String::as_str).collect()
}

/// What a mode gives: the text with the mounts, and what it printed.
struct Given {
    mode: &'static str,
    mounts: String,
    printed: Ran,
}

fn modes(fake: &FakeDriver) -> Vec<Given> {
    let dir = scratch();
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::start(dir.path(), &image.rootfs, &ALL, "");
    let hook = container.hook(&fake.config);
    let edited = fake.edit_config(&spec(&image.rootfs, &ALL));
    let file = dir.path().join("nvidia.yaml");
    let generated = run(fake
        .command()
        .args([
            "cdi",
            "refresh",
            "--create",
            "--hook-path",
            HOOK,
            "--output",
        ])
        .arg(&file));
    vec![
        Given {
            mode: "hook",
            mounts: container.mountinfo(),
            printed: hook,
        },
        Given {
            mode: "edit-config",
            mounts: edited.stdout.clone(),
            printed: edited,
        },
        Given {
            mode: "cdi",
            mounts: fs::read_to_string(&file).unwrap_or_default(),
            printed: generated,
        },
    ]
}

/// With all driver capabilities, a container gets the parts that exist, and a missing one that others require is a note.
fn each_part_alone() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let root = fake.root.display().to_string();
    let all = libraries(&fake);
    assert!(all.len() > 5 && all.contains("libcuda"), "{all:?}");
    for missing in all.iter().filter(|stem| *stem != ML) {
        shell!("cd '{root}'; mkdir away; mv usr/lib/*/{missing}.so* away; /sbin/ldconfig -r .");
        for Given {
            mode,
            mounts,
            printed,
        } in modes(&fake)
        {
            assert_eq!(
                printed.code,
                Some(0),
                "{missing}, {mode}: {}",
                printed.stderr
            );
            let given = named(&mounts, &all);
            let mut expected: BTreeSet<_> = all.iter().map(String::as_str).collect();
            expected.remove(missing.as_str());
            assert_eq!(given, expected, "{missing}, {mode}");
        }
        let record = run(Command::new(HOOK).args(["why", "waiting"])).stdout;
        assert_eq!(record.contains("ONH-224"), missing == "libcuda", "{record}");
        shell!("cd '{root}'; mv away/* usr/lib/*/; rmdir away; /sbin/ldconfig -r .");
    }
    compute_alone(&fake);
}

/// A container that names the capability does not start without it. A spec is for all containers, also if config.toml limits the
/// capabilities.
fn compute_alone(fake: &FakeDriver) {
    let root = fake.root.display();
    shell!("cd '{root}'; rm usr/lib/*/libcuda.so*; /sbin/ldconfig -r .");
    let dir = scratch();
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let env = [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ];
    let container = Waiting::start(dir.path(), &image.rootfs, &env, "");
    let stderr = container.hook(&fake.config).failed(1);
    assert!(stderr.contains("(ONH-023)"), "{stderr}");
    let config = read(&fake.config);
    let limits = "supported-driver-capabilities = \"compute,utility\"\n";
    write_file(&fake.config, format!("{limits}{config}"));
    let printed = fake.run(&["cdi", "generate", "--format", "json", "--output", "-"]);
    let spec: Value = serde_json::from_str(&printed.ok()).unwrap();
    assert_eq!(spec["devices"].as_array().unwrap().len(), 3, "{spec}");
}
