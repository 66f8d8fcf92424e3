use super::*;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn line(child: &mut Child) -> String {
    String::from_utf8(child.line(soon()).unwrap()).unwrap()
}

#[test]
fn a_child_reports_line_by_line() {
    let mut child = spawn(|pipe| report(pipe, b"hello\nworld\nunfinished")).unwrap();
    assert_eq!([line(&mut child), line(&mut child)], ["hello", "world"]);
    assert!(matches!(child.line(soon()), Err(NoAnswer::Died(None))));
}

#[test]
fn a_long_line_arrives_whole_and_one_without_an_end_does_not() {
    let mut child =
        spawn(|pipe| report(pipe, &[vec![b'7'; 300_000], vec![b'\n']].concat())).unwrap();
    assert_eq!(child.line(soon()).unwrap().len(), 300_000);
    let mut child = spawn(|pipe| {
        loop {
            report(pipe, &[b'7'; 4096]);
        }
    })
    .unwrap();
    let error = child.line(soon()).unwrap_err();
    assert!(
        matches!(&error, NoAnswer::System(error) if error.to_string().contains("too long")),
        "{error:?}"
    );
}

#[test]
fn a_hanging_child_is_given_up_at_the_deadline() {
    let start = Instant::now();
    let mut child = spawn(|pipe| {
        report(pipe, b"here\n");
        std::thread::sleep(Duration::from_secs(60));
    })
    .unwrap();
    assert_eq!(line(&mut child), "here");
    let outcome = child.line(Instant::now() + Duration::from_millis(100));
    assert!(matches!(outcome, Err(NoAnswer::Timeout)), "{outcome:?}");
    drop(child);
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_child_has_no_files_of_ours() {
    let _open = File::open("/dev/zero").unwrap();
    let mut child = spawn(|pipe| {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let targets: Vec<_> = links
            .filter_map(|link| std::fs::read_link(link.path()).ok())
            .collect();
        report(pipe, format!("{targets:?}\n").as_bytes());
    })
    .unwrap();
    let text = line(&mut child);
    assert!(
        text.contains("/dev/null") && !text.contains("/dev/zero"),
        "{text}"
    );
}

#[test]
fn a_dying_child_is_noticed() {
    for signal in [Signal::SIGKILL, Signal::SIGABRT, Signal::SIGILL] {
        let mut child = spawn(|_| nix::sys::signal::raise(signal).unwrap()).unwrap();
        let outcome = child.line(soon());
        assert!(
            matches!(outcome, Err(NoAnswer::Died(Some(by))) if by == signal),
            "{outcome:?}"
        );
    }
    let outcome = spawn(|_| {}).unwrap().line(soon());
    assert!(matches!(outcome, Err(NoAnswer::Died(None))), "{outcome:?}");
}

/// The running process that has this name.
fn named(name: &str) -> Option<i32> {
    let is = |pid: &i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.starts_with(&format!("Name:\t{name}\n")) && !status.contains("\nState:\tZ")
    };
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .find(is)
}

/// Forks a process that keeps nothing of its parent's but the file system, and takes this name.
fn leave_behind(name: &std::ffi::CStr) {
    // SAFETY: the worker is a fork with one thread.
    if let ForkResult::Child = unsafe { fork() }.unwrap() {
        nix::unistd::setsid().unwrap();
        nix::sys::prctl::set_name(name).unwrap();
        std::thread::sleep(Duration::from_secs(600));
        end(0);
    }
    let start = Instant::now();
    while named(name.to_str().unwrap()).is_none() && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_a_child_leaves_behind_is_killed() {
    for (ends, name) in [
        ("by itself", c"onh-left-1"),
        ("at the deadline", c"onh-left-2"),
        ("by a crash", c"onh-left-3"),
    ] {
        let text = name.to_str().unwrap();
        let mut child = spawn(|pipe| {
            leave_behind(name);
            report(pipe, b"left\n");
            match ends {
                "by itself" => {}
                "by a crash" => nix::sys::signal::raise(Signal::SIGABRT).unwrap(),
                _ => std::thread::sleep(Duration::from_secs(600)),
            }
        })
        .unwrap();
        assert_eq!(line(&mut child), "left");
        let start = Instant::now();
        drop(child);
        while let Some(pid) = named(text) {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{ends}: process {pid} is left"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// As [`what_a_child_leaves_behind_is_killed`], for a user who may not make a PID namespace: the caller is the subreaper.
#[test]
fn orphans_without_a_namespace_are_killed() {
    // In a process of its own: capabilities do not come back.
    // SAFETY: as in `spawn`.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            super::super::confine::keep_caps(rustix::thread::CapabilitySet::empty()).unwrap();
            let could = ns::new_pid_ns_for_children().is_ok();
            let mut child = spawn(|pipe| {
                leave_behind(c"onh-left-4");
                report(pipe, b"left\n");
            })
            .unwrap();
            child.line(soon()).unwrap();
            let was_there = named("onh-left-4").is_some();
            drop(child);
            end(if could {
                1
            } else if !was_there {
                2
            } else if named("onh-left-4").is_some() {
                3
            } else {
                0
            })
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0))
        }
    }
}
