//! The fake kubelet, and the device plugin next to it.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::bench::Bench;
use crate::check::Stop;
use crate::process;

/// How often a wait checks whether the plugin has ended.
const TURN: Duration = Duration::from_millis(200);
/// How long the plugin may take to end.
const END: Duration = Duration::from_secs(5);

/// A kubelet with the device plugin. Dropping it ends both.
#[derive(Debug)]
pub struct Kubelet {
    kubelet: Child,
    commands: Option<ChildStdin>,
    lines: Receiver<String>,
    plugin: Option<Child>,
    pub dir: PathBuf,
    log: PathBuf,
}

impl Kubelet {
    /// Starts both, the plugin with these options.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub fn start(
        bench: &Bench,
        name: &str,
        arguments: &[&str],
        options: &[&str],
    ) -> Result<Self, Stop> {
        let config = bench.driver()?.config.clone();
        let dir = bench.work.join(name);
        let failed = |error: std::io::Error| format!("cannot start the kubelet: {error}");
        std::fs::create_dir_all(dir.join("node")).map_err(failed)?;
        let mut command = process::command(bench.options.program("fake-kubelet"));
        command
            .arg(dir.join("node"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let mut kubelet = command.spawn().map_err(failed)?;
        let (sender, lines) = channel();
        if let Some(stdout) = kubelet.stdout.take() {
            std::thread::spawn(move || {
                let lines = BufReader::new(stdout).lines().map_while(Result::ok);
                lines
                    .map_while(|line| sender.send(line).ok())
                    .for_each(drop);
            });
        }
        let mut plugin = process::command(bench.options.program("oci-nvidia-kubelet-plugin"));
        plugin
            .arg("run")
            .arg("--config")
            .arg(config)
            .arg("--kubelet-dir")
            .arg(dir.join("node"));
        plugin
            .arg("--run-dir")
            .arg(dir.join("run"))
            .arg("--cdi-dir")
            .arg(dir.join("cdi"));
        plugin
            .arg("--hook-path")
            .arg(bench.options.program("oci-nvidia-hook"))
            .arg("--labels=false")
            .args(options);
        let commands = kubelet.stdin.take();
        let mut started = Self {
            kubelet,
            commands,
            lines,
            plugin: None,
            log: dir.join("log"),
            dir,
        };
        started.wait(|line| line == "ready", END)?;
        started.plugin = Some(started.spawn(&mut plugin)?);
        Ok(started)
    }

    fn spawn(&self, plugin: &mut Command) -> Result<Child, String> {
        let log = std::fs::File::create(&self.log)
            .map_err(|error| format!("cannot create a log: {error}"))?;
        plugin
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(|error| format!("cannot start the plugin: {error}"))
    }

    /// Waits for a line of the kubelet, and returns it.
    ///
    /// # Errors
    /// If the line does not come in time, or one of the programs ends: their last lines.
    pub fn wait(
        &mut self,
        is_it: impl Fn(&str) -> bool,
        limit: Duration,
    ) -> Result<String, String> {
        let end = Instant::now() + limit;
        let mut last = String::new();
        let how = loop {
            match self
                .lines
                .recv_timeout(end.saturating_duration_since(Instant::now()).min(TURN))
            {
                Ok(line) if is_it(&line) => return Ok(line),
                Ok(line) => last = line,
                Err(RecvTimeoutError::Disconnected) => break "the kubelet ended",
                Err(RecvTimeoutError::Timeout) if Instant::now() >= end => {
                    break "the kubelet did not report it in time";
                }
                Err(RecvTimeoutError::Timeout) if self.plugin_has_ended() => {
                    break "the plugin ended";
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        Err(format!(
            "{how}; the last line of the kubelet: {last:?}; of the plugin: {:?}",
            self.last_of_log()
        ))
    }

    fn plugin_has_ended(&mut self) -> bool {
        self.plugin
            .as_mut()
            .is_some_and(|plugin| !matches!(plugin.try_wait(), Ok(None)))
    }

    fn last_of_log(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().last().unwrap_or_default().to_owned()
    }

    /// Sends a command to the kubelet, and returns its answer, which begins with one of these words.
    ///
    /// # Errors
    /// If the answer does not come in time.
    pub fn ask(
        &mut self,
        command: &str,
        answers: &[&str],
        limit: Duration,
    ) -> Result<String, String> {
        let commands = self.commands.as_mut().ok_or("the kubelet has ended")?;
        writeln!(commands, "{command}")
            .map_err(|error| format!("the kubelet does not read: {error}"))?;
        self.wait(
            |line| answers.iter().any(|answer| line.starts_with(answer)),
            limit,
        )
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        if let Some(mut plugin) = self.plugin.take() {
            end(&mut plugin);
        }
        drop(self.commands.take());
        self.kubelet.kill().ok();
        self.kubelet.wait().ok();
        std::fs::remove_dir_all(&self.dir).ok();
    }
}

/// Ends a program with SIGTERM, and otherwise with SIGKILL.
fn end(child: &mut Child) {
    if let Ok(pid) = i32::try_from(child.id()) {
        kill(Pid::from_raw(pid), Signal::SIGTERM).ok();
    }
    let begun = Instant::now();
    while begun.elapsed() < END {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().ok();
    child.wait().ok();
}

/// Reads the devices of a line `list RESOURCE ID=HEALTH…`, and whether each is healthy.
pub fn devices(line: &str) -> Vec<(String, bool)> {
    let words = line.split(' ').filter_map(|word| word.split_once('='));
    words
        .map(|(id, health)| (id.to_owned(), health == "Healthy"))
        .collect()
}

/// Returns the spec that the plugin keeps in this directory.
///
/// # Errors
/// If there is none, or it is invalid.
pub fn kept_spec(dir: &Path, name: &str) -> Result<cdi_spec::spec::Spec, String> {
    let path = dir.join(name);
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("cannot read {path:?}: {error}"))?;
    serde_json::from_str(&text).map_err(|error| format!("{path:?}: {error}"))
}
