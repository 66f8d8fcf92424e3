//! This process's own standard streams and environment, and the few programs of the host that it runs.
#![allow(unsafe_code, reason = "fork, clearenv and signal have no safe form")]

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Gid, Pid, Uid, fork};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::thread::CapabilitySets;

/// How long a killed program may take to go. One that hangs in the kernel is left to init.
const REAP: Duration = Duration::from_millis(500);

/// How the child ended; `None` if it has not when its time is up.
pub(super) fn wait(child: Pid, patience: Duration) -> nix::Result<Option<WaitStatus>> {
    let end = Instant::now() + patience;
    loop {
        match waitpid(child, Some(WaitPidFlag::WNOHANG))? {
            WaitStatus::StillAlive if Instant::now() >= end => return Ok(None),
            WaitStatus::StillAlive => std::thread::sleep(Duration::from_micros(100)),
            ended => return Ok(Some(ended)),
        }
    }
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
    // SAFETY: as in `child::spawn`: there is one thread, so the child is an ordinary process.
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
                kill(child, Signal::SIGKILL).ok();
                wait(child, REAP).ok();
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

/// Creates files as ourselves again. The kernel gives the caps of files back with fsuid 0; see capabilities(7).
pub fn create_files_as_ourselves() {
    nix::unistd::setfsuid(nix::unistd::geteuid());
    nix::unistd::setfsgid(nix::unistd::getegid());
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
