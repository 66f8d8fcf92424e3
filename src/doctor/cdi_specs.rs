//! Checks of the CDI specs that the engines read.

use base::report::Kind;
use engines::cdi::list_paths;
use engines::cdi_check::CdiVerdict;
use engines::{Engine, EngineKind, Version};
use findings::catalog;

use super::check::{Check, count, or_ok};
use super::facts::{CdiView, Facts};

pub(super) fn specs(facts: &Facts) -> Vec<Check> {
    /// A broken file affects all devices of a host.
    const MOST: usize = 3;
    let mut checks = Vec::new();
    let is_reported = |verdict: &CdiVerdict| {
        let diagnosis = facts.driver.diagnosis.as_ref();
        diagnosis.is_some_and(|finding| verdict.kind == Some(finding.kind))
    };
    for view in &facts.cdi {
        // The driver's check has the same finding: one cause is one finding.
        let count_of_them = view.verdicts.iter().filter(|verdict| is_reported(verdict));
        if count_of_them.count() > 0 {
            checks.push(Check::skipped(format!(
                "{}: devices cannot be used, for the reason that the check of the driver's libraries reports",
                view.engines
            )));
            continue;
        }
        let problems = spec_problems(view, MOST);
        if problems.is_empty() {
            checks.push(usable_devices(view, &facts.engines));
        }
        checks.extend(problems);
    }
    or_ok(
        checks,
        Check::skipped("no engine that reads CDI is installed"),
    )
}

fn usable_devices(view: &CdiView, engines: &[Engine]) -> Check {
    let what = match view.verdicts.len() {
        0 => {
            let dirs = list_paths(&view.dirs);
            format!("no CDI devices in {dirs}; \"oci-nvidia-hook cdi generate\" writes a spec")
        }
        good => {
            let is_of_podman = view.engines.contains("Podman");
            let builds = if is_of_podman && engines.iter().any(has_buildah_1_39) {
                "; \"podman build\" of Podman 5.4 reads only /etc/cdi, unless cdi_spec_dirs is set in containers.conf"
            } else {
                ""
            };
            let devices = count(good, "CDI device");
            format!("{} can use {devices}{builds}", view.engines)
        }
    };
    Check::ok(what)
}

/// Podman 5.4 contains Buildah 1.39, which has no other default directory.
fn has_buildah_1_39(engine: &Engine) -> bool {
    let is_podman = matches!(engine.kind, EngineKind::Podman | EngineKind::PodmanOf(_));
    is_podman && matches!(engine.version, Some(Version(5, 4, _)))
}

/// Returns at most `most` findings of a kind.
fn spec_problems(view: &CdiView, most: usize) -> Vec<Check> {
    let mut checks = Vec::new();
    for conflict in view.conflicts.iter().take(most) {
        checks.push(Check::found(conflict.clone()));
    }
    let mut bad: Vec<_> = view.verdicts.iter().filter(|verdict| !verdict.ok).collect();
    bad.sort_by_key(|verdict| !verdict.denied);
    let causes = causes(&bad);
    for cause in causes.iter().take(most) {
        let [first, others @ ..] = cause.as_slice() else {
            continue;
        };
        let subject = if others.is_empty() {
            first.subject.clone()
        } else {
            count(cause.len(), "device")
        };
        let what = format!("{}: {subject}: {}", view.engines, first.full_reason());
        checks.push(Check::of(problem(first), what, first.hint.clone()));
    }
    let more: Vec<_> = causes.iter().skip(most).flatten().collect();
    if let Some(next) = more.first() {
        let what = format!("{} with other problems", count(more.len(), "more device"));
        let fix = "run \"oci-nvidia-hook cdi check\", which prints a hint for each device";
        checks.push(Check::of(problem(next), what, fix));
    }
    if let Some(verdict) = view.verdicts.iter().find(|verdict| verdict.root_only) {
        checks.push(Check::of(
            &catalog::SPEC_USELESS,
            format!("{}: {}", verdict.file, verdict.reason),
            verdict.hint.clone(),
        ));
    }
    if let Some(verdict) = view.verdicts.iter().find(|verdict| verdict.outdated) {
        checks.push(Check::of(
            &catalog::SPEC_OUTDATED,
            verdict.reason.clone(),
            verdict.hint.clone(),
        ));
    }
    checks
}

/// Groups devices that have the same problem and the same fix, in their order: one cause is one line.
fn causes<'v>(bad: &[&'v CdiVerdict]) -> Vec<Vec<&'v CdiVerdict>> {
    let mut causes: Vec<Vec<&CdiVerdict>> = Vec::new();
    for verdict in bad {
        let is_same = |cause: &&mut Vec<&CdiVerdict>| {
            let first = cause.first();
            first.is_some_and(|first| {
                (&first.reason, &first.hint) == (&verdict.reason, &verdict.hint)
            })
        };
        match causes.iter_mut().find(is_same) {
            Some(cause) => cause.push(verdict),
            None => causes.push(vec![verdict]),
        }
    }
    causes
}

/// Returns the finding for a device that containers cannot or may not have.
fn problem(verdict: &CdiVerdict) -> &'static Kind {
    if verdict.denied {
        &catalog::SPEC_DENIED
    } else {
        &catalog::SPEC_USELESS
    }
}
