//! What a container that was given GPUs lacks, or cannot use. Pure.
//!
//! The hook does not stop such a container, and engines do not show the warnings of a hook that succeeds. So the record must not
//! state that the container got what it asked for.

use base::report::Kind;
use findings::catalog;

use super::StoredFinding;

/// The findings that report a shortfall, the most important first, with the end of a sentence that begins with "the container got".
const SHORTFALLS: [(&Kind, &str); 17] = [
    (
        &catalog::NO_GLIBC,
        "its GPUs, but its image cannot load the driver's programs and libraries",
    ),
    (
        &catalog::NO_ACCESS,
        "its GPUs, but its process cannot open the device nodes",
    ),
    (
        &catalog::NO_CGROUPS,
        "its GPUs, but its device cgroup denies them",
    ),
    (
        &catalog::DENIED_BY_PROGRAM,
        "its GPUs, but its device cgroup denies them",
    ),
    (
        &catalog::SHARED_CGROUP,
        "its GPUs, but its device cgroup may deny them",
    ),
    (
        &catalog::CGROUP_ABOVE,
        "its GPUs, but its device cgroup may deny them",
    ),
    (&catalog::GPU_LEFT_OUT, "fewer GPUs than it requested"),
    (
        &catalog::MIG_LEFT_OUT,
        "fewer MIG devices than it requested",
    ),
    (
        &catalog::MIG_WHOLE,
        "a GPU in MIG mode, which CUDA programs cannot use",
    ),
    (
        &catalog::NO_UVM,
        "its GPUs, but CUDA does not work without \"/dev/nvidia-uvm\"",
    ),
    (
        &catalog::IMAGE_CACHE,
        "its GPUs, but the linker cache of its image does not contain the driver's libraries",
    ),
    (
        &catalog::LACKING_LIBRARIES,
        "its GPUs, but not all driver libraries that it requested",
    ),
    (
        &catalog::LEFT_OUT,
        "its GPUs, but not all driver files that it requested",
    ),
    (
        &catalog::NO_FILE,
        "its GPUs, but not all files that config.toml names",
    ),
    (
        &catalog::NO_FEATURE,
        "its GPUs, but not all other devices that it requested",
    ),
    (
        &catalog::LOCAL_SOURCE,
        "its GPUs, but not all sockets and directories of the driver's daemons",
    ),
    (
        &catalog::FEATURE_VALUE,
        "its GPUs, but a variable has no effect, because its value is unknown",
    ),
];

/// The findings of a container that started without the GPUs that it requested, or that it has device nodes of.
const WITHOUT_GPUS: [&Kind; 4] = [
    &catalog::REFUSED,
    &catalog::NODES_ONLY,
    &catalog::NO_GPU_HERE,
    &catalog::MISSPELLED_VARIABLE,
];

/// Reports whether one of these findings states that the container started without its GPUs.
pub(crate) fn is_without_gpus(findings: &[StoredFinding]) -> bool {
    findings
        .iter()
        .any(|finding| WITHOUT_GPUS.iter().any(|kind| finding.id == kind.id()))
}

/// The most important shortfall that one of these findings reports: its number and the words.
pub(crate) fn of(findings: &[StoredFinding]) -> Option<(&'static str, &'static str)> {
    let is_found = |kind: &Kind| findings.iter().any(|finding| finding.id == kind.id());
    SHORTFALLS
        .iter()
        .find(|(kind, _)| is_found(kind))
        .map(|(kind, words)| (kind.id(), *words))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Outcome, Record};
    use base::report::{Finding, Severity};
    use std::time::SystemTime;

    /// Warnings about a start or its host that do not mean that the container lacks something.
    const NO_SHORTFALLS: [&Kind; 19] = [
        // About config.toml, its log and records.
        &catalog::UNKNOWN_KEY,
        &catalog::NO_LOG,
        &catalog::SWARM_RESOURCE,
        &catalog::LIMIT_UNMATCHED,
        &catalog::TIMEOUTS,
        &catalog::BROKEN_RECORD,
        // Another program has set up the container.
        &catalog::OTHER_FILES,
        // If the container requests the library, LACKING_LIBRARIES or LEFT_OUT reports that too.
        &catalog::STALE_CACHE,
        &catalog::OTHER_VERSION,
        &catalog::UNREADABLE,
        // The container got what it requested, and its programs may fail.
        &catalog::REQUIREMENT_WARNING,
        &catalog::SLOW_NVML,
        &catalog::NO_FABRIC_MANAGER,
        &catalog::NOT_ISOLATED,
        &catalog::COVERED,
        &catalog::CRUN,
        &catalog::LEFT_BEHIND,
        // Only commands report these.
        &catalog::NODE_ACCESS,
        &catalog::NOT_IN_TABLE,
    ];

    /// A new warning needs a decision: does a container with it lack something that it requested?
    #[test]
    fn each_warning_of_a_start_is_in_a_list() {
        let mut listed: Vec<_> = SHORTFALLS.iter().map(|(kind, _)| kind.id()).collect();
        listed.extend(WITHOUT_GPUS.iter().map(|kind| kind.id()));
        listed.extend(NO_SHORTFALLS.iter().map(|kind| kind.id()));
        // An empty GPU in MIG mode is left out of "all"; the next two are about daemons of MPS, the last about specs.
        listed.extend(["ONH-216", "ONH-235", "ONH-236", "ONH-316"]);
        for kind in catalog::ALL {
            let is_of_start = ("ONH-100".."ONH-400").contains(&kind.id());
            if kind.severity == Severity::Warning && is_of_start {
                let count = listed.iter().filter(|id| **id == kind.id()).count();
                assert_eq!(count, 1, "{}", kind.id());
            }
        }
    }

    #[test]
    fn a_container_with_a_shortfall_did_not_get_all() {
        let record = |kinds: &[&'static Kind]| {
            let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
            kinds
                .iter()
                .for_each(|kind| record.add_finding(&Finding::new(kind, "what", "fix")));
            record.end(Outcome::Given, String::new());
            record
        };
        for (kind, words) in SHORTFALLS {
            assert!(kind.severity == Severity::Warning, "{}", kind.id());
            let record = record(&[&catalog::IMAGE_CUDA, kind]);
            assert_eq!(
                (record.outcome, record.shortfall()),
                (Outcome::Incomplete, Some(words)),
                "{}",
                kind.id()
            );
        }
        let both = record(&[&catalog::GPU_LEFT_OUT, &catalog::NO_ACCESS]);
        assert_eq!(
            both.shortfall(),
            Some("its GPUs, but its process cannot open the device nodes")
        );
        assert_eq!(record(&[&catalog::IMAGE_CUDA]).outcome, Outcome::Given);
    }
}
