//! `doctor` on hosts that are directories: a bare one, one without problems, one with many problems, and one for each problem.
//! The output for the first three is in `tests/golden` and must be reviewed when it changes: `UPDATE_GOLDEN=1 cargo test --test it --
//! doctor::`.

pub mod engines;
pub mod fault_table;
pub mod faults;
mod host;
pub mod kubelet_plugin;
pub mod packages;
pub mod user;

use std::path::Path;
use std::process::Command;

use ::engines::status;
use base::paths::HostPath;
use base::tree::Tree;
use oci_nvidia_hook::testing::cli::doctor_text::{self, View};
use oci_nvidia_hook::testing::cli::status as status_words;
use oci_nvidia_hook::testing::doctor::{self, Caller, Check, Status};
use serde_json::Value;

use crate::golden;
use crate::harness::has_own_process;
use crate::json_schema;
use crate::support::{HOOK, Need, read, run, scratch, source};
use host::{changed, good_host};

const NEEDS: &[Need] = &[Need::OwnProcess, Need::Root, Need::Program("cc")];

tests! {
    &[Need::OwnProcess] => a_bare_host, this_host, the_man_page_explains_each_check;
    NEEDS => a_good_host, a_broken_host, a_driver_root_with_files_only, nothing_is_changed, one_sentence_for_all_names_of_a_library;
}

fn examine(host: &Path, caller: Caller) -> Vec<Check> {
    assert!(has_own_process(), "this test lacks Need::OwnProcess");
    let host = Tree::open(&HostPath::new(host)).unwrap();
    doctor::examine(&doctor::inspect(&host, None, caller))
}

/// Compares what `doctor`, `doctor --all` and `status` print for a host with the golden files.
#[track_caller]
fn assert_golden(name: &str, dir: &Path) {
    let outcomes = examine(dir, Caller::default());
    let report = status::report(&Tree::open(&HostPath::new(dir)).unwrap(), None);
    let dir = dir.to_str().unwrap();
    let outcomes: Vec<_> = outcomes
        .into_iter()
        .map(|outcome| Check {
            what: below_root(&outcome.what, dir),
            fix: below_root(&outcome.fix, dir),
            ..outcome
        })
        .collect();
    for (command, all) in [("doctor", false), ("doctor --all", true)] {
        golden::check_text(
            &format!("{}-{name}", command.replace(" --", "-")),
            &format!("oci-nvidia-hook {command}"),
            |terminal| doctor_text::text(&outcomes, View { all, is_root: true }, terminal),
        );
    }
    golden::check_text(
        &format!("status-{name}"),
        "oci-nvidia-hook status",
        |terminal| status_words::text(&report, terminal),
    );
}

/// Removes the directory of the host from a text. It can be the driver root, too.
fn below_root(text: &str, dir: &str) -> String {
    text.replace(&format!("{dir:?}"), "\"/\"").replace(dir, "")
}

fn a_bare_host() {
    let dir = scratch();
    assert_golden("bare", dir.path());
}

fn a_good_host() {
    assert_golden("good", &good_host().root);
    let outcomes = examine(&good_host().root, Caller::default());
    let bad: Vec<_> = outcomes
        .iter()
        .filter(|outcome| outcome.status > Status::Skipped)
        .collect();
    assert!(bad.is_empty(), "{bad:?}");
}

/// Several faults at once, as after a failed update.
fn a_broken_host() {
    let dir = changed(
        "sed -i 's/^driver .*/driver 535.183.01/' usr/lib/*/nvml.conf; rm dev/nvidia-uvm dev/nvidia3; \
         chgrp 4321 dev/nvidia*; chmod 660 dev/nvidia*; sed -i '/container-cli/a user = \"nobody\"' \
             etc/nvidia-container-runtime/config.toml; echo 'bogus = 1' | cat - etc/nvidia-container-runtime/config.toml >c; \
         mv c etc/nvidia-container-runtime/config.toml; rm usr/lib/*/libcuda.so*; rm run/nvidia-persistenced/socket; \
         sed 's/prestart/precreate/' usr/share/containers/oci/hooks.d/oci-nvidia-hook.json >usr/share/containers/oci/hooks.d/own.json; \
         printf '#!/bin/sh\\necho crun version 1.24\\n' >usr/bin/crun; touch usr/bin/nvidia-ctk; \
         printf '[engine]\\nhooks_dir = [\"/etc/containers/oci/hooks.d\"]\\n' >etc/containers/containers.conf; \
         echo '0 0' >sys/fs/selinux/booleans/container_use_devices",
    );
    assert_golden("broken", dir.path());
}

