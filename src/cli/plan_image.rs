//! Examines the files of a container for `plan`, in a child process with a deadline.
//!
//! The container may run. It can mount a FUSE file system at any path, whose server decides how long a lookup takes, and a process that
//! waits for the server cannot always be killed. So another process waits, and is abandoned if it gets no answer.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use base::json;
use base::report::{Finding, Kind, failure};
use base::sys::child::{self, NoAnswer};
use base::sys::in_root::Root;
use findings::catalog;
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::edits::placement::RootfsFacts;

use crate::inject::container::OpenContainer;
use crate::inject::foresee::{Foreseen, Foresight};
use crate::oci::SpecView;
use crate::plan::{Container, Gpus, Image, newer_libcuda};
use crate::stages::rootfs;

/// How long the examination may take. Usually it takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is known about the files of a container, and what a start would report about them.
#[derive(Debug, Default)]
pub(super) struct Examined {
    pub image: Image,
    pub foreseen: Foreseen,
    /// Whether the root file system is empty or cannot be read
    pub is_missing: bool,
}

/// Examines the container for the hook at prestart. `pid`: its process, or 0 if it has none.
///
/// # Errors
/// If there is no result in time.
pub(super) fn of_hook(gpus: &Gpus, spec: &SpecView, pid: i32) -> Result<Examined> {
    let container = Container::from_spec(spec)?;
    within_deadline(|| {
        let Some(foresight) = foresight(spec, pid) else {
            return Examined::missing();
        };
        let libraries = gpus
            .compat_libraries()
            .and_then(|(dir, driver, cuda)| foresight.compat_libraries(&dir, driver, cuda));
        let image = Image {
            facts: foresight.facts(),
            compat: libraries.unwrap_or_default(),
        };
        let steps = gpus.steps(&container, &image).steps;
        Examined {
            foreseen: foresight.steps(&steps),
            image,
            is_missing: false,
        }
    })
}

/// Examines the container for the hook entries in its config.json.
///
/// # Errors
/// If there is no result in time.
pub(super) fn of_entries(edits: RootfsEdits, spec: &SpecView, pid: i32) -> Result<Examined> {
    within_deadline(|| {
        let edits = rootfs::resolve(edits, spec);
        let Some(foresight) = foresight(spec, pid) else {
            return Examined::missing();
        };
        let image = rootfs::image(&edits, foresight.facts(), |dir, driver, cuda| {
            foresight.compat_libraries(dir, driver, cuda)
        });
        let mut foreseen = foresight.steps(&rootfs::steps(&edits, &image));
        let mut findings = Vec::new();
        findings.extend(image.facts.finding());
        findings.extend(newer_libcuda(&image));
        findings.append(&mut foreseen.findings);
        Examined {
            foreseen: Foreseen {
                findings,
                ..foreseen
            },
            image,
            is_missing: false,
        }
    })
}

/// Opens the root file system: of the process, or on the host. `None` if it is empty or cannot be read.
fn foresight(spec: &SpecView, pid: i32) -> Option<Foresight<'_>> {
    let waiting = if pid > 0 {
        OpenContainer::open(pid, &spec.rootfs).ok()
    } else {
        None
    };
    if let Some(waiting) = waiting {
        return Some(Foresight::new(waiting.into_rootfs(), spec, true));
    }
    if spec.rootfs == Path::new("/") || !OpenContainer::has_files(&spec.rootfs) {
        return None;
    }
    let root = Root::open(&spec.rootfs).ok()?;
    Some(Foresight::new(root, spec, false))
}

impl Examined {
    fn missing() -> Self {
        Self {
            is_missing: true,
            ..Self::default()
        }
    }

    /// Returns what could not be examined, in words.
    pub(super) fn unknown(&self, rootfs: &Path) -> Vec<String> {
        let mut unknown = Vec::new();
        if self.is_missing {
            unknown.push(format!(
                "the files of the image: the root file system {rootfs:?} is not mounted here; \
                 \"podman mount\" mounts it for a container that does not run"
            ));
        }
        for path in &self.foreseen.unknown {
            unknown.push(format!("the files in {path:?}: its mount is not visible"));
        }
        unknown
    }
}

