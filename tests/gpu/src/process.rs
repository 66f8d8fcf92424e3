//! Runs programs with a time limit.

use std::fs::File;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

/// The search path of the programs that are started.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The result of a program.
#[derive(Clone, Debug)]
pub struct Ran {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    pub time: Duration,
}

impl Ran {
    /// Returns the standard output.
    ///
    /// # Errors
    /// If the program failed: its exit status and the last lines of its output.
    pub fn ok(self) -> Result<String, String> {
        if self.status.success() {
            Ok(self.stdout)
        } else {
            Err(self.failure())
        }
    }

    /// Describes a failure: the exit status and the last lines of the output.
    pub fn failure(&self) -> String {
        let how = match (self.status.code(), self.status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, signal) => format!("signal {}", signal.unwrap_or_default()),
        };
        let all = format!("{}\n{}", self.stdout, self.stderr);
        let lines: Vec<_> = all
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .collect();
        let last = lines
            .get(lines.len().saturating_sub(6)..)
            .unwrap_or_default();
        format!("{how}: {}", last.join("; "))
    }
}

/// Returns a command with an environment that has only `PATH`.
pub fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", PATH).stdin(Stdio::null());
    command
}

/// A program that was started, with its output in files: a process that it leaves behind would keep a pipe open.
#[derive(Debug)]
pub struct Started {
    child: Child,
    name: String,
    out: std::path::PathBuf,
    err: std::path::PathBuf,
    begun: Instant,
}

/// Starts a program in a process group.
///
/// # Errors
/// If it cannot be started.
pub fn start(command: &mut Command, input: &[u8], work: &Path) -> Result<Started, String> {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = command
        .get_program()
        .to_string_lossy()
        .rsplit('/')
        .next()
        .unwrap_or_default()
        .to_owned();
    let out = work.join(format!("out-{number}"));
    let err = work.join(format!("err-{number}"));
    let create = |path: &Path| {
        File::create(path).map_err(|error| format!("cannot create {path:?}: {error}"))
    };
    command
        .stdout(create(&out)?)
        .stderr(create(&err)?)
        .process_group(0);
    if !input.is_empty() {
        command.stdin(Stdio::piped());
    }
    let begun = Instant::now();
    let mut child = command
        .spawn()
        .map_err(|error| format!("cannot start {name}: {error}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that ends early does not read it.
        stdin.write_all(input).ok();
    }
    Ok(Started {
        child,
        name,
        out,
        err,
        begun,
    })
}

impl Started {
    /// Waits for the end of the program, and kills its process group after the limit.
    ///
    /// # Errors
    /// If the program did not end in time.
    pub fn wait(mut self, limit: Duration) -> Result<Ran, String> {
        let mut pause = Duration::from_micros(500);
        let status = loop {
            if let Some(status) = self.child.try_wait().map_err(|error| error.to_string())? {
                break status;
            }
            if self.begun.elapsed() >= limit {
                self.kill();
                return Err(format!(
                    "{} did not end within {} s",
                    self.name,
                    limit.as_secs()
                ));
            }
            std::thread::sleep(pause);
            // Short at first, because the checks of times compare starts of some 50 ms.
            if self.begun.elapsed() > Duration::from_secs(1) {
                pause = Duration::from_millis(20);
            }
        };
        let time = self.begun.elapsed();
        let read = |path: &Path| {
            let text = std::fs::read(path).unwrap_or_default();
            std::fs::remove_file(path).ok();
            String::from_utf8_lossy(&text).into_owned()
        };
        Ok(Ran {
            status,
            stdout: read(&self.out),
            stderr: read(&self.err),
            time,
        })
    }

    /// Waits until the program has printed `text`, or has ended.
    pub fn wait_for(&mut self, text: &str, limit: Duration) -> bool {
        while self.begun.elapsed() < limit {
            let printed = std::fs::read_to_string(&self.out).unwrap_or_default();
            if printed.contains(text) {
                return true;
            }
            if !matches!(self.child.try_wait(), Ok(None)) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }

    /// Returns its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Asks the program to end.
    pub fn terminate(&self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            kill(Pid::from_raw(pid), Signal::SIGTERM).ok();
        }
    }

    /// Reports whether the program has ended within this time.
    pub fn ends(&mut self, limit: Duration) -> bool {
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() >= limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }

    /// Ends the program and its process group.
    pub fn kill(&mut self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            killpg(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
        self.child.wait().ok();
    }
}

/// Runs a program to its end.
///
/// # Errors
/// If it cannot be started, or did not end in time.
pub fn run(
    command: &mut Command,
    input: &[u8],
    work: &Path,
    limit: Duration,
) -> Result<Ran, String> {
    start(command, input, work)?.wait(limit)
}

/// Returns the path of a program of the machine.
pub fn find(name: &str) -> Option<std::path::PathBuf> {
    PATH.split(':')
        .map(|dir| Path::new(dir).join(name))
        .find(|path| path.is_file())
}
