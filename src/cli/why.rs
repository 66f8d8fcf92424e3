//! `why`: prints what the hook did for a container, and why, from the record of its last run. Without a record, it uses the
//! container's config.json.

use std::path::Path;
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::Result;
use serde::Serialize;

use base::json;
use base::paths::HostPath;
use base::report::one_line;
use base::tree::Tree;
use engines::ignored::{Ignored, ignored_request};
use nvidia_host::config;
use nvidia_host::device_id::in_words;

use super::containers::{self, KnownContainer, RemovedRecords};
use super::terminal::{Line, Terminal, Tone};
use super::why_list::{self, tone};
use super::{args, output, time};
use crate::oci::{self, spec_view::SpecView};
use crate::plan::engine_devices;
use crate::plan::{self, Verdict};
use crate::record::call::Call;
use records::{NRI, Outcome, Record, RecordedDevice, StoredFinding};

/// The document of `--json`, whose schema is `docs/schemas/why.json`.
#[derive(Debug, Serialize)]
struct Document<'a> {
    version: u32,
    /// Sorted from the newest to the oldest
    records: &'a [&'a Record],
    /// The given container, if it has no record
    #[serde(skip_serializing_if = "Option::is_none")]
    without_record: Option<&'a WithoutRecord>,
    /// The containers of the given pod, or the given container, that have no record
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    without_records: &'a [WithoutRecord],
}

/// Prints the records. Returns 0 if the container is known, even if the hook failed for it.
pub(crate) fn run(
    options: &args::Why,
    config: Option<&Path>,
    terminal: Terminal,
) -> Result<ExitCode> {
    Ok(output::print(&match &options.container {
        Some(name) => show(name, options, config, terminal)?,
        None => list(options, terminal)?,
    }))
}

fn list(options: &args::Why, terminal: Terminal) -> Result<String> {
    let known = containers::read()?;
    let now = SystemTime::now();
    let records = known.iter().filter_map(|known| known.record.as_ref());
    let records: Vec<_> = records
        .filter(|record| why_list::is_recent_failure(record, now))
        .collect();
    let roots = containers::roots_records("why");
    if options.output.json {
        // On stderr, because stdout contains only the document.
        roots.iter().for_each(|hint| Call::default().report(hint));
        return document(&records, &[]);
    }
    let text = match records.is_empty() {
        false => {
            let more = "details: \"oci-nvidia-hook why NAME\"; all containers: \"oci-nvidia-hook ps --all\"";
            terminal.render(&why_list::lines(&records, now)) + more + "\n"
        }
        true => {
            let of_user = if roots.is_some() { " of this user" } else { "" };
            format!(
                "no container{of_user} failed in the last hour; \"oci-nvidia-hook ps --all\" lists all\n"
            )
        }
    };
    Ok(text + &roots.map(|hint| format!("{hint}\n")).unwrap_or_default())
}

fn show(
    name: &str,
    options: &args::Why,
    config: Option<&Path>,
    terminal: Terminal,
) -> Result<String> {
    let known = containers::read()?;
    let found = containers::find(name, &known)?;
    let (mut records, mut without_records) = (Vec::new(), Vec::new());
    for container in found {
        if let Some(record) = &container.record {
            records.push(record);
            continue;
        }
        let mut answer = without_record(container, config)?;
        if let Some(earlier) = containers::earlier(container, &known) {
            answer.earlier.clone_from(&earlier.container.id);
        }
        without_records.push(answer);
    }
    if options.output.json {
        return document(&records, &without_records);
    }
    let now = SystemTime::now();
    let mut texts = Vec::new();
    for record in records {
        texts.push(terminal.render(&lines(record, now)));
    }
    for container in without_records {
        texts.push(terminal.render(&container.lines()));
    }
    Ok(texts.join("\n"))
}

fn document(records: &[&Record], without_records: &[WithoutRecord]) -> Result<String> {
    Ok(json::pretty(&Document {
        version: json::VERSION,
        without_record: match without_records {
            [one] if records.is_empty() => Some(one),
            _ => None,
        },
        records,
        without_records,
    })? + "\n")
}

/// A container without a record, as in most cases because it requests no GPU. The field names are part of the JSON interface.
#[derive(Debug, Default, Serialize)]
struct WithoutRecord {
    id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
    outcome: NotSetUp,
    reason: String,
    /// The finding that is the reason; empty if none is
    #[serde(skip_serializing_if = "str::is_empty")]
    finding: &'static str,
    /// The GPUs that the engine gave to the container
    devices: Vec<RecordedDevice>,
    /// These GPUs and how they got into the container, in words
    #[serde(skip)]
    given: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    hint: String,
    /// The id of an earlier container with the same name, which has a record
    #[serde(skip_serializing_if = "String::is_empty")]
    earlier: String,
    /// The number of removed records, if its record can be one of them
    #[serde(skip_serializing_if = "Option::is_none")]
    removed_records: Option<RemovedRecords>,
}

