//! Starts a program that keeps running, and asks a program a question within a time limit.
#![allow(unsafe_code, reason = "capabilities are dropped between fork and exec")]

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
use rustix::fs::MemfdFlags;
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::process;

/// The most bytes of an answer that are read.
const MAX_ANSWER: u64 = 1 << 16;

/// A program with its arguments and its whole environment. It is started in the directory `/`.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// The path
    pub path: &'a Path,
    /// The arguments after the name
    pub arguments: &'a [&'a str],
    /// The environment variables
    pub environment: &'a [(&'a str, &'a OsStr)],
    /// The capabilities that it keeps, of those that this process has
    pub capabilities: CapabilitySet,
}

impl Program<'_> {
    #[expect(
        clippy::disallowed_methods,
        reason = "programs of the driver, with a clean environment"
    )]
    fn command(&self) -> Command {
        let mut command = Command::new(self.path);
        command.args(self.arguments).env_clear().current_dir("/");
        command.envs(self.environment.iter().copied());
        let kept = self.capabilities;
        // SAFETY: in the child of a fork, the function only makes system calls. It does not allocate memory or take locks.
        unsafe { command.pre_exec(move || drop_capabilities(kept)) };
        command
    }
}

/// Drops all other capabilities, so that a program of root does not have them either: at execve(2) it gets those of the bounding set.
fn drop_capabilities(kept: CapabilitySet) -> io::Result<()> {
    for capability in CapabilitySet::all() {
        if !kept.contains(capability) {
            // EINVAL means that the kernel does not have the capability, EPERM that this process may not change the set.
            rustix::thread::remove_capability_from_bounding_set(capability).ok();
        }
    }
    let kept = rustix::thread::capabilities(None)?.permitted & kept;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// What a program answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether it succeeded
    pub succeeded: bool,
    /// Its standard output and error, up to 64 KiB; bytes that are not UTF-8 are replaced.
    pub text: String,
}

/// Runs a program with `input` as its standard input, and waits for it to end. It is killed if it does not end within `deadline`.
///
/// # Errors
/// If the program cannot be started. [`io::ErrorKind::TimedOut`] if it was killed.
pub fn ask(program: Program<'_>, input: &str, deadline: Duration) -> io::Result<Answer> {
    let (mut question, mut answer) = (file_in_memory()?, file_in_memory()?);
    question.write_all(input.as_bytes())?;
    question.rewind()?;
    let mut command = program.command();
    command.stdin(question).stdout(answer.try_clone()?);
    let child = command.stderr(answer.try_clone()?).spawn()?;
    let pid = pid_of(&child);
    let Some(status) = process::wait(pid, deadline)? else {
        kill(pid, Signal::SIGKILL).ok();
        process::wait(pid, process::REAP).ok();
        return Err(io::ErrorKind::TimedOut.into());
    };
    answer.rewind()?;
    let mut bytes = Vec::new();
    answer.take(MAX_ANSWER).read_to_end(&mut bytes)?;
    Ok(Answer {
        succeeded: matches!(status, WaitStatus::Exited(_, 0)),
        text: String::from_utf8_lossy(&bytes).into_owned(),
    })
}

/// Creates a file for a question or an answer. Pipes would have to be read and written while the program runs.
fn file_in_memory() -> io::Result<File> {
    let file = rustix::fs::memfd_create("answer", MemfdFlags::CLOEXEC)?;
    Ok(File::from(file))
}

/// A program that keeps running, in a separate process group. Dropping the value does not end it.
#[derive(Debug)]
pub struct Service {
    child: Child,
}

impl Service {
    /// Starts the program, which writes its output to a file.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub fn start(program: Program<'_>, output: File) -> io::Result<Self> {
        let errors = output.try_clone()?;
        let mut command = program.command();
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        let child = command.process_group(0).spawn()?;
        Ok(Self { child })
    }

    /// Returns the id of the process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns how the program ended, or `None` while it runs.
    ///
    /// # Errors
    /// If the process cannot be waited for.
    pub fn ended(&mut self) -> io::Result<Option<String>> {
        Ok(self.child.try_wait()?.map(in_words))
    }

    /// Kills the process group of the program.
    pub fn kill(&self) {
        killpg(pid_of(&self.child), Signal::SIGKILL).ok();
    }
}

fn pid_of(child: &Child) -> Pid {
    // The kernel has no process ids above 2^22.
    Pid::from_raw(i32::try_from(child.id()).unwrap_or_default())
}

/// Returns an exit status in words, such as `SIGKILL` or `exit status 1`.
fn in_words(status: ExitStatus) -> String {
    match (status.signal().map(Signal::try_from), status.code()) {
        (Some(Ok(signal)), _) => signal.to_string(),
        (_, Some(code)) => format!("exit status {code}"),
        _ => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn shell<'a>(arguments: &'a [&'a str; 2]) -> Program<'a> {
        Program {
            path: Path::new("/bin/sh"),
            arguments,
            environment: &[],
            capabilities: CapabilitySet::all(),
        }
    }

    #[test]
    fn a_question_has_an_answer_and_a_deadline() {
        let answer = ask(
            shell(&["-c", "read word; echo $word; echo no >&2; exit 3"]),
            "quit -t 5\n",
            Duration::from_secs(30),
        );
        let expected = Answer {
            succeeded: false,
            text: "quit -t 5\nno\n".to_owned(),
        };
        assert_eq!(answer.unwrap(), expected);
        let begun = Instant::now();
        let hangs = ask(
            shell(&["-c", "exec sleep 60"]),
            "",
            Duration::from_millis(100),
        );
        assert_eq!(hangs.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_service_ends_in_words() {
        for (script, how) in [("exit 4", "exit status 4"), ("kill -9 $$", "SIGKILL")] {
            let output = File::from(rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap());
            let mut service = Service::start(shell(&["-c", script]), output).unwrap();
            let end = Instant::now() + Duration::from_secs(30);
            let ended = loop {
                match service.ended().unwrap() {
                    None if Instant::now() < end => {}
                    ended => break ended,
                }
            };
            assert_eq!(ended.as_deref(), Some(how));
        }
    }
}
