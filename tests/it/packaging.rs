//! What packages install beside the program: systemd and udev must take it.

use std::process::Command;

use crate::Test;
use crate::driver::FakeDriver;
use crate::support::{HOOK, Need, run, scratch, source};

pub const TESTS: &[Test] = &[
    ("packaging::systemd_takes_the_units", &[Need::Program("systemd-analyze")], systemd_takes_the_units),
    ("packaging::the_service_refreshes", &[Need::Root, Need::Program("cc")], the_service_refreshes),
    ("packaging::udev_rules_start_a_unit_that_is_there", &[], udev_rules_start_a_unit_that_is_there),
    ("packaging::cri_o_never_sees_the_precreate_stage", &[], cri_o_never_sees_the_precreate_stage),
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

/// It refuses to start on a stage that it does not know, in any file of the directories that it shares with Podman.
fn cri_o_never_sees_the_precreate_stage() {
    let json = |path: &str| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(source(path)).unwrap()).unwrap()
    };
    let hook = json("packaging/podman/oci-nvidia-hook-precreate.json");
    assert_eq!(hook["stages"], serde_json::json!(["precreate"]));
    assert_eq!(hook["hook"]["args"], serde_json::json!(["oci-nvidia-hook", "precreate"]));
    assert!(hook["hook"]["env"].as_array().is_some_and(|env| !env.is_empty()), "CVE-2025-23266");
    let shared = std::fs::read_dir(source("hooks.d")).unwrap().flatten();
    for file in shared {
        // The same name in both directories would be one hook: the later directory hides the other's.
        assert_ne!(file.file_name(), "oci-nvidia-hook-precreate.json");
        let hook = json(&format!("hooks.d/{}", file.file_name().display()));
        assert!(!hook["stages"].to_string().contains("precreate"), "{file:?}");
    }
    let conf = std::fs::read_to_string(source("packaging/podman/50-oci-nvidia-hook.conf")).unwrap();
    let lines: Vec<_> = conf.lines().filter(|line| !line.starts_with('#')).map(str::trim).collect();
    let dirs = ["\"/usr/share/containers/oci/hooks.d\",", "\"/usr/share/containers/oci/hooks.podman.d\","];
    assert_eq!(lines, ["[engine]", "hooks_dir = [", dirs[0], dirs[1], "]"], "Podman's own directory first");
}
