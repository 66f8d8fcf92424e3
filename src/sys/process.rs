//! A forked child that may do little, answers once over a pipe, and is gone by a deadline.
#![allow(unsafe_code, reason = "fork, clearenv and close_range have no safe form")]

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Gid, Pid, Uid, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// The longest answer that is read; an inventory of 64 GPUs with 8 MIG devices each is a tenth of it.
const MAX_ANSWER: usize = 1 << 20;

/// How long a killed child may take to go. One that hangs in the kernel (a lost GPU) is left to init: it holds
/// nothing of the runtime's, its stdio is /dev/null.
const REAP: Duration = Duration::from_millis(500);

/// Why there is no answer.
#[derive(Debug)]
pub enum NoAnswer {
    /// Fork, pipe or poll failed.
    System(io::Error),
    /// The deadline passed.
    Timeout,
    /// The child ended without a word, by this signal if it was one.
    Died(Option<Signal>),
}

/// Runs `body` in a forked child and returns what it wrote. `body` gets the pipe; whatever it returns, the child ends.
///
/// In the child stdio is /dev/null, and all other fds but the pipe are closed.
pub fn ask_child(deadline: Duration, body: impl FnOnce(&mut File)) -> Result<Vec<u8>, NoAnswer> {
    let end = Instant::now() + deadline;
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(system)?;
    let parent = nix::unistd::getpid();
    // SAFETY: fork(2) is unsafe because in a threaded process only async-signal-safe calls are allowed in the child.
    // The hook never starts a thread, so the child is an ordinary process; glibc's own fork handlers keep malloc
    // usable even under a threaded test harness.
    match unsafe { fork() }.map_err(|errno| NoAnswer::System(errno.into()))? {
        ForkResult::Child => {
            drop(read);
            let code = match isolate(parent, write) {
                Ok(mut pipe) => {
                    body(&mut pipe);
                    0
                }
                Err(_) => 1,
            };
            // SAFETY: _exit(2) takes any status and does not return. Unlike exit(3) it runs no destructor of a
            // library that `body` loaded, so nothing can hang or fail after the answer was given.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => {
            drop(write);
            let answer = read_until(&read, end);
            let status = reap(child, answer.is_err());
            match answer? {
                bytes if bytes.is_empty() => Err(NoAnswer::Died(match status {
                    Some(WaitStatus::Signaled(_, signal, _)) => Some(signal),
                    _ => None,
                })),
                bytes => Ok(bytes),
            }
        }
    }
}

fn system(errno: rustix::io::Errno) -> NoAnswer {
    NoAnswer::System(errno.into())
}

/// Cuts the child's ties to the runtime: a child that holds its stdout delays every error by its own life time.
fn isolate(parent: Pid, pipe: OwnedFd) -> io::Result<File> {
    die_with(parent)?;
    let null = rustix::fs::openat(CWD, c"/dev/null", OFlags::RDWR, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    drop(null);
    close_others(&pipe);
    Ok(pipe.into())
}

/// What the runtime left open in the hook is nothing for a library to find. Before Linux 5.9 it stays open: only what
/// was opened without O_CLOEXEC is at stake, and no program is run.
fn close_others(keep: &OwnedFd) {
    let keep = keep.as_fd().as_raw_fd().cast_unsigned();
    for (first, last) in [(3, keep.saturating_sub(1)), (keep.saturating_add(1), u32::MAX)] {
        if first <= last {
            // SAFETY: close_range(2) takes two numbers and touches no memory. The fds it closes belong to values of the
            // parent's that the child only has copies of: it never uses or drops them, and ends with _exit(2).
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
    }
}

/// The child must not outlive the hook. Changing credentials clears this (prctl(2)), hence `Identity::assume` repeats it.
fn die_with(parent: Pid) -> io::Result<()> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
    if nix::unistd::getppid() == parent { Ok(()) } else { Err(Errno::ESRCH.into()) }
}

fn read_until(pipe: &OwnedFd, end: Instant) -> Result<Vec<u8>, NoAnswer> {
    let mut bytes = Vec::new();
    let mut chunk = [0u8; 4096];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(NoAnswer::Timeout);
        }
        let timeout = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(pipe, PollFlags::IN)], timeout.as_ref()) {
            Ok(0) => return Err(NoAnswer::Timeout),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(system(errno)),
        }
        let mut source = File::from(pipe.as_fd().try_clone_to_owned().map_err(NoAnswer::System)?);
        match source.read(&mut chunk).map_err(NoAnswer::System)? {
            0 => return Ok(bytes),
            n => bytes.extend_from_slice(chunk.get(..n).unwrap_or_default()),
        }
        if bytes.len() > MAX_ANSWER {
            return Err(NoAnswer::System(io::Error::other("the answer is too long")));
        }
    }
}

