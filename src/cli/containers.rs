//! Finds containers by id, name or pod, among the records of the hook and the containers that engines list.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use anyhow::Result;
use nix::unistd::Uid;
use serde::Serialize;

use base::report::{Finding, failure};
use base::sys::{ns, run_dir};
use findings::catalog;

use super::status::this_user;
use crate::record::call::Call;
use crate::record::storage::{self, Listed};
use records::Pod;
use records::Record;
use records::store::{self, Store};

/// A container with a record, or one that an engine lists.
#[derive(Debug)]
pub(super) struct KnownContainer {
    pub id: String,
    /// The names that the engine lists now; without them, the name in the record
    pub names: Vec<String>,
    /// Whether the engine lists the container
    pub is_listed: bool,
    /// The directory of its config.json
    pub bundle: PathBuf,
    pub record: Option<Record>,
}

impl KnownContainer {
    /// Returns a name that [`find`] finds: of the pod, of the container, or its id.
    pub(super) fn name(&self) -> String {
        if let Some(record) = &self.record {
            let name = record.container.display_name();
            if !name.is_empty() {
                return name;
            }
        }
        self.names.first().unwrap_or(&self.id).clone()
    }
}

/// Returns all known containers. Those with a record precede the others, from the newest to the oldest.
pub(super) fn read() -> Result<Vec<KnownContainer>> {
    let records = records()?;
    let dirs = storage_dirs(&records);
    let mut listed = Vec::new();
    for dir in &dirs {
        for one in storage::read(dir) {
            listed.push((one, dir.as_path()));
        }
    }
    Ok(merge(records, listed))
}

/// Reads the records. Files that are not records are reported.
fn records() -> Result<Vec<Record>> {
    let dir = run_dir::path()?;
    let store = Store::existing().map_err(|error| {
        let hint = format!("remove the directory {dir:?}, which the next start creates again");
        failure(
            &catalog::SYSTEM,
            format!("cannot read the records: {error}"),
            hint,
        )
    })?;
    let Some(store) = store else {
        return Ok(Vec::new());
    };
    let found = store.all()?;
    let dir = dir.join(store::DIR);
    for (name, why) in &found.broken {
        let path = dir.join(name);
        Call::default().finding(&Finding::new(
            &catalog::BROKEN_RECORD,
            format!("cannot read the record {path:?}: {why}"),
            format!("rm {}", path.display()),
        ));
    }
    Ok(found.records)
}

/// Says that records are missing, or returns `None` if none was removed. Nobody can tell whose they were.
pub(super) fn removed_records() -> Option<RemovedRecords> {
    let store = Store::existing().ok()??;
    let count = NonZero::new(store.removed())?;
    Some(RemovedRecords(count))
}

/// The number of records that were removed while their containers ran.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub(super) struct RemovedRecords(NonZero<usize>);

impl fmt::Display for RemovedRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.get() {
            1 => f.write_str("1 record of a running container was removed"),
            count => write!(f, "{count} records of running containers were removed"),
        }?;
        f.write_str(" since the last boot, because there were too many")
    }
}

/// Returns the directories of bundles of the calling user, and those that the records name.
fn storage_dirs(records: &[Record]) -> BTreeSet<PathBuf> {
    let home = this_user().and_then(|user| user.home);
    let mut dirs = BTreeSet::from_iter(storage::dirs(home.as_deref()));
    for record in records {
        if let Some(dir) = storage::dir_of(&record.container.bundle) {
            dirs.insert(dir.to_owned());
        }
    }
    dirs
}

/// Combines the records with the containers that engines list, each with its directory of bundles. A container has the name that its
/// engine lists now: it may have been renamed, and at a stage the hook does not know the name.
fn merge(records: Vec<Record>, mut listed: Vec<(Listed, &Path)>) -> Vec<KnownContainer> {
    let mut known = Vec::new();
    for mut record in records {
        let container = &mut record.container;
        let mut names = Vec::new();
        let mut places = listed.iter();
        let place = places.position(|(listed, _)| listed.id == container.id);
        if let Some(place) = place {
            names = listed.remove(place).0.names;
        }
        match names.first() {
            // In Kubernetes, the names that engines list are not those that people know.
            Some(name) if container.pod.name.is_empty() || container.name.is_empty() => {
                container.name.clone_from(name);
            }
            _ if !container.name.is_empty() => names.push(container.name.clone()),
            _ => {}
        }
        known.push(KnownContainer {
            id: container.id.clone(),
            names,
            is_listed: place.is_some(),
            bundle: container.bundle.clone(),
            record: Some(record),
        });
    }
    for (Listed { id, names, .. }, dir) in listed {
        known.push(KnownContainer {
            bundle: dir.join(&id).join("userdata"),
            id,
            names,
            is_listed: true,
            record: None,
        });
    }
    known
}

