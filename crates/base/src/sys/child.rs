//! A forked child that reports over a pipe, line by line, and of which nothing is left afterwards.
//!
//! Three processes stand below the caller. The *warden* is a plain fork, which makes a PID namespace for its children; the
//! caller itself could not leave such a namespace again inside a user namespace (setns(2)). The *init* is process 1 of that
//! namespace and only waits. The *worker* runs the caller's code. When the init ends, the kernel kills everything in the
//! namespace, including a process that called setsid(2) or cleared its parent-death signal, and nothing in the namespace
//! can see, signal or stop a process outside of it (pid_namespaces(7)).
//!
//! A plain user may not make a PID namespace. Then there is no init, and the caller is a subreaper (prctl(2)): orphans of the
//! worker become its children and are killed.
#![allow(unsafe_code, reason = "fork, unshare and close_range have no safe form")]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags};

use super::{ns, proc_file, process};

/// The longest report that is read; an inventory of 64 GPUs with 8 MIG devices each is a tenth of it.
const MAX_REPORT: usize = 1 << 20;

/// How long a killed child may take to go. One that hangs in the kernel (a lost GPU) is left to init: it holds
/// nothing of the runtime's, its stdio is /dev/null.
const REAP: Duration = Duration::from_millis(500);

/// An exit status above this is a signal that ended the worker, as in a shell.
const SIGNALED: i32 = 128;

/// Why there is no further line.
#[derive(Debug)]
pub enum NoAnswer {
    /// Fork, pipe or poll failed.
    System(io::Error),
    /// The deadline passed.
    Timeout,
    /// The child ended, by this signal if it was one.
    Died(Option<Signal>),
}

/// A running child. Dropping it kills the child and all its descendants.
#[derive(Debug)]
pub struct Child {
    warden: Pid,
    pipe: File,
    /// What was read and not handed out yet
    pending: Vec<u8>,
    read: usize,
    /// Children of this process that were there before
    others: Option<Vec<i32>>,
    reaped: bool,
}

/// Runs `body` in a forked child. `body` gets the pipe; whatever it returns, the child ends.
///
/// In the child stdio is /dev/null, and all other fds but the pipe are closed.
///
/// # Errors
/// If there can be no pipe or no process.
pub fn spawn(body: impl FnOnce(&mut File)) -> io::Result<Child> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let others = children();
    nix::sys::prctl::set_child_subreaper(true)?;
    // SAFETY: fork(2) is unsafe because in a threaded process only async-signal-safe calls are allowed in the child.
    // The hook never starts a thread, so the child is an ordinary process; glibc's own fork handlers keep malloc
    // usable even under a threaded test harness.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(read);
            let code = isolate(write).map_or(1, |pipe| guard(pipe, body));
            end(code)
        }
        ForkResult::Parent { child } => {
            drop(write);
            Ok(Child { warden: child, pipe: read.into(), pending: Vec::new(), read: 0, others, reaped: false })
        }
    }
}

/// Ends a forked process.
fn end(code: i32) -> ! {
    // SAFETY: _exit(2) takes any status and does not return. Unlike exit(3) it runs no destructor of a library that the
    // worker loaded, so nothing can hang or fail after the last line was written.
    unsafe { libc::_exit(code) }
}

/// The warden: makes the namespace where that is allowed, and passes the worker's end on.
fn guard(pipe: File, body: impl FnOnce(&mut File)) -> i32 {
    let has_init = ns::new_pid_ns_for_children().is_ok();
    pass_on(pipe, |mut pipe| {
        if !has_init {
            return work(&mut pipe, body);
        }
        die_with_parent(&pipe).map_or(1, |()| pass_on(pipe, |mut pipe| work(&mut pipe, body)))
    })
}

/// Forks a child with the pipe, and returns how it ended, as an exit status.
fn pass_on(pipe: File, child: impl FnOnce(File) -> i32) -> i32 {
    // SAFETY: as in `spawn`; this process is itself a fork with one thread.
    match unsafe { fork() } {
        Err(_) => 1,
        Ok(ForkResult::Child) => end(child(pipe)),
        Ok(ForkResult::Parent { child }) => {
            // The reader is to see the end of the pipe when the worker ends.
            drop(pipe);
            loop {
                // As process 1 it also inherits the worker's orphans, whose ends are of no interest.
                match waitpid(None, None) {
                    Ok(WaitStatus::Exited(pid, code)) if pid == child => return code,
                    Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => return SIGNALED + signal as i32,
                    Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                    Err(_) => return 1,
                }
            }
        }
    }
}

/// A session of its own, so that it has no controlling terminal and its process group is known.
fn work(pipe: &mut File, body: impl FnOnce(&mut File)) -> i32 {
    nix::unistd::setsid().ok();
    if die_with_parent(&*pipe).is_err() {
        return 1;
    }
    body(pipe);
    0
}

