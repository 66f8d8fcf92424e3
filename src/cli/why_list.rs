//! The list that `why` prints without a name: the containers that recently did not get what they requested.

use std::time::{Duration, SystemTime};

use base::report::one_line;
use records::{Outcome, Record};

use super::terminal::{Cell, Line, Tone, cell, heading, table};
use super::time;

/// How long a failure is listed.
const RECENT: Duration = Duration::from_secs(3600);

/// Reports whether a container did not get what it requested in the last hour. A record in the future is recent: the clock was set back.
pub(super) fn is_recent_failure(record: &Record, now: SystemTime) -> bool {
    let is_failure = matches!(
        record.outcome,
        Outcome::Failed | Outcome::Unfinished | Outcome::Incomplete
    ) || record.is_without_gpus();
    is_failure && time::parse(&record.started).is_none_or(|started| started + RECENT >= now)
}

/// Returns a table of the records, with the reason below each row.
pub(super) fn lines(records: &[&Record], now: SystemTime) -> Vec<Line> {
    // Names of pods are long, so they are in the last column.
    let mut rows = vec![["STARTED", "RESULT", "NUMBER", "ID", "CONTAINER"].map(heading)];
    for record in records {
        rows.push(row(record, now));
    }
    let mut rows = table(rows).into_iter();
    let mut lines = Vec::from_iter(rows.next());
    for (row, record) in rows.zip(records) {
        lines.push(row);
        lines.push(Line::new(format!("    {}", reason(record))));
    }
    lines
}

fn row(record: &Record, now: SystemTime) -> [Cell; 5] {
    let since = match time::parse(&record.started) {
        Some(started) => time::ago(started, now),
        None => "-".to_owned(),
    };
    let number = match record.most_severe() {
        Some(finding) => one_line(&finding.id),
        None => "-".to_owned(),
    };
    let container = &record.container;
    let id = one_line(container.short());
    let mut name = bounded(&container.display_name());
    if name.is_empty() {
        "-".clone_into(&mut name);
    }
    let outcome = short_outcome(record.outcome).to_owned();
    [
        cell(since),
        (tone_of_row(record), outcome),
        cell(number),
        cell(id),
        cell(name),
    ]
}

/// The longest name in the list: names come from containers, and one of them must not make each row wrap.
const MAX_NAME: usize = 60;

fn bounded(name: &str) -> String {
    if name.chars().count() <= MAX_NAME {
        return name.to_owned();
    }
    let start: String = name.chars().take(MAX_NAME - 1).collect();
    start + "…"
}

/// Returns why a container did not get what it requested.
fn reason(record: &Record) -> String {
    match (record.outcome, record.shortfall()) {
        (Outcome::Incomplete, Some(lacks)) => format!("the container got {lacks}"),
        _ if record.reason.is_empty() => "the hook did not finish".to_owned(),
        _ => one_line(&record.reason),
    }
}

/// Returns the outcome as one or two words. oci-nvidia-hook(8) explains them.
pub(super) const fn short_outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Given => "ok",
        Outcome::Incomplete => "incomplete",
        Outcome::Nothing => "nothing",
        Outcome::Unchanged => "left alone",
        Outcome::Failed => "failed",
        Outcome::Unfinished => "unfinished",
    }
}

fn tone_of_row(record: &Record) -> Tone {
    if record.is_without_gpus() {
        Tone::Warning
    } else {
        tone(record.outcome)
    }
}

/// Returns how an outcome is highlighted.
pub(super) const fn tone(outcome: Outcome) -> Tone {
    match outcome {
        Outcome::Given => Tone::Good,
        Outcome::Incomplete => Tone::Warning,
        Outcome::Failed | Outcome::Unfinished => Tone::Bad,
        Outcome::Nothing | Outcome::Unchanged => Tone::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::terminal::Terminal;
    use base::report::Finding;
    use findings::catalog;
    use records::Pod;
    use std::path::Path;

    fn record(pod: [&str; 3], name: &str, outcome: Outcome) -> Record {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        let [namespace, pod, container] = pod.map(str::to_owned);
        record.name_container(
            "aa1".to_owned(),
            Pod {
                name: pod,
                namespace,
                container,
            },
            Path::new("/b"),
        );
        record.container.name = name.to_owned();
        record.end(outcome, "because".to_owned());
        record
    }

    #[test]
    fn each_row_has_its_reason() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(120);
        let lines = lines(
            &[
                &record(["lab", "cuda-0", "main"], "k8s_main", Outcome::Failed),
                &record(["", "", ""], "web\n\u{202e}", Outcome::Unfinished),
                &record(["", "", ""], "", Outcome::Incomplete),
            ],
            now,
        );
        assert_eq!(
            Terminal::default().render(&lines),
            "STARTED        RESULT      NUMBER  ID   CONTAINER\n\
             2 minutes ago  failed      -       aa1  lab/cuda-0/main\n    because\n\
             2 minutes ago  unfinished  -       aa1  web\\n\\u{202e}\n    because\n\
             2 minutes ago  incomplete  -       aa1  -\n    because\n"
        );
    }

    #[test]
    fn failures_of_the_last_hour() {
        for (outcome, expected) in [
            (Outcome::Given, false),
            (Outcome::Incomplete, true),
            (Outcome::Nothing, false),
            (Outcome::Unchanged, false),
            (Outcome::Failed, true),
            (Outcome::Unfinished, true),
        ] {
            let record = record([""; 3], "", outcome);
            let after = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(
                is_recent_failure(&record, after(3600)),
                expected,
                "{outcome:?}"
            );
            assert!(!is_recent_failure(&record, after(3601)), "{outcome:?}");
        }
        for (kind, expected) in [
            (&catalog::REFUSED, true),
            (&catalog::MISSPELLED_VARIABLE, true),
            (&catalog::OTHER_FILES, false),
        ] {
            let mut record = record([""; 3], "", Outcome::Unchanged);
            record.add_finding(&Finding::new(kind, "what", "fix"));
            let is_listed = is_recent_failure(&record, SystemTime::UNIX_EPOCH);
            assert_eq!(is_listed, expected, "{}", kind.id());
        }
    }
}
