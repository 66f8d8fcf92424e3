//! Ends this process if it waits too long for a file system: the server of a FUSE or network file system may not answer.
#![allow(
    unsafe_code,
    reason = "neither nix nor rustix has timers of a process with these features"
)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use super::run_dir::Replacement;

/// What is left at the end.
static LAST_WORDS: OnceLock<LastWords> = OnceLock::new();

/// What this process leaves if it is ended: the cause is known only then.
#[derive(Debug)]
pub struct LastWords {
    /// If it waited for a file system most of the time
    pub waited: DeadlineReport,
    /// If it used the processor most of the time
    pub worked: DeadlineReport,
    /// The seconds of processor time from which it worked
    pub busy_from: i64,
    /// The file that gets the content of the report
    pub file: Option<Replacement<Arc<OwnedFd>>>,
}

/// A report of the end.
#[derive(Clone, Debug, Default)]
pub struct DeadlineReport {
    /// What is printed to stderr
    pub text: String,
    /// The content of the file
    pub content: Vec<u8>,
}

/// The time between SIGALRM and SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

/// Ends this process, with exit status 1 and one of the reports, if it still runs after this time. Children do not inherit the timers.
///
/// A process that waits for a FUSE or NFS server does not run signal handlers. It is killed 5 seconds later, without a report. If
/// the FUSE server has already read the request, the process does not end before the server does.
///
/// # Errors
/// If a system call fails.
pub fn set(after: Duration, words: LastWords) -> io::Result<()> {
    if LAST_WORDS.set(words).is_err() {
        return Ok(());
    }
    let action = SigAction::new(SigHandler::Handler(end), SaFlags::empty(), SigSet::empty());
    // SAFETY: sigaction(2) is unsafe for what a handler may do: this one calls what signal-safety(7) allows, and nothing else.
    unsafe { sigaction(Signal::SIGALRM, &action) }?;
    nix::unistd::alarm::set(u32::try_from(after.as_secs()).unwrap_or(u32::MAX));
    kill(after + GRACE)
}

/// Starts a second timer, because the signal of alarm(2) has a handler. It uses system calls, because the functions are in librt
/// before glibc 2.34.
fn kill(after: Duration) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid value of the struct: integers, and a null pointer.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    event.sigev_notify = libc::SIGEV_SIGNAL;
    event.sigev_signo = libc::SIGKILL;
    let mut id: libc::c_int = 0;
    // SAFETY: timer_create(2) reads the sigevent and writes the id of the timer, an int in the kernel, to `id`. Both are alive,
    // and the kernel keeps neither pointer.
    let made = unsafe {
        libc::syscall(
            libc::SYS_timer_create,
            libc::CLOCK_MONOTONIC,
            &raw const event,
            &raw mut id,
        )
    };
    if made != 0 {
        return Err(io::Error::last_os_error());
    }
    let none = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let once = libc::itimerspec {
        it_interval: none,
        it_value: libc::timespec {
            tv_sec: seconds(after),
            ..none
        },
    };
    let null = std::ptr::null_mut::<libc::itimerspec>();
    // SAFETY: timer_settime(2) reads the itimerspec, which is alive, and keeps no pointer; null means that the old value is not
    // stored.
    match unsafe { libc::syscall(libc::SYS_timer_settime, id, 0, &raw const once, null) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn seconds(time: Duration) -> libc::time_t {
    libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX)
}

