//! Checks the units and rules of the packages with systemd and udev.

use std::os::unix::fs::{MetadataExt, chown};
use std::process::Command;

use serde_json::Value;

use crate::driver::FakeDriver;
use crate::support::{HOOK, Need, read, run, scratch, source, write_file};

// systemd-analyze creates /run/systemd if it does not exist.
tests! {
    &[Need::Root, Need::Program("systemd-analyze")] => systemd_takes_the_units;
    &[Need::Root, Need::Program("cc")] => the_service_refreshes;
    &[Need::Program("systemctl")] => udev_starts_only_an_enabled_unit;
    &[Need::Root] => sudo_leaves_no_files_of_root;
    &[] => the_output_of_a_failed_build_is_printed;
    &[Need::Cargo] => one_oldest_rust;
}

fn systemd_takes_the_units() {
    let dir = scratch();
    let mut verify = Command::new("systemd-analyze");
    // The man page that the units name is not installed.
    verify.args(["verify", "--man=no"]);
    let mut seen = 0;
    let files = std::fs::read_dir(source("packaging/systemd"))
        .unwrap()
        .flatten();
    for unit in files.filter(|file| {
        file.path()
            .extension()
            .is_some_and(|extension| extension != "preset")
    }) {
        // systemd checks that the program exists.
        let text = read(unit.path());
        let text = text
            .replace("/usr/bin/oci-nvidia-hook", HOOK)
            .replace("/usr/bin/oci-nvidia-kubelet-plugin", HOOK)
            .replace("/usr/bin/oci-nvidia-mps", HOOK);
        let path = dir.path().join(unit.file_name());
        write_file(&path, text);
        verify.arg(path);
        seen += 1;
    }
    assert_eq!(seen, 8);
    let ran = run(&mut verify);
    assert!(ran.code == Some(0) && ran.stderr.is_empty(), "{ran:?}");
}

/// `sudo make` in the clone of a user.
fn sudo_leaves_no_files_of_root() {
    let dir = scratch();
    let tests = dir.path().join("tests");
    std::fs::create_dir(&tests).unwrap();
    std::fs::copy(source("tests/keep-owner"), tests.join("keep-owner")).unwrap();
    chown(dir.path(), Some(1234), Some(1234)).unwrap();
    let mut make = Command::new(tests.join("keep-owner"));
    make.args([
        "sh",
        "-c",
        "mkdir -p target/release; echo >target/release/program; ln -s /etc target/link; exit 3",
    ]);
    run(make.current_dir(dir.path()).env_remove("CARGO_TARGET_DIR")).failed(3);
    for created in [
        "target",
        "target/release",
        "target/release/program",
        "target/link",
    ] {
        assert_eq!(
            std::fs::symlink_metadata(dir.path().join(created))
                .unwrap()
                .uid(),
            1234,
            "{created}"
        );
    }
    assert_eq!(std::fs::metadata("/etc").unwrap().uid(), 0);
}

fn the_output_of_a_failed_build_is_printed() {
    let log = scratch();
    let build = |script: &str| {
        let mut progress = Command::new(source("packaging/with-progress"));
        run(progress
            .arg("build-rpm")
            .arg(log.path().join("log"))
            .args(["sh", "-c", script]))
    };
    assert_eq!(
        build("echo compiled; echo linked >&2; exit 4").failed(4),
        "compiled\nlinked\n"
    );
    let ran = build("echo compiled");
    assert!(
        ran.code == Some(0) && ran.stdout.is_empty() && ran.stderr.is_empty(),
        "{ran:?}"
    );
}

