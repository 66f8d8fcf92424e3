//! The file with the errors of GPUs, so that a restart of the plugin does not forget an XID. NVML reports an XID once, and drivers before
//! 565 have no field for the recovery action that follows from it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base::json;
use base::read::read_file_limited;
use base::report::line;
use cdi_spec::file;
use nvidia_host::config::Config;
use nvidia_host::host::HostState;
use serde::{Deserialize, Serialize};

use super::health::OpenError;

/// The name of the file in the runtime directory.
const NAME: &str = "errors.json";
/// The limit for its size in bytes.
const MAX_SIZE: usize = 1 << 20;
/// The precision of the time of the last error. A driver can report thousands of errors a second, and the file is not written for each.
const PRECISION: Duration = Duration::from_secs(1);

/// The content of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ErrorsFile {
    /// The boot, and a number that changes when the module is loaded again: the GPUs are then initialized
    driver: String,
    /// The errors by the UUID of the GPU
    gpus: BTreeMap<String, ErrorEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ErrorEntry {
    cause: String,
    /// Milliseconds since 1970
    since: u64,
    last: u64,
    #[serde(default, rename = "is_of_driver")]
    driver_silent: bool,
    #[serde(default)]
    is_stuck: bool,
}

/// The file.
#[derive(Debug)]
pub struct ErrorFile {
    dir: PathBuf,
    config: Config,
    /// What the file contains; `None` before it is written
    written: Option<BTreeMap<String, OpenError>>,
    /// The last error, which is reported once
    failure: Option<String>,
}

impl ErrorFile {
    /// Describes the file in this directory, for the host that the configuration names.
    #[must_use]
    pub fn new(dir: &Path, config: &Config) -> Self {
        Self {
            dir: dir.to_owned(),
            config: config.clone(),
            written: None,
            failure: None,
        }
    }

    /// Returns the errors that an earlier process left, unless the driver has been loaded since then. Only root can write the file;
    /// one that is damaged is the same as none.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "only root can write to the directory"
    )]
    pub fn read(&self, now: (Instant, SystemTime)) -> BTreeMap<String, OpenError> {
        let bytes = File::open(self.dir.join(NAME))
            .ok()
            .and_then(|file| read_file_limited(&file, MAX_SIZE).ok());
        let driver = driver(&HostState::of_host(&self.config));
        parse(&bytes.unwrap_or_default(), &driver, now)
    }

    /// Writes these errors if the file does not contain them.
    ///
    /// # Errors
    /// An error that is not the same as the last time.
    pub fn update(
        &mut self,
        errors: BTreeMap<String, OpenError>,
        now: (Instant, SystemTime),
    ) -> Result<(), String> {
        if self
            .written
            .as_ref()
            .is_some_and(|written| is_nearly(written, &errors))
        {
            return Ok(());
        }
        let result = self.write(&errors, now).map_err(|error| {
            format!(
                "cannot write {:?}: {}",
                self.dir.join(NAME),
                line(&error.into())
            )
        });
        self.written = Some(errors);
        let before = std::mem::replace(&mut self.failure, result.clone().err());
        if self.failure == before {
            Ok(())
        } else {
            result
        }
    }

    fn write(
        &self,
        errors: &BTreeMap<String, OpenError>,
        now: (Instant, SystemTime),
    ) -> io::Result<()> {
        let path = self.dir.join(NAME);
        if errors.is_empty() {
            return match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        }
        let gpus = errors
            .iter()
            .map(|(uuid, error)| (uuid.clone(), ErrorEntry::of(error, now)))
            .collect();
        let document = ErrorsFile {
            driver: driver(&HostState::of_host(&self.config)),
            gpus,
        };
        // A process that is killed leaves the old errors or the new ones.
        file::write(&path, &serde_json::to_string(&document)?)
    }
}

/// Returns the errors in the content of a file. There are none if it is invalid or describes another driver.
#[must_use]
pub fn parse(
    bytes: &[u8],
    driver: &str,
    now: (Instant, SystemTime),
) -> BTreeMap<String, OpenError> {
    let mut errors = BTreeMap::new();
    let Ok(document) = json::from_bytes::<ErrorsFile>(bytes) else {
        return errors;
    };
    if document.driver == driver {
        for (uuid, entry) in document.gpus {
            errors.insert(uuid, entry.open_error(now));
        }
    }
    errors
}

/// Reports whether the errors are the same but for less than [`PRECISION`] of the last ones.
fn is_nearly(written: &BTreeMap<String, OpenError>, errors: &BTreeMap<String, OpenError>) -> bool {
    written.len() == errors.len()
        && written
            .iter()
            .all(|(uuid, old)| errors.get(uuid).is_some_and(|new| is_near(old, new)))
}