/// The answer of the child.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    facts: RootfsFacts,
    compat: BTreeSet<String>,
    findings: Vec<Observation>,
    error: Option<Observation>,
    unknown: BTreeSet<PathBuf>,
    is_missing: bool,
}

/// A finding.
#[derive(Debug, Serialize, Deserialize)]
struct Observation {
    id: String,
    what: String,
    fix: String,
}

/// Returns the result of `examine`, which opens files of the container.
///
/// # Errors
/// If the result does not arrive in time, or the child process cannot be created.
fn within_deadline(examine: impl FnOnce() -> Examined) -> Result<Examined> {
    let spawned = child::spawn(|pipe| {
        let answer = serde_json::to_string(&Answer::from(examine())).unwrap_or_default();
        child::report(pipe, format!("{answer}\n").as_bytes());
    });
    let line = spawned
        .map_err(NoAnswer::System)
        .and_then(|mut child| child.line(Instant::now() + PATIENCE));
    let line = line.map_err(|why| {
        let what = match why {
            NoAnswer::Timeout => format!("the container's files do not answer within {} seconds", PATIENCE.as_secs()),
            NoAnswer::Died(_) => "the process that examines the container's files has ended".to_owned(),
            NoAnswer::System(error) => format!("cannot examine the container's files: {error}"),
        };
        failure(
            &catalog::TOO_LONG,
            what,
            "find the file system that does not answer (FUSE, NFS): run \"findmnt\" in the container",
        )
    })?;
    Ok(json::from_bytes::<Answer>(&line)?.into())
}

impl From<Examined> for Answer {
    fn from(examined: Examined) -> Self {
        let Examined {
            image,
            foreseen,
            is_missing,
        } = examined;
        let names = image.compat.into_iter().map(OsString::into_string);
        Self {
            facts: image.facts,
            compat: names.flatten().collect(),
            findings: foreseen
                .findings
                .into_iter()
                .map(Observation::from)
                .collect(),
            error: foreseen.error.map(Observation::from),
            unknown: foreseen.unknown,
            is_missing,
        }
    }
}

impl From<Answer> for Examined {
    fn from(answer: Answer) -> Self {
        Self {
            image: Image {
                facts: answer.facts,
                compat: answer.compat.into_iter().map(OsString::from).collect(),
            },
            foreseen: Foreseen {
                findings: answer.findings.into_iter().map(Finding::from).collect(),
                error: answer.error.map(Finding::from),
                unknown: answer.unknown,
            },
            is_missing: answer.is_missing,
        }
    }
}

impl From<Finding> for Observation {
    fn from(finding: Finding) -> Self {
        Self {
            id: finding.kind.id().to_owned(),
            what: finding.what,
            fix: finding.fix,
        }
    }
}

impl From<Observation> for Finding {
    fn from(observation: Observation) -> Self {
        let kind: Option<&'static Kind> = catalog::find(&observation.id);
        Self::new(
            kind.unwrap_or(&catalog::IN_THE_WAY),
            observation.what,
            observation.fix,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvidia_host::edits::placement::{Compat32, Loader};

    #[test]
    fn an_answer_arrives_as_it_is() {
        for loader in [Loader::Glibc, Loader::Musl, Loader::None] {
            for compat32 in [Compat32::Lib, Compat32::Lib32, Compat32::Nowhere] {
                let facts = RootfsFacts {
                    debian: compat32 == Compat32::Lib,
                    compat32,
                    merged: true,
                    loader,
                };
                let image = Image {
                    facts,
                    compat: ["libcuda.so.1", "a \"b\"\n"].map(OsString::from).into(),
                };
                let finding = Finding::new(&catalog::HIDDEN, "a\nb", "c");
                let examined = within_deadline(|| Examined {
                    image: image.clone(),
                    foreseen: Foreseen {
                        findings: vec![finding.clone()],
                        error: Some(finding.clone()),
                        unknown: BTreeSet::from(["/x".into()]),
                    },
                    is_missing: true,
                })
                .unwrap();
                assert_eq!(examined.image, image);
                assert_eq!(examined.foreseen.findings, std::slice::from_ref(&finding));
                assert_eq!(examined.foreseen.error, Some(finding));
                assert_eq!(examined.unknown(Path::new("/r")).len(), 2);
            }
        }
    }
}
