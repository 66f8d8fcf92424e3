//! Starts the monitor, reads its lines, and starts it again when it ends.
//!
//! A call of NVML that exceeds its time limit, or a crash, costs a process, and the health of the GPU that the call was about. The next
//! process leaves that GPU out for a while, so that the others are watched.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Error, Result};
use base::report;
use nix::sys::signal::{SigSet, SigmaskHow, Signal as Number};
use nvidia_host::config::Config;
use nvidia_host::host::HostState;
use nvidia_host::nvml::program;
use nvidia_host::nvml::progress::Progress;
use nvidia_host::nvml::protocol::{Measures, MonitorRequest, Request};
use rustix::fs::{Mode, OFlags};
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::lines::Lines;
use super::message::{End, Message, NvmlCall, Snapshot};
use super::update::Update;
use crate::settings::Settings;

/// How often /proc and /sys are read while no monitor runs.
const STEP: Duration = Duration::from_secs(2);

/// The time before the first restart, which doubles with each further one.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const MAX_DELAY: Duration = Duration::from_secs(30);
/// The longest time before the next start if the driver is missing or NVML fails at once. A library that is installed again changes
/// nothing that the kernel shows, and the documents say that a driver is noticed within five seconds.
const MAX_ABSENCE: Duration = Duration::from_secs(4);

/// A monitor that ran for this time has started successfully.
const STEADY: Duration = Duration::from_secs(60);

/// The time before the driver is asked about a GPU again at which it hung or crashed. It doubles too.
const FIRST_SKIP: Duration = Duration::from_secs(30);
const MAX_SKIP: Duration = Duration::from_secs(600);

/// The time before the next start after a crash, which may be an accident.
const AFTER_CRASH: Duration = Duration::from_millis(100);

/// How long a killed monitor may take to end. If it hangs in the kernel, it ends later.
const REAP: Duration = Duration::from_secs(2);

/// How to run the monitor.
#[derive(Clone, Debug)]
pub struct SupervisorOptions {
    request: MonitorRequest,
    config: Config,
    time_limit: Duration,
}

impl SupervisorOptions {
    /// Runs the monitor with this configuration file, and the settings that options may have changed. `measures` is for metrics.
    #[must_use]
    pub fn new(config_path: Option<&Path>, settings: &Settings, measures: bool) -> Self {
        let config = &settings.common;
        let mut names = settings.plugin.metrics_names.iter();
        let measures = match measures {
            true if names.any(|names| names.are_dcgm()) => Measures::All,
            true => Measures::Few,
            false => Measures::Nothing,
        };
        let request = MonitorRequest {
            // The monitor runs in another directory.
            config: config_path
                .map(|path| std::path::absolute(path).unwrap_or_else(|_| path.into())),
            driver_root: config.driver_root.as_path().to_owned(),
            dev_root: config
                .dev_root
                .as_ref()
                .map(|root| root.as_path().to_owned()),
            skip: Vec::new(),
            measures,
        };
        Self {
            request,
            config: config.clone(),
            time_limit: settings.plugin.nvml_timeout,
        }
    }
}

/// Watches the GPUs until the receiver of the updates is dropped, or an error occurs. SIGUSR1 ends the monitor until SIGUSR2 arrives
/// or the driver's module is loaded again. The future must run on the first thread of the process: the monitor asks the kernel to be
/// killed when its parent ends, and the parent is the thread that started it (PR_SET_PDEATHSIG(2const)).
pub async fn supervise(options: SupervisorOptions, updates: mpsc::Sender<Update>) -> Error {
    let mut supervisor = match Supervisor::new(options, updates) {
        Ok(supervisor) => supervisor,
        Err(error) => return error,
    };
    while supervisor.run_once().await.is_ok() {}
    Error::msg("the supervisor of the monitor has no receiver")
}

/// The agent has dropped the receiver.
struct Finished;

struct Supervisor {
    options: SupervisorOptions,
    /// The program that was installed when the first monitor was started. The update of the package may replace the file, and programs of
    /// two builds do not understand each other.
    program: Option<OwnedFd>,
    updates: mpsc::Sender<Update>,
    let_go: Signal,
    resume: Signal,
    delay: Duration,
    /// The GPUs at which the driver hung or crashed, by NVML's index
    skipped: BTreeMap<u32, Skipped>,
    snapshot: Option<Snapshot>,
    /// The last reason why NVML cannot be used
    absent: Option<String>,
    /// The last monitor crashed, and the next one has not polled the GPUs yet.
    is_suspect: bool,
    /// Killed monitors that have not ended
    unreaped: Vec<Child>,
}

