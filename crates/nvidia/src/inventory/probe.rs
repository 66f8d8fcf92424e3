//! Queries NVML through a separate program, for callers with threads.
//!
//! [`ask::ask`] forks, and the child continues with the memory of the caller. A program with threads must not do that: a thread that does
//! not exist in the child may hold a lock of malloc or of the dynamic loader (fork(2)), and orphans of the child can only be
//! distinguished from other children if the program starts none in the meantime. A daemon therefore executes a program with one
//! thread, `oci-nvidia-hook nvml-probe`, which queries NVML in the same way as the hook.
//!
//! The program reads the query as JSON from its standard input, and writes the answer as JSON to its standard output. Both sides have the
//! same version, so the format is not an interface.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use base::json;
use base::paths::HostPath;
use base::report::{Failure, catalog};
use base::sys::process;

use super::ask::{self, Question};
use super::gather::NvmlAnswer;
use super::identity::Who;
use super::stored_error::StoredError;

/// The argument with which the program calls [`respond`].
pub const VERB: &str = "nvml-probe";

/// The additional time for the program to start and to end.
const MARGIN: Duration = Duration::from_secs(5);

/// The size limit of a query in bytes. It contains two paths.
const MAX_QUESTION: u64 = 1 << 16;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    root: PathBuf,
    library: PathBuf,
    who: Who,
    deadline: Duration,
    left: Duration,
}

type Reply = Result<NvmlAnswer, StoredError>;

/// Executes `program` to query NVML for the inventory until `end`. This blocks the calling thread, and does not affect other threads.
///
/// # Errors
/// Those of [`ask::ask`], and if the program cannot be executed.
pub fn ask(program: &Path, question: &Question, end: Instant) -> Result<NvmlAnswer> {
    let left = end.saturating_duration_since(Instant::now());
    let reply = exchange(program, question, left).with_context(|| {
        Failure::new(
            &catalog::NVML_PROCESS,
            format!("cannot run {program:?} to ask NVML"),
            "check that it is an oci-nvidia-hook of the same version",
        )
    })?;
    Ok(reply?)
}

fn exchange(program: &Path, question: &Question, left: Duration) -> Result<Reply> {
    let Question { root, library, who, deadline } = question.clone();
    let request = Request { root: root.as_path().to_owned(), library, who, deadline, left };
    let request = serde_json::to_vec(&request)?;
    let reply = process::exchange(program, &[VERB], &request, left + MARGIN)?;
    Ok(json::from_bytes(&reply)?)
}

/// Reads the query, queries NVML in a forked child, and returns the reply to print. The process must have only one thread.
///
/// # Errors
/// If the query cannot be read. An error of NVML is a reply.
pub fn respond(input: impl Read) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    input.take(MAX_QUESTION).read_to_end(&mut text)?;
    let Request { root, library, who, deadline, left } =
        json::from_bytes(&text).context("the question on stdin is not one of this version")?;
    let question = Question { root: HostPath::new(root), library, who, deadline };
    let reply: Reply = ask::ask(&question, Instant::now() + left).map_err(|error| StoredError::new(&error));
    Ok(serde_json::to_vec(&reply)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_answer_is_an_error_with_a_number() {
        let question = Question {
            root: HostPath::new("/"),
            library: "/nowhere/libnvidia-ml.so.1".into(),
            who: Who::Unchanged,
            deadline: Duration::from_secs(1),
        };
        for program in ["/nowhere/program", "/bin/false", "/bin/true", "/bin/echo"] {
            let error = ask(Path::new(program), &question, Instant::now() + Duration::from_secs(1)).unwrap_err();
            let text = base::report::render(&error);
            assert!(text.contains(&format!("cannot run \"{program}\" to ask NVML")), "{text}");
            assert!(text.contains(catalog::NVML_PROCESS.id), "{text}");
        }
    }

    #[test]
    fn an_error_keeps_its_number_its_line_and_its_hint() {
        let error = anyhow::anyhow!("cause").context(Failure::new(&catalog::NVML_TIMEOUT, "slow", "wait"));
        let text = serde_json::to_string(&StoredError::new(&error)).unwrap();
        let other = anyhow::Error::from(serde_json::from_str::<StoredError>(&text).unwrap());
        assert_eq!(base::report::render(&other), base::report::render(&error));
    }

    #[test]
    fn a_question_of_another_version_is_refused() {
        for text in ["", "{}", r#"{"root":"/","library":"/x","who":"Fewest","deadline":1,"left":1,"more":1}"#] {
            assert!(respond(text.as_bytes()).is_err(), "{text}");
        }
    }
}
