//! Decides which records to remove if there are too many. Pure.
//!
//! Every user who can start containers creates records. So records of running containers are removed last, failures, which `why`
//! explains, are kept longer than ended containers, and a namespace that has more than its limit loses its records first. A container
//! that the kubelet restarts every few seconds has one record instead of one for each attempt. The hook reads only names that the
//! author of a pod cannot invent (`oci::pod`).

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{ContainerNames, Outcome, Record};
use crate::Pod;

/// Upper limit for the number of records. With 32 KiB each, these are 12.5 MiB.
pub(crate) const MAX_RECORDS: usize = 400;
/// Limit for records of ended and failed containers, minus the number of running ones.
const MAX_ENDED: usize = MAX_RECORDS / 2;
/// Lower bound of that limit.
const MIN_ENDED: usize = MAX_RECORDS / 8;
/// Limit for the failures of one container of a pod, each for another reason.
const MAX_REASONS: usize = 4;
/// The records of a namespace that have precedence over all records beyond this number in other namespaces.
const PER_NAMESPACE: usize = 40;

/// A record and the name of its file.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub name: String,
    pub record: Record,
    pub bundle_exists: bool,
}

/// The records to remove.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Surplus {
    /// The names of their files
    pub names: Vec<String>,
    /// How many of them are of containers that can still run
    pub running: usize,
}

/// Returns the records to remove.
pub(crate) fn surplus(records: Vec<Candidate>) -> Surplus {
    let (mut running, mut others) = (Vec::new(), Vec::new());
    for candidate in records {
        if candidate.is_running() {
            running.push(candidate);
        } else {
            others.push(candidate);
        }
    }
    let for_others = MAX_ENDED.saturating_sub(running.len()).max(MIN_ENDED);
    let mut names = beyond(others, for_others);
    let of_running = beyond(running, MAX_RECORDS - MIN_ENDED);
    let running = of_running.len();
    names.extend(of_running);
    Surplus { names, running }
}

impl Candidate {
    /// Reports whether the container can still run: a container whose end was not seen has lost its bundle.
    fn is_running(&self) -> bool {
        self.bundle_exists && self.record.ended.is_empty() && !self.is_failure()
    }

    fn is_failure(&self) -> bool {
        self.record.outcome == Outcome::Failed
    }
}

/// Returns the names of all but `count` records. Failures are kept longer than ended containers, and newer records longer than older
/// ones. Records beyond the limit of their namespace go first.
fn beyond(mut records: Vec<Candidate>, count: usize) -> Vec<String> {
    newest_first(&mut records, |candidate| {
        (usize::from(!candidate.is_failure()), &candidate.record)
    });
    let mut in_namespace: BTreeMap<String, usize> = BTreeMap::new();
    let (mut kept, mut excess) = (Vec::new(), Vec::new());
    for Candidate { name, record, .. } in records {
        let number = in_namespace
            .entry(record.container.pod.namespace)
            .or_default();
        *number += 1;
        if *number <= PER_NAMESPACE {
            kept.push(name);
        } else {
            excess.push(name);
        }
    }
    kept.extend(excess);
    kept.split_off(count.min(kept.len()))
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
    let ContainerNames { id, name, pod, .. } = &by.container;
    // Without a name, attempts of the same container cannot be recognized.
    if by.outcome != Outcome::Failed || name.is_empty() && *pod == Pod::default() {
        return Vec::new();
    }
    let mut failed = Vec::new();
    for (file, record) in records {
        let other = &record.container;
        let is_same = other.id != *id && other.name == *name && other.pod == *pod;
        if is_same && record.outcome == Outcome::Failed {
            failed.push((file, record));
        }
    }
    newest_first(&mut failed, |(_, record)| (0, record));
    let (mut names, mut other_reasons) = (Vec::new(), Vec::new());
    for (file, record) in failed {
        if record.reason == by.reason {
            names.push(file.clone());
        } else {
            other_reasons.push(file.clone());
        }
    }
    names.extend(other_reasons.into_iter().skip(MAX_REASONS - 1));
    names
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
        let gone = surplus(records).names;
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
        let gone = surplus(records).names;
        assert!(gone.iter().all(|name| name.starts_with("loop")), "{gone:?}");
        assert_eq!(gone.len(), 10_060 - MAX_ENDED);
        assert!(
            !gone.contains(&"loopFailed9999".to_owned())
                && gone.contains(&"loopFailed0".to_owned())
        );
    }

    /// A container that ended does not run, although the engine keeps its bundle until it is removed.
    #[test]
    fn an_ended_container_does_not_run() {
        let mut records = kept(MAX_RECORDS, "", Outcome::Given, true);
        for candidate in &mut records[..MAX_RECORDS - 10] {
            candidate.record.ended = "000000".to_owned();
        }
        let gone = surplus(records).names;
        assert_eq!(gone.len(), MAX_RECORDS - 10 - (MAX_ENDED - 10));
        assert!(!gone.contains(&"Given399".to_owned()), "it runs");
        assert!(
            !gone.contains(&"Given389".to_owned()),
            "the last that ended"
        );
        assert!(gone.contains(&"Given0".to_owned()));
    }

    #[test]
    fn many_namespaces_displace_the_oldest_records() {
        let mut records = Vec::new();
        for namespace in 0..MAX_RECORDS {
            let mut one = kept(1, &format!("n{namespace:03}"), Outcome::Failed, false);
            one[0].record.started = format!("{namespace:06}");
            records.extend(one);
        }
        let gone = surplus(records).names;
        let expected: Vec<_> = (0..MAX_RECORDS - MAX_ENDED)
            .rev()
            .map(|namespace| format!("n{namespace:03}Failed0"))
            .collect();
        assert_eq!(gone, expected);
    }

    #[test]
    fn of_one_namespace_failures_and_the_newest_stay() {
        let mut records = kept(10, "", Outcome::Failed, false);
        records.extend(kept(MAX_ENDED, "", Outcome::Given, false));
        let gone = surplus(records).names;
        let expected: Vec<_> = (0..10)
            .rev()
            .map(|number| format!("Given{number}"))
            .collect();
        assert_eq!(gone, expected);
    }

    #[test]
    fn there_is_an_end_to_those_that_run() {
        let mut records = kept(MAX_RECORDS * 2, "a", Outcome::Given, true);
        records.extend(kept(MAX_ENDED, "b", Outcome::Given, false));
        let gone = surplus(records);
        let running = MAX_RECORDS * 2 - (MAX_RECORDS - MIN_ENDED);
        assert_eq!(gone.running, running);
        assert_eq!(gone.names.len(), running + MAX_ENDED - MIN_ENDED);
        assert_eq!(gone.names.last().unwrap(), "aGiven0");
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
