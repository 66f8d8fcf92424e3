//! Carries out what [`super::machine`] decides: the only place that starts the daemon, sends it commands and sets the compute mode.

use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use base::report::{failure, line, one_line};
use base::sys::service::{self, Program, Service};
use base::sys::signals::{Received, Signals};
use base::sys::stdio;
use findings::catalog;
use nvidia_host::config::{Config, Sharing};
use nvidia_host::host::{MpsPrograms, mode_process};
use nvidia_host::inventory::Gpu;
use nvidia_host::mps::{FORMAT, Phase, State};
use nvidia_host::nvml::compute_mode::ComputeMode;
use nvidia_host::nvml::mode_process::ModeProcess;
use sd_notify::NotifyState;

use super::control::Command;
use super::directory::{GpuDir, Lock};
use super::leftover;
use super::machine::{Action, Event, Machine, Public, Settings};

/// How long the daemon may take to answer a command.
const ANSWER: Duration = Duration::from_secs(5);
/// How long killed processes may take to end. The server gives the memory of the GPU back.
const END: Duration = Duration::from_secs(5);
/// The most characters of an answer that a message contains
const EXCERPT: usize = 200;

/// The daemon that is to run.
#[derive(Debug)]
pub(super) struct Daemon {
    /// The GPU as the command line names it
    pub name: String,
    pub gpu: Gpu,
    pub limits: Sharing,
    pub programs: MpsPrograms,
}

/// The supervisor of a daemon.
#[derive(Debug)]
pub(super) struct Supervisor {
    daemon: Daemon,
    machine: Machine,
    state: State,
    /// What the file `state` contains
    published: Option<State>,
    dir: GpuDir,
    _lock: Lock,
    service: Option<Service>,
    signals: Signals,
    begun: Instant,
    /// Its end ends all other children, so it is dropped last.
    modes: ModeProcess,
}

impl Supervisor {
    /// Takes the lock, and finds out which compute mode is to be restored.
    ///
    /// # Errors
    /// If another supervisor runs, or the administrator has closed the GPU.
    pub(super) fn new(daemon: Daemon, config: &Config) -> Result<Self> {
        let (dir, lock) = super::open_dir(&daemon.gpu.uuid)?;
        let signals = Signals::block()?;
        let mut modes = mode_process(config, &super::target(&daemon.gpu))?;
        let mode = modes.mode()?;
        let before = match dir.state() {
            // The mode is one that the earlier supervisor has set.
            Some(state) => ComputeMode::from_number(state.compute_mode_before),
            None => mode,
        };
        let mode_before = before.unwrap_or(ComputeMode::Default);
        if mode_before == ComputeMode::Prohibited {
            return Err(closed(&daemon.gpu));
        }
        let memory = daemon.limits.memory_limit_mib;
        let threads = daemon.limits.thread_percentage.map(u64::from);
        let state = State {
            format: FORMAT,
            gpu: daemon.gpu.uuid.clone(),
            name: Some(daemon.name.clone()),
            state: Phase::Starting,
            why: None,
            memory_limit_mib: memory,
            active_thread_percentage: daemon.limits.thread_percentage,
            multi_user: serves_several_users(&daemon.programs),
            compute_mode_before: mode_before.number(),
            clients: 0,
            supervisor: i32::try_from(std::process::id()).ok(),
            daemon: None,
            server: None,
        };
        let settings = Settings {
            memory,
            threads,
            mode_before,
        };
        Ok(Self {
            machine: Machine::new(settings),
            daemon,
            state,
            published: None,
            dir,
            _lock: lock,
            service: None,
            signals,
            begun: Instant::now(),
            modes,
        })
    }

    /// Runs the daemon until it fails or this process is asked to stop.
    ///
    /// # Errors
    /// If the daemon fails. Its GPU is closed then.
    pub(super) fn run(mut self) -> Result<()> {
        let mut event = Event::Begun;
        loop {
            let action = self.machine.next(event, self.begun.elapsed());
            for note in self.machine.take_notes() {
                print(&note);
            }
            if let Action::Exit(why) = action {
                return self.exit(why);
            }
            // Before the first action: a supervisor that follows this one must know which mode to restore.
            self.publish()?;
            event = self.perform(&action);
        }
    }