/// Why there is no record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum NotSetUp {
    /// The container requests no GPU.
    #[default]
    Nothing,
    /// The container requests GPUs, and the hook leaves it unchanged.
    #[serde(rename = "left-alone")]
    Unchanged,
    /// The container requests GPUs, and the hook was not called.
    NotCalled,
}

fn without_record(known: &KnownContainer, config: Option<&Path>) -> Result<WithoutRecord> {
    let spec = oci::spec_view::read_named(&known.bundle)?;
    let (config, _) = config::read(config)?;
    let name = known.names.first().cloned().unwrap_or_default();
    let mut answer = WithoutRecord {
        id: known.id.clone(),
        name,
        ..WithoutRecord::default()
    };
    match plan::verdict(&spec, &config)? {
        Verdict::Nothing(reason) => {
            answer.reason = reason;
            if let Some(given) = engine_devices::find(&spec) {
                (answer.devices, answer.given) = (given.devices(), given.to_string());
            } else if let Some(ignored) = ignored_by_podman(&spec, &known.id) {
                answer.reason.push_str(&format!(", and {}", ignored.what()));
                ignored.instead().clone_into(&mut answer.hint);
            }
        }
        Verdict::Unchanged(finding) => {
            answer.outcome = NotSetUp::Unchanged;
            answer.finding = finding.kind.id();
            (answer.reason, answer.hint) = (finding.what, finding.fix);
        }
        Verdict::Gpus(request) => {
            answer.outcome = NotSetUp::NotCalled;
            answer.removed_records = containers::removed_records();
            answer.reason = format!(
                "{} requests {}",
                request.asked_by,
                in_words(&request.devices.names())
            );
            "\"oci-nvidia-hook status\" shows whether engines start the hook"
                .clone_into(&mut answer.hint);
        }
    }
    Ok(answer)
}

/// Returns the request that Podman ignored. It is not asked about pods of Kubernetes: where only CRI-O has containers, Podman would create a
/// database.
fn ignored_by_podman(spec: &SpecView, id: &str) -> Option<Ignored> {
    if !spec.pod.name.is_empty() {
        return None;
    }
    let host = Tree::open(&HostPath::new("/")).ok()?;
    ignored_request(&host, id)
}

impl WithoutRecord {
    fn lines(&self) -> Vec<Line> {
        let reason = one_line(&self.reason);
        let why = match self.outcome {
            NotSetUp::Nothing if self.given.is_empty() => {
                format!("the container requests no GPU: {reason}")
            }
            NotSetUp::Nothing => format!("the container requests no GPU from the hook: {reason}"),
            NotSetUp::Unchanged => format!("the hook does nothing: {reason} ({})", self.finding),
            NotSetUp::NotCalled => {
                format!(
                    "{reason}, but no record shows that the hook was called for the container since the last boot"
                )
            }
        };
        let mut lines = vec![format!("container {}", named(&self.id, &self.name)), why];
        lines.extend(self.given.lines().map(one_line));
        lines.extend(self.removed_records.map(|removed| removed.to_string()));
        if !self.hint.is_empty() {
            lines.push(format!("hint: {}", one_line(&self.hint)));
        }
        if !self.earlier.is_empty() {
            let id = one_line(&self.earlier);
            lines.push(format!(
                "an earlier container had this name: \"oci-nvidia-hook why {id}\""
            ));
        }
        lines.into_iter().map(plain).collect()
    }
}

fn named(id: &str, name: &str) -> String {
    let id = one_line(id);
    if name.is_empty() {
        id
    } else {
        format!("{id} ({})", one_line(name))
    }
}

/// Returns the record as text.
pub fn to_text(record: &Record) -> String {
    Terminal::default().render(&lines(record, SystemTime::UNIX_EPOCH))
}

fn plain(text: impl Into<String>) -> Line {
    Line::new(text)
}

/// Returns the record as lines. Its texts can come from a container, so control characters are escaped.
fn lines(record: &Record, now: SystemTime) -> Vec<Line> {
    let mut lines = container_lines(record, now);
    lines.extend(request_lines(record));
    lines.push(outcome(record));
    for device in &record.devices {
        lines.push(plain(format!("  {}", one_line(&device.to_string()))));
    }
    for finding in &record.findings {
        lines.extend(finding_lines(finding, record.outcome));
    }
    let mut steps = Vec::new();
    for step in &record.steps {
        let name = one_line(&step.name);
        steps.push(format!("{name} {:.1} ms", step.milliseconds));
    }
    if !steps.is_empty() {
        lines.push(plain(format!("took: {}", steps.join(", "))));
    }
    lines
}

