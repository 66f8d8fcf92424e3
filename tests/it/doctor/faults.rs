//! Each fault of a host has a finding, and doctor reports an error exactly if containers do not start.

use std::process::Command;

use oci_nvidia_hook::testing::doctor::{Caller, Check, Status};

use super::fault_table::{FAULTS, MORE_FAULTS};
use super::host::changed;
use super::{NEEDS, examine};
use crate::support::{HOOK, run_with};

tests! {
    NEEDS => each_fault_has_its_finding, an_error_is_a_container_that_does_not_start;
}

/// NVML's answer without the kernel module: NVML_ERROR_DRIVER_NOT_LOADED.
const NOT_LOADED: &str = "echo init-error 9 >>$(find usr -name nvml.conf)";

fn hides_the_module(script: &str) -> bool {
    script.contains("proc/driver proc") || script.contains("rm -r proc/driver")
}

fn each_fault_has_its_finding() {
    let mut wrong = Vec::new();
    for (script, check, expected, status) in FAULTS {
        let dir = changed(&if hides_the_module(script) {
            format!("{script}; {NOT_LOADED}")
        } else {
            (*script).to_owned()
        });
        let outcomes = examine(dir.path(), Caller::default());
        let of_check: Vec<_> = outcomes
            .iter()
            .filter(|outcome| outcome.check == *check)
            .collect();
        let text = |outcome: &&Check| {
            let id = outcome.id.unwrap_or_default();
            format!("{id}: {}", outcome.what).replace(dir.path().to_str().unwrap(), "")
        };
        let is_it =
            |outcome: &&&Check| text(outcome).starts_with(expected) && outcome.status == *status;
        match of_check.iter().find(is_it) {
            Some(outcome) if outcome.fix.is_empty() => {
                wrong.push(format!("{script}\n  no fix: {outcome:?}"))
            }
            Some(_) => {}
            None => wrong.push(format!(
                "{script}\n  expected {check} {expected}\n  found {of_check:?}"
            )),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // A fault is reported once.
    let outcomes = examine(changed("rm dev/nvidia3").path(), Caller::default());
    assert_eq!(
        outcomes
            .iter()
            .filter(|outcome| outcome.status > Status::Skipped)
            .count(),
        1,
        "{outcomes:?}"
    );
}

/// The checks of the hook's own hook file, and of what other hook files and CDI specs permit an image to do.
const ABOUT_ENGINES: &[&str] = &["engines", "hook-env"];

/// Whether doctor reports an error, and which containers do not start: both are the same decision. The engines of the host are not part
/// of it, and a host without the kernel module cannot be simulated, because the fake driver answers without one.
fn an_error_is_a_container_that_does_not_start() {
    let faults = FAULTS
        .iter()
        .map(|(script, ..)| *script)
        .filter(|script| !hides_the_module(script));
    let mut wrong = Vec::new();
    for script in faults.chain(MORE_FAULTS.iter().copied()) {
        let dir = changed(script);
        let outcomes = examine(dir.path(), Caller::default());
        let errors: Vec<_> = outcomes
            .iter()
            .filter(|outcome| {
                outcome.status == Status::Error && !ABOUT_ENGINES.contains(&outcome.check)
            })
            .map(|outcome| {
                format!(
                    "{} {}: {}",
                    outcome.check,
                    outcome.id.unwrap(),
                    outcome.what
                )
            })
            .collect();
        let mut refused = Vec::new();
        for capabilities in ["compute,utility", "all"] {
            let spec = serde_json::json!({
                "root": {"path": dir.path().join("image")},
                "process": {
                    "env": ["NVIDIA_VISIBLE_DEVICES=all", format!("NVIDIA_DRIVER_CAPABILITIES={capabilities}")],
                    "capabilities": {"bounding": ["CAP_SYS_ADMIN"], "effective": ["CAP_SYS_ADMIN"]},
                },
            });
            let mut plan = Command::new(HOOK);
            plan.arg("--config")
                .arg(dir.path().join("etc/nvidia-container-runtime/config.toml"));
            plan.args(["plan", "-", "--json", "--root"]).arg(dir.path());
            let ran = run_with(&mut plan, spec.to_string().as_bytes());
            let document: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
            if document["outcome"] != "inject" {
                refused.push(format!("{capabilities}: {}", document["reason"]));
            }
            // What a start reports, doctor reports too.
            for finding in document["findings"].as_array().unwrap() {
                let id = finding["kind"]["id"]
                    .as_str()
                    .or_else(|| finding["id"].as_str())
                    .unwrap();
                if !outcomes.iter().any(|outcome| outcome.id == Some(id)) {
                    wrong.push(format!("{script}\n  doctor does not report {finding}"));
                }
            }
        }
        if errors.is_empty() != refused.is_empty() {
            wrong.push(format!(
                "{script}\n  doctor: {errors:?}\n  not started: {refused:?}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