extern "C" fn end(_signal: libc::c_int) {
    let mut stderr = libc::pollfd {
        fd: 2,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: poll(2) reads and writes the struct, which is alive, and keeps no pointer. It is safe in a signal handler.
    unsafe { libc::poll(&raw mut stderr, 1, 0) };
    // The read of an atomic by `get` is safe in a signal handler.
    if let Some(words) = LAST_WORDS.get() {
        let mut used = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: clock_gettime(2) writes the struct, which is alive. It is safe in a signal handler.
        unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut used) };
        let DeadlineReport { text, content } = if used.tv_sec >= words.busy_from {
            &words.worked
        } else {
            &words.waited
        };
        // A full pipe that nothing reads must not block the end of the process.
        if stderr.revents & libc::POLLOUT != 0 {
            // SAFETY: write(2) reads the bytes of a String that is never changed or freed. It is safe in a signal handler.
            unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        }
        if let Some(file) = &words.file {
            // Nobody is left to read the error.
            file.write(content).ok();
        }
    }
    // SAFETY: _exit(2) does not return, and runs nothing of the interrupted program.
    unsafe { libc::_exit(1) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use nix::sys::wait::WaitStatus;
    use nix::unistd::ForkResult;

    use super::*;

    fn forked(body: impl FnOnce()) -> WaitStatus {
        // SAFETY: the child calls what is safe after fork(2) in a process with threads, and ends by _exit(2).
        match unsafe { nix::unistd::fork() }.unwrap() {
            ForkResult::Child => {
                body();
                // SAFETY: it takes any status and does not return.
                unsafe { libc::_exit(7) }
            }
            ForkResult::Parent { child } => nix::sys::wait::waitpid(child, None).unwrap(),
        }
    }

    fn words() -> LastWords {
        let report = |text: &str| DeadlineReport {
            text: format!("{text}\n"),
            content: text.into(),
        };
        LastWords {
            waited: report("too long"),
            worked: report("too much"),
            busy_from: 1,
            file: None,
        }
    }

    fn wait() {
        std::thread::sleep(Duration::from_secs(30));
    }

    #[test]
    fn it_ends_with_its_text() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let status = forked(|| {
            rustix::stdio::dup2_stderr(write.as_fd()).unwrap();
            set(Duration::from_secs(1), words()).unwrap();
            wait();
        });
        drop(write);
        assert!(matches!(status, WaitStatus::Exited(_, 1)), "{status:?}");
        assert_eq!(
            std::io::read_to_string(std::fs::File::from(read)).unwrap(),
            "too long\n"
        );
    }

    #[test]
    fn it_replaces_its_file() {
        let base = tempfile::tempdir().unwrap();
        let dir = crate::sys::run_dir::RunDir::open_in(base.path()).unwrap();
        dir.replace("record", b"unfinished").unwrap();
        let status = forked(|| {
            set(
                Duration::from_secs(1),
                LastWords {
                    file: dir.replacement("record").ok(),
                    ..words()
                },
            )
            .unwrap();
            wait();
        });
        assert!(matches!(status, WaitStatus::Exited(_, 1)), "{status:?}");
        assert_eq!(dir.read("record", 100).unwrap().unwrap(), b"too long");
        assert_eq!(dir.all_names().unwrap(), ["record"]);
    }

    #[test]
    fn a_process_that_works_ends_with_another_text() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        forked(|| {
            rustix::stdio::dup2_stderr(write.as_fd()).unwrap();
            set(Duration::from_secs(30), words()).unwrap();
            let mut used = Duration::ZERO;
            while used < Duration::from_secs(1) {
                used = nix::time::ClockId::CLOCK_PROCESS_CPUTIME_ID
                    .now()
                    .unwrap()
                    .into();
            }
            nix::sys::signal::raise(Signal::SIGALRM).unwrap();
        });
        drop(write);
        assert_eq!(
            std::io::read_to_string(std::fs::File::from(read)).unwrap(),
            "too much\n"
        );
    }

    #[test]
    fn it_ends_if_nothing_reads_its_text() {
        let (_read, write) = rustix::pipe::pipe().unwrap();
        let status = forked(|| {
            rustix::stdio::dup2_stderr(write.as_fd()).unwrap();
            rustix::fs::fcntl_setfl(write.as_fd(), rustix::fs::OFlags::NONBLOCK).unwrap();
            while rustix::io::write(&write, &[0; 4096]).is_ok() {}
            rustix::fs::fcntl_setfl(write.as_fd(), rustix::fs::OFlags::empty()).unwrap();
            set(Duration::from_secs(1), words()).unwrap();
            wait();
        });
        assert!(matches!(status, WaitStatus::Exited(_, 1)), "{status:?}");
    }

    /// A process that waits for a FUSE or NFS server handles no signal.
    #[test]
    fn a_process_that_handles_no_signal_is_killed() {
        let status = forked(|| {
            kill(Duration::from_secs(1)).unwrap();
            wait();
        });
        assert!(
            matches!(
                status,
                WaitStatus::Signaled(_, nix::sys::signal::Signal::SIGKILL, _)
            ),
            "{status:?}"
        );
    }

    #[test]
    fn a_process_that_ends_in_time_is_not_killed() {
        let status = forked(|| set(Duration::from_secs(60), words()).unwrap());
        assert!(matches!(status, WaitStatus::Exited(_, 7)), "{status:?}");
    }
}
