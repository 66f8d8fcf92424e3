//! Counts the system calls and the wakeups of processes.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Counts how often the processes wait and wake in this time.
pub fn wakeups(processes: [u32; 2], seconds: u64) -> u64 {
    let before: u64 = processes.map(switches).into_iter().sum();
    std::thread::sleep(Duration::from_secs(seconds));
    let after: u64 = processes.map(switches).into_iter().sum();
    after - before
}

fn switches(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let mut lines = status.lines();
    let found = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    found.unwrap().trim().parse().unwrap()
}

/// Counts the system calls of the processes in this time, without the assertions of debug builds. `output` is a file for strace.
pub fn calls(processes: [u32; 2], seconds: u64, output: &Path) -> u64 {
    let mut strace = Command::new("strace");
    strace
        .args(["-f", "-qq", "-e", "signal=none", "-o"])
        .arg(output);
    for process in processes {
        strace.arg("-p").arg(process.to_string());
    }
    let mut strace = strace.stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(seconds));
    let pid = rustix::process::Pid::from_child(&strace);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    strace.wait().unwrap();
    let text = std::fs::read_to_string(output).unwrap();
    // The standard library checks each descriptor before it closes it, if it was built with assertions.
    let counts = |line: &&str| !line.contains("F_GETFD") && !line.contains("resumed>");
    text.lines().filter(counts).count().try_into().unwrap()
}
