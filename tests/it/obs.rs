//! The directory for the Open Build Service: it is generated from `packaging/rpm.spec`, and is committed so that it can be
//! uploaded without a build step.

use std::path::Path;
use std::process::Command;

use crate::support::{Need, assert_says, read, run, scratch, source};

tests! {
    &[] => the_folder_is_current;
    &[Need::Program("rpmspec")] => the_spec_builds_what_make_rpm_builds;
}

fn the_folder_is_current() {
    let made = scratch();
    run(Command::new(source("packaging/obs/update")).arg(made.path())).ok();
    for name in ["oci-nvidia-hook.spec", "_service"] {
        let current = read(made.path().join(name));
        assert!(
            read(source("packaging/obs").join(name)) == current,
            "packaging/obs/{name} is out of date; hint: run packaging/obs/update"
        );
    }
}

/// Both specs as read by openSUSE's rpm. `zypper.rs` builds the packages from one of them.
fn the_spec_builds_what_make_rpm_builds() {
    let parsed = |spec: &Path, options: &[&str]| {
        let mut rpmspec = Command::new("rpmspec");
        rpmspec
            .arg("--load")
            .arg(source("tests/fixtures/rpm/macros.suse"))
            .args(["--define", "test_cargo cargo"]);
        run(rpmspec.args(options).arg("-P").arg(spec)).ok()
    };
    let of_rpm = parsed(&source("packaging/rpm.spec"), &["--without", "presets"]);
    let of_obs = parsed(&source("packaging/obs/oci-nvidia-hook.spec"), &[]);
    let lines = |text: &str| -> Vec<String> {
        let text = text
            .split("\n%changelog")
            .next()
            .unwrap()
            .replace(".tar.zst", ".tar.gz");
        let lines = text
            .lines()
            .filter(|line| !line.starts_with('#') && *line != "BuildRequires:  zstd");
        // An empty macro leaves a space.
        lines
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .filter(|line| !line.is_empty())
            .collect()
    };
    assert_eq!(lines(&of_rpm), lines(&of_obs));
    let check = of_obs
        .split("\n%check\n")
        .nth(1)
        .unwrap()
        .split("\n%p")
        .next()
        .unwrap();
    assert_says(check, &["auditable; fi && CARGO_INCREMENTAL=0", "test"]);
    // openSUSE and Fedora enable and start units themselves. Only an upgrade starts the enabled unit that writes the spec.
    assert!(!of_obs.contains(".preset"), "{of_obs}");
    assert_eq!(of_obs.matches("systemctl start").count(), 1, "{of_obs}");
}
