//! `why`: prints what the hook did for a container, and why, from the record of its last run. Without a record, it uses the
//! container's config.json.

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

/// A container that an engine lists.
struct Known {
    listed: Listed,
    bundle: PathBuf,
}

/// The document of `--json`, whose schema is `docs/schemas/why.json`.
#[derive(Debug, Serialize)]
struct Answer<'a> {
    version: u32,
    /// Sorted from the newest to the oldest
    records: Vec<&'a Record>,
    /// The given container, if it has no record
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

/// The containers that match a name.
#[derive(Debug, PartialEq, Eq)]
enum Match {
    /// Containers with a record, as indices of the records
    Records(Vec<usize>),
    /// A container without a record, as index of the known containers
    Known(usize),
    /// Several ids that begin with the name
    Several(Vec<String>),
    Nothing,
}

/// Prints the records. Returns 0 if the container is known, even if the hook failed for it.
pub(crate) fn run(options: &args::Why, config: Option<&Path>, terminal: Terminal) -> ExitCode {
    let text = match &options.container {
        Some(name) => show(name, options, config, terminal),
        None => list(options, terminal),
    };
    match text {
        Ok(text) => output::print(&text),
        Err(error) => {
            Log::default().error(&error);
            ExitCode::FAILURE
        }
    }
}

fn list(options: &args::Why, terminal: Terminal) -> Result<String> {
    let (records, _) = records_and_known()?;
    let roots = roots_records();
    if options.output.json {
        // On stderr, because stdout contains only the document.
        roots.iter().for_each(|hint| Log::default().report(hint));
        return Answer::of(records.iter().collect()).print();
    }
    if records.is_empty() {
        return Ok(match roots {
            Some(hint) => format!("no container of this user has requested GPUs\n{hint}\n"),
            None => "no container has requested GPUs\n".to_owned(),
        });
    }
    Ok(terminal.render(&why_list::lines(&records)) + &roots.map(|hint| hint + "\n").unwrap_or_default())
}

/// Returns a hint for users who cannot read the records of root's containers.
fn roots_records() -> Option<String> {
    let is_root = rustix::process::geteuid().is_root() && !ns::in_user_namespace().unwrap_or_default();
    let exists = run_dir::path_of_root().symlink_metadata().is_ok();
    (!is_root && exists).then(|| {
        "only root can read the records of root's containers (Kubernetes, \"sudo podman\"): \
         run \"sudo oci-nvidia-hook why\""
            .to_owned()
    })
}

fn show(name: &str, options: &args::Why, config: Option<&Path>, terminal: Terminal) -> Result<String> {
    let (records, known) = records_and_known()?;
    match find(name, &records, &known) {
        Match::Records(places) => {
            let found: Vec<_> = places.iter().filter_map(|at| records.get(*at)).collect();
            if options.output.json {
                return Answer::of(found).print();
            }
            let texts: Vec<_> = found.iter().map(|record| terminal.render(&lines(record))).collect();
            Ok(texts.join("\n"))
        }
        Match::Known(at) => {
            let Some(known) = known.get(at) else { return Ok(String::new()) };
            let answer = without_record(known, config)?;
            if options.output.json {
                return Answer { without_record: Some(answer), ..Answer::of(Vec::new()) }.print();
            }
            Ok(terminal.render(&answer.lines()))
        }
        Match::Several(ids) => Err(ambiguous(name, &ids)),
        Match::Nothing => Err(unknown(name)),
    }
}

fn ambiguous(name: &str, ids: &[String]) -> anyhow::Error {
    failure(
        &catalog::NO_RECORD,
        format!("several ids begin with {name:?}: {}", ids.join(", ")),
        "give more characters of the id",
    )
}

fn unknown(name: &str) -> anyhow::Error {
    failure(
        &catalog::NO_RECORD,
        format!("unknown container or pod {name:?}"),
        roots_records().unwrap_or_else(|| {
            "\"oci-nvidia-hook why\" lists the containers that requested GPUs; \"oci-nvidia-hook status\" shows whether \
             engines start the hook"
                .to_owned()
        }),
    )
}