#[derive(Clone, Copy)]
struct Skipped {
    delay: Duration,
    until: Instant,
    is_active: bool,
}

/// Why a monitor ended.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    /// Another one starts at once.
    Again,
    /// The driver is missing, or NVML fails.
    Unusable(String),
    /// The driver hung or crashed in these calls.
    Silent { call: NvmlCall, why: String },
    /// The process ended without a reason. Another one starts at once.
    Crashed { call: NvmlCall, why: String },
    /// The administrator wants it.
    LetGo,
}

impl Supervisor {
    fn new(options: SupervisorOptions, updates: mpsc::Sender<Update>) -> Result<Self> {
        Ok(Self {
            options,
            program: None,
            updates,
            let_go: signal(SignalKind::user_defined1())?,
            resume: signal(SignalKind::user_defined2())?,
            delay: FIRST_DELAY,
            skipped: BTreeMap::new(),
            snapshot: None,
            absent: None,
            is_suspect: false,
            unreaped: Vec::new(),
        })
    }

    /// Runs one monitor to its end, and waits until the next one may start.
    async fn run_once(&mut self) -> Result<(), Finished> {
        let start = Instant::now();
        let ended = self.watch().await?;
        if start.elapsed() >= STEADY {
            self.delay = FIRST_DELAY;
        }
        match ended {
            Ended::Again => {
                self.pause(FIRST_DELAY.saturating_sub(start.elapsed()))
                    .await
            }
            Ended::Unusable(why) => {
                if self.absent.as_ref() != Some(&why) {
                    self.absent = Some(why.clone());
                    self.send(Update::Absent(why)).await?;
                }
                self.back_off(MAX_ABSENCE).await
            }
            Ended::Silent { .. } => self.back_off(MAX_DELAY).await,
            // Something else may have killed it, such as the kernel when memory is short.
            Ended::Crashed { .. } => self.pause(AFTER_CRASH).await,
            Ended::LetGo => self.wait_for_resume().await,
        }
    }

    async fn send(&self, update: Update) -> Result<(), Finished> {
        self.updates.send(update).await.map_err(|_| Finished)
    }

    /// Starts a monitor, and passes on what it reports until it ends.
    async fn watch(&mut self) -> Result<Ended, Finished> {
        let (mut child, progress) = match self.spawn() {
            Ok(started) => started,
            Err(error) => {
                return Ok(Ended::Unusable(format!(
                    "cannot start the monitor: {}",
                    report::line(&error)
                )));
            }
        };
        let Some(stdout) = child.stdout.take() else {
            return Ok(Ended::Again);
        };
        let mut ended = self
            .listen(Lines::new(stdout), &progress, &mut child)
            .await?;
        child.start_kill().ok();
        if let Ended::Crashed { call, why } = &ended {
            // A crash of the driver is one that the next monitor meets too.
            if self.is_suspect {
                ended = Ended::Silent {
                    call: call.clone(),
                    why: why.clone(),
                };
            }
            self.is_suspect = !self.is_suspect;
        }
        // The agent must not wait for a process that hangs in the kernel.
        if let Ended::Silent { call, why } = &ended {
            self.blame(call, why.clone()).await?;
        }
        if timeout(REAP, child.wait()).await.is_err() {
            self.unreaped.push(child);
        }
        Ok(ended)
    }

    fn spawn(&mut self) -> Result<(Child, Progress)> {
        let progress = Progress::new()?;
        let skipped = self.skipped.iter().filter(|(_, skipped)| skipped.is_active);
        let arguments = program::arguments(&Request::Monitor(MonitorRequest {
            skip: skipped.map(|(index, _)| *index).collect(),
            ..self.options.request.clone()
        }))?;
        let program = match &self.program {
            Some(program) => program,
            None => {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                let path = program::find()?;
                self.program
                    .insert(rustix::fs::open(path, flags, Mode::empty())?)
            }
        };
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
        command
            .arg0(program::NAME)
            .args(arguments.iter().skip(1))
            .env_clear()
            .current_dir("/");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // The monitor knows it as the place for its progress, and prints nothing.
            .stderr(Stdio::from(progress.for_monitor()?))
            .kill_on_drop(true);
        // `systemctl kill` sends the signals of the supervisor to all processes of the unit, and they must not end the monitor. It
        // inherits the mask through fork(2), and execve(2) keeps it (signal(7)).
        let before = SigSet::from_iter([Number::SIGUSR1, Number::SIGUSR2])
            .thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let child = command.spawn();
        before.thread_set_mask()?;
        Ok((child?, progress))
    }

