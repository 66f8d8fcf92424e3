//! `why`: what the hook did for a container, and why. From the record of its last call; for a container without one, from
//! its config.json.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use base::json;
use base::report::{Finding, catalog, failure, one_line};
use base::sys::{ns, run_dir};
use nvidia_host::config;

use super::terminal::{Line, Terminal, Tone};
use super::{args, output, why_list};
use crate::log::Log;
use crate::oci;
use crate::plan::{self, Verdict};
use crate::record::storage::{self, Listed};
use crate::record::store::{self, Store};
use crate::record::{Outcome, Record};
use crate::request::given;

/// A container that engines have.
struct Known {
    listed: Listed,
    bundle: PathBuf,
}

/// The document of `--json`. The names are an interface.
#[derive(Debug, Serialize)]
struct Answer<'a> {
    version: u32,
    /// The newest first
    records: Vec<&'a Record>,
    /// The container that was asked about, if it has no record
    #[serde(skip_serializing_if = "Option::is_none")]
    without_record: Option<WithoutRecord>,
}

impl<'a> Answer<'a> {
    const fn of(records: Vec<&'a Record>) -> Self {
        Self { version: json::VERSION, records, without_record: None }
    }

    fn print(&self) -> Result<String> {
        Ok(json::pretty(self)? + "\n")
    }
}

/// Which container is meant.
#[derive(Debug, PartialEq, Eq)]
enum Meant {
    /// The records of these places in the list
    Records(Vec<usize>),
    /// The container of this place in the list: it has no record
    Known(usize),
    /// These ids begin so
    Several(Vec<String>),
    Nothing,
}

/// Prints it. 0 if there is something to tell, also if that is a failure.
pub(crate) fn run(options: &args::Why, config: Option<&Path>, terminal: Terminal) -> ExitCode {
    let told = match &options.container {
        Some(name) => tell(name, options, config, terminal),
        None => tell_all(options, terminal),
    };
    match told {
        Ok(text) => output::print(&text),
        Err(error) => {
            Log::default().error(&error);
            ExitCode::FAILURE
        }
    }
}

fn tell_all(options: &args::Why, terminal: Terminal) -> Result<String> {
    let (records, _) = records_and_known()?;
    let roots = roots_records();
    if options.output.json {
        // Stdout is for the records alone.
        roots.iter().for_each(|hint| Log::default().report(hint));
        return Answer::of(records.iter().collect()).print();
    }
    if records.is_empty() {
        return Ok(match roots {
            Some(hint) => format!("no container of this user has asked for GPUs\n{hint}\n"),
            None => "no container has asked for GPUs\n".to_owned(),
        });
    }
    Ok(terminal.render(&why_list::lines(&records)) + &roots.map(|hint| hint + "\n").unwrap_or_default())
}

/// Where to look for containers of root's engines, for a user who cannot read their records.
fn roots_records() -> Option<String> {
    let is_root = rustix::process::geteuid().is_root() && !ns::in_user_namespace().unwrap_or_default();
    let is_there = run_dir::path_of_root().symlink_metadata().is_ok();
    (!is_root && is_there).then(|| {
        "only root can read the records of root's containers (Kubernetes, \"sudo podman\"): \
         run \"sudo oci-nvidia-hook why\""
            .to_owned()
    })
}

fn tell(name: &str, options: &args::Why, config: Option<&Path>, terminal: Terminal) -> Result<String> {
    let (records, known) = records_and_known()?;
    match find(name, &records, &known) {
        Meant::Records(places) => {
            let meant: Vec<_> = places.iter().filter_map(|at| records.get(*at)).collect();
            if options.output.json {
                return Answer::of(meant).print();
            }
            let texts: Vec<_> = meant.iter().map(|record| terminal.render(&lines(record))).collect();
            Ok(texts.join("\n"))
        }
        Meant::Known(at) => {
            let Some(known) = known.get(at) else { return Ok(String::new()) };
            let answer = without_record(known, config)?;
            if options.output.json {
                return Answer { without_record: Some(answer), ..Answer::of(Vec::new()) }.print();
            }
            Ok(terminal.render(&answer.lines()))
        }
        Meant::Several(ids) => Err(ambiguous(name, &ids)),
        Meant::Nothing => Err(unknown(name)),
    }
}

fn ambiguous(name: &str, ids: &[String]) -> anyhow::Error {
    failure(&catalog::NO_RECORD, format!("several ids begin with {name:?}: {}", ids.join(", ")), "give more of the id")
}

fn unknown(name: &str) -> anyhow::Error {
    failure(
        &catalog::NO_RECORD,
        format!("no container or pod {name:?} is known"),
        roots_records().unwrap_or_else(|| {
            "\"oci-nvidia-hook why\" lists the containers that asked for GPUs; \"oci-nvidia-hook status\" shows whether \
             engines call the hook"
                .to_owned()
        }),
    )
}