fn is_near(old: &OpenError, new: &OpenError) -> bool {
    let moved = new.last.saturating_duration_since(old.last);
    old.cause == new.cause
        && old.driver_silent == new.driver_silent
        && old.is_stuck == new.is_stuck
        && old.since == new.since
        && old.last <= new.last
        && moved < PRECISION
}

fn driver(state: &HostState) -> String {
    format!(
        "{} {}",
        state.boot.as_deref().unwrap_or_default(),
        state.load
    )
}

impl ErrorEntry {
    fn of(error: &OpenError, now: (Instant, SystemTime)) -> Self {
        Self {
            cause: error.cause.clone(),
            since: to_millis(error.since, now),
            last: to_millis(error.last, now),
            driver_silent: error.driver_silent,
            is_stuck: error.is_stuck,
        }
    }

    fn open_error(self, now: (Instant, SystemTime)) -> OpenError {
        OpenError {
            cause: self.cause,
            since: from_millis(self.since, now),
            last: from_millis(self.last, now),
            driver_silent: self.driver_silent,
            is_stuck: self.is_stuck,
        }
    }
}

/// Returns the milliseconds since 1970.
fn to_millis(instant: Instant, (now, wall): (Instant, SystemTime)) -> u64 {
    let time = wall
        .checked_sub(now.saturating_duration_since(instant))
        .unwrap_or(UNIX_EPOCH);
    u64::try_from(
        time.duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_millis(),
    )
    .unwrap_or(u64::MAX)
}

/// A time in the future, from before the clock was set, is now.
fn from_millis(millis: u64, (now, wall): (Instant, SystemTime)) -> Instant {
    let age = wall
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .saturating_sub(Duration::from_millis(millis));
    now.checked_sub(age).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(cause: &str, now: Instant, since: u64, last: u64) -> OpenError {
        let ago = |seconds| now.checked_sub(Duration::from_secs(seconds)).unwrap();
        OpenError {
            cause: cause.to_owned(),
            since: ago(since),
            last: ago(last),
            driver_silent: false,
            is_stuck: true,
        }
    }

    #[test]
    fn errors_outlive_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let (now, wall) = (
            Instant::now() + Duration::from_secs(1000),
            SystemTime::now(),
        );
        let mut file = ErrorFile::new(&run, &Config::default());
        assert_eq!(file.read((now, wall)), BTreeMap::new());
        file.update(BTreeMap::new(), (now, wall)).unwrap();
        assert!(!run.is_dir());
        let errors = BTreeMap::from([("GPU-0".to_owned(), error("XID 79", now, 30, 10))]);
        file.update(errors, (now, wall)).unwrap();
        // More errors within a second do not change the file.
        let content = || fs::read(run.join(NAME)).unwrap();
        let before = content();
        for (last, is_new) in [
            (10_000, false),
            (9_500, false),
            (9_000, true),
            (8_900, false),
        ] {
            let last = now.checked_sub(Duration::from_millis(last)).unwrap();
            let errors = BTreeMap::from([(
                "GPU-0".to_owned(),
                OpenError {
                    last,
                    ..error("XID 79", now, 30, 10)
                },
            )]);
            let old = content();
            file.update(errors, (now, wall)).unwrap();
            assert_eq!(content() != old, is_new);
        }
        fs::write(run.join(NAME), before).unwrap();
        let later = (now + Duration::from_secs(5), wall + Duration::from_secs(5));
        let found = file.read(later);
        let (expected, found) = (error("XID 79", later.0, 35, 15), &found["GPU-0"]);
        let is_near = |a: Instant, b: Instant| a.max(b) - a.min(b) < Duration::from_millis(2);
        assert!(
            found.cause == expected.cause && found.is_stuck && is_near(found.since, expected.since),
            "{found:?}"
        );
        assert!(is_near(found.last, expected.last), "{found:?}");
        // The clock was set back.
        assert_eq!(
            file.read((now, wall - Duration::from_secs(600)))["GPU-0"].last,
            now
        );
        // Another boot, a damaged file
        let path = run.join(NAME);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replacen("\"driver\":\"", "\"driver\":\"x", 1)).unwrap();
        assert_eq!(file.read(later), BTreeMap::new());
        fs::write(&path, &text[1..]).unwrap();
        assert_eq!(file.read(later), BTreeMap::new());
        file.update(BTreeMap::new(), later).unwrap();
        assert!(!path.is_file());
    }
}