/// Runs the command line of the service, with the options of an administrator's file: systemd passes them to the shell unchanged.
fn the_service_refreshes() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let unit = read(source("packaging/systemd/oci-nvidia-hook-cdi.service"));
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart=/bin/sh -c '"))
        .unwrap();
    let program = format!("{HOOK} --config {}", fake.config.display());
    let script = line
        .strip_suffix('\'')
        .unwrap()
        .replace("/usr/bin/oci-nvidia-hook", &program);
    let path = dir.path().join("nvidia.yaml");
    let start = || {
        let mut service = Command::new("/bin/sh");
        service.args(["-c", &script]).env(
            "CDI_OPTIONS",
            format!("--name-strategy uuid --output {}", path.display()),
        );
        run(&mut service)
    };
    assert_eq!(start().ok(), "");
    assert!(!read(&path).contains("name: \"0\""));
    // It is tried three times before it is an error.
    std::fs::remove_file(&path).unwrap();
    fake.set_nvml(|old| old + "\ninit-error 9\n");
    let stderr = start().failed(1);
    assert_eq!(stderr.matches("oci-nvidia-hook: ").count(), 3, "{stderr}");
}

/// No crate needs a newer Rust than documented, and the spec has the same version. clippy checks our own code (`incompatible_msrv`).
fn one_oldest_rust() {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--locked", "--format-version", "1"]);
    let metadata = run(cargo.current_dir(source(""))).ok();
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    let version = |text: &str| {
        let mut parts = text.split('.').map(|part| part.parse::<u32>().unwrap());
        (parts.next(), parts.next())
    };
    let oldest = env!("CARGO_PKG_RUST_VERSION");
    for package in metadata["packages"].as_array().unwrap() {
        if let Some(wanted) = package["rust_version"].as_str() {
            let is_older = version(wanted) <= version(oldest);
            assert!(is_older, "{} wants {wanted}", package["name"]);
        }
    }
    let spec = read(source("packaging/rpm.spec"));
    assert!(spec.contains(&format!("cargo >= {oldest}\n")));
}

/// Runs the check of each rule on a host that is a directory.
fn udev_starts_only_an_enabled_unit() {
    let dir = scratch();
    for file in std::fs::read_dir(source("packaging/systemd"))
        .unwrap()
        .flatten()
    {
        let is_preset = file
            .path()
            .extension()
            .is_some_and(|extension| extension == "preset");
        let to = dir.path().join("usr/lib/systemd").join(if is_preset {
            "system-preset"
        } else {
            "system"
        });
        std::fs::create_dir_all(&to).unwrap();
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
    // Distributions disable what no preset names.
    write_file(
        dir.path()
            .join("usr/lib/systemd/system-preset/99-default.preset"),
        "disable *\n",
    );
    let systemctl = |arguments: &[&str]| {
        run(Command::new("systemctl")
            .arg(format!("--root={}", dir.path().display()))
            .args(arguments))
    };
    let rules = read(source("packaging/udev/90-oci-nvidia-hook.rules"));
    let starts = || {
        let answers = rules
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| {
                let (_, rest) = line
                    .split_once("PROGRAM==\"/usr/bin/systemctl --root=/ ")
                    .unwrap();
                let (words, then) = rest.split_once('"').unwrap();
                assert!(
                    then.contains("oci-nvidia-hook-cdi.service"),
                    "the condition precedes the action: {line}"
                );
                systemctl(&words.split(' ').collect::<Vec<_>>()).code == Some(0)
            });
        answers.collect::<Vec<_>>()
    };
    assert_eq!(starts(), [false; 3], "before the presets");
    systemctl(&["preset-all"]).ok();
    assert_eq!(starts(), [true; 3], "as it is installed");
    let enabled = |unit: &str| systemctl(&["is-enabled", unit]).stdout.trim() == "enabled";
    assert!(enabled("oci-nvidia-hook-cdi.path") && enabled("oci-nvidia-kubelet-plugin.service"));
    assert!(
        !enabled("oci-nvidia-nri.service"),
        "an alternative to the device plugin"
    );
    systemctl(&["disable", "oci-nvidia-hook-cdi.service"]).ok();
    assert_eq!(starts(), [false; 3]);
    systemctl(&["enable", "--runtime", "oci-nvidia-hook-cdi.service"]).ok();
    assert_eq!(starts(), [true; 3], "until the next boot");
    systemctl(&["mask", "oci-nvidia-hook-cdi.service"]).ok();
    assert_eq!(starts(), [false; 3]);
}