    async fn listen(
        &mut self,
        mut lines: Lines,
        progress: &Progress,
        child: &mut Child,
    ) -> Result<Ended, Finished> {
        let mut end = None;
        let until = self.next_retry();
        let mut silent_at = Instant::now() + self.options.time_limit;
        loop {
            let line = tokio::select! {
                line = lines.next() => line,
                () = sleep_until(silent_at) => match self.time_left(progress) {
                    Ok(left) => {
                        silent_at = Instant::now() + left;
                        continue;
                    }
                    Err(call) => return Ok(Ended::Silent { call, why: self.no_answer() }),
                },
                _ = self.let_go.recv() => {
                    self.forget_resume().await;
                    return Ok(Ended::LetGo);
                }
                () = self.updates.closed() => return Err(Finished),
                () = sleep_until(until.unwrap_or_else(far_away)), if until.is_some() && self.are_reaped() => {
                    self.retry();
                    return Ok(Ended::Again);
                }
            };
            let message = match line {
                Ok(Some(bytes)) => base::json::from_bytes(bytes),
                Ok(None) => {
                    let (why, call) = (last_words(child).await, last_call(progress));
                    return Ok(end.unwrap_or(Ended::Crashed { call, why }));
                }
                Err(error) => {
                    let error = report::line(&error.into());
                    return Ok(misread(progress, "cannot read from the monitor", error));
                }
            };
            match message {
                Ok(Message::Polled { next_ms }) => silent_at = self.polled(next_ms),
                Ok(Message::Refused(_)) => end = Some(Ended::Unusable(other_build())),
                Ok(Message::End(End::Changed)) => end = Some(Ended::Again),
                Ok(Message::End(End::Unusable(why))) => end = Some(Ended::Unusable(why)),
                Ok(Message::Snapshot(snapshot)) => {
                    self.note(&snapshot);
                    self.send(Update::Snapshot(snapshot)).await?;
                }
                Ok(Message::Sample(sample)) => self.send(Update::Sample(sample)).await?,
                Ok(Message::Event(event)) => self.send(Update::Event(event)).await?,
                Err(error) => {
                    return Ok(misread(
                        progress,
                        "the monitor prints an invalid line",
                        error,
                    ));
                }
            }
        }
    }

    /// Takes a completed poll into account, and returns by when the next one must be complete.
    fn polled(&mut self, next_ms: u32) -> Instant {
        self.is_suspect = false;
        Instant::now() + Duration::from_millis(next_ms.into()) + self.options.time_limit
    }

    /// Returns how long the call that the monitor makes may still last, or the call if it has lasted too long.
    fn time_left(&self, progress: &Progress) -> Result<Duration, NvmlCall> {
        let Some(step) = progress.last() else {
            return Err(NvmlCall::default());
        };
        let limit = self.options.time_limit + Duration::from_millis(step.call.wait_ms.into());
        match limit.checked_sub(step.elapsed()) {
            Some(left) if !left.is_zero() => Ok(left),
            _ => Err(step.call),
        }
    }

    fn no_answer(&self) -> String {
        let seconds = self.options.time_limit.as_secs();
        format!("the driver does not answer within {seconds} s")
    }

    fn note(&mut self, snapshot: &Snapshot) {
        self.absent = None;
        if self
            .snapshot
            .as_ref()
            .is_some_and(|known| known.count() != snapshot.count())
        {
            // An index may belong to another GPU.
            self.skipped.clear();
        }
        self.snapshot = Some(snapshot.clone());
    }

    /// Reports the GPU at which the driver hung or crashed, and leaves it out for a while.
    async fn blame(&mut self, call: &NvmlCall, why: String) -> Result<(), Finished> {
        let Some(index) = call.index else {
            return self.send(Update::Silent { gpu: None, why }).await;
        };
        let now = Instant::now();
        let before = self
            .skipped
            .get(&index)
            .filter(|skipped| now < skipped.until + MAX_SKIP * 2);
        let delay = before.map_or(FIRST_SKIP, |skipped| (skipped.delay * 2).min(MAX_SKIP));
        self.skipped.insert(
            index,
            Skipped {
                delay,
                until: now + delay,
                is_active: true,
            },
        );
        // The others are watched again at once.
        self.delay = FIRST_DELAY;
        match call.gpu.clone().or_else(|| self.uuid_of(index)) {
            Some(gpu) => {
                self.send(Update::Silent {
                    gpu: Some(gpu),
                    why,
                })
                .await
            }
            None => Ok(()),
        }
    }