    fn exit(mut self, why: Option<String>) -> Result<()> {
        let Some(why) = why else {
            let removed = self.dir.remove_state();
            return removed.context("cannot remove the state of the MPS daemon");
        };
        Public::Failed(why.clone()).write_to(&mut self.state);
        self.dir.publish(&self.state).ok();
        Err(failure(
            &catalog::MPS_FAILED,
            format!("the MPS daemon of {} failed: {why}", self.state.gpu),
            format!(
                "see the logs in {:?}; end other programs that use the GPU, which \"nvidia-smi\" lists",
                self.dir.log()
            ),
        ))
    }

    /// Writes the file `state` if its content has changed.
    fn publish(&mut self) -> Result<()> {
        self.machine.public().write_to(&mut self.state);
        self.state.clients = u32::try_from(self.machine.clients()).unwrap_or(u32::MAX);
        self.state.server = self.machine.server().and_then(pid);
        self.state.daemon = self.service.as_ref().map(Service::pid).and_then(pid);
        if self.published.as_ref() == Some(&self.state) {
            return Ok(());
        }
        match self.dir.publish(&self.state) {
            Ok(()) => self.published = Some(self.state.clone()),
            Err(error) if self.published.is_none() => {
                return Err(error).context("cannot write the state of the MPS daemon");
            }
            Err(error) => print(&format!("cannot write the state of the daemon: {error}")),
        }
        notify(&NotifyState::Status(&status(&self.state)));
        Ok(())
    }

    fn perform(&mut self, action: &Action) -> Event {
        match action {
            Action::SetMode(mode) => match self.modes.set(*mode) {
                Ok(()) => Event::Done,
                Err(error) => Event::Failed(line(&error)),
            },
            Action::Start => match self.start() {
                Ok(()) => Event::Done,
                Err(error) => Event::Failed(line(&error)),
            },
            Action::Ask(command) => self.ask(*command),
            Action::Wait(duration) => self.wait(*duration),
            Action::Announce => {
                notify(&NotifyState::Ready);
                Event::Done
            }
            Action::Kill => {
                self.kill();
                Event::Done
            }
            Action::Exit(_) => Event::Done,
        }
    }

    /// Starts the daemon, after what an earlier supervisor has left is killed.
    fn start(&mut self) -> Result<()> {
        let pipe = self.dir.pipe();
        leftover::end(&pipe);
        let output = self
            .dir
            .output()
            .context("cannot open the log of the daemon")?;
        let log = self.dir.log();
        let MpsPrograms {
            control,
            path,
            library_path,
        } = &self.daemon.programs;
        let mut environment = environment(&pipe, path, library_path);
        environment.push(("CUDA_MPS_LOG_DIRECTORY", log.as_os_str()));
        environment.push(("CUDA_VISIBLE_DEVICES", OsStr::new(&self.state.gpu)));
        let arguments: &[&str] = match self.state.multi_user {
            true => &["-f", "-M"],
            false => &["-f"],
        };
        let program = Program {
            path: control.as_path(),
            arguments,
            environment: &environment,
        };
        let started = Service::start(program, output);
        let control = control.as_path();
        self.service = Some(started.with_context(|| format!("cannot start {control:?}"))?);
        Ok(())
    }