/// How the child ended; `None` if it has not when its time is up.
fn wait(child: Pid, patience: Duration) -> nix::Result<Option<WaitStatus>> {
    let end = Instant::now() + patience;
    loop {
        match waitpid(child, Some(WaitPidFlag::WNOHANG))? {
            WaitStatus::StillAlive if Instant::now() >= end => return Ok(None),
            WaitStatus::StillAlive => std::thread::sleep(Duration::from_micros(100)),
            ended => return Ok(Some(ended)),
        }
    }
}

/// Waits for the child to go, and sees to it that it does. It has closed the pipe or is to be killed, so this is short.
fn reap(child: Pid, mut kill_it: bool) -> Option<WaitStatus> {
    for _ in 0..2 {
        if kill_it {
            // It may have ended by itself meanwhile: it is our child, not waited for, so the pid is still its own.
            kill(child, Signal::SIGKILL).ok();
        }
        match wait(child, REAP) {
            Ok(None) => {}
            Ok(ended) => return ended,
            Err(_) => return None,
        }
        if kill_it {
            break;
        }
        kill_it = true;
    }
    None
}

/// Who the child is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// real, effective and saved user id
    pub uid: u32,
    /// real, effective and saved group id, and the only supplementary group
    pub gid: u32,
}

/// Gives up everything that the NVML library does not need: environment, kernel caps (bounding set too), the chance
/// to gain any by exec, and with `identity` the user and groups. For the child only: there is no way back.
pub fn confine(root: &Path, identity: Option<Identity>) -> io::Result<()> {
    let parent = nix::unistd::getppid();
    clear_environment();
    if root != Path::new("/") {
        nix::unistd::chroot(root)?;
        nix::unistd::chdir("/")?;
    }
    drop_bounding_set();
    if let Some(Identity { uid, gid }) = identity {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        nix::unistd::setgroups(&[gid])?;
        nix::unistd::setresgid(gid, gid, gid)?;
        nix::unistd::setresuid(uid, uid, uid)?;
    }
    rustix::thread::set_no_new_privs(true)?;
    drop_caps()?;
    die_with(parent)
}

/// Before the user changes: it takes CAP_SETPCAP.
fn drop_bounding_set() {
    for cap in CapabilitySet::all() {
        // EPERM: an unprivileged caller has no CAP_SETPCAP, and nothing to lose; EINVAL: a cap this kernel does not know.
        rustix::thread::remove_capability_from_bounding_set(cap).ok();
    }
}

fn drop_caps() -> io::Result<()> {
    rustix::thread::clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    Ok(())
}

/// What a program needs before it opens a file: stdin, stdout and stderr that are open, or the first file would become one of
/// them; and writes to a closed pipe that fail instead of ending it.
pub fn start() {
    let mut polled = [0, 1, 2].map(|fd| libc::pollfd { fd, events: 0, revents: 0 });
    // SAFETY: poll(2) reads and writes the three structs, which are alive, and keeps no pointer.
    unsafe { libc::poll(polled.as_mut_ptr(), 3, 0) };
    for _ in polled.iter().filter(|polled| polled.revents & libc::POLLNVAL != 0) {
        // SAFETY: open(2) reads the string only. It takes the lowest free number, which is the first of those that are closed.
        unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) };
    }
    // SAFETY: signal(2) with SIG_IGN installs no handler, so nothing of ours can run in its context.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Forgets the environment. For a process with one thread.
