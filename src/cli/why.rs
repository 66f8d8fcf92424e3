//! `why`: what the hook did for a container, and why. From the record of its last call; for a container without one, from
//! its config.json.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;

use super::{Options, output};
use crate::config;
use crate::error::{failure, one_line};
use crate::few;
use crate::finding::catalog;
use crate::log::Log;
use crate::oci;
use crate::record::storage::{self, Listed};
use crate::record::store::Store;
use crate::record::{Outcome, Record};
use crate::request::{self, Decision};

/// A container that engines have.
struct Known {
    listed: Listed,
    bundle: PathBuf,
}

/// Which container is meant.
#[derive(Debug, PartialEq, Eq)]
enum Meant {
    /// The record of this place in the list
    Record(usize),
    /// The container of this place in the list: it has no record
    Known(usize),
    /// These ids begin so
    Several(Vec<String>),
    Nothing,
}

/// Prints it. 0 if there is something to tell, also if that is a failure.
#[must_use]
pub fn run(options: &Options) -> ExitCode {
    let told = match &options.container {
        Some(name) => tell(name, options),
        None => tell_all(options),
    };
    match told {
        Ok(text) => output::print(&text),
        Err(error) => {
            Log::default().error(&error);
            ExitCode::FAILURE
        }
    }
}

fn tell_all(options: &Options) -> Result<String> {
    let records = records()?;
    if options.json {
        return Ok(serde_json::to_string_pretty(&records)? + "\n");
    }
    if records.is_empty() {
        return Ok("no container has asked for GPUs\n".to_owned());
    }
    let line = |record: &Record| {
        format!(
            "{}  {:<12}  {:<10}  {}\n",
            record.started,
            record.container.short(),
            ended(record),
            one_line(&record.reason)
        )
    };
    Ok(records.iter().map(line).collect())
}

fn tell(name: &str, options: &Options) -> Result<String> {
    let mut records = records()?;
    let known = known_containers(&records);
    name_all(&mut records, &known);
    match find(name, &records, &known) {
        Meant::Record(at) => match records.get(at) {
            Some(record) if options.json => Ok(serde_json::to_string_pretty(record)? + "\n"),
            Some(record) => Ok(in_words(record)),
            None => Ok(String::new()),
        },
        Meant::Known(at) => known.get(at).map_or_else(|| Ok(String::new()), |known| without_record(known, options)),
        Meant::Several(ids) => Err(failure(
            &catalog::NO_RECORD,
            format!("{name:?} is the beginning of {}", ids.join(", ")),
            "give more of the id",
        )),
        Meant::Nothing => Err(failure(
            &catalog::NO_RECORD,
            format!("nothing is known of a container {name:?}"),
            if rustix::process::geteuid().is_root() {
                "\"oci-nvidia-hook why\" lists those that asked for GPUs; \"oci-nvidia-hook status\" tells whether engines \
                 call the hook"
            } else {
                "for a container of root's: \"sudo oci-nvidia-hook why …\""
            },
        )),
    }
}

/// The id of the container that this name or beginning of an id means, if it is known.
pub(super) fn id_of(name: &str) -> Option<String> {
    let mut records = records().unwrap_or_default();
    let known = known_containers(&records);
    name_all(&mut records, &known);
    match find(name, &records, &known) {
        Meant::Record(at) => records.get(at).map(|record| record.container.id.clone()),
        Meant::Known(at) => known.get(at).map(|known| known.listed.id.clone()),
        Meant::Several(_) | Meant::Nothing => None,
    }
}

fn records() -> Result<Vec<Record>> {
    Ok(Store::existing()?.map(|store| store.all()).transpose()?.unwrap_or_default())
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
    few::set(dirs).into_iter().flat_map(of).collect()
}

/// The engine knows the names of those that it still has.
fn name_all(records: &mut [Record], known: &[Known]) {
    for record in records.iter_mut().filter(|record| record.container.name.is_empty()) {
        let listed = known.iter().find(|known| known.listed.id == record.container.id);
        record.container.name = listed.and_then(|known| known.listed.names.first()).cloned().unwrap_or_default();
    }
}

/// An id, a name, or the beginning of one id; in this order. `records` are the newest first.
fn find(name: &str, records: &[Record], known: &[Known]) -> Meant {
    let id_of_name = known.iter().find(|known| known.listed.names.iter().any(|other| other == name));
    let id = id_of_name.map_or(name, |known| &known.listed.id);
    let is = |record: &Record| !name.is_empty() && (record.container.id == id || record.container.name == name);
    if let Some(at) = records.iter().position(is) {
        return Meant::Record(at);
    }
    if let Some(at) = known.iter().position(|known| known.listed.id == id) {
        return Meant::Known(at);
    }
    let ids = records.iter().map(|record| &record.container.id).chain(known.iter().map(|known| &known.listed.id));
    let ids = few::set(ids.filter(|id| !name.is_empty() && id.starts_with(name)).cloned());
    let ids: Vec<_> = ids.into_iter().collect();
    match ids.as_slice() {
        [] => Meant::Nothing,
        [id] => find(id, records, known),
        _ => Meant::Several(ids),
    }
}

