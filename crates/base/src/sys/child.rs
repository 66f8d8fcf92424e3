//! Runs code in a forked child that reports over a pipe, line by line. No process is left afterwards.
//!
//! The caller starts a chain of three processes. The *warden* is a plain fork that creates a PID namespace for its children; inside
//! a user namespace, the caller itself could not return from such a namespace (setns(2)). The *init* is process 1 of that
//! namespace and only waits. The *worker* runs the caller's code. When the init ends, the kernel kills all processes in the
//! namespace, including one that called setsid(2) or cleared its parent-death signal. A process in the namespace cannot see,
//! signal or stop a process outside of it (pid_namespaces(7)).
//!
//! An unprivileged user cannot create a PID namespace. In that case there is no init, and the caller becomes a subreaper
//! (prctl(2)): orphans of the worker become its children, and it kills them. [`spawn_among_processes`] does the same.
#![allow(
    unsafe_code,
    reason = "fork, unshare and close_range have no safe form"
)]

use std::convert::Infallible;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{ns, proc_file, process};
use crate::json;

/// The longest report in bytes. An inventory of 64 GPUs with 8 MIG devices each has a tenth of this size.
const MAX_REPORT: usize = 1 << 20;

/// How long a killed child may take to end. A child that hangs in the kernel because of a lost GPU is left to init. It does not
/// keep files of the runtime open, since its standard streams are /dev/null.
const REAP: Duration = Duration::from_millis(500);

/// An exit status above this value means that a signal ended the worker, as in a shell.
const SIGNALED: i32 = 128;

/// Why the child sent no further line.
#[derive(Debug)]
pub enum NoAnswer {
    /// Fork, pipe or poll failed.
    System(io::Error),
    /// The deadline passed.
    Timeout,
    /// The child ended. The signal is given if one ended it.
    Died(Option<Signal>),
}

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System(error) => write!(f, "{error}"),
            Self::Timeout => f.write_str("no answer in time"),
            Self::Died(Some(signal)) => write!(f, "the process was ended by {signal}"),
            Self::Died(None) => f.write_str("the process has ended"),
        }
    }
}

/// A running child. Dropping it kills the child and all its descendants.
#[derive(Debug)]
pub struct Child {
    warden: Pid,
    pipe: File,
    /// Bytes after the last line that was returned
    pending: Vec<u8>,
    read: usize,
    /// The children that this process had before
    others: Option<Vec<i32>>,
    reaped: bool,
}

/// Runs `body` in a forked child, which ends when `body` returns. `body` gets the pipe.
///
/// The standard streams of the child are /dev/null, and all other file descriptors except the pipe are closed.
///
/// # Errors
/// If the pipe or the process cannot be created.
pub fn spawn(body: impl FnOnce(&mut File)) -> io::Result<Child> {
    // unshare(2) leaves the warden in its PID namespace. The next fork makes process 1 of the new one, see pid_namespaces(7).
    spawn_after(|| ns::new_pid_ns_for_children().is_ok(), None, body)
}

/// Returns the result of `examine`, which runs in a child process like that of [`spawn`].
///
/// # Errors
/// If the result does not arrive within `patience`.
pub fn ask<T: Serialize + DeserializeOwned>(
    patience: Duration,
    examine: impl FnOnce() -> T,
) -> Result<T, NoAnswer> {
    let spawned = spawn(|pipe| {
        let answer = serde_json::to_string(&examine()).unwrap_or_default();
        report(pipe, format!("{answer}\n").as_bytes());
    });
    let line = spawned
        .map_err(NoAnswer::System)?
        .line(Instant::now() + patience)?;
    json::from_bytes(&line).map_err(|error| NoAnswer::System(error.into()))
}

/// Like [`spawn`], but the standard input of the child is a pipe, whose other end is returned.
///
/// # Errors
/// If a pipe or the process cannot be created.
pub fn spawn_with_input(body: impl FnOnce(&mut File)) -> io::Result<(Child, File)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let child = spawn_after(|| ns::new_pid_ns_for_children().is_ok(), Some(read), body)?;
    Ok((child, write.into()))
}

/// Like [`spawn`], but the child stays in the PID namespace of this process, as if it could not create one.
///
/// The driver knows a process by its id in the PID namespace of the process that asks, and omits those that have none there. In a
/// namespace without other processes, NVML lists none (seen with driver 580.159.04).
///
/// # Errors
/// If the pipe or the process cannot be created.
pub fn spawn_among_processes(body: impl FnOnce(&mut File)) -> io::Result<Child> {
    spawn_after(|| false, None, body)
}

/// Replaces this forked process with a program that gets these arguments, from `argv[0]` on, and an empty environment. Its standard output is
/// the pipe. The kernel kills it when the parent ends.
///
/// # Errors
/// Returns only if the program cannot be started.
pub fn run_program(program: &Path, arguments: &[OsString], pipe: &File) -> io::Result<Infallible> {
    rustix::stdio::dup2_stdout(pipe)?;
    Err(process::replace(program, arguments))
}