pub fn clear_environment() {
    // SAFETY: clearenv(3) frees nothing that somebody holds: there is no other thread to read environ, and no pointer
    // into it is kept by this program.
    unsafe { libc::clearenv() };
}

/// Runs a program of the host's with these arguments and an environment of its own, and waits for it; whether it succeeded.
/// What it prints goes to `output`, or nowhere. One that takes longer than `deadline` is ended. (`std::process::Command` is
/// 25 KB.)
fn run_program(
    program: &Path,
    arguments: &[&str],
    output: Option<BorrowedFd<'_>>,
    deadline: Duration,
) -> io::Result<bool> {
    let text = |bytes: &[u8]| CString::new(bytes).map_err(io::Error::from);
    let program = text(program.as_os_str().as_bytes())?;
    let mut argv = vec![program.clone()];
    for argument in arguments {
        argv.push(text(argument.as_bytes())?);
    }
    let exec = || -> io::Result<()> {
        let null = rustix::fs::openat(CWD, c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stderr(&null)?;
        rustix::stdio::dup2_stdout(output.unwrap_or_else(|| null.as_fd()))?;
        nix::unistd::chdir("/")?;
        // SAFETY: signal(2) with SIG_DFL installs no handler. An ignored signal would stay so in the program.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        nix::unistd::execve(&program, &argv, &[c"PATH=/usr/sbin:/usr/bin:/sbin:/bin"])?;
        Ok(())
    };
    // SAFETY: as in ask_child: there is one thread, so the child is an ordinary process.
    match unsafe { fork() }? {
        ForkResult::Child => {
            exec().ok();
            // SAFETY: _exit(2) takes any status and does not return.
            unsafe { libc::_exit(NOT_RUN) }
        }
        ForkResult::Parent { child } => match wait(child, deadline)? {
            Some(WaitStatus::Exited(_, 0)) => Ok(true),
            Some(WaitStatus::Exited(_, NOT_RUN)) => Err(io::Error::from(io::ErrorKind::NotFound)),
            Some(_) => Ok(false),
            None => {
                reap(child, true);
                Err(io::Error::from(io::ErrorKind::TimedOut))
            }
        },
    }
}

/// What a shell says of a command that it cannot run.
const NOT_RUN: i32 = 127;

/// Runs modprobe(8): no program ever runs on a container's files.
pub fn run_modprobe(program: &Path, module: &str, deadline: Duration) -> io::Result<bool> {
    run_program(program, &[module], None, deadline)
}

/// What a program of the host's prints when it is asked for its version: see [`read_output`].
pub fn read_version(program: &Path, deadline: Duration) -> io::Result<String> {
    read_output(program, &["--version"], deadline)
}

/// What a program of the host's prints with these arguments. One that takes longer than `deadline` is ended; one that ends with
/// an error is [`io::ErrorKind::Other`].
pub fn read_output(program: &Path, arguments: &[&str], deadline: Duration) -> io::Result<String> {
    let output = rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC)?;
    if !run_program(program, arguments, Some(output.as_fd()), deadline)? {
        return Err(io::Error::other("it ends with an error"));
    }
    rustix::fs::seek(&output, rustix::fs::SeekFrom::Start(0))?;
    let mut text = String::new();
    File::from(output).take(1 << 20).read_to_string(&mut text)?;
    Ok(text)
}

/// Creates files as `uid`:`gid` from here on, with our caps kept: an id-mapped rootfs refuses inodes of an owner
/// that its user namespace does not know (EOVERFLOW).
pub fn create_files_as(uid: u32, gid: u32) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    nix::unistd::setfsgid(gid);
    nix::unistd::setfsuid(uid);
    // Leaving fsuid 0 takes the file caps out of the effective set (capabilities(7)); they are still permitted.
    let caps = rustix::thread::capabilities(None)?;
    rustix::thread::set_capabilities(None, CapabilitySets { effective: caps.permitted, ..caps })?;
    // setfsuid(2) reports nothing: asking again is how one learns whether it was obeyed.
    if nix::unistd::setfsuid(uid) == uid && nix::unistd::setfsgid(gid) == gid {
        Ok(())
    } else {
        Err(Errno::EPERM.into())
    }
}