/// On GKE's nodes, the driver root contains only files; /dev and /proc are the host's, and NVML must run there.
fn a_driver_root_with_files_only() {
    let dir = changed(
        "mkdir -p home/kubernetes/bin/nvidia/usr/lib home/kubernetes/bin/nvidia/etc; \
         mv usr/lib/x86_64-linux-gnu home/kubernetes/bin/nvidia/usr/lib; mv etc/ld.so.* home/kubernetes/bin/nvidia/etc; \
         sed -i '/container-cli/a root = \"/home/kubernetes/bin/nvidia\"' etc/nvidia-container-runtime/config.toml",
    );
    let outcomes = examine(dir.path(), Caller::default());
    let nvml = outcomes
        .iter()
        .find(|outcome| outcome.check == "nvml")
        .unwrap();
    assert_eq!(
        (nvml.status, nvml.what.as_str()),
        (Status::Ok, "8 GPUs answered: driver 535.183.01, CUDA 12.2")
    );
    assert!(
        outcomes
            .iter()
            .all(|outcome| outcome.status <= Status::Skipped),
        "{outcomes:?}"
    );
}

fn nothing_is_changed() {
    let dir = changed("true");
    let before = crate::support::fingerprint(dir.path(), "none");
    examine(dir.path(), Caller::default());
    assert!(before == crate::support::fingerprint(dir.path(), "none"));
}

/// oci-nvidia-hook(8) explains each check, under the name that doctor prints.
fn the_man_page_explains_each_check() {
    let page = read(source("docs/man/oci-nvidia-hook.8")).replace("\\-", "-");
    let table = page
        .split("\n.SH CHECKS\n")
        .nth(1)
        .unwrap()
        .split("\n.SH ")
        .next()
        .unwrap();
    let mut explained = Vec::new();
    for section in table.split("\n.SS ").skip(1) {
        let (name, text) = section.split_once('\n').unwrap();
        let rows = text
            .split(".TP\n.B ")
            .skip(1)
            .map(|row| row.split_once('\n').unwrap());
        for (check, meaning) in rows {
            assert!(meaning.len() > 10, "{check}: {meaning}");
            explained.push((name.to_owned(), check.to_owned()));
        }
    }
    let names = doctor::names()
        .into_iter()
        .map(|(section, name)| (section.to_string(), name.to_owned()));
    assert_eq!(explained, names.collect::<Vec<_>>());
}

/// The built program: the text, the JSON and the exit status agree.
fn this_host() {
    let json = run(Command::new(HOOK).args(["doctor", "--json"]));
    let outcomes = json_schema::part("doctor", &json.stdout, "checks");
    for outcome in &outcomes {
        let keys: Vec<_> = outcome
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let is_problem =
            ["note", "warning", "error"].contains(&outcome["status"].as_str().unwrap());
        let expected = ["check", "fix", "id", "section", "status", "what", "why"];
        let of_all = ["check", "section", "status", "what"];
        assert_eq!(
            keys,
            if is_problem { &expected[..] } else { &of_all },
            "{outcome}"
        );
    }
    let has = |status: &str| outcomes.iter().any(|outcome| outcome["status"] == status);
    let expected = if has("error") {
        3
    } else {
        i32::from(has("warning"))
    };
    assert_eq!(json.code, Some(expected));
    let words = run(Command::new(HOOK).args(["doctor", "--all"]));
    assert_eq!(words.code, Some(expected));
    // A section has its own exit status.
    let cdi = run(Command::new(HOOK).args(["doctor", "--json", "cdi", "kubelet"]));
    let of_sections = json_schema::part("doctor", &cdi.stdout, "checks");
    let is_part =
        |outcome: &&Value| ["cdi", "kubelet"].contains(&outcome["section"].as_str().unwrap());
    assert_eq!(
        of_sections,
        outcomes.iter().filter(is_part).cloned().collect::<Vec<_>>()
    );
    assert!(
        !of_sections.is_empty() && cdi.code <= Some(expected),
        "{cdi:?}"
    );
    for outcome in &outcomes {
        assert!(
            words.stdout.contains(outcome["check"].as_str().unwrap()),
            "{}",
            words.stdout
        );
    }
}

/// The linker cache can list a library of another version under several names. The fix is for the driver root.
fn one_sentence_for_all_names_of_a_library() {
    let dir = changed(
        "cd usr/lib/x86_64-linux-gnu; mv libcuda.so.535.183.01 libcuda.so.550.54.14; \
         for name in libcuda.so libcuda.so.1; do ln -sfn libcuda.so.550.54.14 $name; done; cd ../../..; /sbin/ldconfig -r .",
    );
    let checks = examine(dir.path(), Caller::default());
    let check = checks
        .iter()
        .find(|check| check.id == Some("ONH-023"))
        .unwrap_or_else(|| panic!("{checks:?}"));
    assert_eq!(check.status, Status::Error, "the default request needs it");
    assert_eq!(
        check.what.matches("libraries are ignored").count(),
        1,
        "{}",
        check.what
    );
    let root = dir.path();
    let fix = format!(
        "reboot the host if its driver was just updated; otherwise install libcuda.so of driver 535.183.01: \
         chroot {root:?} zypper install nvidia-compute-G06"
    );
    assert_eq!(check.fix, fix);
}
