//! Examines the files of a container for `plan`, in a child process with a deadline.
//!
//! The container may run. It can mount a FUSE file system at any path, whose server decides how long a lookup takes, and a process that
//! waits for the server cannot always be killed. So another process waits, and is abandoned if it gets no answer.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use base::json;
use base::report::failure;
use base::sys::child::{self, NoAnswer};
use findings::catalog;
use nvidia_host::edits::placement::RootfsFacts;

use crate::plan::Image;

/// How long the examination may take. Usually it takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// The answer of the child.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    facts: RootfsFacts,
    compat: BTreeSet<String>,
}

/// Returns the result of `examine`, which opens files of the container.
///
/// # Errors
/// If the result does not arrive in time, or the child process cannot be created.
pub(super) fn within_deadline(examine: impl FnOnce() -> Image) -> Result<Image> {
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

impl From<Image> for Answer {
    fn from(Image { facts, compat }: Image) -> Self {
        let names = compat.into_iter().map(OsString::into_string);
        Self {
            facts,
            compat: names.flatten().collect(),
        }
    }
}

impl From<Answer> for Image {
    fn from(Answer { facts, compat }: Answer) -> Self {
        Self {
            facts,
            compat: compat.into_iter().map(OsString::from).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvidia_host::edits::placement::{Compat32, Loader};

    #[test]
    fn an_image_arrives_as_it_is() {
        for loader in [Loader::Glibc, Loader::Musl, Loader::None] {
            for compat32 in [Compat32::Lib, Compat32::Lib32, Compat32::Nowhere] {
                let compat = ["libcuda.so.1", "a \"b\"\n"].map(OsString::from).into();
                let facts = RootfsFacts {
                    debian: compat32 == Compat32::Lib,
                    compat32,
                    merged: true,
                    loader,
                };
                let image = Image { facts, compat };
                assert_eq!(within_deadline(|| image.clone()).unwrap(), image);
            }
        }
    }
}