/// Returns the bundle of the container with this name, which contains config.json.
///
/// # Errors
/// If the name matches no container or several, or the container was removed.
pub(super) fn bundle_of(name: &str) -> Result<PathBuf> {
    let (records, known) = records_and_known()?;
    let bundle = match find(name, &records, &known) {
        Match::Records(places) => {
            match places.iter().filter_map(|at| records.get(*at)).collect::<Vec<_>>().as_slice() {
                [record] => record.container.bundle.clone(),
                several => {
                    let names: Vec<_> =
                        several.iter().map(|record| why_list::display_name(&record.container)).collect();
                    return Err(failure(
                        &catalog::NO_RECORD,
                        format!("pod {name:?} has several containers"),
                        format!("give one of {}", names.join(", ")),
                    ));
                }
            }
        }
        Match::Known(at) => known.get(at).map(|known| known.bundle.clone()).unwrap_or_default(),
        Match::Several(ids) => return Err(ambiguous(name, &ids)),
        Match::Nothing => return Err(unknown(name)),
    };
    match bundle.join("config.json").try_exists() {
        Ok(false) => Err(failure(
            &catalog::NO_RECORD,
            format!("config.json of container {name:?} is missing: the engine has removed it"),
            format!("see what the hook did for it with \"oci-nvidia-hook why {name}\""),
        )),
        // The caller reads the file and reports errors.
        Ok(true) | Err(_) => Ok(bundle),
    }
}

/// Returns the id of the container that matches this name or beginning of an id; `None` if it is unknown.
pub(super) fn id_of(name: &str) -> Option<String> {
    let (records, known) = records_and_known().ok()?;
    match find(name, &records, &known) {
        // A pod with several containers does not name one of them.
        Match::Records(places) => match places.as_slice() {
            [at] => records.get(*at).map(|record| record.container.id.clone()),
            _ => None,
        },
        Match::Known(at) => known.get(at).map(|known| known.listed.id.clone()),
        Match::Several(_) | Match::Nothing => None,
    }
}

/// Returns the records, with the names of their containers, and the containers that engines list.
fn records_and_known() -> Result<(Vec<Record>, Vec<Known>)> {
    let mut records = records()?;
    let known = known_containers(&records);
    name_all(&mut records, &known);
    Ok((records, known))
}

/// Reads the records. Files that are not records are reported.
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

/// Returns the containers in the storage of the calling user, and in the storages that the records name.
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

/// Adds missing names to the records, from the engine's list: at a stage, the hook does not know the name.
fn name_all(records: &mut [Record], known: &[Known]) {
    for record in records.iter_mut().filter(|record| record.container.name.is_empty()) {
        let listed = known.iter().find(|known| known.listed.id == record.container.id);
        record.container.name = listed.and_then(|known| known.listed.names.first()).cloned().unwrap_or_default();
    }
}

/// Finds the containers for an id, a name, a pod or the beginning of an id, in this order. `records` begin with the newest.
fn find(name: &str, records: &[Record], known: &[Known]) -> Match {
    let id_of_name = known.iter().find(|known| known.listed.names.iter().any(|other| other == name));
    let id = id_of_name.map_or(name, |known| &known.listed.id);
    let is = |record: &Record| !name.is_empty() && (record.container.id == id || record.container.name == name);
    if let Some(at) = records.iter().position(is) {
        return Match::Records(vec![at]);
    }
    let of_pod: Vec<_> = (0..records.len())
        .filter(|at| records.get(*at).is_some_and(|record| why_list::is_pod(&record.container, name)))
        .collect();
    if !of_pod.is_empty() {
        return Match::Records(why_list::newest_of_each(records, &of_pod));
    }
    if let Some(at) = known.iter().position(|known| known.listed.id == id) {
        return Match::Known(at);
    }
    let ids = records.iter().map(|record| &record.container.id).chain(known.iter().map(|known| &known.listed.id));
    let ids = BTreeSet::from_iter(ids.filter(|id| !name.is_empty() && id.starts_with(name)).cloned());
    let ids: Vec<_> = ids.into_iter().collect();
    match ids.as_slice() {
        [] => Match::Nothing,
        [id] => find(id, records, known),
        _ => Match::Several(ids),
    }
}

/// A container without a record, as in most cases because it requests no GPU. The field names are part of the JSON interface.
#[derive(Debug, Serialize)]
struct WithoutRecord {
    id: String,
    name: String,
    outcome: NotSetUp,
    reason: String,
    /// The finding that is the reason; empty if none is
    finding: &'static str,
    /// CDI devices or device nodes that the engine gave to the container; empty if it gave none
    given: String,
    hint: String,
}

/// Why there is no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum NotSetUp {
    /// The container requests no GPU.
    Nothing,
    /// The container requests GPUs, and the hook leaves it unchanged.
    LeftAlone,
    /// The container requests GPUs, and the hook was not called.
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
            "\"oci-nvidia-hook status\" shows whether engines start the hook".clone_into(&mut answer.hint);
        }
    }
    Ok(answer)
}

