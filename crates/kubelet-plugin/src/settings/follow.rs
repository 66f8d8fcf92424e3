//! Follows the limits of `[devices]` in config.toml while the plugin runs.
//!
//! The directories are watched, and the files are also examined twice a minute: that finds files that are links to another directory. A file
//! that is being written may be valid and lack its limits, so a new state is used only when it has lasted.
//! Whatever cannot be read, or is lost, keeps the limits that are in force: only a valid configuration changes what the node offers.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use base::report::{Finding, failure, line};
use findings::catalog;
use nvidia_host::config::{self, Config, FileStates, Limits};

/// The time between two polls after a change.
pub const PERIOD: Duration = Duration::from_secs(2);
/// How long the files must have been the same before they are read. Programs that truncate a file write it at once.
const SETTLED: Duration = Duration::from_secs(1);

/// The limits of a configuration that is valid, with the findings about it; or why the limits stay in force.
pub type SettingsChange = Result<(Limits, Vec<Finding>)>;

/// Follows config.toml and its drop-in files.
#[derive(Debug)]
pub struct Follower {
    path: Option<PathBuf>,
    /// The limits in force
    limits: Limits,
    /// The files from which they were read
    accepted: FileStates,
    /// Whether the files of the start were read again
    is_started: bool,
    /// The last state of the files, and when it was new
    seen: Option<(FileStates, Instant)>,
    /// The error that is in the log
    held: Option<String>,
}

impl Follower {
    /// Follows the file of `--config`, or the default one. `limits` are those that were read from it.
    #[must_use]
    pub fn new(path: Option<&Path>, limits: Limits) -> Self {
        Self {
            path: path.map(Path::to_owned),
            limits,
            accepted: FileStates::take(path),
            is_started: false,
            seen: None,
            held: None,
        }
    }

    /// Returns the directories of the files.
    #[must_use]
    pub fn dirs(&self) -> Vec<PathBuf> {
        self.accepted.dirs()
    }