    /// Sends a command to the daemon.
    fn ask(&mut self, command: Command) -> Event {
        let pipe = self.dir.pipe();
        let MpsPrograms {
            control,
            path,
            library_path,
        } = &self.daemon.programs;
        let program = Program {
            path: control.as_path(),
            arguments: &[],
            environment: &environment(&pipe, path, library_path),
        };
        let deadline = match command {
            Command::Quit(seconds) => ANSWER + Duration::from_secs(seconds.into()),
            _ => ANSWER,
        };
        let why = match service::ask(program, &format!("{command}\n"), deadline) {
            Ok(answer) if answer.succeeded => return Event::Answer(answer.text),
            Ok(answer) => excerpt(&answer.text),
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
                format!("no answer within {} s", deadline.as_secs())
            }
            Err(error) => error.to_string(),
        };
        // A daemon that has ended is the cause of the failure.
        match self.ended() {
            Some(how) => Event::Ended(how),
            None => Event::Failed(format!("the daemon does not obey \"{command}\": {why}")),
        }
    }

    /// Returns how the daemon ended, if it has ended.
    fn ended(&mut self) -> Option<String> {
        let service = self.service.as_mut()?;
        match service.ended() {
            Ok(ended) => ended,
            Err(error) => Some(error.to_string()),
        }
    }

    fn wait(&mut self, duration: Duration) -> Event {
        let end = Instant::now() + duration;
        loop {
            // The signal of the daemon may have arrived during another action.
            if let Some(how) = self.ended() {
                return Event::Ended(how);
            }
            match self.signals.next(end) {
                Ok(Some(Received::Stop)) => {
                    notify(&NotifyState::Stopping);
                    return Event::Stop;
                }
                Ok(Some(Received::Child)) => {}
                Ok(None) => break,
                Err(error) => {
                    print(&format!("cannot wait for signals: {error}"));
                    std::thread::sleep(duration);
                    break;
                }
            }
        }
        if let Err(error) = self.dir.cut_logs() {
            print(&format!("cannot cut the logs of the daemon: {error}"));
        }
        Event::Waited
    }

    /// Kills the daemon and its servers.
    fn kill(&mut self) {
        if let Some(service) = self.service.take() {
            service.kill();
        }
        self.modes.end_other_children(END);
        leftover::end(&self.dir.pipe());
    }
}

/// Returns the environment of the driver's program.
fn environment<'a>(
    pipe: &'a Path,
    path: &'a OsStr,
    library_path: &'a OsStr,
) -> Vec<(&'static str, &'a OsStr)> {
    vec![
        ("PATH", path),
        ("LD_LIBRARY_PATH", library_path),
        ("CUDA_MPS_PIPE_DIRECTORY", pipe.as_os_str()),
    ]
}

/// Whether the server can serve clients of several users at once. Older daemons do not have the option: there, a client of another user
/// waits until the server has no client.
fn serves_several_users(programs: &MpsPrograms) -> bool {
    let program = Program {
        path: programs.control.as_path(),
        arguments: &["--help"],
        environment: &[("LD_LIBRARY_PATH", &programs.library_path)],
    };
    let answer = service::ask(program, "", ANSWER);
    answer.is_ok_and(|answer| answer.text.contains("--multiuser-server"))
}

/// Returns the error for a GPU whose compute mode is PROHIBITED although no supervisor has set it.
fn closed(gpu: &Gpu) -> anyhow::Error {
    failure(
        &catalog::MPS_START,
        format!(
            "the compute mode of {} is PROHIBITED, and this program has not set it",
            gpu.uuid
        ),
        format!(
            "to share the GPU, run \"nvidia-smi -i {} -c DEFAULT\"",
            gpu.index
        ),
    )
}

fn pid(number: u32) -> Option<i32> {
    i32::try_from(number).ok()
}

/// Returns the state in words for `systemctl status`.
fn status(state: &State) -> String {
    match state.state {
        Phase::Starting => "starting".to_owned(),
        Phase::Ready => format!("ready, client processes: {}", state.clients),
        Phase::Stopping => "stopping".to_owned(),
        Phase::Failed => format!("failed: {}", state.why.as_deref().unwrap_or_default()),
    }
}

/// Reports to the service manager. The daemon does not depend on it: one that does not listen is no error.
fn notify(state: &NotifyState<'_>) {
    sd_notify::notify(std::slice::from_ref(state)).ok();
}

fn excerpt(answer: &str) -> String {
    let text = one_line(answer.trim());
    if text.is_empty() {
        return "no answer".to_owned();
    }
    text.chars().take(EXCERPT).collect()
}

/// Prints a line to the journal.
fn print(text: &str) {
    stdio::offer_stderr(&format!("{}\n", one_line(text)));
}
