//! What packages install beside the program: systemd and udev must take it.

use std::process::Command;

use crate::Test;
use crate::support::{HOOK, Need, run, scratch, source};

pub const TESTS: &[Test] = &[
    ("packaging::systemd_takes_the_units", &[Need::Program("systemd-analyze")], systemd_takes_the_units),
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
