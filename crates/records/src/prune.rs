//! Decides which records to remove if there are too many. Pure.
//!
//! Every user who can start containers creates records. So records of running containers are removed last, one namespace cannot
//! displace the records of another, and a container that the kubelet restarts every few seconds has one record instead of one
//! for each attempt.
//!
//! A user who can create namespaces could displace the records of others with many namespaces of one record each. So half of the
//! places are for the newest records, and half for the namespaces that had records first: a flood of new namespaces displaces only
//! itself and other new records. The hook reads only names that the author of a pod cannot invent (`oci::pod`).

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Container, Outcome, Record};
use crate::Pod;

/// Upper limit for the number of records. With 32 KiB each, these are 12.5 MiB.
pub(crate) const MAX_RECORDS: usize = 400;
/// Limit for records of ended and failed containers, minus the number of running ones.
const MAX_ENDED: usize = MAX_RECORDS / 2;
/// Lower bound of that limit.
const MIN_ENDED: usize = MAX_RECORDS / 8;
/// Limit for the failures of one container of a pod, each for another reason.
const MAX_REASONS: usize = 4;
/// The records of a namespace that have precedence over those of namespaces that had records later.
const SHARE: usize = 8;

/// A record and the name of its file.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub name: String,
    pub record: Record,
    pub bundle_exists: bool,
}

/// The time of the first record of each namespace.
type Seniority = BTreeMap<String, String>;

/// Returns the names of the records to remove.
pub(crate) fn surplus(records: Vec<Candidate>) -> Vec<String> {
    let mut seniority = Seniority::new();
    for Candidate { record, .. } in &records {
        let first = seniority
            .entry(record.container.pod.namespace.clone())
            .or_insert_with(|| record.since().to_owned());
        if record.since() < first.as_str() {
            record.since().clone_into(first);
        }
    }
    let (running, others): (Vec<_>, Vec<_>) = records.into_iter().partition(
        |Candidate {
             record,
             bundle_exists,
             ..
         }| {
            *bundle_exists && record.ended.is_empty() && record.outcome != Outcome::Failed
        },
    );
    let for_others = MAX_ENDED.saturating_sub(running.len()).max(MIN_ENDED);
    let mut names = beyond(others, for_others, &seniority);
    names.extend(beyond(running, MAX_RECORDS - MIN_ENDED, &seniority));
    names
}

/// Returns all but `count` records, of which each namespace keeps an equal share. Within a namespace, failures have precedence
/// over ended containers, and newer records over older ones. Between namespaces, newer records have precedence for half of the
/// places, and older namespaces for the others.
fn beyond(mut records: Vec<Candidate>, count: usize, seniority: &Seniority) -> Vec<String> {
    newest_first(&mut records, |candidate| {
        (
            usize::from(candidate.record.outcome != Outcome::Failed),
            &candidate.record,
        )
    });
    let mut of_namespace: BTreeMap<String, usize> = BTreeMap::new();
    let ranked = records.into_iter().map(|candidate| {
        let rank = of_namespace
            .entry(candidate.record.container.pod.namespace.clone())
            .or_default();
        *rank += 1;
        (*rank - 1, candidate)
    });
    let mut ranked: Vec<(usize, Candidate)> = ranked.collect();
    newest_first(&mut ranked, |(rank, candidate)| (*rank, &candidate.record));
    let mut older = ranked.split_off(ranked.len().min(count / 2));
    older.sort_by_cached_key(|(rank, candidate)| {
        (
            rank / SHARE,
            seniority
                .get(&candidate.record.container.pod.namespace)
                .cloned(),
            *rank,
        )
    });
    older
        .into_iter()
        .skip(count - count / 2)
        .map(|(_, candidate)| candidate.name)
        .collect()
}

/// Sorts items by a rank, then by the time at which their container started, with the newest one first.
pub(crate) fn newest_first<T>(items: &mut [T], key: impl Fn(&T) -> (usize, &Record)) {
    items.sort_by_cached_key(|item| {
        let (rank, record) = key(item);
        (rank, Reverse(record.started.clone()))
    });
}

