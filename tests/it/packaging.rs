//! What packages install beside the program: systemd and udev must take it.

use std::process::Command;

use crate::Test;
use crate::driver::FakeDriver;
use crate::support::{HOOK, Need, run, scratch, source};

pub const TESTS: &[Test] = &[
    ("packaging::systemd_takes_the_units", &[Need::Program("systemd-analyze")], systemd_takes_the_units),
    ("packaging::the_service_refreshes", &[Need::Root, Need::Program("cc")], the_service_refreshes),
    ("packaging::udev_rules_start_a_unit_that_is_there", &[], udev_rules_start_a_unit_that_is_there),
];

fn systemd_takes_the_units() {
    let dir = scratch();
    let mut verify = Command::new("systemd-analyze");
    verify.arg("verify");
    let mut seen = 0;
    for unit in std::fs::read_dir(source("packaging/systemd")).unwrap().flatten() {
        // systemd looks whether the program is there.
        let text = std::fs::read_to_string(unit.path()).unwrap().replace("/usr/bin/oci-nvidia-hook", HOOK);
        let path = dir.path().join(unit.file_name());
        std::fs::write(&path, text).unwrap();
        verify.arg(path);
        seen += 1;
    }
    assert_eq!(seen, 2);
    let ran = run(&mut verify);
    assert!(ran.code == Some(0) && ran.stderr.is_empty(), "{ran:?}");
}

/// Its command line, with the options of an administrator's file: systemd gives them to the shell as they are.
fn the_service_refreshes() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let unit = std::fs::read_to_string(source("packaging/systemd/oci-nvidia-hook-cdi.service")).unwrap();
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/bin/sh -c '")).unwrap();
    let program = format!("{HOOK} --config {}", fake.config.display());
    let script = line.strip_suffix('\'').unwrap().replace("/usr/bin/oci-nvidia-hook", &program);
    let path = dir.path().join("nvidia.yaml");
    let start = || {
        let mut service = Command::new("/bin/sh");
        service.args(["-c", &script]).env("CDI_OPTIONS", format!("--name-strategy uuid --output {}", path.display()));
        run(&mut service)
    };
    assert_eq!(start().ok(), "");
    assert!(!std::fs::read_to_string(&path).unwrap().contains("name: \"0\""));
    // Three times, and then it is an error.
    std::fs::remove_file(&path).unwrap();
    fake.set_nvml(|old| old + "\ninit-error 9\n");
    let stderr = start().failed(1);
    assert_eq!(stderr.matches("oci-nvidia-hook: ").count(), 3, "{stderr}");
}

fn udev_rules_start_a_unit_that_is_there() {
    let rules = std::fs::read_to_string(source("packaging/udev/90-oci-nvidia-hook.rules")).unwrap();
    let lines: Vec<_> = rules.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(lines.len(), 3);
    for line in lines {
        let unit = line.split(['"', ' ']).find(|word| word.ends_with(".service")).unwrap();
        assert!(source("packaging/systemd").join(unit).is_file(), "{line}");
        let keys = line.split(", ").filter(|part| part.contains("==")).count();
        assert!(keys >= 3 && line.starts_with("ACTION=="), "{line}");
    }
}