/// Returns the containers for an id, a name, a pod or the beginning of an id, in this order. Only a pod can have several.
///
/// # Errors
/// If the name matches no container, or is the beginning of several ids.
pub(super) fn find<'k>(name: &str, known: &'k [KnownContainer]) -> Result<Vec<&'k KnownContainer>> {
    if name.is_empty() {
        return Err(unknown(name));
    }
    if let Some(one) = named(name, known, true).or_else(|| named(name, known, false)) {
        return Ok(vec![one]);
    }
    let of_pod = newest_of_pod(name, known);
    if !of_pod.is_empty() {
        return Ok(of_pod);
    }
    let similar = known.iter().filter(|known| known.id.starts_with(name));
    let similar: Vec<_> = similar.collect();
    match similar.as_slice() {
        [] => Err(unknown(name)),
        [one] => Ok(vec![one]),
        several => Err(ambiguous(name, several)),
    }
}

/// Returns the newest container with this id or name, of those that an engine lists or of the others. After "podman run --replace", the
/// record of the removed container has the same name.
fn named<'k>(
    name: &str,
    known: &'k [KnownContainer],
    is_listed: bool,
) -> Option<&'k KnownContainer> {
    let mut of_kind = known.iter().filter(|known| known.is_listed == is_listed);
    of_kind.find(|known| known.id == name || known.names.iter().any(|other| other == name))
}

/// Returns the record of an earlier container that had the name of this one.
pub(super) fn earlier<'k>(
    container: &KnownContainer,
    known: &'k [KnownContainer],
) -> Option<&'k Record> {
    let name = container.names.first()?;
    let earlier = named(name, known, false)?;
    earlier.record.as_ref()
}

/// Returns the newest record of each container of a pod.
fn newest_of_pod<'k>(name: &str, known: &'k [KnownContainer]) -> Vec<&'k KnownContainer> {
    let mut seen = Vec::new();
    let mut found = Vec::new();
    for container in known {
        let Some(record) = &container.record else {
            continue;
        };
        let pod = &record.container.pod;
        if is_pod(pod, name) && !seen.contains(&pod) {
            seen.push(pod);
            found.push(container);
        }
    }
    found
}

/// Returns whether the name is the pod of a container: `pod`, `namespace/pod`, or `namespace/pod/container`.
fn is_pod(
    Pod {
        namespace,
        name: pod,
        container,
    }: &Pod,
    name: &str,
) -> bool {
    let names = [
        pod.clone(),
        format!("{namespace}/{pod}"),
        format!("{namespace}/{pod}/{container}"),
    ];
    !pod.is_empty() && names.iter().any(|known| known == name)
}

fn ambiguous(name: &str, several: &[&KnownContainer]) -> anyhow::Error {
    let ids = BTreeSet::from_iter(several.iter().map(|known| known.id.as_str()));
    failure(
        &catalog::NO_RECORD,
        format!(
            "several ids begin with {name:?}: {}",
            Vec::from_iter(ids).join(", ")
        ),
        "give more characters of the id",
    )
}

fn unknown(name: &str) -> anyhow::Error {
    let mut hint = match roots_records(&format!("why {}", shown_name(name))) {
        Some(hint) => hint,
        None => "\"oci-nvidia-hook ps --all\" lists the containers that requested GPUs; \
             \"oci-nvidia-hook status\" shows whether engines start the hook"
            .to_owned(),
    };
    if let Some(removed) = removed_records() {
        hint += &format!("; {removed}");
    }
    failure(
        &catalog::NO_RECORD,
        format!("unknown container or pod {name:?}"),
        hint,
    )
}

/// Returns a name as a word of a command line, or `NAME` if a shell would read it in another way.
fn shown_name(name: &str) -> &str {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-/".contains(&byte);
    if !name.is_empty() && name.bytes().all(is_plain) {
        name
    } else {
        "NAME"
    }
}

/// Returns a hint for users who cannot read the records of root's containers, with the command that root would run.
pub(super) fn roots_records(command: &str) -> Option<String> {
    let is_root = Uid::effective().is_root() && !ns::in_user_namespace().unwrap_or_default();
    let exists = run_dir::path_of_root().symlink_metadata().is_ok();
    if is_root || !exists {
        return None;
    }
    Some(format!(
        "only root can read the records of root's containers (Kubernetes, \"sudo podman\"): \
         run \"sudo oci-nvidia-hook {command}\""
    ))
}

