//! Changes the environment and credentials of this process, and runs programs of the host.
#![allow(unsafe_code, reason = "a change of the environment has no safe form")]

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Gid, Pid, Uid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};
use rustix::thread::CapabilitySets;

/// How long a killed program may take to end. A program that hangs in the kernel is left to init.
pub(super) const REAP: Duration = Duration::from_millis(500);

/// Waits for a child and returns its status, or `None` if it still runs after `patience`.
pub(super) fn wait(child: Pid, patience: Duration) -> nix::Result<Option<WaitStatus>> {
    let end = Instant::now() + patience;
    loop {
        match waitpid(child, Some(WaitPidFlag::WNOHANG))? {
            WaitStatus::StillAlive => {}
            ended => return Ok(Some(ended)),
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        wait_for_end(child, left);
    }
}

/// Waits until the child ends, or returns earlier. The child has not been reaped, so its PID is not reused.
fn wait_for_end(child: Pid, patience: Duration) {
    let pid = rustix::process::Pid::from_raw(child.as_raw());
    let handle = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    match handle {
        Some(handle) => {
            let patience = Timespec::try_from(patience).ok();
            poll(
                &mut [PollFd::new(&handle, PollFlags::IN)],
                patience.as_ref(),
            )
            .ok();
        }
        // pidfd_open(2) needs Linux 5.3.
        None => std::thread::sleep(Duration::from_micros(100)),
    }
}

/// Calls `poll` until it returns a value. Returns `None` if that does not happen within `patience`.
fn poll_until<T, E>(
    patience: Duration,
    mut poll: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let end = Instant::now() + patience;
    loop {
        let polled = poll()?;
        if polled.is_some() || Instant::now() >= end {
            return Ok(polled);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Clears the environment. The process must have only one thread.
pub fn clear_environment() {
    // SAFETY: clearenv(3) invalidates pointers into the environment. This process has one thread, and it keeps no such pointer.
    unsafe { libc::clearenv() };
}

/// Runs a program with `/` as its working directory and only `PATH` in its environment. Waits for it to end, and returns whether it
/// succeeded.
///
/// # Errors
/// If the program cannot be started. [`io::ErrorKind::TimedOut`] if it was killed because it did not end within `deadline`.
#[expect(
    clippy::disallowed_methods,
    reason = "the only place that runs programs"
)]
fn run_program(
    program: &Path,
    arguments: &[&str],
    output: Stdio,
    deadline: Duration,
) -> io::Result<bool> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .current_dir("/");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(Stdio::null())
        .spawn()?;
    if let Some(status) = poll_until(deadline, || child.try_wait())? {
        return Ok(status.success());
    }
    child.kill().ok();
    poll_until(REAP, || child.try_wait()).ok();
    Err(io::ErrorKind::TimedOut.into())
}

/// Replaces this program with another one, which gets these arguments, including `argv[0]`, and an empty environment.
#[expect(
    clippy::disallowed_methods,
    reason = "the only place that runs programs"
)]
pub fn replace(program: &Path, args: &[OsString]) -> io::Error {
    let (called, args) = args
        .split_first()
        .map_or((program.as_os_str(), &[][..]), |(called, args)| {
            (called, args)
        });
    Command::new(program)
        .arg0(called)
        .args(args)
        .env_clear()
        .exec()
}

/// Replaces this program with another one, which gets these arguments after its name, and the environment of this process.
#[expect(
    clippy::disallowed_methods,
    reason = "the only place that runs programs"
)]
pub fn replace_with_environment(program: &Path, args: &[OsString]) -> io::Error {
    Command::new(program).args(args).exec()
}

/// What a program made of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filtered {
    /// Whether it succeeded
    pub succeeded: bool,
    /// Its standard output
    pub output: Vec<u8>,
    /// Its standard error, up to 64 KiB
    pub messages: String,
    /// Whether the output is the input
    pub is_same: bool,
}