/// The directory that has config.json of the container that this name means.
///
/// # Errors
/// If no container has it, several have it, or the one that had it was removed.
pub(super) fn bundle_of(name: &str) -> Result<PathBuf> {
    let (records, known) = records_and_known()?;
    let bundle = match find(name, &records, &known) {
        Meant::Records(places) => {
            match places.iter().filter_map(|at| records.get(*at)).collect::<Vec<_>>().as_slice() {
                [record] => record.container.bundle.clone(),
                several => {
                    let names: Vec<_> = several.iter().map(|record| why_list::who(&record.container)).collect();
                    return Err(failure(
                        &catalog::NO_RECORD,
                        format!("pod {name:?} has several containers"),
                        format!("name one of {}", names.join(", ")),
                    ));
                }
            }
        }
        Meant::Known(at) => known.get(at).map(|known| known.bundle.clone()).unwrap_or_default(),
        Meant::Several(ids) => return Err(ambiguous(name, &ids)),
        Meant::Nothing => return Err(unknown(name)),
    };
    match bundle.join("config.json").try_exists() {
        Ok(false) => Err(failure(
            &catalog::NO_RECORD,
            format!("container {name:?} has no config.json any more: its engine removed it"),
            format!("oci-nvidia-hook why {name}"),
        )),
        // What is in the way is reported by the one who reads it.
        Ok(true) | Err(_) => Ok(bundle),
    }
}

/// The id of the container that this name or beginning of an id means, if it is known.
pub(super) fn id_of(name: &str) -> Option<String> {
    let (records, known) = records_and_known().ok()?;
    match find(name, &records, &known) {
        // A pod of several containers is no container.
        Meant::Records(places) => match places.as_slice() {
            [at] => records.get(*at).map(|record| record.container.id.clone()),
            _ => None,
        },
        Meant::Known(at) => known.get(at).map(|known| known.listed.id.clone()),
        Meant::Several(_) | Meant::Nothing => None,
    }
}

/// The records, with names, and the containers that engines have.
fn records_and_known() -> Result<(Vec<Record>, Vec<Known>)> {
    let mut records = records()?;
    let known = known_containers(&records);
    name_all(&mut records, &known);
    Ok((records, known))
}

/// A file that is no record is reported, and the others are read.
fn records() -> Result<Vec<Record>> {
    let found = Store::existing()?.map(|store| store.all()).transpose()?.unwrap_or_default();
    let dir = run_dir::path()?.join(store::DIR);
    for (name, why) in &found.broken {
        let path = dir.join(name);
        Log::default().finding(&Finding::of(
            &catalog::BROKEN_RECORD,
            format!("cannot read the record {path:?}: {why}"),
            format!("rm {}", path.display()),
        ));
    }
    Ok(found.records)
}

/// Of the user who asks, and where these records are from.
fn known_containers(records: &[Record]) -> Vec<Known> {
    let us = nix::unistd::Uid::effective();
    let home = if us.is_root() { None } else { nix::unistd::User::from_uid(us).ok().flatten().map(|user| user.dir) };
    let mut dirs = storage::dirs(home.as_deref());
    dirs.extend(records.iter().filter_map(|record| storage::dir_of(&record.container.bundle)).map(Path::to_owned));
    let of = |dir: PathBuf| {
        let known = storage::read(&dir).into_iter();
        known.map(move |listed| Known { bundle: dir.join(&listed.id).join("userdata"), listed })
    };
    BTreeSet::from_iter(dirs).into_iter().flat_map(of).collect()
}

/// The engine knows the names of those that it still has.
fn name_all(records: &mut [Record], known: &[Known]) {
    for record in records.iter_mut().filter(|record| record.container.name.is_empty()) {
        let listed = known.iter().find(|known| known.listed.id == record.container.id);
        record.container.name = listed.and_then(|known| known.listed.names.first()).cloned().unwrap_or_default();
    }
}

/// An id, a name, a pod, or the beginning of one id; in this order. `records` are the newest first.
fn find(name: &str, records: &[Record], known: &[Known]) -> Meant {
    let id_of_name = known.iter().find(|known| known.listed.names.iter().any(|other| other == name));
    let id = id_of_name.map_or(name, |known| &known.listed.id);
    let is = |record: &Record| !name.is_empty() && (record.container.id == id || record.container.name == name);
    if let Some(at) = records.iter().position(is) {
        return Meant::Records(vec![at]);
    }
    let of_pod: Vec<_> = (0..records.len())
        .filter(|at| records.get(*at).is_some_and(|record| why_list::is_pod(&record.container, name)))
        .collect();
    if !of_pod.is_empty() {
        return Meant::Records(why_list::newest_of_each(records, &of_pod));
    }
    if let Some(at) = known.iter().position(|known| known.listed.id == id) {
        return Meant::Known(at);
    }
    let ids = records.iter().map(|record| &record.container.id).chain(known.iter().map(|known| &known.listed.id));
    let ids = BTreeSet::from_iter(ids.filter(|id| !name.is_empty() && id.starts_with(name)).cloned());
    let ids: Vec<_> = ids.into_iter().collect();
    match ids.as_slice() {
        [] => Meant::Nothing,
        [id] => find(id, records, known),
        _ => Meant::Several(ids),
    }
}

