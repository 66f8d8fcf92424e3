//! Which records go when there are too many. Pure.
//!
//! Whoever can start containers can make records, by starting containers that fail. So those of containers that run go last,
//! one namespace cannot push out the records of another, and a container that the kubelet tries again every few seconds has
//! one record and not one for each attempt.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Outcome, Record};

/// More are pruned. With records of 32 KiB this is 12.5 MiB.
pub(super) const MAX_RECORDS: usize = 400;
/// What is left of them, as far as containers that are gone or failed are concerned.
const LEFT: usize = MAX_RECORDS / 2;
/// What is left of those however many containers run.
const LEFT_AT_LEAST: usize = MAX_RECORDS / 8;
/// Failures of one container of a pod that are kept, each with another text.
const TEXTS: usize = 4;

/// A record and what is known of its file.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub name: String,
    pub record: Record,
    pub is_there: bool,
}

/// The names of those to remove.
pub(super) fn surplus(records: Vec<Kept>) -> Vec<String> {
    let (running, others): (Vec<_>, Vec<_>) =
        records.into_iter().partition(|kept| kept.is_there && kept.record.outcome != Outcome::Failed);
    let for_others = LEFT.saturating_sub(running.len()).max(LEFT_AT_LEAST);
    let mut names = beyond(others, for_others);
    names.extend(beyond(running, MAX_RECORDS - LEFT_AT_LEAST));
    names
}

/// All but `count`, of which each namespace has the same share as far as it needs one. Of one namespace failures stay longer
/// than what is gone, and the newest longest.
fn beyond(records: Vec<Kept>, count: usize) -> Vec<String> {
    let failed = |kept: &Kept| kept.record.outcome == Outcome::Failed;
    let mut records = records;
    records.sort_by_cached_key(|kept| (usize::from(!failed(kept)), Reverse(kept.record.started.clone())));
    let mut of_namespace: BTreeMap<String, usize> = BTreeMap::new();
    let ranked = records.into_iter().map(|kept| {
        let rank = of_namespace.entry(kept.record.container.pod.namespace.clone()).or_default();
        *rank += 1;
        (*rank, kept)
    });
    let mut ranked: Vec<(usize, Kept)> = ranked.collect();
    ranked.sort_by_cached_key(|(rank, kept)| (*rank, Reverse(kept.record.started.clone())));
    ranked.into_iter().skip(count).map(|(_, kept)| kept.name).collect()
}

/// Earlier failures of the same container that this one makes superfluous: the same text, or too many texts.
pub(super) fn superseded(by: &Record, records: &[(String, Record)]) -> Vec<String> {
    let of = |record: &Record| {
        let container = &record.container;
        (container.pod.clone(), container.name.clone())
    };
    // Without a name there is nothing by which a second attempt could be known.
    if by.outcome != Outcome::Failed || of(by) == Default::default() {
        return Vec::new();
    }
    let earlier = records.iter().filter(|(_, record)| {
        record.outcome == Outcome::Failed && record.container.id != by.container.id && of(record) == of(by)
    });
    let mut newest_first: Vec<_> = earlier.collect();
    newest_first.sort_by_cached_key(|(_, record)| Reverse(record.started.clone()));
    let (same, others): (Vec<_>, Vec<_>) = newest_first.into_iter().partition(|(_, record)| record.reason == by.reason);
    same.into_iter().chain(others.into_iter().skip(TEXTS - 1)).map(|(name, _)| name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::Pod;
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

    fn kept(count: usize, namespace: &str, outcome: Outcome, is_there: bool) -> Vec<Kept> {
        let one = |number| {
            let id = format!("{namespace}{outcome:?}{number}");
            Kept { name: id.clone(), record: record(&id, namespace, outcome, number), is_there }
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
        assert_eq!(gone.len(), 10_060 - LEFT);
        assert!(!gone.contains(&"loopFailed9999".to_owned()) && gone.contains(&"loopFailed0".to_owned()));
    }

    #[test]
    fn of_one_namespace_failures_and_the_newest_stay() {
        let mut records = kept(10, "", Outcome::Failed, false);
        records.extend(kept(LEFT, "", Outcome::Given, false));
        let gone = surplus(records);
        let expected: Vec<_> = (0..10).rev().map(|number| format!("Given{number}")).collect();
        assert_eq!(gone, expected);
    }

    #[test]
    fn there_is_an_end_to_those_that_run() {
        let gone = surplus(kept(MAX_RECORDS * 2, "a", Outcome::Given, true));
        assert_eq!(gone.len(), MAX_RECORDS * 2 - (MAX_RECORDS - LEFT_AT_LEAST));
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
        // With other texts a few stay.
        for (number, (_, record)) in records.iter_mut().enumerate().take(6) {
            record.reason = format!("reason {number}");
        }
        assert_eq!(superseded(&new, &records), ["old2", "old1", "old0"]);
        assert!(superseded(&record("x", "lab", Outcome::Given, 9), &records).is_empty());
        let plain = record("p", "", Outcome::Failed, 1);
        assert!(superseded(&plain, &[("q".to_owned(), record("q", "", Outcome::Failed, 0))]).is_empty(), "no name");
    }
}
