//! Stores records as `containers/<id>.json` in the run directory, limited in number and size.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base::sys::run_dir::{Replacement, RunDir};

use super::bound::MAX_SIZE;
use super::prune::{Candidate, MAX_RECORDS, newest_first, superseded, surplus};
use super::{ContainerNames, Outcome, Record};

/// Directory of the records below the run directory.
pub const DIR: &str = "containers";
/// The file with the number of records that were removed while their containers could still run. Only the hook knows this number: whoever
/// counts running containers without a record also counts those that requested no GPU. With its first character, it is no record.
const REMOVED: &str = ".removed";
/// The age at which a temporary file is removed: its writer was killed, because no call takes this long.
const STALE_AFTER: Duration = Duration::from_secs(1200);

/// The directory of records.
#[derive(Debug)]
pub struct Store(RunDir);

/// The records of all containers, and the files that could not be read.
#[derive(Debug, Default)]
pub struct Stored {
    /// Records, the newest first
    pub records: Vec<Record>,
    /// The names of files that cannot be read, and why
    pub broken: Vec<(String, String)>,
}

impl Store {
    /// Opens the directory, created if it is missing.
    pub fn open() -> io::Result<Self> {
        Ok(Self(RunDir::open()?.below(DIR)?))
    }

    /// Like [`Self::open`], for a program that ends soon, see [`RunDir::open_and_keep`].
    pub fn open_and_keep() -> io::Result<Self> {
        Ok(Self(RunDir::open_and_keep()?.below(DIR)?))
    }

    /// Opens the directory if it exists.
    pub fn existing() -> io::Result<Option<Self>> {
        match RunDir::existing()? {
            Some(run) => Ok(run.existing_below(DIR)?.map(Self)),
            None => Ok(None),
        }
    }

    /// Writes a record, which replaces the container's last one. Errors are ignored: a full file system must not stop a
    /// container.
    pub fn write(&self, record: &Record) {
        let Some(name) = file_name(&record.container.id) else {
            return;
        };
        // Only a failure can replace others, so only then all records are read.
        if record.outcome == Outcome::Failed {
            self.write_failure(&name, record);
        } else if let Some(bytes) = record.to_bytes() {
            self.0.replace(&name, &bytes).ok();
        }
    }

    /// Returns the means to replace the record of the container in a signal handler.
    pub fn replacement(&self, id: &str) -> Option<Replacement<Arc<OwnedFd>>> {
        self.0.replacement(&file_name(id)?).ok()
    }

    /// Writes the record of a failure, and removes those that it replaces.
    fn write_failure(&self, name: &str, record: &Record) {
        // Compare the shortened record, as it is stored.
        let Some(mut stored) = record
            .to_bytes()
            .and_then(|bytes| Record::parse(&bytes).ok())
        else {
            return;
        };
        let others = self.readable();
        let replaced = superseded(&stored, &others);
        let mut since = None;
        for (name, record) in &others {
            if replaced.contains(name) && since.is_none_or(|since| record.since() < since) {
                since = Some(record.since());
            }
        }
        stored.since = since.unwrap_or_default().to_owned();
        let Some(bytes) = stored.to_bytes() else {
            return;
        };
        if self.0.replace(name, &bytes).is_ok() {
            for name in &replaced {
                self.remove(name);
            }
        }
    }

    /// Returns the record of the container.
    pub fn record_of(&self, id: &str) -> Option<Record> {
        self.read(&file_name(id)?).ok()
    }

    /// Returns all records, and the files that are not records.
    pub fn all(&self) -> io::Result<Stored> {
        let mut found = Stored::default();
        for name in self.0.names()? {
            match self.read(&name) {
                Ok(record) => found.records.push(record),
                Err(why) => found.broken.push((name, base::report::line(&why))),
            }
        }
        newest_first(&mut found.records, |record| (0, record));
        Ok(found)
    }

    /// Marks the container as ended in its record. It is kept, because users ask `why` for containers that the engine has removed.
    /// `add_name` completes the names of the container.
    pub fn end(&self, id: &str, now: SystemTime, add_name: fn(&mut ContainerNames)) {
        let Some(name) = file_name(id) else {
            return;
        };
        match self.read(&name) {
            Ok(record) if record.outcome == Outcome::Failed => {}
            Ok(mut record) => {
                record.end_of_container(now);
                add_name(&mut record.container);
                self.write(&record);
            }
            Err(_) => self.remove(&name),
        }
    }