/// Describes which container was set up, when, and by which hook.
fn container_lines(record: &Record, now: SystemTime) -> Vec<Line> {
    let container = &record.container;
    let name = named(&container.id, &container.name);
    let mut lines = vec![plain(format!("container {name}"))];
    let pod = &container.pod;
    if !pod.name.is_empty() {
        let words = format!(
            "pod {}/{}, container {}",
            pod.namespace, pod.name, pod.container
        );
        lines.push(plain(one_line(&words)));
    }
    let (stage, hook) = (one_line(&record.stage), one_line(&record.hook));
    let started = time::utc(&record.started, now);
    lines.push(plain(format!("at {stage}, {started}, hook version {hook}")));
    if !record.ended.is_empty() {
        lines.push(plain(format!("ended {}", time::utc(&record.ended, now))));
    }
    lines
}

fn request_lines(record: &Record) -> Vec<Line> {
    let Some(asked) = &record.asked else {
        return match record.request.as_str() {
            "" => Vec::new(),
            request => vec![plain(one_line(request))],
        };
    };
    let requested = in_words(&asked.visible_devices);
    let capabilities = asked.driver_capabilities.join(",");
    let features = match asked.features.as_slice() {
        [] => String::new(),
        features => format!("; features {}", features.join(",")),
    };
    let words = format!(
        "requested: {requested}; capabilities {capabilities}{features} ({})",
        record.request
    );
    let mut lines = vec![plain(one_line(&words))];
    for requirement in &asked.requirements {
        lines.push(plain(format!("requires: {}", one_line(requirement))));
    }
    lines
}

fn finding_lines(finding: &StoredFinding, outcome: Outcome) -> Vec<Line> {
    let id = one_line(&finding.id);
    let severity = one_line(&finding.severity);
    // The line of the outcome already contains the message of this error.
    let line = if finding.severity == "error" && outcome == Outcome::Failed {
        plain(format!(
            "number: {id}; \"oci-nvidia-hook explain {id}\" describes it"
        ))
    } else {
        let line = plain(format!("{id} ")).then(Tone::of_severity(&severity), &severity);
        line.then(Tone::Plain, format!(": {}", one_line(&finding.what)))
    };
    let mut lines = vec![line];
    if !finding.fix.is_empty() {
        lines.push(plain(format!("  hint: {}", one_line(&finding.fix))));
    }
    lines
}

fn outcome(record: &Record) -> Line {
    let is_nri = record.stage == NRI;
    let words = match record.outcome {
        Outcome::Given => "the container got what it requested".to_owned(),
        Outcome::Incomplete => format!(
            "the container got {}",
            record.shortfall().unwrap_or("less than it requested")
        ),
        Outcome::Nothing => "the container requests no GPU".to_owned(),
        Outcome::Unchanged if is_nri => "the NRI plugin did nothing".to_owned(),
        Outcome::Unchanged => "the hook did nothing".to_owned(),
        Outcome::Failed if is_nri => "the NRI plugin refused the container".to_owned(),
        Outcome::Failed => "the hook failed".to_owned(),
        Outcome::Unfinished => {
            "the hook did not finish: it still runs, or it was stopped after a timeout".to_owned()
        }
    };
    let reason = if record.reason.is_empty() {
        String::new()
    } else {
        format!(": {}", one_line(&record.reason))
    };
    Line::default()
        .then(tone(record.outcome), words)
        .then(Tone::Plain, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use records::Pod;

    #[test]
    fn a_hostile_record_stays_on_its_lines() {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        record.name_container("aa1".to_owned(), Pod::default(), Path::new("/b"));
        record.container.name = "x\u{1b}[2J".to_owned();
        record.end(Outcome::Failed, "a\nb".to_owned());
        record.devices.push(RecordedDevice {
            uuid: "c\nd".to_owned(),
            ..RecordedDevice::default()
        });
        let text = to_text(&record);
        assert!(
            text.contains("(x\\u{1b}[2J)") && text.contains("hook failed: a\\nb\n  c\\nd\n"),
            "{text}"
        );
        let mut refused = Record::begin(NRI, SystemTime::UNIX_EPOCH);
        refused.end(Outcome::Failed, "no such GPU".to_owned());
        let text = to_text(&refused);
        assert!(
            text.contains("\nthe NRI plugin refused the container: no such GPU\n"),
            "{text}"
        );
    }
}