/// Returns the bundle of the container with this name, which contains config.json.
///
/// # Errors
/// If the name matches no container or several, or the container was removed.
pub(super) fn bundle_of(name: &str) -> Result<PathBuf> {
    let known = read()?;
    let found = find(name, &known)?;
    let [KnownContainer { bundle, .. }] = found.as_slice() else {
        let names: Vec<_> = found.iter().map(|known| known.name()).collect();
        return Err(failure(
            &catalog::NO_RECORD,
            format!("pod {name:?} has several containers"),
            format!("give one of {}", names.join(", ")),
        ));
    };
    match bundle.join("config.json").try_exists() {
        Ok(false) => Err(failure(
            &catalog::NO_RECORD,
            format!("config.json of container {name:?} is missing: the engine has removed it"),
            format!("see what the hook did for it with \"oci-nvidia-hook why {name}\""),
        )),
        // The caller reads the file and reports errors.
        Ok(true) | Err(_) => Ok(bundle.clone()),
    }
}

/// Returns the id of the container that matches this name or beginning of an id; `None` if it is unknown, or the name belongs to a
/// pod with several containers.
pub(super) fn id_of(name: &str) -> Option<String> {
    match find(name, &read().ok()?).ok()?.as_slice() {
        [one] => Some(one.id.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    fn record(id: &str, name: &str, pod: [&str; 3]) -> Record {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        let [namespace, pod, container] = pod.map(str::to_owned);
        record.name_container(
            id.to_owned(),
            Pod {
                name: pod,
                namespace,
                container,
            },
            Path::new("/b"),
        );
        record.container.name = name.to_owned();
        record
    }

    fn ids(name: &str, known: &[KnownContainer]) -> Result<String> {
        find(name, known).map(|found| {
            found
                .iter()
                .map(|known| known.id.as_str())
                .collect::<Vec<_>>()
                .join(" ")
        })
    }

    #[test]
    fn names_match_containers() {
        let no_pod = [""; 3];
        let records = [("aa1", "web"), ("aa2", "web"), ("ab3", ""), ("cc4", "")]
            .map(|(id, name)| record(id, name, no_pod));
        let listed = [("cc4", "db"), ("dd5", "cache"), ("aa1", "now")].map(|(id, name)| {
            (
                Listed {
                    id: id.to_owned(),
                    names: vec![name.to_owned()],
                    layer: String::new(),
                },
                Path::new("/s"),
            )
        });
        let known = merge(records.into(), listed.into());
        for (name, id) in [
            ("aa1", "aa1"),
            ("now", "aa1"),
            ("web", "aa2"),
            ("db", "cc4"),
            ("c", "cc4"),
            ("ab", "ab3"),
            ("cache", "dd5"),
            ("d", "dd5"),
        ] {
            assert_eq!(ids(name, &known).unwrap(), id, "{name:?}");
        }
        for (name, message) in [
            ("a", "begin with \"a\": aa1, aa2, ab3"),
            ("x", "unknown"),
            ("", "unknown"),
            ("/", "unknown"),
        ] {
            assert!(
                ids(name, &known).unwrap_err().to_string().contains(message),
                "{name:?}"
            );
        }
        let cache = known.last().unwrap();
        assert_eq!(
            (cache.bundle.as_path(), cache.record.is_none()),
            (Path::new("/s/dd5/userdata"), true)
        );
        let names = known
            .iter()
            .filter_map(|known| known.record.as_ref())
            .map(|record| record.container.name.as_str());
        assert_eq!(names.collect::<Vec<_>>(), ["now", "web", "", "db"]);
    }

    /// After "podman run --replace --name web" without a request for GPUs.
    #[test]
    fn a_name_belongs_to_the_container_that_exists() {
        let records = vec![record("old", "web", [""; 3])];
        let listed = Listed {
            id: "new".to_owned(),
            names: vec!["web".to_owned()],
            layer: String::new(),
        };
        let known = merge(records, vec![(listed, Path::new("/s"))]);
        assert_eq!(ids("web", &known).unwrap(), "new");
        assert_eq!(ids("old", &known).unwrap(), "old");
        let found = find("web", &known).unwrap()[0];
        assert_eq!(earlier(found, &known).unwrap().container.id, "old");
    }

    #[test]
    fn a_pod_matches_each_of_its_containers() {
        let records = [("a1", "main"), ("b2", "init"), ("c3", "main")]
            .map(|(id, name)| record(id, "", ["n", "p", name]));
        let known = merge(
            records
                .into_iter()
                .chain([record("p9", "", [""; 3])])
                .collect(),
            Vec::new(),
        );
        for (name, expected) in [
            ("p", Some("a1 b2")),
            ("n/p", Some("a1 b2")),
            ("n/p/main", Some("a1")),
            ("n/p/init", Some("b2")),
            ("c3", Some("c3")),
            ("p9", Some("p9")),
            ("main", None),
            ("n", None),
            ("other/p", None),
        ] {
            assert_eq!(ids(name, &known).ok().as_deref(), expected, "{name:?}");
        }
    }
}
