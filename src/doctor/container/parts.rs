//! Examines one part of a container in a child process with a deadline.
//!
//! The container can mount a FUSE file system at any path, and its server decides how long a lookup takes. A process that waits
//! for the server cannot always be killed. So another process examines the container's files, and is abandoned if it does not
//! answer.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use base::report::{line, one_line};
use base::sys::child::{self, NoAnswer};
use findings::catalog;

use super::Part;
use super::facts::ContainerFacts;
use crate::doctor::{Check, Section, Status, run};

/// How long the examination of one part may take. Usually it takes milliseconds.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// The limit for a path in a message, in characters.
const MAX_SHOWN: usize = 200;

/// Why a part of a container could not be examined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Unanswered {
    /// The deadline passed. The last path that was looked up; empty if there is none.
    Silent(String),
    /// The child failed, for this reason.
    Failed(String),
}

/// The pipe to the parent.
#[derive(Debug)]
pub(super) struct Reporter<'p>(&'p mut File);

// The first byte of a line: the path that is looked up next, a result, the number of an error, and the end.
const PATH: u8 = b'@';
const CHECK: u8 = b'=';
const ERROR: u8 = b'!';
const END: u8 = b'.';
/// Separates the fields of a result.
const SEPARATOR: char = '\u{1f}';

impl Reporter<'_> {
    /// Reports the path that is looked up next, which may not answer.
    pub(super) fn looks_up(&mut self, path: &Path) {
        let shown: String = path.to_string_lossy().chars().take(MAX_SHOWN).collect();
        self.send(PATH, &one_line(&shown));
    }

    fn send(&mut self, kind: u8, text: &str) {
        let mut line = vec![kind];
        line.extend(text.bytes());
        line.push(b'\n');
        child::report(self.0, &line);
    }
}

/// Runs `inspect` and the checks of the part in a child process, and returns the results. The inner error comes from `inspect`.
pub(super) fn ask(
    patience: Duration,
    part: &Part,
    inspect: &dyn Fn(&mut Reporter<'_>) -> io::Result<ContainerFacts>,
) -> Result<io::Result<Vec<Check>>, Unanswered> {
    let until = Instant::now() + patience;
    let spawned = child::spawn(|pipe| {
        let mut reporter = Reporter(pipe);
        match inspect(&mut reporter) {
            Ok(facts) => {
                let checks = run(Section::Container, part.checks, &facts);
                checks
                    .iter()
                    .for_each(|check| reporter.send(CHECK, &encode(check)));
            }
            Err(error) => {
                reporter.send(ERROR, &error.raw_os_error().unwrap_or_default().to_string())
            }
        }
        reporter.send(END, "");
    });
    let mut child = spawned.map_err(|error| Unanswered::Failed(line(&error.into())))?;
    let (mut place, mut checks) = (String::new(), Vec::new());
    loop {
        let received = match child.line(until) {
            Ok(received) => String::from_utf8_lossy(&received).into_owned(),
            Err(NoAnswer::Timeout) => return Err(Unanswered::Silent(place)),
            Err(NoAnswer::Died(signal)) => {
                let how = signal.map_or_else(
                    || "has ended".to_owned(),
                    |signal| format!("was ended by {signal}"),
                );
                return Err(Unanswered::Failed(format!(
                    "the process that examines it {how}"
                )));
            }
            Err(NoAnswer::System(error)) => return Err(Unanswered::Failed(line(&error.into()))),
        };
        let text = received.get(1..).unwrap_or_default();
        match received.bytes().next() {
            Some(PATH) => text.clone_into(&mut place),
            Some(CHECK) => checks.extend(decode(text, part)),
            Some(ERROR) => {
                return Ok(Err(io::Error::from_raw_os_error(
                    text.parse().unwrap_or_default(),
                )));
            }
            _ => return Ok(Ok(checks)),
        }
    }
}

fn encode(
    Check {
        check,
        status,
        id,
        what,
        fix,
        ..
    }: &Check,
) -> String {
    let fields = [
        check,
        &*status.to_string(),
        id.unwrap_or_default(),
        &one_line(what),
        &one_line(fix),
    ];
    fields.join(&SEPARATOR.to_string())
}

fn decode(text: &str, part: &Part) -> Option<Check> {
    let mut fields = text.split(SEPARATOR);
    let (check, status, id, what, fix) = (
        fields.next()?,
        fields.next()?,
        fields.next()?,
        fields.next()?,
        fields.next()?,
    );
    let (check, _) = part.checks.iter().find(|(name, _)| *name == check)?;
    let found = match catalog::find(id) {
        Some(kind) => Check::of(kind, what, fix),
        None if status == Status::Skipped.to_string() => Check::skipped(what),
        None => Check::ok(what),
    };
    Some(Check {
        section: Section::Container,
        check,
        ..found
    })
}

#[cfg(test)]
mod tests {
    use super::super::PARTS;
    use super::*;

    fn asked(
        patience: Duration,
        inspect: &dyn Fn(&mut Reporter<'_>) -> io::Result<ContainerFacts>,
    ) -> Result<io::Result<Vec<Check>>, Unanswered> {
        ask(patience, &PARTS[0], inspect)
    }

    #[test]
    fn a_result_arrives_as_it_was_sent() {
        let part = &PARTS[2];
        for check in [
            Check::ok("a \"b\""),
            Check::skipped("c"),
            Check::of(&catalog::CONTAINER_NODE, "d", "e"),
            Check::of(&catalog::STALE_CACHE, "", "f"),
        ] {
            let check = Check {
                section: Section::Container,
                check: part.checks[1].0,
                ..check
            };
            assert_eq!(decode(&encode(&check), part), Some(check));
        }
        let hostile = Check {
            section: Section::Container,
            check: part.checks[0].0,
            ..Check::ok("a\n=\u{1f}b")
        };
        assert_eq!(
            decode(&encode(&hostile), part).unwrap().what,
            "a\\n=\\u{1f}b"
        );
        assert_eq!(decode("", part), None);
    }

    #[test]
    fn an_error_arrives() {
        let error = asked(PATIENCE, &|_| Err(io::Error::from_raw_os_error(3)))
            .unwrap()
            .unwrap_err();
        assert_eq!(error.raw_os_error(), Some(3));
    }

    #[test]
    fn a_child_that_does_not_answer_is_abandoned() {
        let start = Instant::now();
        let answer = asked(Duration::from_millis(300), &|reporter| {
            reporter.looks_up(Path::new("/first"));
            reporter.looks_up(Path::new("/volume/a\nb"));
            std::thread::sleep(Duration::from_secs(60));
            Err(io::Error::from_raw_os_error(3))
        });
        assert_eq!(
            answer.unwrap_err(),
            Unanswered::Silent("/volume/a\\nb".to_owned())
        );
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{:?}",
            start.elapsed()
        );
    }

    #[test]
    fn a_child_that_ends_is_reported() {
        let answer = asked(PATIENCE, &|_| {
            nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).ok();
            Err(io::Error::from_raw_os_error(3))
        });
        let why = "the process that examines it was ended by SIGKILL";
        assert_eq!(answer.unwrap_err(), Unanswered::Failed(why.to_owned()));
    }
}
