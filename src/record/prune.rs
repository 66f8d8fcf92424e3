//! Decides which records to remove if there are too many. Pure.
//!
//! Every user who can start containers creates records. So records of running containers are removed last, one namespace cannot
//! displace the records of another, and a container that the kubelet restarts every few seconds has one record instead of one
//! for each attempt.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Container, Outcome, Record};
use crate::oci::Pod;

/// Upper limit for the number of records. With 32 KiB each, these are 12.5 MiB.
pub(super) const MAX_RECORDS: usize = 400;
/// Limit for records of ended and failed containers, minus the number of running ones.
const MAX_ENDED: usize = MAX_RECORDS / 2;
/// Lower bound of that limit.
const MIN_ENDED: usize = MAX_RECORDS / 8;
/// Limit for the failures of one container of a pod, each for another reason.
const MAX_REASONS: usize = 4;

/// A record and the name of its file.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub name: String,
    pub record: Record,
    pub bundle_exists: bool,
}

/// Returns the names of the records to remove.
pub(super) fn surplus(records: Vec<Candidate>) -> Vec<String> {
    let (running, others): (Vec<_>, Vec<_>) = records
        .into_iter()
        .partition(|candidate| candidate.bundle_exists && candidate.record.outcome != Outcome::Failed);
    let for_others = MAX_ENDED.saturating_sub(running.len()).max(MIN_ENDED);
    let mut names = beyond(others, for_others);
    names.extend(beyond(running, MAX_RECORDS - MIN_ENDED));
    names
}

/// Returns all but `count` records, of which each namespace keeps an equal share. Within a namespace, failures have precedence
/// over ended containers, and newer records over older ones.
fn beyond(mut records: Vec<Candidate>, count: usize) -> Vec<String> {
    newest_first(&mut records, |candidate| {
        (usize::from(candidate.record.outcome != Outcome::Failed), &candidate.record)
    });
    let mut of_namespace: BTreeMap<String, usize> = BTreeMap::new();
    let ranked = records.into_iter().map(|candidate| {
        let rank = of_namespace.entry(candidate.record.container.pod.namespace.clone()).or_default();
        *rank += 1;
        (*rank, candidate)
    });
    let mut ranked: Vec<(usize, Candidate)> = ranked.collect();
    newest_first(&mut ranked, |(rank, candidate)| (*rank, &candidate.record));
    ranked.into_iter().skip(count).map(|(_, candidate)| candidate.name).collect()
}

/// Sorts items by a rank, then by the time at which their container started, with the newest one first.
pub(super) fn newest_first<T>(items: &mut [T], key: impl Fn(&T) -> (usize, &Record)) {
    items.sort_by_cached_key(|item| {
        let (rank, record) = key(item);
        (rank, Reverse(record.started.clone()))
    });
}

/// Returns the earlier failures of the same container that the record `by` replaces: those with the same reason, and the oldest
/// ones beyond the limit.
pub(super) fn superseded(by: &Record, records: &[(String, Record)]) -> Vec<String> {
    let Container { id, name, pod, .. } = &by.container;
    // Without a name, attempts of the same container cannot be recognized.
    if by.outcome != Outcome::Failed || name.is_empty() && *pod == Pod::default() {
        return Vec::new();
    }
    let mut failed: Vec<_> = records.iter().filter(|(_, record)| record.outcome == Outcome::Failed).collect();
    failed.retain(|(_, Record { container, .. })| {
        container.id != *id && container.name == *name && container.pod == *pod
    });
    newest_first(&mut failed, |(_, record)| (0, record));
    let (same, others): (Vec<_>, Vec<_>) = failed.into_iter().partition(|(_, record)| record.reason == by.reason);
    same.into_iter().chain(others.into_iter().skip(MAX_REASONS - 1)).map(|(name, _)| name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::time::SystemTime;

    fn record(id: &str, namespace: &str, outcome: Outcome, started: usize) -> Record {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        let name = if namespace.is_empty() { "" } else { "pod" };
        let pod = Pod { name: name.into(), namespace: namespace.into(), container: String::new() };
        record.name_container(id.to_owned(), pod, Path::new("/nowhere"));
        record.end(outcome, "because".to_owned());
        record.started = format!("{started:06}");
        record
    }

    fn kept(count: usize, namespace: &str, outcome: Outcome, bundle_exists: bool) -> Vec<Candidate> {
        let one = |number| {
            let id = format!("{namespace}{outcome:?}{number}");
            Candidate { name: id.clone(), record: record(&id, namespace, outcome, number), bundle_exists }
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn containers_that_run_go_last() {
        let mut records = kept(1000, "loop", Outcome::Failed, false);
        records.extend(kept(150, "", Outcome::Given, true));
        records.extend(kept(30, "other", Outcome::Given, false));
        let gone = surplus(records);
        assert_eq!(gone.len(), 1180 - 200);
        assert!(gone.iter().all(|name| !name.starts_with("Given")), "none that runs");
    }

    #[test]
    fn a_namespace_does_not_push_out_another() {
        let mut records = kept(10_000, "loop", Outcome::Failed, false);
        for namespace in ["a", "b", "c"] {
            records.extend(kept(20, namespace, Outcome::Failed, false));
        }
        let gone = surplus(records);
        assert!(gone.iter().all(|name| name.starts_with("loop")), "{gone:?}");
        assert_eq!(gone.len(), 10_060 - MAX_ENDED);
        assert!(!gone.contains(&"loopFailed9999".to_owned()) && gone.contains(&"loopFailed0".to_owned()));
    }

    #[test]
    fn of_one_namespace_failures_and_the_newest_stay() {
        let mut records = kept(10, "", Outcome::Failed, false);
        records.extend(kept(MAX_ENDED, "", Outcome::Given, false));
        let gone = surplus(records);
        let expected: Vec<_> = (0..10).rev().map(|number| format!("Given{number}")).collect();
        assert_eq!(gone, expected);
    }

    #[test]
    fn there_is_an_end_to_those_that_run() {
        let gone = surplus(kept(MAX_RECORDS * 2, "a", Outcome::Given, true));
        assert_eq!(gone.len(), MAX_RECORDS * 2 - (MAX_RECORDS - MIN_ENDED));
        assert_eq!(gone.last().unwrap(), "aGiven0");
    }

    #[test]
    fn attempts_of_one_container_are_one_record() {
        let mut records: Vec<_> =
            (0..6).map(|n| (format!("old{n}"), record(&format!("i{n}"), "lab", Outcome::Failed, n))).collect();
        records.push(("runs".to_owned(), record("r", "lab", Outcome::Given, 7)));
        records.push(("else".to_owned(), record("e", "other", Outcome::Failed, 7)));
        let new = record("new", "lab", Outcome::Failed, 8);
        let mut names = superseded(&new, &records);
        names.sort();
        assert_eq!(names, ["old0", "old1", "old2", "old3", "old4", "old5"]);
        // A few with other reasons are kept.
        for (number, (_, record)) in records.iter_mut().enumerate().take(6) {
            record.reason = format!("reason {number}");
        }
        assert_eq!(superseded(&new, &records), ["old2", "old1", "old0"]);
        assert!(superseded(&record("x", "lab", Outcome::Given, 9), &records).is_empty());
        let plain = record("p", "", Outcome::Failed, 1);
        assert!(superseded(&plain, &[("q".to_owned(), record("q", "", Outcome::Failed, 0))]).is_empty(), "no name");
    }
}
