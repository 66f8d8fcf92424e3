//! NVML, asked by a program that is executed: for callers with threads.
//!
//! [`ask::ask`] forks, and its child goes on in the caller's memory. In a program with threads that is not allowed: a lock of
//! malloc or of the dynamic loader may be held by a thread that the child does not have (fork(2)), and the child's orphans are
//! told from other children only in a program that starts none meanwhile. Such a program, a daemon, executes another one
//! instead, which has one thread and asks as the hook does: with the same child, rights, deadline and errors. The hook is that
//! program too, as `oci-nvidia-hook nvml-probe`.
//!
//! The question is a line of JSON on the standard input of the program, the answer one on its standard output. Both are of
//! the same version of this library, so they are not an interface.

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

/// The argument by which the program knows that it has to call [`respond`].
pub const VERB: &str = "nvml-probe";

/// How much longer than NVML the program may take: it ends by itself, unless it cannot even start.
const MARGIN: Duration = Duration::from_secs(5);

/// Longer than a question: two paths.
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

#[derive(Serialize, Deserialize)]
enum Reply {
    Answer(NvmlAnswer),
    Error(StoredError),
}

/// Has `program` ask NVML for the inventory, until `end`. Blocks the calling thread for so long; no other thread is affected.
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
    match reply {
        Reply::Answer(answer) => Ok(answer),
        Reply::Error(error) => Err(error.into()),
    }
}

fn exchange(program: &Path, question: &Question, left: Duration) -> Result<Reply> {
    let Question { root, library, who, deadline } = question.clone();
    let request = Request { root: root.as_path().to_owned(), library, who, deadline, left };
    let request = serde_json::to_vec(&request)?;
    let reply = process::exchange(program, &[VERB], &request, left + MARGIN)?;
    Ok(json::from_bytes(&reply)?)
}

/// What the program does: reads the question, asks NVML in a forked child, and returns the reply to print. For a process with
/// one thread.
///
/// # Errors
/// If the question cannot be read. An error of NVML is a reply.
pub fn respond(input: impl Read) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    input.take(MAX_QUESTION).read_to_end(&mut text)?;
    let Request { root, library, who, deadline, left } =
        json::from_bytes(&text).context("the question on stdin is not one of this version")?;
    let question = Question { root: HostPath::new(root), library, who, deadline };
    let reply = match ask::ask(&question, Instant::now() + left) {
        Ok(answer) => Reply::Answer(answer),
        Err(error) => Reply::Error(StoredError::of(&error)),
    };
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
        let text = serde_json::to_string(&StoredError::of(&error)).unwrap();
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
