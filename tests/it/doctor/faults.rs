//! Each fault of a host has a finding. `host_states` compares the errors with starts.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use oci_nvidia_hook::testing::doctor::{Caller, Check, Status};

use super::examine;
use super::fault_table::FAULTS;
use super::host::changed;
use crate::hints;
use crate::support::{HOOK, Need, run, source};

tests! {
    &[Need::OwnProcess, Need::Root, Need::Programs(&["cc", "unshare"])] => each_fault_has_its_finding;
}

/// NVML's answer without the kernel module: NVML_ERROR_DRIVER_NOT_LOADED.
const NOT_LOADED: &str = "echo init-error 9 >>$(find usr -name nvml.conf)";

/// Findings about the hook mode. Their commands prepare another mode, which works.
const OF_THE_HOOK_MODE: [&str; 2] = ["ONH-501", "ONH-506"];

fn hides_the_module(script: &str) -> bool {
    script.contains("proc/driver proc") || script.contains("rm -r proc/driver")
}

/// Whether these commands change a host, and need nothing that a test lacks.
fn is_changed_by(commands: &[&str]) -> bool {
    let own =
        ["prepare", "cdi generate", "cdi refresh"].map(|verb| format!("oci-nvidia-hook {verb}"));
    let is_local = |command: &&str| {
        let starts = |start: &str| command.starts_with(start);
        own.iter().any(|start| starts(start))
            || ["chmod ", "chown ", "echo ", "rm "].into_iter().any(starts)
    };
    !commands.is_empty() && commands.iter().all(is_local)
}

/// Runs the commands of a finding on this host as `/`. Returns whether doctor still reports the finding, as it does before.
fn is_found_after(host: &Path, finding: &Check, commands: &[&str]) -> bool {
    let mut as_host = Command::new(source("tests/fake-driver/as-host"));
    let script = format!(
        "mount -t tmpfs run /run; cp -a '{0}/run/.' /run; mkdir -p /dev/char /etc/modules-load.d; mount -t tmpfs char /dev/char; \
         cp -a '{0}/dev/char/.' /dev/char; PATH='{1}':$PATH; \
         is_found() {{ oci-nvidia-hook doctor --json >'{0}/found' || true; grep -q '\"{2}\"' '{0}/found'; }}; \
         is_found; {3}; if is_found; then echo still; fi",
        host.display(),
        Path::new(HOOK).parent().unwrap().display(),
        finding.id.unwrap(),
        commands.join("; ")
    );
    let ran = run(as_host.arg(host).args(["sh", "-ec", &script]));
    ran.ok().ends_with("still\n")
}

fn each_fault_has_its_finding() {
    let (mut wrong, mut followed) = (Vec::new(), BTreeSet::new());
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
            Some(outcome) => {
                let fix = outcome.fix.replace(dir.path().to_str().unwrap(), "");
                let commands = hints::commands(&fix);
                for command in &commands {
                    hints::assert_pasted(command);
                }
                if !is_changed_by(&commands) {
                    continue;
                }
                followed.insert(outcome.id.unwrap());
                let is_fixed = !is_found_after(dir.path(), outcome, &commands);
                if !is_fixed && !OF_THE_HOOK_MODE.contains(&outcome.id.unwrap()) {
                    wrong.push(format!("{script}\n  still there after {fix}"));
                }
            }
            None => wrong.push(format!(
                "{script}\n  expected {check} {expected}\n  found {of_check:?}"
            )),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(followed.len() > 8, "{followed:?}");
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