/// Most containers ask for nothing, and cost nothing: they have no record.
fn without_record(known: &Known, options: &Options) -> Result<String> {
    let spec = oci::spec_view::read(&known.bundle)?;
    let (config, _) = config::read(options.config.as_deref())?;
    let why = match request::from_spec(&spec, &config)? {
        Decision::Nothing(reason) => format!("it asks for no GPU: {reason}"),
        Decision::Refused(reason) => format!("it gets no GPU: {reason}"),
        Decision::Gpus(request) => format!(
            "{} asks for {}, and the hook was not called for it, or before the last boot\n\
             hint: \"oci-nvidia-hook status\" tells whether engines call the hook",
            request.asked_by,
            request.devices.names().join(",")
        ),
    };
    Ok(format!("container {}\n{why}\n", named(&known.listed.id, known.listed.names.first())))
}

fn named(id: &str, name: Option<&String>) -> String {
    let id = one_line(id);
    name.filter(|name| !name.is_empty()).map_or_else(|| id.clone(), |name| format!("{id} ({})", one_line(name)))
}

const fn ended(record: &Record) -> &'static str {
    match record.outcome {
        Outcome::Given => "given",
        Outcome::Partly => "partly",
        Outcome::Nothing => "nothing",
        Outcome::LeftAlone => "left alone",
        Outcome::Failed => "failed",
        Outcome::Unfinished => "unfinished",
    }
}

/// What is in a record may be a container's: it stays on its line.
#[must_use]
pub fn in_words(record: &Record) -> String {
    let mut text = String::new();
    let container = &record.container;
    writeln!(text, "container {}", named(&container.id, Some(&container.name))).ok();
    if !container.pod.name.is_empty() {
        let pod = &container.pod;
        let words = format!("pod {}/{}, container {}", pod.namespace, pod.name, pod.container);
        writeln!(text, "{}", one_line(&words)).ok();
    }
    writeln!(
        text,
        "at {}, {}, by version {}",
        one_line(&record.stage),
        one_line(&record.started),
        one_line(&record.hook)
    )
    .ok();
    if let Some(asked) = &record.asked {
        let with = asked.driver_capabilities.join(",");
        writeln!(text, "{}, with {}", one_line(&record.request), one_line(&with)).ok();
        for requirement in &asked.requirements {
            writeln!(text, "requires: {}", one_line(requirement)).ok();
        }
    }
    let outcome = match record.outcome {
        Outcome::Given => "it got what it asked for",
        Outcome::Partly => "it got fewer GPUs than it asked for",
        Outcome::Nothing => "it asks for nothing",
        Outcome::LeftAlone => "the hook did nothing",
        Outcome::Failed => "the hook stopped it",
        Outcome::Unfinished => {
            "the hook did not come to an end: it still runs, or the engine ended it (its time is up)"
        }
    };
    let reason = if record.reason.is_empty() { String::new() } else { format!(": {}", one_line(&record.reason)) };
    writeln!(text, "{outcome}{reason}").ok();
    for device in &record.devices {
        writeln!(text, "  {}", one_line(device)).ok();
    }
    for said in &record.findings {
        // The reason of a failure is above.
        if said.severity != "error" || record.outcome != Outcome::Failed {
            writeln!(text, "{} {}: {}", one_line(&said.id), one_line(&said.severity), one_line(&said.what)).ok();
        } else {
            writeln!(text, "number: {} ({})", one_line(&said.id), one_line(&said.why)).ok();
        }
        if !said.fix.is_empty() {
            writeln!(text, "  hint: {}", one_line(&said.fix)).ok();
        }
    }
    let steps: Vec<_> =
        record.steps.iter().map(|step| format!("{} {:.1} ms", one_line(&step.name), step.milliseconds)).collect();
    if !steps.is_empty() {
        writeln!(text, "took: {}", steps.join(", ")).ok();
    }
    text
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
        Known { listed: Listed { id: id.to_owned(), names: vec![name.to_owned()] }, bundle: PathBuf::new() }
    }

    #[test]
    fn who_is_meant() {
        let records = [record("aa1", "web"), record("aa2", "web"), record("ab3", ""), record("cc4", "")];
        let known = [known("cc4", "db"), known("dd5", "cache"), known("aa1", "now")];
        for (name, meant) in [
            ("aa1", Meant::Record(0)),
            ("now", Meant::Record(0)),
            ("web", Meant::Record(0)),
            ("db", Meant::Record(3)),
            ("c", Meant::Record(3)),
            ("ab", Meant::Record(2)),
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
    fn a_hostile_record_stays_on_its_lines() {
        let mut record = record("aa1", "x\u{1b}[2J");
        record.end(Outcome::Failed, "a\nb".to_owned());
        record.devices.push("c\nd".to_owned());
        let text = in_words(&record);
        assert!(text.contains("(x\\u{1b}[2J)") && text.contains("stopped it: a\\nb\n  c\\nd\n"), "{text}");
    }
}
