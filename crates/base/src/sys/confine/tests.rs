#![allow(unsafe_code, reason = "calls that fail have no safe function")]

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use nix::libc;
use rustix::fs::{CWD, Mode, OFlags};

use super::super::child::{report, spawn};
use super::*;

/// Runs `body` after [`confine`] with the permission to use /dev/null, and returns what it reports.
fn confined(identity: Option<Identity>, body: impl FnOnce() -> String) -> String {
    confined_to(&[("/dev/null", Access::Use)], false, identity, body)
}

fn confined_to(
    allowed: &[(&str, Access)],
    limits_reading: bool,
    identity: Option<Identity>,
    body: impl FnOnce() -> String,
) -> String {
    let open = |path: &str| {
        rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
    };
    let mut child = spawn(|pipe| {
        let allowed = allowed
            .iter()
            .map(|(path, access)| (open(path), *access))
            .collect();
        let files = Files {
            allowed,
            limits_reading,
        };
        confine(
            Kept {
                root: Path::new("/"),
                identity,
                capabilities: CapabilitySet::empty(),
                files,
            },
            pipe,
        )
        .unwrap();
        report(pipe, (body().replace('\n', "|") + "\n").as_bytes());
    })
    .unwrap();
    String::from_utf8(
        child
            .line(Instant::now() + Duration::from_secs(20))
            .unwrap(),
    )
    .unwrap()
}

/// Returns the version of Landlock that the kernel supports, or 0 if it has none.
fn version_of_landlock() -> i64 {
    const CREATE_RULESET_VERSION: u32 = 1;
    // SAFETY: with this flag landlock_create_ruleset(2) takes NULL and 0, and returns a number.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0_usize,
            CREATE_RULESET_VERSION,
        )
    };
    version.max(0)
}

/// Whether this kernel filters system calls.
fn has_filters() -> bool {
    confined(None, || {
        std::fs::read_to_string("/proc/self/status").unwrap()
    })
    .contains("Seccomp:\t2")
}

#[test]
fn a_confined_child_has_no_environment_and_no_caps() {
    let status = confined(None, || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        format!("{status}env {}", std::env::vars_os().count())
    });
    let mut lines = vec![
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "NoNewPrivs:\t1",
        "env 0",
    ];
    if nix::unistd::geteuid().is_root() {
        lines.push("CapBnd:\t0000000000000000"); // a plain user has no CAP_SETPCAP
    }
    for line in lines {
        assert!(status.contains(line), "{line} missing in\n{status}");
    }
}

#[test]
fn a_confined_child_changes_no_file_and_runs_no_program() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o666)).unwrap();
    // Without Landlock, the mode bits permit all of this, so the test can fail.
    let attempts = |file: &Path| {
        let beside = |name: &str| file.with_file_name(name);
        let denied = [
            (
                "open",
                std::fs::OpenOptions::new().write(true).open(file).map(drop),
            ),
            (
                "truncate",
                nix::unistd::truncate(file, 0).map_err(io::Error::from),
            ),
            ("create", File::create(beside("new")).map(drop)),
            ("link", std::os::unix::fs::symlink("x", beside("link"))),
            ("mkdir", std::fs::create_dir(beside("dir"))),
            (
                "fifo",
                nix::unistd::mkfifo(&beside("fifo"), nix::sys::stat::Mode::S_IRUSR)
                    .map_err(io::Error::from),
            ),
            ("rename", std::fs::rename(beside("old"), beside("older"))),
            ("remove", std::fs::remove_file(beside("gone"))),
            (
                "exec",
                nix::unistd::execv(c"/bin/true", &[c"true"])
                    .map(drop)
                    .map_err(io::Error::from),
            ),
        ]
        .map(|(what, result)| match result {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => format!("{what} denied"),
            other => format!("{what} {other:?}"),
        });
        let null = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/null")
            .map(drop);
        format!("{}; null {null:?}", denied.join(", "))
    };
    for name in ["old", "gone"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    let report = confined(None, || attempts(&file));
    let expected = match version_of_landlock() {
        // truncate(2) is among what is denied since version 3
        3.. => {
            "open denied, truncate denied, create denied, link denied, mkdir denied, fifo denied, rename denied, \
             remove denied, exec denied; null Ok(())"
        }
        _ => return assert!(report.ends_with("null Ok(())"), "{report}"),
    };
    assert_eq!(report, expected);
}

#[test]
fn a_confined_child_signals_no_process_outside() {
    let parent = nix::unistd::getpid();
    let result = confined(None, || {
        format!("{:?}", nix::sys::signal::kill(parent, None))
    });
    // EPERM with a filter and with version 6 of Landlock, ESRCH in a PID namespace of its own
    let is_root = nix::unistd::geteuid().is_root();
    assert!(
        result != "Ok(())" || !is_root && version_of_landlock() < 6 && !has_filters(),
        "{result}"
    );
}