    /// If there were too many records when the directory was opened, removes the surplus, unreadable files, and old temporary files.
    pub fn prune(&self) {
        if !self.0.may_have(MAX_RECORDS) {
            return;
        }
        let Ok(names) = self.0.all_names() else {
            return;
        };
        if names.len() < MAX_RECORDS {
            return;
        }
        let mut records = Vec::new();
        for name in names {
            if name == REMOVED {
                continue;
            }
            if name.starts_with('.') {
                if self.0.age(&name).is_some_and(|age| age > STALE_AFTER) {
                    self.remove(&name);
                }
                continue;
            }
            match self.read(&name) {
                Ok(record) => {
                    let bundle_exists = record.container.bundle.is_dir();
                    records.push(Candidate {
                        name,
                        record,
                        bundle_exists,
                    });
                }
                Err(_) => self.remove(&name),
            }
        }
        let surplus = surplus(records);
        for name in &surplus.names {
            self.remove(name);
        }
        if surplus.running > 0 {
            let count = self.removed().saturating_add(surplus.running);
            self.0.replace(REMOVED, count.to_string().as_bytes()).ok();
        }
    }

    /// Returns how many records were removed since the last boot while their containers could still run, because there were too many.
    pub fn removed(&self) -> usize {
        /// A number has at most 20 digits.
        const LIMIT: u64 = 20;
        let Ok(Some(bytes)) = self.0.read(REMOVED, LIMIT) else {
            return 0;
        };
        let text = std::str::from_utf8(&bytes).unwrap_or_default();
        text.parse().unwrap_or_default()
    }

    fn remove(&self, name: &str) {
        self.0.remove(name).ok();
    }

    fn readable(&self) -> Vec<(String, Record)> {
        let mut records = Vec::new();
        for name in self.0.names().unwrap_or_default() {
            if let Ok(record) = self.read(&name) {
                records.push((name, record));
            }
        }
        records
    }

    fn read(&self, name: &str) -> anyhow::Result<Record> {
        let limit = u64::try_from(MAX_SIZE).unwrap_or(u64::MAX);
        let bytes = self
            .0
            .read(name, limit)?
            .ok_or_else(|| anyhow::anyhow!("it no longer exists"))?;
        Record::parse(&bytes)
    }
}

/// Returns the file name for a container id; `None` for an id that is not a safe file name.
fn file_name(id: &str) -> Option<String> {
    if id.is_empty() || id.len() > 200 || id.starts_with('.') {
        return None;
    }
    if !id.bytes().all(is_plain) {
        return None;
    }
    Some(format!("{id}.json"))
}