impl WithoutRecord {
    fn lines(&self) -> Vec<Line> {
        let reason = one_line(&self.reason);
        let why = match self.outcome {
            NotSetUp::Nothing if self.given.is_empty() => format!("the container requests no GPU: {reason}"),
            NotSetUp::Nothing => format!("the container requests no GPU from the hook: {reason}"),
            NotSetUp::LeftAlone => format!("the hook does nothing: {reason} ({})", self.finding),
            NotSetUp::NotCalled => {
                format!("{reason}, but no record shows that the hook was called for the container since the last boot")
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

/// Returns the outcome as one or two words, for the list.
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

/// Returns the record as text.
pub fn to_text(record: &Record) -> String {
    Terminal::default().render(&lines(record))
}

/// Returns the record as lines. Its texts can come from a container, so control characters are escaped.
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
    lines.push(plain(format!("at {stage}, {started}, hook version {hook}")));
    if let Some(asked) = &record.asked {
        let with = asked.driver_capabilities.join(",");
        lines.push(plain(format!("{}, with {}", one_line(&record.request), one_line(&with))));
        lines.extend(asked.requirements.iter().map(|text| plain(format!("requires: {}", one_line(text)))));
    } else if !record.request.is_empty() {
        lines.push(plain(one_line(&record.request)));
    }
    lines.push(outcome(record));
    lines.extend(record.devices.iter().map(|device| plain(format!("  {}", one_line(device)))));
    for finding in &record.findings {
        let [id, severity, what, why, fix] =
            [&finding.id, &finding.severity, &finding.what, &finding.why, &finding.fix].map(|text| one_line(text));
        // The line of the outcome already contains the message of this error.
        lines.push(if finding.severity == "error" && record.outcome == Outcome::Failed {
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
        Outcome::Given => "the container got what it requested".to_owned(),
        Outcome::Partly => format!("the container got {}", record.shortfall().unwrap_or("less than it requested")),
        Outcome::Nothing => "the container requests no GPU".to_owned(),
        Outcome::LeftAlone => "the hook did nothing".to_owned(),
        Outcome::Failed => "the hook failed".to_owned(),
        Outcome::Unfinished => {
            "the hook did not finish: it still runs, or the engine stopped it after its timeout".to_owned()
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
    fn names_match_containers() {
        let records = [record("aa1", "web"), record("aa2", "web"), record("ab3", ""), record("cc4", "")];
        let known = [known("cc4", "db"), known("dd5", "cache"), known("aa1", "now")];
        for (name, expected) in [
            ("aa1", Match::Records(vec![0])),
            ("now", Match::Records(vec![0])),
            ("web", Match::Records(vec![0])),
            ("db", Match::Records(vec![3])),
            ("c", Match::Records(vec![3])),
            ("ab", Match::Records(vec![2])),
            ("cache", Match::Known(1)),
            ("d", Match::Known(1)),
            ("a", Match::Several(vec!["aa1".into(), "aa2".into(), "ab3".into()])),
            ("x", Match::Nothing),
            ("", Match::Nothing),
        ] {
            assert_eq!(find(name, &records, &known), expected, "{name:?}");
        }
    }

    #[test]
    fn a_pod_matches_each_of_its_containers() {
        let of = |id: &str, container: &str| {
            let mut record = record(id, "");
            record.container.pod = Pod { name: "p".into(), namespace: "n".into(), container: container.into() };
            record
        };
        let records = [of("a1", "main"), of("b2", "init"), of("c3", "main"), record("p9", "")];
        for (name, expected) in [
            ("p", vec![0, 1]),
            ("n/p", vec![0, 1]),
            ("n/p/main", vec![0]),
            ("n/p/init", vec![1]),
            ("c3", vec![2]),
            ("p9", vec![3]),
        ] {
            assert_eq!(find(name, &records, &[]), Match::Records(expected), "{name:?}");
        }
    }

    #[test]
    fn a_hostile_record_stays_on_its_lines() {
        let mut record = record("aa1", "x\u{1b}[2J");
        record.end(Outcome::Failed, "a\nb".to_owned());
        record.devices.push("c\nd".to_owned());
        let text = to_text(&record);
        assert!(text.contains("(x\\u{1b}[2J)") && text.contains("hook failed: a\\nb\n  c\\nd\n"), "{text}");
    }
}
