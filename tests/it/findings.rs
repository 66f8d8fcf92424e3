//! Causes the kinds of findings that no other test causes.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use serde_json::{Value, json};

use crate::driver::{ALL_GPUS, FakeDriver, Image, NEEDS, Waiting};
use crate::hints;
use crate::support::{HOOK, Need, private_dir, read, run, run_with, scratch, write_file};

tests! {
    NEEDS => of_commands, of_the_driver, of_a_container;
    &[Need::Program("cc")] => of_a_request;
}

fn of_commands() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "0"]));
    let file = dir.path().join("x.json");
    let (config, file) = (fake.config.to_str().unwrap(), file.to_str().unwrap());
    // A hint is run with another host, whose nodes "prepare" creates below its driver root.
    let good = FakeDriver::new(&["--gpus", "1"]);
    for (args, id) in rows! {
        &["unshare", "-Ur", HOOK, "prepare"][..], "ONH-006";
        &[HOOK, "--config", config, "files", "--device", "9"], "ONH-030";
        &[HOOK, "--config", config, "why", "no-such-name"], "ONH-053";
        &[HOOK, "--config", config, "cdi", "generate", "--output", file], "ONH-051";
        &[HOOK, "--config", config, "plan", "-", "--inventory", "/nowhere"], "ONH-052";
    } {
        let spec = json!({"process": {"env": ALL_GPUS}, "root": {"path": "/nowhere"}}).to_string();
        let ran = run_with(
            Command::new(args[0]).args(&args[1..]).env_clear(),
            spec.as_bytes(),
        );
        let said = format!("{}{}", ran.stdout, ran.stderr);
        assert!(
            said.contains(id) && said.contains("hint: ") && ran.code == Some(1),
            "{args:?}: {ran:?}"
        );
        for ran in hints::obey(&ran, &good.config) {
            assert!(
                matches!(ran.code, Some(0 | 1)) && !ran.stderr.contains("ONH-"),
                "{args:?}: {ran:?}"
            );
        }
    }
    assert!(
        !std::path::Path::new(file).exists(),
        "a spec without devices is none"
    );
}

/// Returns the numbers that `plan` prints for a container with this environment.
fn explained(fake: &FakeDriver, env: &[&str]) -> BTreeSet<String> {
    numbers(&fake.plan(env))
}

fn numbers(explanation: &Value) -> BTreeSet<String> {
    let findings = explanation["findings"].as_array().unwrap();
    findings
        .iter()
        .map(|finding| finding["id"].as_str().unwrap().to_owned())
        .collect()
}

#[track_caller]
fn assert_found(found: &BTreeSet<String>, id: &str) {
    assert!(found.contains(id), "{id} is not in {found:?}");
}

fn of_the_driver() {
    let libdir = "usr/lib/x86_64-linux-gnu";
    let fake = FakeDriver::new(&["--gpus", "1"]);
    assert_eq!(
        explained(&fake, ALL_GPUS),
        BTreeSet::new(),
        "nothing is wrong yet"
    );

    fs::remove_file(fake.root.join("dev/nvidia-modeset")).unwrap();
    assert_eq!(
        explained(&fake, ALL_GPUS),
        BTreeSet::new(),
        "only graphics needs it"
    );
    let graphics = [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=graphics",
    ];
    assert_found(&explained(&fake, &graphics), "ONH-223");

    // Its cache lists a library that now has another version.
    let (old, new) = (
        fake.root.join(libdir).join("libcuda.so.535.183.01"),
        fake.root.join(libdir).join("libcuda.so.550.1"),
    );
    fs::copy(&old, &new).unwrap();
    fs::remove_file(&old).unwrap();
    fs::remove_file(fake.root.join(libdir).join("libcuda.so.1")).unwrap();
    symlink(
        "libcuda.so.550.1",
        fake.root.join(libdir).join("libcuda.so.1"),
    )
    .unwrap();
    let found = explained(&fake, ALL_GPUS);
    assert_found(&found, "ONH-023");
    let utility = [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=utility",
    ];
    assert_eq!(explained(&fake, &utility), BTreeSet::new());

    let fake = FakeDriver::new(&["--gpus", "1"]);
    fs::copy(
        fake.root.join(libdir).join("libnvidia-nvvm.so.535.183.01"),
        fake.root.join(libdir).join("libnvidia-nvvm.so.550.1"),
    )
    .unwrap();
    run(Command::new("/sbin/ldconfig").arg("-r").arg(&fake.root)).ok();
    let soname = fake.root.join(libdir).join("libnvidia-nvvm.so.4");
    fs::remove_file(&soname).unwrap();
    symlink("libnvidia-nvvm.so.550.1", soname).unwrap();
    assert_found(&explained(&fake, ALL_GPUS), "ONH-203");

    let fake = FakeDriver::new(&["--gpus", "1"]);
    fs::remove_file(fake.root.join("etc/ld.so.cache")).unwrap();
    symlink("lib64", fake.root.join("usr/lib64")).unwrap();
    let found = explained(&fake, ALL_GPUS);
    assert_found(&found, "ONH-206");
    assert_found(&found, "ONH-208");

    let fake = FakeDriver::new(&["--gpus", "1"]);
    fake.set_nvml(|old| old + "\ninit-crash\n");
    assert_found(&explained(&fake, ALL_GPUS), "ONH-017");

    // Root without permission to change the root directory.
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let mut info = Command::new("setpriv");
    info.args([
        "--bounding-set",
        "-sys_chroot",
        "--inh-caps",
        "-sys_chroot",
        HOOK,
        "--config",
    ])
    .arg(&fake.config);
    let stderr = run(info.arg("info")).failed(1);
    assert!(stderr.contains("(ONH-020)\nhint: "), "{stderr}");
}