/// What is known about a container without a record. Most containers have none: they ask for nothing. The names are an
/// interface.
#[derive(Debug, Serialize)]
struct WithoutRecord {
    id: String,
    name: String,
    outcome: NotSetUp,
    reason: String,
    /// Finding that decided; empty if none did
    finding: &'static str,
    /// CDI devices or device nodes that the engine gave to the container; empty if there are none
    given: String,
    hint: String,
}

/// Why there is no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum NotSetUp {
    /// The container asks for nothing.
    Nothing,
    /// It asks, and the hook leaves it alone.
    LeftAlone,
    /// It asks, and the hook was not called.
    NotCalled,
}

fn without_record(known: &Known, config: Option<&Path>) -> Result<WithoutRecord> {
    let spec = oci::spec_view::read(&known.bundle)?;
    let (config, _) = config::read(config)?;
    let mut answer = WithoutRecord {
        id: known.listed.id.clone(),
        name: known.listed.names.first().cloned().unwrap_or_default(),
        outcome: NotSetUp::Nothing,
        reason: String::new(),
        finding: "",
        given: String::new(),
        hint: String::new(),
    };
    match plan::verdict(&spec, &config)? {
        Verdict::Nothing(reason) => {
            answer.reason = reason;
            answer.given = given::find(&spec).map(|given| given.to_string()).unwrap_or_default();
        }
        Verdict::LeftAlone(finding) => {
            answer.outcome = NotSetUp::LeftAlone;
            answer.finding = finding.kind.id;
            (answer.reason, answer.hint) = (finding.what, finding.fix);
        }
        Verdict::Gpus(request) => {
            answer.outcome = NotSetUp::NotCalled;
            answer.reason = format!("{} asks for {}", request.asked_by, request.devices.names().join(","));
            "\"oci-nvidia-hook status\" shows whether engines call the hook".clone_into(&mut answer.hint);
        }
    }
    Ok(answer)
}

impl WithoutRecord {
    fn lines(&self) -> Vec<Line> {
        let reason = one_line(&self.reason);
        let why = match self.outcome {
            NotSetUp::Nothing if self.given.is_empty() => format!("it asks for no GPU: {reason}"),
            NotSetUp::Nothing => format!("it asks the hook for nothing: {reason}"),
            NotSetUp::LeftAlone => format!("the hook does nothing: {reason} ({})", self.finding),
            NotSetUp::NotCalled => {
                format!("{reason}, and there is no record that the hook was called for it since the last boot")
            }
        };
        let mut lines = vec![format!("container {}", named(&self.id, &self.name)), why];
        lines.extend(self.given.lines().map(one_line));
        if self.outcome != NotSetUp::Nothing {
            lines.push(format!("hint: {}", one_line(&self.hint)));
        }
        lines.into_iter().map(|line| Line::new(4, line)).collect()
    }
}

fn named(id: &str, name: &str) -> String {
    let id = one_line(id);
    if name.is_empty() { id } else { format!("{id} ({})", one_line(name)) }
}

pub(super) const fn ended(record: &Record) -> &'static str {
    match record.outcome {
        Outcome::Given => "given",
        Outcome::Partly => "partly",
        Outcome::Nothing => "nothing",
        Outcome::LeftAlone => "left alone",
        Outcome::Failed => "failed",
        Outcome::Unfinished => "unfinished",
    }
}

/// The record as text.
pub fn in_words(record: &Record) -> String {
    Terminal::default().render(&lines(record))
}

