//! What a container that was given GPUs lacks, or cannot use. Pure.
//!
//! The hook does not stop such a container, and engines do not show the warnings of a hook that succeeds. So the record must not
//! state that the container got what it asked for.

use base::report::Kind;
use findings::catalog;

use super::StoredFinding;

/// The findings that report a shortfall, the most important first, with the end of a sentence that begins with "the container got".
const SHORTFALLS: [(&Kind, &str); 13] = [
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
];

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
