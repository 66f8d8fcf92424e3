//! `doctor --bundle`: the archive for a bug report, which anybody may read.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::json_schema;
use crate::support::{HOOK, Need, assert_says, read, run, scratch, write_file};

tests! {
    &[Need::Program("tar")] => bundle;
    &[Need::Root, Need::Program("tar")] => a_link_in_the_place_of_the_log;
}

/// The bundle contains everything that is documented, and existing files are not changed.
fn bundle() {
    let dir = scratch();
    let path = dir.path().join("b.tar.gz");
    let doctor = |path: &Path| run(Command::new(HOOK).args(["doctor", "--bundle"]).arg(path));
    let ran = doctor(&path);
    assert!(matches!(ran.code, Some(0 | 1 | 3)), "{ran:?}");
    assert_eq!(
        path.metadata().unwrap().permissions().mode() & 0o7777,
        0o600
    );
    let list = run(Command::new("tar").arg("-tzf").arg(&path)).ok();
    let report = format!(
        "wrote {} with {} files, for a bug report",
        path.display(),
        list.lines().count()
    );
    assert_eq!(ran.stderr, format!("oci-nvidia-hook: {report}\n"));
    for name in [
        "doctor.json",
        "status.json",
        "engines.json",
        "files/etc/os-release",
        "files/proc/version",
        "files/proc/devices",
    ] {
        assert!(
            list.lines()
                .any(|line| line == format!("oci-nvidia-hook/{name}")),
            "{name} is not in\n{list}"
        );
    }
    let json = run(Command::new("tar")
        .args(["-xzOf"])
        .arg(&path)
        .arg("oci-nvidia-hook/doctor.json"))
    .ok();
    assert!(json_schema::part("doctor", &json, "checks").len() > 20);
    let content = std::fs::read(&path).unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), &link).unwrap();
    for taken in [&path, &link, &dir.path().join("gone/b.tar.gz")] {
        let stderr = doctor(taken).failed(3);
        assert_says(&stderr, &["(ONH-054)", "hint: "]);
    }
    assert!(
        std::fs::read(&path).unwrap() == content && link.symlink_metadata().unwrap().is_symlink()
    );
    assert!(std::fs::metadata(dir.path().join("elsewhere")).is_err());
}

/// The bundle is for a public tracker, and the log can be in a directory that every user can write to.
fn a_link_in_the_place_of_the_log() {
    let dir = scratch();
    let (log, secret, config) = (
        dir.path().join("onh.log"),
        dir.path().join("secret"),
        dir.path().join("config.toml"),
    );
    write_file(&secret, "root:secret");
    write_file(
        &config,
        format!("[nvidia-container-cli]\ndebug = {log:?}\n"),
    );
    let packed = |name: &str| {
        let path = dir.path().join(name);
        run(Command::new(HOOK)
            .arg("--config")
            .arg(&config)
            .args(["doctor", "--bundle"])
            .arg(&path));
        let content = run(Command::new("tar").args(["-xzOf"]).arg(&path)).ok();
        let list = run(Command::new("tar").arg("-tzf").arg(&path)).ok();
        (
            content,
            list.lines().any(|line| line.ends_with("/left-out.txt")),
        )
    };
    // The old implementation: a copy by path.
    std::os::unix::fs::symlink(&secret, &log).unwrap();
    assert_eq!(read(&log), "root:secret");
    let (content, left_out) = packed("link.tar.gz");
    assert!(!content.contains("root:secret") && left_out, "{content}");
    std::fs::remove_file(&log).unwrap();
    std::fs::hard_link(&secret, &log).unwrap();
    let (content, left_out) = packed("hard.tar.gz");
    assert!(
        !content.contains("root:secret")
            && left_out
            && content.contains("the file has other hard links"),
        "{content}"
    );
    std::fs::remove_file(&log).unwrap();
    write_file(&log, "of a user");
    std::os::unix::fs::chown(&log, Some(7777), None).unwrap();
    let (content, left_out) = packed("user.tar.gz");
    assert!(
        !content.contains("of a user") && left_out && content.contains("another user, 7777"),
        "{content}"
    );
    std::fs::remove_file(&log).unwrap();
    write_file(&log, format!("{}the last line", "x".repeat(300 << 10)));
    let (content, left_out) = packed("log.tar.gz");
    assert!(content.contains("the last line") && !left_out);
}