const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pod;
    use std::io::Write;
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
        std::fs::write(dir.join("e.json"), vec![b' '; MAX_SIZE + 1]).unwrap();
        let found = store.all().unwrap();
        assert_eq!(
            found.records,
            [
                record("b", Outcome::Failed, "2"),
                record("a", Outcome::Given, "1")
            ]
        );
        let mut broken: Vec<_> = found.broken.iter().map(|(name, _)| name.as_str()).collect();
        broken.sort_unstable();
        assert_eq!(broken, ["c.json", "d.json", "e.json"]);
        for id in ["a", "b", "c", "d", "e", "../b"] {
            store.end(id, SystemTime::UNIX_EPOCH, |_| ());
        }
        let found = store.all().unwrap();
        let mut ended = record("a", Outcome::Given, "1");
        "1970-01-01T00:00:00.000Z".clone_into(&mut ended.ended);
        assert_eq!(found.records, [record("b", Outcome::Failed, "2"), ended]);
    }

    #[test]
    fn an_id_with_a_path_is_refused() {
        for id in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            ".hidden",
            "a\nb",
            &"x".repeat(201),
        ] {
            assert_eq!(file_name(id), None, "{id:?}");
        }
        assert_eq!(
            file_name("crio-0A_b.c").as_deref(),
            Some("crio-0A_b.c.json")
        );
    }

    #[test]
    fn the_directory_is_bounded() {
        let (base, store) = store();
        let dir = base.path().join("oci-nvidia-hook").join(DIR);
        let opened = || Store(RunDir::open_in(base.path()).unwrap().below(DIR).unwrap());
        for number in 0..MAX_RECORDS + 20 {
            opened().prune();
            store.write(&record(
                &format!("c{number}"),
                Outcome::Given,
                &format!("{number:04}"),
            ));
            assert!(store.0.all_names().unwrap().len() <= MAX_RECORDS);
        }
        // Temporary files of killed writers are removed too, but not one that may still be written.
        let old = std::time::SystemTime::now() - STALE_AFTER - Duration::from_secs(60);
        for number in 0..MAX_RECORDS {
            let file = std::fs::File::create(dir.join(format!(".x{number}.json.1"))).unwrap();
            if number > 0 {
                file.set_modified(old).unwrap();
            }
        }
        std::fs::write(dir.join("broken.json"), "x").unwrap();
        opened().prune();
        let names = store.0.all_names().unwrap();
        assert!(names.len() <= MAX_RECORDS / 2 + 1, "{}", names.len());
        assert!(
            names.contains(&".x0.json.1".to_owned()) && !names.contains(&"broken.json".to_owned())
        );
        assert_eq!(
            store.all().unwrap().records[0].container.id,
            format!("c{}", MAX_RECORDS + 19),
            "the newest"
        );
    }

    #[test]
    fn removed_records_of_running_containers_are_counted() {
        let (base, store) = store();
        let dir = base.path().join("oci-nvidia-hook").join(DIR);
        let fill = |of: &str| {
            for number in 0..MAX_RECORDS {
                let mut record = record(&format!("{of}{number}"), Outcome::Given, "1");
                record.container.bundle = base.path().to_owned();
                store.write(&record);
            }
            Store(RunDir::open_in(base.path()).unwrap().below(DIR).unwrap()).prune();
        };
        assert_eq!(store.removed(), 0);
        fill("a");
        let first = store.removed();
        assert_eq!(first, MAX_RECORDS - store.all().unwrap().records.len());
        assert!(first > 0);
        fill("b");
        assert_eq!(store.removed(), first + MAX_RECORDS, "the sum");
        // It is older than a temporary file may be.
        let count = store.removed().to_string();
        let file = std::fs::File::create(dir.join(REMOVED)).unwrap();
        (&file).write_all(count.as_bytes()).unwrap();
        let old = SystemTime::now() - STALE_AFTER * 2;
        file.set_modified(old).unwrap();
        fill("c");
        assert_eq!(store.removed(), first + 2 * MAX_RECORDS);
        std::fs::write(dir.join(REMOVED), "nonsense").unwrap();
        assert_eq!(store.removed(), 0);
    }

    #[test]
    fn attempts_of_one_pod_have_one_record() {
        let (_base, store) = store();
        for number in 0..20 {
            let mut record = record(
                &format!("c{number}"),
                Outcome::Failed,
                &format!("{number:04}"),
            );
            record.container.pod = Pod {
                name: "p".into(),
                namespace: "n".into(),
                container: "c".into(),
            };
            store.write(&record);
        }
        let left = store.all().unwrap().records;
        assert_eq!(
            left.iter()
                .map(|record| record.container.id.as_str())
                .collect::<Vec<_>>(),
            ["c19"]
        );
        assert_eq!(
            (left[0].started.as_str(), left[0].since.as_str()),
            ("0019", "0000"),
            "the first attempt"
        );
    }

    /// A record that replaces several failures counts from the oldest of them.
    #[test]
    fn a_repeated_failure_began_with_the_oldest() {
        let (_base, store) = store();
        let attempt = |id: &str, reason: &str, started: &str| {
            let mut record = record(id, Outcome::Failed, started);
            record.container.name = "web".to_owned();
            record.reason = reason.to_owned();
            record
        };
        // Their names are in another order than their times.
        for (id, reason, started) in [("c", "x", "3"), ("a", "y", "5"), ("b", "z", "4")] {
            store.write(&attempt(id, reason, started));
        }
        let names = store.0.names().unwrap();
        for name in &names {
            let mut earlier = store.read(name).unwrap();
            earlier.reason = "same".to_owned();
            store.0.replace(name, &earlier.to_bytes().unwrap()).unwrap();
        }
        store.write(&attempt("d", "same", "6"));
        let left = store.all().unwrap().records;
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].since, "3");
    }
}