/// Starts the chain of processes. `has_init` runs in the warden, and returns whether its next child is process 1 of a namespace. `input`
/// becomes the standard input.
fn spawn_after(
    has_init: fn() -> bool,
    input: Option<OwnedFd>,
    body: impl FnOnce(&mut File),
) -> io::Result<Child> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let others = children();
    nix::sys::prctl::set_child_subreaper(true)?;
    // SAFETY: fork(2) is unsafe because in a threaded process only async-signal-safe calls are allowed in the child.
    // The hook never starts a thread, so the child is an ordinary process; glibc's own fork handlers keep malloc
    // usable even under a threaded test harness.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(read);
            let code = isolate(write, input).map_or(1, |pipe| guard(pipe, has_init(), body));
            end(code)
        }
        ForkResult::Parent { child } => {
            drop(write);
            Ok(Child {
                warden: child,
                pipe: read.into(),
                pending: Vec::new(),
                read: 0,
                others,
                reaped: false,
            })
        }
    }
}

/// Ends a forked process.
fn end(code: i32) -> ! {
    // SAFETY: _exit(2) takes any status and does not return. Unlike exit(3) it runs no destructor of a library that the
    // worker loaded, so nothing can hang or fail after the last line was written.
    unsafe { libc::_exit(code) }
}

/// Runs the warden, and returns the exit status of the worker.
fn guard(pipe: File, has_init: bool, body: impl FnOnce(&mut File)) -> i32 {
    pass_on(pipe, |mut pipe| {
        if !has_init {
            return work(&mut pipe, body);
        }
        die_with_parent(&pipe).map_or(1, |()| pass_on(pipe, |mut pipe| work(&mut pipe, body)))
    })
}

/// Forks a child with the pipe, waits for it, and returns its exit status.
fn pass_on(pipe: File, child: impl FnOnce(File) -> i32) -> i32 {
    // SAFETY: as in `spawn`; this process is itself a fork with one thread.
    match unsafe { fork() } {
        Err(_) => 1,
        Ok(ForkResult::Child) => end(child(pipe)),
        Ok(ForkResult::Parent { child }) => {
            // The reader must see the end of the pipe when the worker ends.
            drop(pipe);
            loop {
                // Process 1 also inherits the orphans of the worker. Their exit status does not matter.
                match waitpid(None, None) {
                    Ok(WaitStatus::Exited(pid, code)) if pid == child => return code,
                    Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => {
                        return SIGNALED + signal as i32;
                    }
                    Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                    Err(_) => return 1,
                }
            }
        }
    }
}

/// Runs the worker in a session of its own, so that it has no controlling terminal and a known process group.
fn work(pipe: &mut File, body: impl FnOnce(&mut File)) -> i32 {
    nix::unistd::setsid().ok();
    if die_with_parent(&*pipe).is_err() {
        return 1;
    }
    body(pipe);
    0
}

/// Closes the files of the runtime: it reads the output of a hook until all processes have closed it, so a child that kept the
/// pipe open would delay every error.
fn isolate(pipe: OwnedFd, input: Option<OwnedFd>) -> io::Result<File> {
    let null = rustix::fs::openat(CWD, c"/dev/null", OFlags::RDWR, Mode::empty())?;
    rustix::stdio::dup2_stdin(input.as_ref().unwrap_or(&null))?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    drop((null, input));
    close_others(&pipe);
    let pipe = File::from(pipe);
    die_with_parent(&pipe)?;
    Ok(pipe)
}

/// Closes files that the runtime left open in the hook, so that the driver's library cannot use them. Before Linux 5.9, which
/// lacks close_range(2), they stay open.
fn close_others(keep: &OwnedFd) {
    let keep = keep.as_fd().as_raw_fd().cast_unsigned();
    close_range(3, keep.saturating_sub(1));
    close_range(keep.saturating_add(1), u32::MAX);
}

/// Closes all inherited files except the standard streams: a daemon may have opened files without O_CLOEXEC. The calling program
/// must not have opened any file. Before Linux 5.9 nothing is closed.
pub fn close_inherited() {
    close_range(3, u32::MAX);
}

fn close_range(first: u32, last: u32) {
    if first <= last {
        // SAFETY: close_range(2) takes two numbers and touches no memory. The fds it closes belong to nothing that this process
        // goes on to use: in a child of `spawn`, to values of the parent's that the child only has copies of, never uses and
        // never drops, as it ends with _exit(2); in a program that has just started, to nothing at all.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

/// Has the kernel kill this process when its parent ends: no process may outlive the hook. A change of credentials clears the
/// setting (prctl(2)), so [`super::confine`] repeats it.
///
/// A parent that ended before the call sends no signal. getppid(2) does not show that, because it returns 0 for a parent outside
/// of the PID namespace. Therefore the pipe is polled: the hook is its only reader, and poll(2) reports a pipe without a reader.
pub(super) fn die_with_parent(pipe: impl AsFd) -> io::Result<()> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
    let mut polled = [PollFd::new(&pipe, PollFlags::empty())];
    poll(
        &mut polled,
        Some(&Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        }),
    )?;
    let gone = polled
        .iter()
        .any(|polled| polled.revents().contains(PollFlags::ERR));
    if gone {
        Err(io::ErrorKind::BrokenPipe.into())
    } else {
        Ok(())
    }
}