/// Runs a program in the directory `dir`, without an environment, with `input` as its standard input.
///
/// # Errors
/// If the program cannot be started, or does not end within `deadline`.
#[expect(
    clippy::disallowed_methods,
    reason = "the only place that runs programs"
)]
pub fn filter(
    program: &Path,
    arguments: &[&str],
    dir: &Path,
    mut input: File,
    deadline: Duration,
) -> io::Result<Filtered> {
    // Files in memory: pipes would have to be read while the program runs.
    let memory = || rustix::fs::memfd_create("output", MemfdFlags::CLOEXEC).map(File::from);
    let (mut output, mut errors) = (memory()?, memory()?);
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .current_dir(dir)
        .stdin(input.try_clone()?);
    let mut child = command
        .stdout(output.try_clone()?)
        .stderr(errors.try_clone()?)
        .spawn()?;
    let Some(status) = poll_until(deadline, || child.try_wait())? else {
        child.kill().ok();
        poll_until(REAP, || child.try_wait()).ok();
        return Err(io::ErrorKind::TimedOut.into());
    };
    let mut filtered = Filtered {
        succeeded: status.success(),
        ..Filtered::default()
    };
    output.rewind()?;
    output.read_to_end(&mut filtered.output)?;
    errors.rewind()?;
    let mut messages = Vec::new();
    errors.take(1 << 16).read_to_end(&mut messages)?;
    filtered.messages = String::from_utf8_lossy(&messages).into_owned();
    input.rewind()?;
    let mut old = Vec::new();
    input.read_to_end(&mut old)?;
    filtered.is_same = old == filtered.output;
    Ok(filtered)
}

/// Runs modprobe(8) for a module, and returns whether it succeeded.
///
/// # Errors
/// If the program cannot be started, or does not end within `deadline`.
pub fn run_modprobe(program: &Path, module: &str, deadline: Duration) -> io::Result<bool> {
    run_program(program, &[module], Stdio::null(), deadline)
}

/// Runs a program and returns its standard output, up to 1 MiB.
///
/// # Errors
/// If the program cannot be started, or does not end within `deadline`. [`io::ErrorKind::Other`] if it fails.
pub fn read_output(program: &Path, arguments: &[&str], deadline: Duration) -> io::Result<String> {
    // A file in memory: a pipe would have to be read while the program runs.
    let mut output = File::from(rustix::fs::memfd_create("output", MemfdFlags::CLOEXEC)?);
    if !run_program(program, arguments, output.try_clone()?.into(), deadline)? {
        return Err(io::Error::other("the program failed"));
    }
    output.rewind()?;
    let mut text = String::new();
    output.take(1 << 20).read_to_string(&mut text)?;
    Ok(text)
}

/// Makes `uid`:`gid` the owner of the files that this process creates, and keeps its capabilities. On an id-mapped rootfs, creating
/// a file for an owner that is not mapped fails with EOVERFLOW.
///
/// # Errors
/// EPERM if this process cannot change its ids for files, and the errors of capset(2).
pub fn create_files_as(uid: u32, gid: u32) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    nix::unistd::setfsgid(gid);
    nix::unistd::setfsuid(uid);
    // If the file system user id is no longer 0, the kernel removes CAP_CHOWN, CAP_DAC_OVERRIDE and the others for files from the
    // effective set (capabilities(7)). They stay in the permitted set.
    let caps = rustix::thread::capabilities(None)?;
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: caps.permitted,
            ..caps
        },
    )?;
    // setfsuid(2) does not report errors. A second call returns the id that is in effect.
    if nix::unistd::setfsuid(uid) == uid && nix::unistd::setfsgid(gid) == gid {
        Ok(())
    } else {
        Err(Errno::PERM.into())
    }
}

/// Undoes [`create_files_as`]. With file system user id 0 the kernel restores the capabilities for files, see capabilities(7).
pub fn create_files_as_ourselves() {
    nix::unistd::setfsuid(nix::unistd::geteuid());
    nix::unistd::setfsgid(nix::unistd::getegid());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("slow");
        std::fs::write(
            &program,
            "#!/bin/sh\necho slow version 1.2.3\nexec sleep 60",
        )
        .unwrap();
        std::fs::set_permissions(
            &program,
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        let start = Instant::now();
        let error = read_output(&program, &["--version"], Duration::from_millis(200)).unwrap_err();
        assert!(
            error.kind() == io::ErrorKind::TimedOut && start.elapsed() < Duration::from_secs(20),
            "{error}"
        );
    }

    #[test]
    fn programs_of_the_host() {
        let run = |program: &str| {
            run_modprobe(Path::new(program), "nothing", Duration::from_secs(60)).ok()
        };
        assert_eq!(
            (run("/bin/true"), run("/bin/false"), run("/nowhere/true")),
            (Some(true), Some(false), None)
        );
        let version = |program: &str| {
            read_output(Path::new(program), &["--version"], Duration::from_secs(10))
        };
        assert!(
            version("/bin/sed")
                .unwrap()
                .starts_with("/bin/sed (GNU sed)")
        );
        assert!(version("/nowhere/sed").is_err());
    }
}