/// Cuts the child's ties to the runtime: a child that holds its stdout delays every error by its own life time.
fn isolate(pipe: OwnedFd) -> io::Result<File> {
    let null = rustix::fs::openat(CWD, c"/dev/null", OFlags::RDWR, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    drop(null);
    close_others(&pipe);
    let pipe = File::from(pipe);
    die_with_parent(&pipe)?;
    Ok(pipe)
}

/// What the runtime left open in the hook must not be found by a library. Before Linux 5.9 it stays open: only what
/// was opened without O_CLOEXEC is at stake, and no program is run.
fn close_others(keep: &OwnedFd) {
    let keep = keep.as_fd().as_raw_fd().cast_unsigned();
    close_range(3, keep.saturating_sub(1));
    close_range(keep.saturating_add(1), u32::MAX);
}

/// Closes what a program inherited beside its standard streams: a daemon may have files open without O_CLOEXEC. For a program
/// that has not opened anything yet. Before Linux 5.9 nothing is closed.
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

/// No process may outlive the hook. Changing credentials clears this (prctl(2)), so [`super::confine`] repeats it.
///
/// A parent that ended before the call sends no signal. Its number does not show that, as it is 0 for a parent outside of
/// the PID namespace; but the hook is the only reader of the pipe, and poll(2) reports a pipe that has none.
pub(super) fn die_with_parent(pipe: impl AsFd) -> io::Result<()> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
    let mut polled = [PollFd::new(&pipe, PollFlags::empty())];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    let gone = polled.iter().any(|polled| polled.revents().contains(PollFlags::ERR));
    if gone { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
}

impl Child {
    /// The next line, without its newline. One that has not come by `until` is [`NoAnswer::Timeout`].
    ///
    /// # Errors
    /// If there is none.
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
            match poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], timeout.as_ref()) {
                Ok(0) => return Err(NoAnswer::Timeout),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(NoAnswer::System(errno.into())),
            }
            self.take()?;
        }
    }

    fn take(&mut self) -> Result<(), NoAnswer> {
        let mut chunk = [0; 4096];
        let count = self.pipe.read(&mut chunk).map_err(NoAnswer::System)?;
        if count == 0 {
            return Err(NoAnswer::Died(self.ended()));
        }
        self.read += count;
        if self.read > MAX_REPORT {
            return Err(NoAnswer::System(io::Error::other("the answer is too long")));
        }
        self.pending.extend_from_slice(chunk.get(..count).unwrap_or_default());
        Ok(())
    }

    /// The signal that ended the worker, which has closed the pipe.
    fn ended(&mut self) -> Option<Signal> {
        let status = process::wait(self.warden, REAP).ok()??;
        self.reaped = true;
        match status {
            WaitStatus::Exited(_, code) if code > SIGNALED => Signal::try_from(code - SIGNALED).ok(),
            _ => None,
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            // It was not waited for, so the number is still its own.
            kill(self.warden, Signal::SIGKILL).ok();
            process::wait(self.warden, REAP).ok();
        }
        let until = Instant::now() + REAP;
        loop {
            let Some(now) = children() else {
                reap_all(until);
                break;
            };
            let is_other = |child: &i32| self.others.as_ref().is_some_and(|others| others.contains(child));
            let orphans: Vec<i32> = now.into_iter().filter(|child| !is_other(child)).collect();
            if orphans.is_empty() || Instant::now() >= until {
                break;
            }
            for orphan in orphans.into_iter().map(Pid::from_raw) {
                kill(orphan, Signal::SIGKILL).ok();
                // The worker leads a process group.
                killpg(orphan, Signal::SIGKILL).ok();
                waitpid(orphan, Some(WaitPidFlag::WNOHANG)).ok();
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        nix::sys::prctl::set_child_subreaper(false).ok();
    }
}

/// Waits for all children: the warden has ended, and its end ended those that it left. A zombie that the hook leaves goes to
/// process 1 of its PID namespace. At the createContainer stage that is crun, which waits for the hook and loses its SIGCHLD to
/// that of the zombie: it then reports a timeout of the hook.
fn reap_all(until: Instant) {
    while Instant::now() < until {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) => std::thread::sleep(Duration::from_micros(100)),
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(_) => break,
        }
    }
}

/// The children of this process, as its first thread has them; orphans go to that thread as well. `None` on a kernel without
/// `CONFIG_PROC_CHILDREN`, and where /proc is that of another PID namespace, whose numbers are not ours to signal.
fn children() -> Option<Vec<i32>> {
    let pid = nix::unistd::getpid();
    let is_ours = std::fs::read_link("/proc/self").is_ok_and(|to| to.as_os_str() == pid.to_string().as_str());
    let path = format!("/proc/self/task/{pid}/children");
    let text = if is_ours { proc_file::read_text(path).ok()? } else { return None };
    Some(text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect())
}

/// Writes all of `bytes`; an error means that the reader is gone.
pub fn report(pipe: &mut File, bytes: &[u8]) {
    pipe.write_all(bytes).ok();
}

#[cfg(test)]
mod tests;
