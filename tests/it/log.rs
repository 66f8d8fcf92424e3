//! What the hook keeps on the host, and who else can read or write it: the log of `debug`, and the run directory.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::path::Path;
use std::process::Command;

use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::json_schema;
use crate::support::{HOOK, chmod, private_dir, run, scratch, write_file};

tests! {
    NEEDS => only_in_directories_of_root, debug_shows_what_a_command_reads;
}

/// The log is on stderr, and stdout is unchanged.
fn debug_shows_what_a_command_reads() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let (config, specs) = (fake.config.to_str().unwrap(), dir.path().to_str().unwrap());
    let hook = |arguments: &[&str]| {
        run(Command::new(HOOK)
            .args(["--config", config])
            .args(arguments)
            .env_clear())
    };
    let spec = dir.path().join("nvidia.yaml").display().to_string();
    hook(&["cdi", "generate", "--output", &spec]).ok();
    let (read, root) = (
        format!("read {config:?}"),
        format!("driver root {:?}", fake.root),
    );
    for (arguments, lines) in rows! {
        &["info"][..], vec![read.clone(), root.clone(), "NVML is \"/usr/lib/".into(), "NVML answered after ".into()];
        &["files", "--libraries"], vec![read.clone(), root.clone()];
        &["cdi", "check", "--spec-dir", specs], vec![read, root, format!("read the CDI spec {spec:?}")];
        &["version"], Vec::new();
    } {
        let plain = hook(arguments);
        let debug = hook(&[arguments, &["--debug"]].concat());
        assert_eq!(
            (&debug.stdout, debug.code),
            (&plain.stdout, plain.code),
            "{arguments:?}"
        );
        let log: Vec<_> = debug
            .stderr
            .lines()
            .filter_map(|line| line.split_once("]: debug: "))
            .map(|(_, l)| l)
            .collect();
        for line in lines {
            assert!(
                log.iter().any(|one| one.starts_with(&line)),
                "{arguments:?}: {line}: {debug:?}"
            );
        }
        assert!(!plain.stderr.contains("debug: "), "{plain:?}");
    }
}

/// A user of the host.
const USER: Option<u32> = Some(7777);

/// The user creates the log first, and owns what root writes to it; or links it to a file of root. doctor reports what the hook does.
fn only_in_directories_of_root() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let place = private_dir();
    let at = |name: &str| place.path().join(name);
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    for (name, mode) in [
        ("tmp", 0o1777),
        ("theirs", 0o755),
        ("group", 0o770),
        ("ours", 0o755),
    ] {
        fs::create_dir(at(name)).unwrap();
        chmod(at(name), mode);
    }
    chown(at("theirs"), USER, None).unwrap();
    write_file(at("ours/secret"), "secret");
    for name in [
        "tmp/first.log",
        "tmp/roots.log",
        "theirs/first.log",
        "ours/given.log",
        "ours/open.log",
    ] {
        write_file(at(name), "old");
    }
    for name in ["tmp/first.log", "theirs/first.log", "ours/given.log"] {
        chown(at(name), USER, None).unwrap();
    }
    chmod(at("ours/open.log"), 0o666);
    symlink(at("ours/secret"), at("tmp/link.log")).unwrap();
    symlink(at("ours"), at("tmp/ours")).unwrap();
    fs::hard_link(at("ours/secret"), at("ours/hard.log")).unwrap();
    let content = |name: &str| fs::read_to_string(at(name)).ok();
    for (log, why) in [
        ("tmp/new.log", "other users can write to the directory"),
        ("tmp/first.log", "other users can write to the directory"),
        ("tmp/roots.log", "other users can write to the directory"),
        ("tmp/link.log", "other users can write to the directory"),
        (
            "tmp/ours/x.log",
            "is a symbolic link that another user may have created",
        ),
        ("group/new.log", "other users can write to the directory"),
        ("theirs/first.log", "belongs to user 7777"),
        ("theirs/new.log", "belongs to user 7777"),
        ("ours/given.log", "it belongs to user 7777"),
        ("ours/open.log", "other users can write to it"),
        ("ours/hard.log", "it has other hard links"),
        ("ours", "it is not a regular file"),
        ("gone/new.log", "no such file or directory (ENOENT)"),
        ("ours/good.log", ""),
        ("ours/good.log", ""),
    ] {
        let before = content(log);
        fake.configure(&format!("debug = \"{}\"", at(log).display()));
        let (found, reason) = of_doctor(&fake.config);
        assert_eq!(content(log), before, "{log}: doctor only checks");
        let ran = container.hook(&fake.config);
        if why.is_empty() {
            assert!(
                !ran.stderr.contains("ONH-102") && found == "ok",
                "{log}: {ran:?} {reason}"
            );
            assert!(
                content(log).unwrap().contains(": note: waiting: injected "),
                "{log}"
            );
        } else {
            let said = ran
                .stderr
                .lines()
                .find(|line| line.contains("ONH-102"))
                .unwrap_or_default();
            // Words that Podman takes for its own errors are replaced on stderr.
            let said = said.replace(
                "it does not exist (ENOENT)",
                "no such file or directory (ENOENT)",
            );
            assert!(said.contains(why), "{log}: {ran:?}");
            assert!(
                found == "warning" && said.contains(&reason),
                "{log}: the hook: {said}, doctor: {reason}"
            );
            assert_eq!(content(log), before, "{log}");
        }
        ran.ok();
    }
    assert_eq!(content("ours/secret").unwrap(), "secret");
    assert_eq!(
        at("ours/good.log").metadata().unwrap().mode() & 0o7777,
        0o640
    );
}

/// The status of doctor's check of the log, and its message.
fn of_doctor(config: &Path) -> (String, String) {
    let ran = run(Command::new(HOOK)
        .arg("--config")
        .arg(config)
        .args(["doctor", "--json"]));
    let checks = json_schema::part("doctor", &ran.stdout, "checks");
    let log = checks.iter().find(|check| check["check"] == "log").unwrap();
    let text = |key: &str| log[key].as_str().unwrap().to_owned();
    (text("status"), text("what"))
}
