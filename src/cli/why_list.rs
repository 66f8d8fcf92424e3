//! The list that `why` prints without a name: the containers with a record.

use base::report::one_line;

use super::terminal::{Line, Tone, cell, table};
use records::{Outcome, Record};

/// Returns the indices of the devices: `0,1` for `GPU 0: …` and `GPU 1: …`, `0:1` for `MIG 0:1 of …`. For a text of another form,
/// it is the first word.
fn gpus(devices: &[String]) -> String {
    let indices: Vec<_> = devices.iter().map(|device| index(device)).collect();
    if indices.is_empty() { "-".to_owned() } else { one_line(&indices.join(",")) }
}

fn index(device: &str) -> &str {
    let rest = device.strip_prefix("GPU ").or_else(|| device.strip_prefix("MIG ")).unwrap_or(device);
    let word = rest.split(' ').next().unwrap_or_default();
    word.strip_suffix(':').unwrap_or(word).trim_start_matches("/dev/")
}

/// Returns a table of the records: time, id, outcome, name, GPUs and reason.
pub(super) fn lines(records: &[&Record]) -> Vec<Line> {
    let rows = records.iter().map(|record| {
        let name = record.container.display_name();
        [
            cell(one_line(&record.started)),
            cell(one_line(record.container.short())),
            (tone(record.outcome), short_outcome(record.outcome).to_owned()),
            cell(if name.is_empty() { "-".to_owned() } else { name }),
            cell(gpus(&record.devices)),
            cell(one_line(&record.reason)),
        ]
    });
    table(rows.collect())
}

/// Returns the outcome as one or two words.
pub(super) const fn short_outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Given => "given",
        Outcome::Partly => "partly",
        Outcome::Nothing => "nothing",
        Outcome::LeftAlone => "left alone",
        Outcome::Failed => "failed",
        Outcome::Unfinished => "unfinished",
    }
}

/// Returns how an outcome is highlighted.
pub(super) const fn tone(outcome: Outcome) -> Tone {
    match outcome {
        Outcome::Given => Tone::Good,
        Outcome::Partly => Tone::Warning,
        Outcome::Failed | Outcome::Unfinished => Tone::Bad,
        Outcome::Nothing | Outcome::LeftAlone => Tone::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::terminal::Terminal;
    use records::Pod;
    use std::path::Path;
    use std::time::SystemTime;

    fn record(pod: [&str; 3], name: &str, devices: &[&str]) -> Record {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        let [namespace, pod, container] = pod.map(str::to_owned);
        record.name_container("aa1".to_owned(), Pod { name: pod, namespace, container }, Path::new("/b"));
        record.container.name = name.to_owned();
        record.devices = devices.iter().map(|device| (*device).to_owned()).collect();
        record.end(Outcome::Given, "because".to_owned());
        record
    }

    #[test]
    fn columns() {
        let lines = lines(&[
            &record(["lab", "cuda-0", "main"], "k8s_main", &["GPU 0: X (UUID: GPU-1)", "MIG 1:2 of X (UUID: MIG-1)"]),
            &record(["", "", ""], "web\n\u{202e}", &[]),
            &record(["", "", ""], "", &["/dev/nvidia3"]),
        ]);
        assert_eq!(
            Terminal::default().render(&lines),
            "1970-01-01T00:00:00.000Z  aa1  given  lab/cuda-0/main  0,1:2    because\n\
             1970-01-01T00:00:00.000Z  aa1  given  web\\n\\u{202e}    -        because\n\
             1970-01-01T00:00:00.000Z  aa1  given  -                nvidia3  because\n"
        );
    }
}
