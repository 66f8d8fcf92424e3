//! The directory for the Open Build Service: it is generated from `packaging/rpm.spec`, and is committed so that it can be
//! uploaded without a build step.

use std::path::Path;
use std::process::Command;

use crate::support::{Need, run, scratch, source};

tests! {
    &[] => the_folder_is_current, the_spec_has_what_reviewers_ask_for, changes_have_the_form_of_osc;
    &[Need::Program("rpmspec")] => the_spec_builds_what_make_rpm_builds;
    &[Need::Program("rpmlint")] => rpmlint_finds_no_error;
}

fn read(name: &str) -> String {
    std::fs::read_to_string(source("packaging/obs").join(name)).unwrap()
}

fn the_folder_is_current() {
    let made = scratch();
    run(Command::new(source("packaging/obs/update")).arg(made.path())).ok();
    for name in ["oci-nvidia-hook.spec", "_service"] {
        let current = std::fs::read_to_string(made.path().join(name)).unwrap();
        assert!(
            read(name) == current,
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
    assert!(
        check.contains("auditable; fi && CARGO_INCREMENTAL=0") && check.contains("test"),
        "{check}"
    );
    // openSUSE and Fedora enable and start units themselves. Only an upgrade starts the enabled unit that writes the spec.
    assert!(!of_obs.contains(".preset"), "{of_obs}");
    assert_eq!(of_obs.matches("systemctl start").count(), 1, "{of_obs}");
}

fn the_spec_has_what_reviewers_ask_for() {
    let spec = read("oci-nvidia-hook.spec");
    for text in [
        "\n# Copyright (c) ",
        "\n# This file is under MIT license\n",
        "\nURL:            http",
        "\nBuildRequires:  cargo-packaging\n",
        "\nRelease:        0\n",
        "\n%{?systemd_ordering}\n",
        "\n%autosetup -a1\n",
        "\n%{cargo_build} ",
        "\n%{cargo_test} ",
        "%{_rundir}/",
    ] {
        assert!(spec.contains(text), "{text:?}");
    }
    assert!(
        spec.ends_with("%changelog\n") && !spec.contains("plain"),
        "{spec}"
    );
    // The spec reads the files that the services create.
    let (service, url) = (
        read("_service"),
        spec.lines()
            .find_map(|line| line.strip_prefix("URL:"))
            .unwrap()
            .trim(),
    );
    assert!(service.contains(&format!("<param name=\"url\">{url}.git</param>")));
    assert!(service.contains(concat!(
        "<param name=\"revision\">v",
        env!("CARGO_PKG_VERSION"),
        "</param>"
    )));
    assert_eq!(
        spec.matches(".tar.zst\n").count(),
        service
            .matches("<param name=\"compression\">zst</param>")
            .count()
    );
}

fn changes_have_the_form_of_osc() {
    let changes = read("oci-nvidia-hook.changes");
    let rule = "-".repeat(67);
    let entries: Vec<_> = changes.split(&format!("{rule}\n")).skip(1).collect();
    assert!(changes.starts_with(&rule) && !entries.is_empty());
    for entry in &entries {
        let (head, text) = entry.split_once("\n\n").unwrap();
        let (date, author) = head.split_once(" - ").unwrap();
        let words: Vec<_> = date.split(' ').collect();
        assert!(
            words.len() == 6 && words[4] == "UTC" && words[3].matches(':').count() == 2,
            "{head}"
        );
        assert!(author.contains(" <") && author.ends_with('>'), "{head}");
        assert!(text.starts_with("- ") && text.ends_with("\n\n"), "{text:?}");
        assert!(text.lines().all(|line| line.len() <= 67), "{text}");
    }
    assert!(
        entries[0].contains(env!("CARGO_PKG_VERSION")),
        "the first entry is of this version"
    );
    for files in std::fs::read_dir(source("tests/fixtures/rpm"))
        .unwrap()
        .flatten()
    {
        let name = files.file_name().into_string().unwrap();
        if let Some(package) = name.strip_suffix(".files") {
            assert!(
                changes.contains(&format!("  * {package} ")),
                "the first entry lists {package}"
            );
        }
    }
}

fn rpmlint_finds_no_error() {
    let mut lint = Command::new("rpmlint");
    lint.arg("-c")
        .arg(source("packaging/rpmlint.toml"))
        .arg(source("packaging/obs/oci-nvidia-hook.spec"));
    let text = run(&mut lint).ok();
    assert!(
        text.contains("1 specfiles checked; 0 errors, 0 warnings"),
        "{text}"
    );
}