impl Child {
    /// Returns the next line, without its newline.
    ///
    /// # Errors
    /// If the child ends without another line, the line is not complete at `until`, or a system call fails.
    pub fn line(&mut self, until: Instant) -> Result<Vec<u8>, NoAnswer> {
        loop {
            if let Some(at) = self.pending.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.pending.drain(..=at).collect();
                line.pop();
                return Ok(line);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(NoAnswer::Timeout);
            }
            let timeout = Timespec::try_from(left).ok();
            match poll(
                &mut [PollFd::new(&self.pipe, PollFlags::IN)],
                timeout.as_ref(),
            ) {
                Ok(0) => return Err(NoAnswer::Timeout),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(NoAnswer::System(errno.into())),
            }
            self.read()?;
        }
    }

    fn read(&mut self) -> Result<(), NoAnswer> {
        let mut chunk = [0; 4096];
        let count = self.pipe.read(&mut chunk).map_err(NoAnswer::System)?;
        if count == 0 {
            return Err(NoAnswer::Died(self.ended()));
        }
        self.read += count;
        if self.read > MAX_REPORT {
            return Err(NoAnswer::System(io::Error::other("the answer is too long")));
        }
        self.pending
            .extend_from_slice(chunk.get(..count).unwrap_or_default());
        Ok(())
    }

    /// Returns the signal that ended the worker, which has closed the pipe.
    fn ended(&mut self) -> Option<Signal> {
        let status = process::wait(self.warden, REAP).ok()??;
        self.reaped = true;
        match status {
            WaitStatus::Exited(_, code) if code > SIGNALED => {
                Signal::try_from(code - SIGNALED).ok()
            }
            _ => None,
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            // Nothing has waited for the warden, so its PID is not reused.
            kill(self.warden, Signal::SIGKILL).ok();
            process::wait(self.warden, REAP).ok();
        }
        end_children(self.others.as_deref().unwrap_or_default());
        nix::sys::prctl::set_child_subreaper(false).ok();
    }
}

/// Kills all children of this process except those in `kept`, and waits for their end. Orphans of a killed child become children too.
fn end_children(kept: &[i32]) {
    let until = Instant::now() + REAP;
    loop {
        let Some(now) = children() else {
            reap_all(until);
            break;
        };
        let mut others = now;
        others.retain(|child| !kept.contains(child));
        if others.is_empty() || Instant::now() >= until {
            break;
        }
        for other in &others {
            let other = Pid::from_raw(*other);
            kill(other, Signal::SIGKILL).ok();
            // The worker leads a process group.
            killpg(other, Signal::SIGKILL).ok();
        }
        let mut is_reaped = false;
        for other in others {
            let left = until.saturating_duration_since(Instant::now());
            is_reaped |= matches!(process::wait(Pid::from_raw(other), left), Ok(Some(_)));
        }
        // The list can lack some children while others end, see proc_tid_children(5). So it is read until it is empty.
        if !is_reaped {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Waits for all children. The warden has ended, and the kernel has killed the processes below it.
///
/// The hook must not leave a zombie. Process 1 of its PID namespace would inherit it, which is crun at the createContainer stage.
/// crun takes the zombie's SIGCHLD for the hook's, and reports a timeout of the hook.
fn reap_all(until: Instant) {
    while Instant::now() < until {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) => std::thread::sleep(Duration::from_micros(100)),
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            // ECHILD: all children have been waited for.
            Err(_) => break,
        }
    }
}

/// Returns the children of the first thread of this process, which also inherits orphans. Returns `None` if the kernel lacks
/// `CONFIG_PROC_CHILDREN`, or if /proc belongs to another PID namespace, in which the PIDs denote other processes.
fn children() -> Option<Vec<i32>> {
    let pid = nix::unistd::getpid();
    let is_ours =
        std::fs::read_link("/proc/self").is_ok_and(|to| to.as_os_str() == pid.to_string().as_str());
    let path = format!("/proc/self/task/{pid}/children");
    let text = if is_ours {
        proc_file::read_text(path).ok()?
    } else {
        return None;
    };
    Some(
        text.split_ascii_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect(),
    )
}

/// Writes `bytes` to the pipe. An error is ignored, because it means that the reader has ended.
pub fn report(pipe: &mut File, bytes: &[u8]) {
    pipe.write_all(bytes).ok();
}

#[cfg(test)]
mod tests;
