//! The first process: starts the checks, prints their results, and writes the report.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::check::{self, Check, Outcome, Stop};
use crate::options::Options;
use crate::{checks, container, redact, report, unchanged};

/// How long the second process may take after the time limit, to end what it started.
const GRACE: Duration = Duration::from_secs(20);

/// The check of the first process.
const UNCHANGED: Check = Check {
    name: "unchanged",
    about: "the machine is as it was before the checks",
    limit: 0,
    run: |_| Ok(String::new()),
};

/// Performs the checks, and writes the report. Returns whether no check failed.
///
/// # Errors
/// If the second process cannot be started, or the report not written.
pub fn run(options: &Options) -> Result<bool, String> {
    std::fs::create_dir_all(&options.report)
        .map_err(|error| format!("cannot create {:?}: {error}", options.report))?;
    let had_run_dir = Path::new(RUN_DIR).exists();
    let before = unchanged::list();
    // Paths of sockets below it must be short.
    let parent = Some(PathBuf::from("/tmp"))
        .filter(|dir| dir.is_dir())
        .unwrap_or_else(std::env::temp_dir);
    let work = nix::unistd::mkdtemp(&parent.join("gpu-checks.XXXXXX"))
        .map_err(|error| format!("cannot create a directory: {error}"))?;
    let seen = perform(options, &work);
    // What the second process left is in its mount namespace, unless the namespace was not permitted.
    std::fs::remove_dir_all(&work).ok();
    if !had_run_dir {
        std::fs::remove_dir_all(RUN_DIR).ok();
    }
    let mut seen = seen?;
    let begun = Instant::now();
    // crun leaves the cgroup of version 2 on machines that also have version 1.
    let cgroups = container::leftover_cgroups(&work)
        .into_iter()
        .filter(|cgroup| std::fs::remove_dir(cgroup).is_err());
    let outcome = compare(&before, &settled(&before), &cgroups.collect::<Vec<_>>());
    let is_everything = options.only.is_empty();
    if is_everything || outcome.is_err() {
        seen.add(check::result(&UNCHANGED, &outcome, begun.elapsed()));
    }
    write(options, &seen)
}

/// The directory in which the hook stores what it knows.
const RUN_DIR: &str = "/run/oci-nvidia-hook";

/// Lists the state after the checks. Mounts of processes that have just ended can take a moment to disappear.
fn settled(before: &unchanged::State) -> unchanged::State {
    for _ in 0..20 {
        let after = unchanged::list();
        if unchanged::differences(before, &after).is_empty() {
            return after;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    unchanged::list()
}

fn compare(before: &unchanged::State, after: &unchanged::State, cgroups: &[PathBuf]) -> Outcome {
    let mut differences = unchanged::differences(before, after);
    differences.extend(
        cgroups
            .iter()
            .map(|cgroup| format!("{} was left", cgroup.display())),
    );
    if differences.is_empty() {
        Ok(format!(
            "{} files, modules and mounts are as before, and no cgroup was left",
            after.len()
        ))
    } else {
        Err(Stop::Failed(differences.join("; ")))
    }
}

/// What the second process reported.
#[derive(Debug, Default)]
struct Seen {
    machine: Value,
    secrets: Vec<String>,
    results: Vec<Value>,
}

impl Seen {
    fn add(&mut self, result: Value) {
        let text = |name: &str| result[name].as_str().unwrap_or_default().to_owned();
        let seen = redact::redact(&text("seen").replace('\n', " "), &self.secrets);
        say(&format!(
            "{:<10}  {:<22}  {seen}",
            text("verdict"),
            text("check")
        ));
        self.results.push(result);
    }
}

/// Prints a line. The report is written even if nothing reads the lines.
fn say(line: &str) {
    writeln!(std::io::stdout(), "{line}").ok();
}

fn perform(options: &Options, work: &Path) -> Result<Seen, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = std::process::Command::new(program);
    // The variable names where a sandbox has the driver's libraries.
    command
        .args(options.for_inside(work))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|error| format!("cannot start the checks: {error}"))?;
    let lines = lines_of(&mut child);
    let end = Instant::now() + options.time + GRACE;
    let mut seen = Seen::default();
    let mut current = None;
    let why = loop {
        let Ok(line) = lines.recv_timeout(end.saturating_duration_since(Instant::now())) else {
            let status = child.try_wait().ok().flatten();
            if status.is_none() {
                kill_with_children(child.id());
            }
            let waited = child.wait();
            match status.or_else(|| waited.ok()) {
                Some(status) if status.success() => return Ok(seen),
                Some(status) => break format!("the checks ended with {status}"),
                None => break "the checks did not end".to_owned(),
            }
        };
        let line: Value = serde_json::from_str(&line).unwrap_or_default();
        if line["machine"].is_object() {
            seen.machine = line["machine"].clone();
            seen.secrets = serde_json::from_value(line["secrets"].clone()).unwrap_or_default();
        } else if let Some(name) = line["begun"].as_str() {
            current = Some(name.to_owned());
        } else if line["check"].is_string() {
            seen.add(line);
        }
    };
    if seen.machine.is_null() {
        return Err(why);
    }
    // The check that ended the process has failed, and the others did not run.
    let is_done = |seen: &Seen, check: &Check| {
        seen.results
            .iter()
            .any(|result| result["check"] == check.name)
    };
    for check in checks::ALL.iter().filter(|check| {
        options.only.is_empty() || options.only.iter().any(|name| name == check.name)
    }) {
        if is_done(&seen, check) {
            continue;
        }
        let is_cause = current.as_deref() == Some(check.name);
        let outcome = Err(if is_cause {
            Stop::Failed(why.clone())
        } else {
            Stop::CannotRun(why.clone())
        });
        seen.add(check::result(check, &outcome, Duration::ZERO));
    }
    Ok(seen)
}

/// Kills a process with all processes that it started.
fn kill_with_children(pid: u32) {
    let children =
        std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    if let Ok(pid) = i32::try_from(pid) {
        kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
    }
    children
        .split_whitespace()
        .filter_map(|child| child.parse().ok())
        .for_each(kill_with_children);
}

fn lines_of(child: &mut Child) -> Receiver<String> {
    let (sender, lines) = channel();
    if let Some(stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines
                .map_while(|line| sender.send(line).ok())
                .for_each(drop);
        });
    }
    lines
}

fn write(options: &Options, seen: &Seen) -> Result<bool, String> {
    let document = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "date": humantime::format_rfc3339_seconds(SystemTime::now()).to_string().get(..10),
        "machine": seen.machine,
        "checks": seen.results,
    });
    let json = base::json::pretty(&document).map_err(|error| error.to_string())? + "\n";
    let clean = redact::redact(&json, &seen.secrets);
    let document: Value = serde_json::from_str(&clean).map_err(|error| error.to_string())?;
    let path = |name: &str| -> PathBuf { options.report.join(name) };
    for (name, text) in [
        ("gpu-report.json", clean),
        ("gpu-report.md", report::markdown(&document)),
    ] {
        std::fs::write(path(name), text)
            .map_err(|error| format!("cannot write {name}: {error}"))?;
    }
    let count = |verdict: &str| {
        seen.results
            .iter()
            .filter(|result| result["verdict"] == verdict)
            .count()
    };
    let failed = count("failed");
    say(&format!(
        "{} passed, {failed} failed, {} cannot run here",
        count("passed"),
        count("cannot run")
    ));
    say(&format!("report: {}", path("gpu-report.md").display()));
    Ok(failed == 0)
}
