//! Files that a careless engine leaves open in the hook.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::NEEDS;
use crate::driver::FakeDriver;
use crate::support::HOOK;

tests! {
    NEEDS => nvml_inherits_no_files;
}

/// Returns the processes that have this directory as `/`.
fn inside(root: &Path) -> Vec<PathBuf> {
    let processes = std::fs::read_dir("/proc")
        .unwrap()
        .map(|entry| entry.unwrap().path());
    processes
        .filter(|process| std::fs::read_link(process.join("root")).is_ok_and(|to| to == root))
        .collect()
}

/// Waits until there are such processes, or until there are none.
fn wait_for(root: &Path, exist: bool) -> Vec<PathBuf> {
    let end = Instant::now() + Duration::from_secs(15);
    while inside(root).is_empty() == exist && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    inside(root)
}

/// Returns the open files of a process.
fn files(process: &Path) -> Vec<PathBuf> {
    let fds = std::fs::read_dir(process.join("fd"))
        .unwrap()
        .map(|fd| fd.unwrap().path());
    fds.filter_map(|fd| std::fs::read_link(fd).ok()).collect()
}

/// The process that calls NVML has none of them, and ends with a hook that is killed.
pub(super) fn nvml_inherits_no_files() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    fake.set_nvml(|old| old + "\ninit-hang\n");
    let mut caller = Command::new("sh");
    caller
        .args([
            "-euc",
            "exec 3</etc/passwd 9</etc/group; exec \"$0\" --config \"$1\" info",
            HOOK,
        ])
        .arg(&fake.config);
    let mut hook = caller
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let asking = wait_for(&fake.root, true);
    let open: Vec<_> = asking.iter().flat_map(|process| files(process)).collect();
    let of_hook = files(Path::new(&format!("/proc/{}", hook.id())));
    hook.kill().unwrap();
    hook.wait().unwrap();
    assert!(!open.is_empty(), "NVML is being asked");
    // Descriptors below and above the pipe's
    for file in ["/etc/passwd", "/etc/group"].map(Path::new) {
        assert!(
            of_hook.iter().any(|open| open == file),
            "the hook has it: {of_hook:?}"
        );
        assert!(!open.iter().any(|open| open == file), "{open:?}");
    }
    assert_eq!(
        wait_for(&fake.root, false),
        Vec::<PathBuf>::new(),
        "processes are left"
    );
}