/// What is in a record may be a container's: it stays on its line.
fn lines(record: &Record) -> Vec<Line> {
    let plain = |text: String| Line::new(4, text);
    let container = &record.container;
    let mut lines = vec![plain(format!("container {}", named(&container.id, &container.name)))];
    if !container.pod.name.is_empty() {
        let pod = &container.pod;
        let words = format!("pod {}/{}, container {}", pod.namespace, pod.name, pod.container);
        lines.push(plain(one_line(&words)));
    }
    let [stage, started, hook] = [&record.stage, &record.started, &record.hook].map(|text| one_line(text));
    lines.push(plain(format!("at {stage}, {started}, by version {hook}")));
    if let Some(asked) = &record.asked {
        let with = asked.driver_capabilities.join(",");
        lines.push(plain(format!("{}, with {}", one_line(&record.request), one_line(&with))));
        lines.extend(asked.requirements.iter().map(|text| plain(format!("requires: {}", one_line(text)))));
    } else if !record.request.is_empty() {
        lines.push(plain(one_line(&record.request)));
    }
    lines.push(outcome(record));
    lines.extend(record.devices.iter().map(|device| plain(format!("  {}", one_line(device)))));
    for said in &record.findings {
        let [id, severity, what, why, fix] =
            [&said.id, &said.severity, &said.what, &said.why, &said.fix].map(|text| one_line(text));
        // The reason of a failure is above.
        lines.push(if said.severity == "error" && record.outcome == Outcome::Failed {
            plain(format!("number: {id} ({why})"))
        } else {
            plain(format!("{id} ")).then(Tone::of_severity(&severity), &severity).then(Tone::Plain, format!(": {what}"))
        });
        if !fix.is_empty() {
            lines.push(plain(format!("  hint: {fix}")));
        }
    }
    let steps: Vec<_> =
        record.steps.iter().map(|step| format!("{} {:.1} ms", one_line(&step.name), step.milliseconds)).collect();
    if !steps.is_empty() {
        lines.push(plain(format!("took: {}", steps.join(", "))));
    }
    lines
}

fn outcome(record: &Record) -> Line {
    let words = match record.outcome {
        Outcome::Given => "it got what it asked for".to_owned(),
        Outcome::Partly => format!("it got {}", record.shortfall().unwrap_or("less than it asked for")),
        Outcome::Nothing => "it asks for nothing".to_owned(),
        Outcome::LeftAlone => "the hook did nothing".to_owned(),
        Outcome::Failed => "the hook stopped it".to_owned(),
        Outcome::Unfinished => {
            "the hook did not come to an end: it still runs, or the engine ended it (its time is up)".to_owned()
        }
    };
    let reason = if record.reason.is_empty() { String::new() } else { format!(": {}", one_line(&record.reason)) };
    Line::new(4, "").then(tone(record.outcome), words).then(Tone::Plain, reason)
}

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
    use crate::oci::Pod;
    use std::time::SystemTime;

    fn record(id: &str, name: &str) -> Record {
        let mut record = Record::begin("precreate", SystemTime::UNIX_EPOCH);
        record.name_container(id.to_owned(), Pod::default(), Path::new("/b"));
        record.container.name = name.to_owned();
        record
    }

    fn known(id: &str, name: &str) -> Known {
        Known {
            listed: Listed { id: id.to_owned(), names: vec![name.to_owned()], layer: String::new() },
            bundle: PathBuf::new(),
        }
    }

    #[test]
    fn who_is_meant() {
        let records = [record("aa1", "web"), record("aa2", "web"), record("ab3", ""), record("cc4", "")];
        let known = [known("cc4", "db"), known("dd5", "cache"), known("aa1", "now")];
        for (name, meant) in [
            ("aa1", Meant::Records(vec![0])),
            ("now", Meant::Records(vec![0])),
            ("web", Meant::Records(vec![0])),
            ("db", Meant::Records(vec![3])),
            ("c", Meant::Records(vec![3])),
            ("ab", Meant::Records(vec![2])),
            ("cache", Meant::Known(1)),
            ("d", Meant::Known(1)),
            ("a", Meant::Several(vec!["aa1".into(), "aa2".into(), "ab3".into()])),
            ("x", Meant::Nothing),
            ("", Meant::Nothing),
        ] {
            assert_eq!(find(name, &records, &known), meant, "{name:?}");
        }
    }

    #[test]
    fn a_pod_is_each_of_its_containers() {
        let of = |id: &str, container: &str| {
            let mut record = record(id, "");
            record.container.pod = Pod { name: "p".into(), namespace: "n".into(), container: container.into() };
            record
        };
        let records = [of("a1", "main"), of("b2", "init"), of("c3", "main"), record("p9", "")];
        for (name, meant) in [
            ("p", vec![0, 1]),
            ("n/p", vec![0, 1]),
            ("n/p/main", vec![0]),
            ("n/p/init", vec![1]),
            ("c3", vec![2]),
            ("p9", vec![3]),
        ] {
            assert_eq!(find(name, &records, &[]), Meant::Records(meant), "{name:?}");
        }
    }

    #[test]
    fn a_hostile_record_stays_on_its_lines() {
        let mut record = record("aa1", "x\u{1b}[2J");
        record.end(Outcome::Failed, "a\nb".to_owned());
        record.devices.push("c\nd".to_owned());
        let text = in_words(&record);
        assert!(text.contains("(x\\u{1b}[2J)") && text.contains("stopped it: a\\nb\n  c\\nd\n"), "{text}");
    }
}
