//! Where records are: `containers/<id>.json` in the run directory; bounded in number.

use std::cmp::Reverse;
use std::io;

use super::{Outcome, Record};
use crate::few;
use crate::sys::run_dir::RunDir;

const DIR: &str = "containers";
/// A record has bounded parts; a larger file is none.
const MAX_SIZE: u64 = 1 << 20;
/// More are pruned, to half.
const MAX_RECORDS: usize = 200;

/// The directory of records, open.
#[derive(Debug)]
pub struct Store(RunDir);

impl Store {
    /// Opens it; makes it if it is missing.
    pub fn open() -> io::Result<Self> {
        Ok(Self(RunDir::open()?.below(DIR)?))
    }

    /// Opens it, if there is one.
    pub fn existing() -> io::Result<Option<Self>> {
        match RunDir::existing()? {
            Some(run) => Ok(run.existing_below(DIR)?.map(Self)),
            None => Ok(None),
        }
    }

    /// Writes a record over the container's last one. A full disk stops no container.
    pub fn write(&self, record: &Record) {
        if let (Some(name), Ok(bytes)) = (file_name(&record.container.id), serde_json::to_vec_pretty(record)) {
            self.0.replace(&name, &bytes).ok();
        }
    }

    /// Whether the container has a record.
    #[must_use]
    pub fn has(&self, id: &str) -> bool {
        file_name(id).and_then(|name| self.read(&name)).is_some()
    }

    /// All records, the newest first. What cannot be read is none.
    pub fn all(&self) -> io::Result<Vec<Record>> {
        let names = self.0.names()?;
        let records = names.iter().filter_map(|name| self.read(name)).collect();
        Ok(few::sorted_by_key(records, |record: &Record| Reverse(record.started.clone())))
    }

    /// Removes the record of a container that has ended. That of one that failed stays: somebody will ask.
    pub fn forget(&self, id: &str) {
        let Some(name) = file_name(id) else { return };
        if self.read(&name).is_some_and(|record| record.outcome != Outcome::Failed) {
            self.0.remove(&name).ok();
        }
    }

    /// Removes records, if there are too many.
    pub fn prune(&self) {
        let Ok(names) = self.0.names() else { return };
        if names.len() <= MAX_RECORDS {
            return;
        }
        let (records, broken): (Vec<_>, Vec<_>) =
            names.into_iter().map(|name| (self.read(&name), name)).partition(|(record, _)| record.is_some());
        let records = records.into_iter().filter_map(|(record, name)| Some((name, record?))).collect();
        let old = too_many(records, |record| record.container.bundle.is_dir());
        for name in old.into_iter().chain(broken.into_iter().map(|(_, name)| name)) {
            self.0.remove(&name).ok();
        }
    }

    fn read(&self, name: &str) -> Option<Record> {
        Record::parse(&self.0.read(name, MAX_SIZE).ok()??).ok()
    }
}

/// Those to remove until half of [`MAX_RECORDS`] are left: first of containers that are gone, then of those that did not
/// fail, the oldest first.
fn too_many(records: Vec<(String, Record)>, is_there: impl Fn(&Record) -> bool) -> Vec<String> {
    let count = records.len().saturating_sub(MAX_RECORDS / 2);
    let records = few::sorted_by_key(records, |(_, record)| {
        let failed = record.outcome == Outcome::Failed;
        (failed || is_there(record), failed, record.started.clone())
    });
    records.into_iter().take(count).map(|(name, _)| name).collect()
}

/// The id becomes a name: one that could be another path has no record.
fn file_name(id: &str) -> Option<String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let fits = !id.is_empty() && id.len() <= 200 && !id.starts_with('.') && id.bytes().all(plain);
    fits.then(|| format!("{id}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::Pod;
    use std::path::Path;
    use std::time::SystemTime;

    fn record(id: &str, outcome: Outcome, started: &str) -> Record {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        record.name_container(id.to_owned(), Pod::default(), Path::new("/nowhere"));
        record.end(outcome, "because".to_owned());
        record.started = started.to_owned();
        record
    }

    fn store() -> (tempfile::TempDir, Store) {
        let base = tempfile::tempdir().unwrap();
        let run = RunDir::open_in(base.path()).unwrap();
        (base, Store(run.below(DIR).unwrap()))
    }

    #[test]
    fn what_is_written_is_read() {
        let (base, store) = store();
        for (id, outcome, started) in [("a", Outcome::Given, "1"), ("b", Outcome::Failed, "2")] {
            store.write(&record(id, outcome, started));
        }
        let dir = base.path().join("oci-nvidia-hook").join(DIR);
        std::fs::write(dir.join("c.json"), "nonsense").unwrap();
        std::fs::write(dir.join("d.json"), r#"{"version":99}"#).unwrap();
        assert_eq!(store.all().unwrap(), [record("b", Outcome::Failed, "2"), record("a", Outcome::Given, "1")]);
        ["a", "b", "c", "../b"].into_iter().for_each(|id| store.forget(id));
        assert_eq!(store.all().unwrap(), [record("b", Outcome::Failed, "2")], "failures stay");
    }

    #[test]
    fn an_id_is_no_path() {
        for id in ["", ".", "..", "../x", "a/b", ".hidden", "a\nb", &"x".repeat(201)] {
            assert_eq!(file_name(id), None, "{id:?}");
        }
        assert_eq!(file_name("crio-0A_b.c").as_deref(), Some("crio-0A_b.c.json"));
    }

    #[test]
    fn their_number_is_bounded() {
        let (_base, store) = store();
        for number in 0..=MAX_RECORDS {
            let outcome = if number < 10 { Outcome::Failed } else { Outcome::Given };
            store.write(&record(&format!("c{number}"), outcome, &format!("{number:04}")));
        }
        store.prune();
        let left = store.all().unwrap();
        assert_eq!(left.len(), MAX_RECORDS / 2);
        let failed = left.iter().filter(|record| record.outcome == Outcome::Failed).count();
        assert_eq!((failed, left[0].container.id.as_str()), (10, "c200"), "failures and the newest are kept");
        store.prune();
        assert_eq!(store.all().unwrap().len(), MAX_RECORDS / 2);
    }

    #[test]
    fn those_of_containers_that_are_gone_go_first() {
        let one = |id: &str, outcome, started| (id.to_owned(), record(id, outcome, started));
        let mut records = vec![one("gone", Outcome::Given, "9"), one("old", Outcome::Given, "1")];
        records.extend((0..MAX_RECORDS / 2 - 1).map(|number| one(&format!("n{number}"), Outcome::Given, "2")));
        assert_eq!(too_many(records, |record| record.container.id != "gone"), ["gone"]);
    }
}