/// Writes all of `bytes`; an error means that nobody reads any more.
pub fn answer(pipe: &mut File, bytes: &[u8]) {
    pipe.write_all(bytes).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_answers() {
        let bytes = ask_child(Duration::from_secs(5), |pipe| answer(pipe, b"hello")).unwrap();
        assert_eq!(bytes, b"hello");
    }

    #[test]
    fn a_long_answer_arrives_whole() {
        let bytes = ask_child(Duration::from_secs(5), |pipe| answer(pipe, &[7; 300_000])).unwrap();
        assert_eq!(bytes.len(), 300_000);
    }

    #[test]
    fn a_hanging_child_is_ended_at_the_deadline() {
        let start = Instant::now();
        let outcome = ask_child(Duration::from_millis(100), |_| std::thread::sleep(Duration::from_secs(60)));
        assert!(matches!(outcome, Err(NoAnswer::Timeout)), "{outcome:?}");
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_child_has_no_files_of_ours() {
        let _open = File::open("/dev/zero").unwrap();
        let bytes = ask_child(Duration::from_secs(5), |pipe| {
            let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            let targets: Vec<_> = links.filter_map(|link| std::fs::read_link(link.path()).ok()).collect();
            answer(pipe, format!("{targets:?}").as_bytes());
        });
        let text = String::from_utf8(bytes.unwrap()).unwrap();
        assert!(text.contains("/dev/null") && !text.contains("/dev/zero"), "{text}");
    }

    #[test]
    fn a_program_that_tells_no_version_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("slow");
        std::fs::write(&program, "#!/bin/sh\necho slow version 1.2.3\nexec sleep 60").unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let start = Instant::now();
        let error = read_version(&program, Duration::from_millis(200)).unwrap_err();
        assert!(error.kind() == io::ErrorKind::TimedOut && start.elapsed() < Duration::from_secs(20), "{error}");
    }

    #[test]
    fn programs_of_the_host() {
        let run = |program: &str| run_modprobe(Path::new(program), "nothing", Duration::from_secs(60)).ok();
        assert_eq!((run("/bin/true"), run("/bin/false"), run("/nowhere/true")), (Some(true), Some(false), None));
        assert!(
            read_version(Path::new("/bin/sed"), Duration::from_secs(10)).unwrap().starts_with("/bin/sed (GNU sed)")
        );
        assert!(read_version(Path::new("/nowhere/sed"), Duration::from_secs(10)).is_err());
    }

    #[test]
    fn a_dying_child_is_noticed() {
        let outcome = ask_child(Duration::from_secs(5), |_| nix::sys::signal::raise(Signal::SIGKILL).unwrap());
        assert!(matches!(outcome, Err(NoAnswer::Died(Some(Signal::SIGKILL)))), "{outcome:?}");
        let outcome = ask_child(Duration::from_secs(5), |_| {});
        assert!(matches!(outcome, Err(NoAnswer::Died(None))), "{outcome:?}");
    }

    #[test]
    fn a_confined_child_has_no_environment_and_no_caps() {
        let bytes = ask_child(Duration::from_secs(5), |pipe| {
            confine(Path::new("/"), None).unwrap();
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            answer(pipe, format!("{status}env {}", std::env::vars_os().count()).as_bytes());
        })
        .unwrap();
        let status = String::from_utf8(bytes).unwrap();
        let mut lines = vec!["CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "env 0"];
        if nix::unistd::geteuid().is_root() {
            lines.push("CapBnd:\t0000000000000000"); // a plain user has no CAP_SETPCAP
        }
        for line in lines {
            assert!(status.contains(line), "{line} missing in\n{status}");
        }
    }
}