#[test]
fn a_confined_child_uses_and_reads_what_it_keeps() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    for name in ["read", "other"] {
        std::fs::create_dir(path(name)).unwrap();
        std::fs::write(path(name) + "/file", "").unwrap();
    }
    let attempts = || {
        let file = |name: &str| {
            File::open(path(name))
                .map(drop)
                .map_err(|error| error.kind())
        };
        let list = |name: &str| {
            std::fs::read_dir(path(name))
                .map(drop)
                .map_err(|error| error.kind())
        };
        let write = |path: &str| {
            std::fs::OpenOptions::new()
                .write(true)
                .open(path)
                .map(drop)
                .map_err(|error| error.kind())
        };
        let devices = [write("/dev/null"), write("/dev/zero")];
        format!(
            "{:?}",
            (
                [
                    file("read/file"),
                    file("other/file"),
                    list("read"),
                    list("other"),
                    list("")
                ],
                devices
            )
        )
    };
    let allowed = [
        ("/dev/null", Access::Use),
        (&path("read"), Access::Read),
        (&path(""), Access::List),
    ];
    let shown = confined_to(&allowed, true, None, attempts);
    let unlimited = confined_to(&allowed, false, None, attempts);
    if version_of_landlock() > 0 {
        let denied = "Err(PermissionDenied)";
        assert_eq!(
            shown,
            format!("([Ok(()), {denied}, Ok(()), Ok(()), Ok(())], [Ok(()), {denied}])")
        );
        assert_eq!(
            unlimited,
            format!("([Ok(()), Ok(()), Ok(()), Ok(()), Ok(())], [Ok(()), {denied}])")
        );
    }
}

#[test]
fn a_confined_child_still_has_what_programs_do() {
    let shown = confined(None, || {
        let thread = std::thread::Builder::new()
            .spawn(|| 7)
            .map(|thread| thread.join().is_ok());
        let limit =
            nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).is_ok();
        let cpus = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0))
            .and_then(|cpus| nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &cpus));
        let duplicate = std::io::stdin().as_fd().try_clone_to_owned().is_ok();
        format!(
            "{:?} {limit} {cpus:?} {duplicate}",
            thread.is_ok_and(|joined| joined)
        )
    });
    assert_eq!(shown, "true true Ok(()) true");
}

/// A call without valid arguments fails in another way if the filter permits it.
#[test]
fn calls_that_a_library_of_devices_does_not_need_are_denied() {
    if !has_filters() {
        return;
    }
    let invalid = i64::from(i32::MAX);
    let own = i64::from(std::process::id());
    let calls: &[(&str, libc::c_long, [i64; 3])] = &[
        ("fchmod", libc::SYS_fchmod, [invalid, 0, 0]),
        ("fchmodat2", 452, [invalid, 0, 0]),
        ("fchown", libc::SYS_fchown, [invalid, -1, -1]),
        ("utimensat", libc::SYS_utimensat, [invalid, 0, 0]),
        ("fsetxattr", libc::SYS_fsetxattr, [invalid, 0, 0]),
        ("file_setattr", 469, [invalid, 0, 0]),
        ("mount", libc::SYS_mount, [0, 0, 0]),
        ("open_tree", libc::SYS_open_tree, [invalid, 0, 0]),
        ("open_tree_attr", 467, [invalid, 0, 0]),
        ("unshare", libc::SYS_unshare, [0, 0, 0]),
        (
            "clone of a user namespace",
            libc::SYS_clone,
            [0x1000_0000 | 0x200, 0, 0],
        ),
        ("ptrace", libc::SYS_ptrace, [0, 0, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, [own, 0, 0]),
        ("kill", libc::SYS_kill, [own, 0, 0]),
        ("tgkill", libc::SYS_tgkill, [1, 1, 0]),
        ("prlimit64", libc::SYS_prlimit64, [1, 7, 0]),
        ("bpf", libc::SYS_bpf, [invalid, 0, 0]),
        ("io_uring_setup", libc::SYS_io_uring_setup, [0, 0, 0]),
        ("init_module", libc::SYS_init_module, [0, 0, 0]),
        ("keyctl", libc::SYS_keyctl, [invalid, 0, 0]),
        ("socket AF_UNIX", libc::SYS_socket, [1, 1, 0]),
        ("socket AF_INET", libc::SYS_socket, [2, 1, 0]),
        ("socket AF_NETLINK", libc::SYS_socket, [16, 3, 0]),
        ("connect", libc::SYS_connect, [invalid, 0, 0]),
        ("shmget", libc::SYS_shmget, [0, 0, 0]),
        ("fcntl F_SETOWN", libc::SYS_fcntl, [0, 8, 0]),
        ("ioctl TIOCSTI", libc::SYS_ioctl, [0, 0x5412, 0]),
    ];
    let shown = confined(None, || {
        let results = calls.iter().map(|(what, number, [a, b, c])| {
            // SAFETY: every call is denied, or it fails, because its arguments name no memory, no file and no process.
            let result = unsafe { libc::syscall(*number, *a, *b, *c) };
            format!("{what}: {result} {}", nix::errno::Errno::last())
        });
        results.collect::<Vec<_>>().join("\n")
    });
    let results: Vec<_> = shown
        .split('|')
        .filter(|line| !line.ends_with(": -1 EPERM: Operation not permitted"))
        .collect();
    assert_eq!(results, [""; 0]);
}

#[test]
fn calls_of_later_kernels_and_of_the_x32_abi_do_not_exist() {
    if !has_filters() {
        return;
    }
    let shown = confined(None, || {
        let numbers = [libc::SYS_clone3, 470, 0x4000_0000 | libc::SYS_getpid, -7];
        // SAFETY: the numbers belong to no call, or to one that gets no memory.
        let results = numbers.map(|number| unsafe { libc::syscall(number, 0, 0) });
        format!("{results:?} {:?}", nix::errno::Errno::last())
    });
    assert_eq!(shown, "[-1, -1, -1, -1] ENOSYS");
}