    /// Reports whether the files must be examined again soon: they were not read since they changed, or reading them failed.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        let seen = self.seen.as_ref().map(|(seen, _)| seen);
        !self.is_started || self.held.is_some() || seen != Some(&self.accepted)
    }

    /// Examines the files, and reads them if that is due. The limits are read as for the hook and for the NRI plugin.
    pub fn poll(&mut self, now: Instant) -> Option<SettingsChange> {
        let path = self.path.clone();
        let states = FileStates::take(path.as_deref());
        if !self.is_due(&states, now) {
            return None;
        }
        let read = config::read(path.as_deref());
        if FileStates::take(path.as_deref()) != states {
            // The file may have been incomplete when it was read.
            return None;
        }
        self.take(states, read)
    }

    /// Decides whether the files must be read. After an error they are read at each poll: its reason may be elsewhere, and then the files
    /// remain the same when it ends.
    fn is_due(&mut self, states: &FileStates, now: Instant) -> bool {
        match &self.seen {
            Some((seen, since)) if seen == states => {
                let is_new = !self.is_started || *states != self.accepted;
                (is_new || self.held.is_some()) && now.duration_since(*since) >= SETTLED
            }
            _ => {
                self.seen = Some((states.clone(), now));
                false
            }
        }
    }

    /// Decides what follows from the result of reading the files.
    fn take(
        &mut self,
        states: FileStates,
        read: Result<(Config, Vec<Finding>)>,
    ) -> Option<SettingsChange> {
        match read {
            Err(error) => self.hold(error),
            Ok((Config { devices, .. }, findings)) => match states.lost_since(&self.accepted) {
                Some(lost) if devices != self.limits => self.hold(failure(
                    &catalog::CONFIG_FILE,
                    lost,
                    "restore the file, or restart the plugin if it is to use the configuration without it",
                )),
                _ => self.accept(states, devices, findings),
            },
        }
    }

    fn hold(&mut self, error: anyhow::Error) -> Option<SettingsChange> {
        let error = error.context(
            "cannot follow a change of config.toml, and the lists of [devices] remain in force",
        );
        let text = line(&error);
        let is_new = self.held.as_ref() != Some(&text);
        self.held = Some(text);
        is_new.then_some(Err(error))
    }

    fn accept(
        &mut self,
        states: FileStates,
        limits: Limits,
        findings: Vec<Finding>,
    ) -> Option<SettingsChange> {
        self.accepted = states;
        let was_held = self.held.take().is_some();
        // The findings of the start are in the log.
        let is_started = std::mem::replace(&mut self.is_started, true);
        let findings = if is_started { findings } else { Vec::new() };
        let is_news = was_held || limits != self.limits || !findings.is_empty();
        self.limits.clone_from(&limits);
        is_news.then_some(Ok((limits, findings)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// The files of a plugin, and its clock.
    struct Host {
        dir: tempfile::TempDir,
        follower: Follower,
        now: Instant,
    }

    impl Host {
        /// The plugin starts with these files.
        fn with(files: &[(&str, &str)]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("config.toml.d")).unwrap();
            files
                .iter()
                .for_each(|(name, text)| fs::write(dir.path().join(name), text).unwrap());
            let path = dir.path().join("config.toml");
            let (config, _) = config::read(Some(&path)).unwrap();
            let follower = Follower::new(Some(&path), config.devices);
            let mut host = Self {
                dir,
                follower,
                now: Instant::now(),
            };
            assert_eq!(host.settle(), "", "nothing has changed since the start");
            host
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn write(&self, name: &str, text: &str) {
            // Times have the resolution of the kernel's tick.
            std::thread::sleep(Duration::from_millis(20));
            fs::write(self.path(name), text).unwrap();
        }

        fn remove(&self, name: &str) {
            fs::remove_file(self.path(name)).unwrap();
        }

        fn poll(&mut self) -> String {
            self.now += PERIOD;
            match self.follower.poll(self.now) {
                None => String::new(),
                Some(Err(error)) => format!("held: {}", line(&error)),
                Some(Ok((limits, findings))) => {
                    let findings: String =
                        findings.iter().map(|finding| finding.kind.id()).collect();
                    format!("deny {}{findings}", limits.deny.join(","))
                }
            }
        }

        /// What happens within two polls. The first one never changes anything, and nothing is repeated.
        fn settle(&mut self) -> String {
            let reads_each_time = self.follower.held.is_some();
            let first = self.poll();
            assert!(first.is_empty() || reads_each_time, "{first}");
            let text = if first.is_empty() { self.poll() } else { first };
            for _ in 0..3 {
                assert_eq!(self.poll(), "", "after {text}");
            }
            text
        }
    }

    fn deny(gpu: &str) -> String {
        format!("[devices]\ndeny = [\"{gpu}\"]\n")
    }

    #[test]
    fn changed_added_and_removed_files() {
        let mut host = Host::with(&[("config.toml", "# nothing")]);
        host.write("config.toml", &deny("1"));
        assert_eq!(host.settle(), "deny 1");
        host.write("config.toml.d/50.toml", &deny("2"));
        assert_eq!(host.settle(), "deny 1,2");
        host.write("new", "# nothing");
        fs::rename(host.path("new"), host.path("config.toml")).unwrap();
        assert_eq!(host.settle(), "deny 2");
        host.remove("config.toml.d/50.toml");
        assert_eq!(host.settle(), "deny ");
        host.write("config.toml", "# other words");
        assert_eq!(host.settle(), "");
        host.write("config.toml", "[other]\nkey = 1");
        assert_eq!(host.settle(), "deny ONH-101");
        fs::remove_dir_all(host.path("config.toml.d")).unwrap();
        assert_eq!(host.settle(), "deny ONH-101");
    }

    #[test]
    fn invalid_files_keep_the_limits() {
        let mut host = Host::with(&[("config.toml", &deny("1"))]);
        host.write("config.toml", "[devices]\ndeny = [");
        let text = host.settle();
        let beginning = "held: cannot follow a change of config.toml, and the lists of [devices] remain in force: ";
        assert!(
            text.starts_with(beginning) && text.contains("config.toml\" line 2: "),
            "{text}"
        );
        host.write("config.toml", "[devices]\ndeny = [\"H100\"]");
        let text = host.settle();
        assert!(
            text.contains("line 2: devices.deny has an invalid value"),
            "another error: {text}"
        );
        host.write("config.toml", &deny("1"));
        assert_eq!(host.settle(), "deny 1");
        fs::set_permissions(host.path("config.toml"), fs::Permissions::from_mode(0o666)).unwrap();
        assert!(
            host.settle()
                .contains("it is writable by users other than root")
        );
        host.write("config.toml", &deny("2"));
        assert_eq!(host.settle(), "", "still writable");
        fs::set_permissions(host.path("config.toml"), fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(host.settle(), "deny 2");
        // With a file in the place of the directory, the drop-in files are unknown.
        fs::remove_dir(host.path("config.toml.d")).unwrap();
        host.write("config.toml.d", "");
        let text = host.settle();
        assert!(text.contains("config.toml.d\": not a directory"), "{text}");
    }

    #[test]
    fn lost_files_keep_the_limits() {
        let mut host = Host::with(&[
            ("config.toml", &deny("1")),
            ("config.toml.d/50.toml", &deny("2")),
        ]);
        host.write("config.toml", "");
        assert!(host.settle().ends_with("config.toml\" is empty"));
        host.remove("config.toml");
        assert!(host.settle().contains("no such file or directory"));
        host.write("config.toml", &deny("1"));
        assert_eq!(host.settle(), "deny 1,2");
        host.write("config.toml.d/50.toml", "");
        assert!(host.settle().ends_with("50.toml\" is empty"));
        host.remove("config.toml.d/50.toml");
        assert_eq!(host.settle(), "deny 1", "a drop-in file that is removed");
        host.write("config.toml", "# no limits");
        assert_eq!(host.settle(), "deny ");
        host.write("config.toml", "");
        assert_eq!(host.settle(), "", "the limits are the same");
    }

    /// `--config` is not given: a missing file is valid.
    #[test]
    fn a_default_file_that_is_lost() {
        let mut host = Host::with(&[
            ("config.toml", &deny("1")),
            ("config.toml.d/50.toml", &deny("2")),
        ]);
        let before = host.follower.accepted.clone();
        host.remove("config.toml");
        let now = FileStates::take(Some(&host.path("config.toml")));
        let limits = Limits {
            deny: vec!["2".to_owned()],
            ..Limits::default()
        };
        let config = Config {
            devices: limits,
            ..Config::default()
        };
        let change = host
            .follower
            .take(now.clone(), Ok((config.clone(), Vec::new())));
        let Some(Err(error)) = change else {
            panic!("{change:?}")
        };
        assert!(
            line(&error).ends_with("config.toml\" is missing"),
            "{error:#}"
        );
        assert_eq!(host.follower.accepted, before);
        assert!(
            host.follower.take(now, Ok((config, Vec::new()))).is_none(),
            "the same error again"
        );
    }

    #[test]
    fn files_that_are_being_written() {
        let mut host = Host::with(&[("config.toml", &deny("1"))]);
        for text in ["", "# deny", "[devices]", &deny("3")] {
            host.write("config.toml", text);
            assert_eq!(host.poll(), "");
        }
        assert_eq!(host.poll(), "deny 3");
        // After a pause of the process, two polls follow at once.
        host.write("config.toml", "# no limits yet");
        assert_eq!(host.poll(), "");
        assert!(
            host.follower
                .poll(host.now + Duration::from_millis(1))
                .is_none()
        );
        host.write("config.toml", &deny("3"));
        assert_eq!(host.settle(), "");
    }
}