/// Returns the earlier failures of the same container that the record `by` replaces: those with the same reason, and the oldest
/// ones beyond the limit.
pub(crate) fn superseded(by: &Record, records: &[(String, Record)]) -> Vec<String> {
    let Container { id, name, pod, .. } = &by.container;
    // Without a name, attempts of the same container cannot be recognized.
    if by.outcome != Outcome::Failed || name.is_empty() && *pod == Pod::default() {
        return Vec::new();
    }
    let mut failed: Vec<_> = records
        .iter()
        .filter(|(_, record)| record.outcome == Outcome::Failed)
        .collect();
    failed.retain(|(_, Record { container, .. })| {
        container.id != *id && container.name == *name && container.pod == *pod
    });
    newest_first(&mut failed, |(_, record)| (0, record));
    let (same, others): (Vec<_>, Vec<_>) = failed
        .into_iter()
        .partition(|(_, record)| record.reason == by.reason);
    same.into_iter()
        .chain(others.into_iter().skip(MAX_REASONS - 1))
        .map(|(name, _)| name.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::time::SystemTime;

    fn record(id: &str, namespace: &str, outcome: Outcome, started: usize) -> Record {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        let name = if namespace.is_empty() { "" } else { "pod" };
        let pod = Pod {
            name: name.into(),
            namespace: namespace.into(),
            container: String::new(),
        };
        record.name_container(id.to_owned(), pod, Path::new("/nowhere"));
        record.end(outcome, "because".to_owned());
        record.started = format!("{started:06}");
        record
    }

    fn kept(
        count: usize,
        namespace: &str,
        outcome: Outcome,
        bundle_exists: bool,
    ) -> Vec<Candidate> {
        let one = |number| {
            let id = format!("{namespace}{outcome:?}{number}");
            Candidate {
                name: id.clone(),
                record: record(&id, namespace, outcome, number),
                bundle_exists,
            }
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
        assert!(
            gone.iter().all(|name| !name.starts_with("Given")),
            "none that runs"
        );
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
        assert!(
            !gone.contains(&"loopFailed9999".to_owned())
                && gone.contains(&"loopFailed0".to_owned())
        );
    }

    /// Records of `namespaces` different namespaces, each with `each` failures, that started from `from` on.
    fn invented(namespaces: usize, each: usize, from: usize) -> Vec<Candidate> {
        let one = |number: usize| {
            let (namespace, id) = (
                format!("invented{}", from + number / each),
                format!("invented{}", from + number),
            );
            Candidate {
                name: id.clone(),
                record: record(&id, &namespace, Outcome::Failed, from + number),
                bundle_exists: false,
            }
        };
        (0..namespaces * each).map(one).collect()
    }

    /// Prunes like a store to which these records are added one by one.
    fn add(kept: &mut Vec<Candidate>, more: Vec<Candidate>) {
        for candidate in more {
            if kept.len() >= MAX_RECORDS {
                let gone: std::collections::BTreeSet<String> =
                    surplus(kept.clone()).into_iter().collect();
                kept.retain(|candidate| !gone.contains(&candidate.name));
            }
            kept.push(candidate);
        }
    }

    fn of_victim(kept: &[Candidate]) -> usize {
        kept.iter()
            .filter(|candidate| candidate.name.starts_with("victim"))
            .count()
    }

    #[test]
    fn many_namespaces_do_not_push_out_one() {
        for (namespaces, each) in [(520, 1), (5000, 1), (300, 5), (100, 40), (1, 5000)] {
            for (outcome, count) in [
                (Outcome::Failed, 5),
                (Outcome::Given, 5),
                (Outcome::Failed, SHARE),
            ] {
                let mut records = kept(count, "victim", outcome, false);
                add(&mut records, invented(namespaces, each, 1000));
                assert_eq!(
                    of_victim(&records),
                    count,
                    "{namespaces} namespaces with {each} records each"
                );
                let gone = surplus(records.clone());
                assert!(
                    gone.iter().all(|name| !name.starts_with("victim")),
                    "{namespaces} {each}: {gone:?}"
                );
                let newest = format!("invented{}", 1000 + namespaces * each - 1);
                assert!(!gone.contains(&newest), "the newest record stays");
            }
        }
    }

    /// Of two floods, the first has the places of older namespaces. The newest record of each namespace stays nevertheless, until as many
    /// others are newer as there are places for new records.
    #[test]
    fn namespaces_that_came_first_do_not_keep_out_another() {
        let mut records = Vec::new();
        add(&mut records, invented(1000, 1, 0));
        let mut victim = kept(5, "victim", Outcome::Failed, false);
        for (number, candidate) in victim.iter_mut().enumerate() {
            candidate.record.started = format!("{:06}", 100_000 + number);
        }
        add(&mut records, victim);
        add(&mut records, invented(MAX_ENDED / 2 - 5, 1, 200_000));
        let gone = surplus(records);
        assert!(!gone.contains(&"victimFailed4".to_owned()), "{gone:?}");
    }

    #[test]
    fn containers_that_run_in_many_namespaces_do_not_push_out_one() {
        let mut records = kept(5, "victim", Outcome::Given, true);
        records.extend(invented(500, 1, 1000).into_iter().map(|mut candidate| {
            (candidate.record.outcome, candidate.bundle_exists) = (Outcome::Given, true);
            candidate
        }));
        let gone = surplus(records);
        assert!(
            gone.len() == 505 - (MAX_RECORDS - MIN_ENDED)
                && gone.iter().all(|name| !name.starts_with("victim"))
        );
    }

    #[test]
    fn a_container_that_fails_again_keeps_its_place() {
        let mut again = kept(1, "victim", Outcome::Failed, false);
        again[0].record.started = "900000".to_owned();
        again[0].record.since = "000001".to_owned();
        let mut records = invented(400, 1, 1000);
        records.extend(again);
        records.extend(invented(300, 1, 950_000));
        assert!(
            surplus(records)
                .iter()
                .all(|name| !name.starts_with("victim"))
        );
    }

    #[test]
    fn of_one_namespace_failures_and_the_newest_stay() {
        let mut records = kept(10, "", Outcome::Failed, false);
        records.extend(kept(MAX_ENDED, "", Outcome::Given, false));
        let gone = surplus(records);
        let expected: Vec<_> = (0..10)
            .rev()
            .map(|number| format!("Given{number}"))
            .collect();
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
        let mut records: Vec<_> = (0..6)
            .map(|n| {
                (
                    format!("old{n}"),
                    record(&format!("i{n}"), "lab", Outcome::Failed, n),
                )
            })
            .collect();
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
        assert!(
            superseded(
                &plain,
                &[("q".to_owned(), record("q", "", Outcome::Failed, 0))]
            )
            .is_empty(),
            "no name"
        );
    }
}