fn of_a_request() {
    let fake = FakeDriver::new(&["--gpus", "0", "--no-dev"]);
    fake.configure("");
    let text = read(&fake.config);
    let with = |line: &str| write_file(&fake.config, format!("{line}\n{text}"));
    with("accept-nvidia-visible-devices-envvar-when-unprivileged = false");
    assert_eq!(explained(&fake, ALL_GPUS), ["ONH-103".to_owned()].into());
    with("swarm-resource = \"GPU\"");
    assert_found(&explained(&fake, ALL_GPUS), "ONH-104");
    with("");
    assert_eq!(
        explained(&fake, &["NVIDIA_VISIBLE_DEVICE=all"]),
        ["ONH-317".to_owned()].into()
    );
    assert_eq!(
        explained(&fake, &["NVIDIA_BUILD_ID=1", "NVIDIA_VISIBLE_DEVICES=void"]),
        BTreeSet::new()
    );
    let hook = json!({"path": "/usr/bin/nvidia-container-runtime-hook"});
    let spec = json!({"process": {"env": ALL_GPUS}, "root": {"path": "/nowhere"}, "hooks": {"prestart": [hook]}});
    let ran = fake.run_with(&["plan", "-", "--json"], &spec.to_string());
    let explanation = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(numbers(&explanation), ["ONH-105".to_owned()].into());
}

fn of_a_container() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let libcuda = image.rootfs.join("usr/lib/x86_64-linux-gnu/libcuda.so.1");
    write_file(&libcuda, "the image's own");
    write_file(
        libcuda.with_file_name("libnvidia-ml.so.535.183.01"),
        "the image's own",
    );
    write_file(libcuda.with_file_name("libcuda.so.535.183.01"), "");
    std::os::unix::fs::symlink("sh", image.rootfs.join("usr/bin/nvidia-smi")).unwrap();
    let proc = "mount -t tmpfs proc $rootfs/proc; mkdir -p $rootfs/proc/driver; touch $rootfs/proc/driver/nvidia";
    let container = Waiting::start(dir.path(), &image.rootfs, ALL_GPUS, proc);
    let stderr = container.hook(&fake.config).failed(1);
    assert!(stderr.contains("(ONH-045)\nhint: "), "{stderr}");
    container.output("rm /proc/driver/nvidia; mkdir /proc/driver/nvidia");
    let private = private_dir();
    let log = private.path().join("log");
    let config = dir.path().join("config.toml");
    let text = read(&fake.config);
    write_file(&config, format!("{text}debug = \"{}\"\n", log.display()));
    container.hook(&config).ok();
    let log = read(log);
    assert!(log.contains(": note: "), "{log}");
    let lib = "usr/lib/x86_64-linux-gnu";
    let hidden: Vec<_> = log
        .lines()
        .filter(|line| line.contains("(ONH-301)"))
        .collect();
    for path in [
        "/usr/bin/nvidia-smi",
        &format!("/{lib}/libcuda.so.1"),
        &format!("/{lib}/libnvidia-ml.so.535.183.01"),
    ] {
        assert!(
            hidden
                .iter()
                .any(|line| line.contains(&format!("{path:?}"))),
            "{path}: {log}"
        );
    }
    assert_eq!(hidden.len(), 3, "an empty file is a mount point: {log}");

    // A state whose process has ended.
    let gone =
        json!({"id": "gone", "pid": i32::MAX, "bundle": dir.path().join("bundle")}).to_string();
    let ran = fake.run_with(&["prestart"], &gone);
    assert!(ran.stderr.contains("(ONH-040)\nhint: "), "{ran:?}");
    ran.failed(1);

    for (output, id) in [
        ("/proc/x.json", "ONH-050"),
        (dir.path().join("x.json").to_str().unwrap(), "ONH-403"),
    ] {
        let ran = fake.run(&["cdi", "generate", "--output", output]);
        assert!(ran.stderr.contains(&format!("({id})")), "{output}: {ran:?}");
    }
}
