//! Each fault of a host has a finding. `host_states` compares the errors with starts.

use oci_nvidia_hook::testing::doctor::{Caller, Check, Status};

use super::fault_table::FAULTS;
use super::host::changed;
use super::{NEEDS, examine};

tests! {
    NEEDS => each_fault_has_its_finding;
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