    fn uuid_of(&self, index: u32) -> Option<String> {
        let inventory = &self.snapshot.as_ref()?.inventory;
        let gpu = inventory
            .gpus
            .iter()
            .find(|gpu| gpu.index == index)
            .map(|gpu| gpu.uuid.clone());
        gpu.or_else(|| {
            inventory
                .failed
                .iter()
                .find(|failed| failed.index == Some(index))?
                .uuid
                .clone()
        })
    }

    fn next_retry(&self) -> Option<Instant> {
        self.skipped
            .values()
            .filter(|skipped| skipped.is_active)
            .map(|skipped| skipped.until)
            .min()
    }

    fn retry(&mut self) {
        let now = Instant::now();
        for skipped in self
            .skipped
            .values_mut()
            .filter(|skipped| skipped.until <= now)
        {
            skipped.is_active = false;
        }
    }

    /// Whether all killed monitors have ended. Another one would hang at the same GPU.
    fn are_reaped(&mut self) -> bool {
        self.unreaped
            .retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        self.unreaped.is_empty()
    }

    async fn pause(&self, time: Duration) -> Result<(), Finished> {
        tokio::select! {
            () = sleep(time) => Ok(()),
            () = self.updates.closed() => Err(Finished),
        }
    }

    /// Waits before the next start, at most this long, until the kernel shows another driver or other GPUs.
    async fn back_off(&mut self, longest: Duration) -> Result<(), Finished> {
        let end = Instant::now() + self.delay.min(longest);
        self.delay = (self.delay * 2).min(MAX_DELAY);
        let before = HostState::of_host(&self.options.config);
        while Instant::now() < end && HostState::of_host(&self.options.config) == before {
            tokio::select! {
                () = sleep_until(end.min(Instant::now() + STEP)) => {}
                _ = self.let_go.recv() => {
                    self.forget_resume().await;
                    return self.wait_for_resume().await;
                }
                () = self.updates.closed() => return Err(Finished),
            }
        }
        Ok(())
    }

    /// Forgets a SIGUSR2 that arrived while the monitor ran.
    async fn forget_resume(&mut self) {
        tokio::select! {
            biased;
            _ = self.resume.recv() => {}
            () = std::future::ready(()) => {}
        }
    }

    /// Waits for SIGUSR2, or until the module is loaded again.
    async fn wait_for_resume(&mut self) -> Result<(), Finished> {
        self.send(Update::LetGo).await?;
        self.absent = None;
        self.delay = FIRST_DELAY;
        self.skipped.clear();
        let before = HostState::of_host(&self.options.config);
        let mut was_unloaded = before.module.is_none();
        loop {
            tokio::select! {
                () = sleep(STEP) => {}
                _ = self.resume.recv() => return Ok(()),
                _ = self.let_go.recv() => {}
                () = self.updates.closed() => return Err(Finished),
            }
            let now = HostState::of_host(&self.options.config);
            if now.module.is_some() && (was_unloaded || now.load != before.load) {
                return Ok(());
            }
            was_unloaded |= now.module.is_none();
        }
    }
}

/// Returns why the program that loads NVML does not answer.
fn other_build() -> String {
    format!("{} belongs to another build than the plugin", program::NAME)
}

/// Returns the end of a monitor whose output cannot be used.
fn misread(progress: &Progress, what: &str, error: impl Display) -> Ended {
    Ended::Silent {
        call: last_call(progress),
        why: format!("{what}: {error}"),
    }
}

/// Returns the call that the monitor made last.
fn last_call(progress: &Progress) -> NvmlCall {
    progress.last().map(|step| step.call).unwrap_or_default()
}

/// Returns a time for a branch that is disabled.
fn far_away() -> Instant {
    Instant::now() + MAX_SKIP
}

/// Returns how a monitor ended that has closed its standard output without a last line.
async fn last_words(child: &mut Child) -> String {
    match timeout(REAP, child.wait()).await {
        Ok(Ok(status)) => ended(status),
        _ => "the monitor does not end".to_owned(),
    }
}

fn ended(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("the driver's library crashes (signal {signal})"),
        None => format!("the monitor ends without a reason ({status})"),
    }
}
