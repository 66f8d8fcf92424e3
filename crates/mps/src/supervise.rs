//! Starts the driver's daemon for a GPU, and checks it until it fails or the unit is stopped.
//!
//! The GPU is closed before anything else, and again before the reason of an end is written. [`super::close`] kills what is left.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use base::report::{failure, line, one_line};
use base::sys::service::{self, Program, Service};
use base::sys::signals::{Received, Signals};
use findings::catalog;
use nvidia_host::config::{self, ClientLimits, Config};
use nvidia_host::host::{Host, MpsPrograms, mode_process};
use nvidia_host::inventory::limits::is_shared;
use nvidia_host::mps::{self, Phase, State};
use nvidia_host::nvml::compute_mode::ComputeMode;
use nvidia_host::nvml::mode_process::ModeProcess;
use nvidia_host::nvml::protocol::ModeTarget;
use rustix::thread::CapabilitySet;
use sd_notify::NotifyState;

use super::cgroup::UnitCgroup;
use super::control::{self, Amount, Command, Limit};
use super::directory::GpuDir;
use super::note;

/// How long the daemon may take to answer a command.
const ANSWER: Duration = Duration::from_secs(5);
/// How long the daemon may take to start.
const START: Duration = Duration::from_secs(10);
/// How long the server may take to start. Without persistence mode, the driver initializes the GPU, which takes seconds.
const SERVER: Duration = Duration::from_secs(60);
/// The time between two questions while the daemon or its server starts.
const PAUSE: Duration = Duration::from_millis(100);
/// The time between two checks of the daemon.
const ROUND: Duration = Duration::from_secs(5);
/// The number of checks that must fail one after the other.
const BAD_ROUNDS: u32 = 2;
/// How long the clients have, in seconds, when the daemon is stopped.
const QUIT: u32 = 10;
/// The most characters of an answer that a message contains
const EXCERPT: usize = 200;
/// The mode in which only the server of the daemon can use the GPU.
const SERVED: ComputeMode = ComputeMode::ExclusiveProcess;
/// What the driver's daemon keeps: it becomes the user of a client for a server, ends servers, identifies its clients, and raises priorities.
const CAPABILITIES: CapabilitySet = CapabilitySet::SETUID
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::SYS_NICE);

/// Why the daemon is not supervised any more.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// systemd stops the unit.
    Stop,
    /// The daemon does not work.
    Failed(String),
}

/// The supervisor of a daemon.
#[derive(Debug)]
struct Supervisor {
    programs: MpsPrograms,
    capabilities: CapabilitySet,
    limits: Vec<(Limit, Amount)>,
    dir: GpuDir,
    modes: ModeProcess,
    signals: Signals,
    service: Option<Service>,
    state: State,
    /// What the file `state` contains, and the open file, which is locked
    published: Option<(State, File)>,
}

/// Runs the daemon of the GPU with this UUID until it fails or this process is asked to stop.
///
/// # Errors
/// If the GPU cannot be shared, or the daemon fails.
pub(super) fn run(uuid: &str, file: Option<&Path>, keep_capabilities: bool) -> Result<()> {
    let Some(cgroup) = UnitCgroup::of_gpu(uuid)? else {
        return Err(failure(
            &catalog::MPS_START,
            format!(
                "this process does not belong to the unit {}",
                mps::unit_of(uuid)
            ),
            format!("run \"systemctl start {}\"", mps::UNIT),
        ));
    };
    let signals = Signals::block()?;
    let (config, _) = config::read(file)?;
    let host = Host::inspect(&config, &|| ())?;
    let target = target(uuid, &config, &host)?;
    if !cgroup.others()?.is_empty() {
        // systemd has killed the command that cleans up.
        mode_process(&config, &target)?.set(ComputeMode::Prohibited)?;
        cgroup.kill_others()?;
    }
    let mut modes = mode_process(&config, &target)?;
    modes.set(ComputeMode::Prohibited)?;
    let programs = host.mps_programs()?;
    let directory = mps::directory_of(uuid);
    let dir = GpuDir::create(Path::new(mps::DIRECTORY), uuid)
        .with_context(|| format!("cannot create {directory:?}"))?;
    dir.clear_pipe().with_context(|| {
        format!("cannot remove the files of an earlier daemon in {directory:?}")
    })?;
    let supervisor = Supervisor {
        programs,
        capabilities: match keep_capabilities {
            true => CapabilitySet::all(),
            false => CAPABILITIES,
        },
        limits: limits(config.sharing.limits),
        dir,
        modes,
        signals,
        service: None,
        state: first_state(uuid, &config),
        published: None,
    };
    supervisor.run()
}

/// Returns the GPU if config.toml shares it.
fn target(uuid: &str, config: &Config, host: &Host) -> Result<ModeTarget> {
    let mut gpus = host.inventory.gpus.iter();
    match gpus.find(|gpu| gpu.uuid == uuid) {
        Some(gpu) if is_shared(&config.sharing, gpu) => Ok(ModeTarget {
            uuid: uuid.to_owned(),
            index: Some(gpu.index),
        }),
        Some(gpu) if gpu.mig_enabled => Err(failure(
            &catalog::MPS_START,
            format!("{uuid} is in MIG mode, in which MPS does not share it"),
            format!(
                "leave MIG mode with \"nvidia-smi -i {} -mig 0\", or disable the unit",
                gpu.index
            ),
        )),
        Some(_) => Err(failure(
            &catalog::MPS_START,
            format!("mps-gpus in the [sharing] table of config.toml does not list {uuid}"),
            format!("list it, and run \"systemctl restart {}\"", mps::UNIT),
        )),
        // The GPU may work again at the next attempt.
        None => Err(failure(
            &catalog::UNKNOWN_DEVICE,
            format!("the GPU {uuid:?} does not exist, or does not work"),
            "\"oci-nvidia-hook info\" lists the GPUs",
        )),
    }
}

fn limits(limits: ClientLimits) -> Vec<(Limit, Amount)> {
    let mut found = Vec::new();
    found.extend(limits.memory_limit_mib.map(|mib| (Limit::Memory, mib)));
    let percentage = limits.thread_percentage.map(Amount::from);
    found.extend(percentage.map(|percentage| (Limit::Threads, percentage)));
    found
}

fn first_state(uuid: &str, config: &Config) -> State {
    State {
        memory_limit_mib: config.sharing.limits.memory_limit_mib,
        active_thread_percentage: config.sharing.limits.thread_percentage,
        driver_root: Some(config.driver_root.as_path().to_owned()),
        supervisor: pid(std::process::id()),
        ..State::new(uuid, Phase::Starting)
    }
}

impl Supervisor {
    fn run(mut self) -> Result<()> {
        // Without a state, no program would know that the GPU has to be opened again.
        self.publish()
            .context("cannot write the state of the MPS daemon")?;
        let end = self.serve();
        // A program that does not find its daemon would run without limits. Clients that have a context go on.
        let closed = self.modes.set(ComputeMode::Prohibited);
        match end {
            End::Stop => {
                notify(&NotifyState::Stopping);
                self.enter(Phase::Stopping, None);
                // systemd kills a daemon that does not obey.
                self.ask(Command::Quit(QUIT)).ok();
                closed
            }
            End::Failed(why) => {
                self.enter(Phase::Failed, Some(one_line(&why)));
                Err(failure(
                    &catalog::MPS_FAILED,
                    format!("the MPS daemon of {} failed: {why}", self.state.gpu),
                    format!(
                        "see the logs in {:?}; end other programs that use the GPU, which \"nvidia-smi\" lists",
                        self.dir.log()
                    ),
                ))
            }
        }
    }

    /// Starts the daemon and checks it, until the end.
    fn serve(&mut self) -> End {
        if let Err(end) = self.open() {
            return end;
        }
        self.enter(Phase::Ready, None);
        notify(&NotifyState::Ready);
        let mut bad_rounds = 0;
        loop {
            let problem = match self.round() {
                Ok(problem) => problem,
                Err(end) => return end,
            };
            let Some(why) = problem else {
                bad_rounds = 0;
                continue;
            };
            bad_rounds += 1;
            if bad_rounds >= BAD_ROUNDS {
                return End::Failed(why);
            }
            note(&why);
        }
    }

    /// Starts the daemon, and opens the GPU for it when it has its limits.
    fn open(&mut self) -> Result<(), End> {
        self.start().map_err(|error| End::Failed(line(&error)))?;
        self.contact()?;
        if let Err(error) = self.dir.protect_pipe() {
            return Err(End::Failed(format!("cannot protect its files: {error}")));
        }
        for (limit, amount) in self.limits.clone() {
            self.tell(Command::SetDefault(limit, amount))?;
            let answer = self.tell(Command::Default(limit))?;
            if limit.parse(&answer) != Some(amount) {
                let (command, answer) = (Command::Default(limit), answer.trim());
                return Err(End::Failed(format!(
                    "the daemon did not take its limit: {command} returns {answer:?}"
                )));
            }
        }
        let opened = self.modes.set(SERVED);
        opened.map_err(|error| End::Failed(line(&error)))?;
        self.tell(Command::StartServer)?;
        let end = Instant::now() + SERVER;
        while let Some(why) = self.server_problem() {
            if Instant::now() >= end {
                return Err(End::Failed(why));
            }
            self.pause(PAUSE)?;
        }
        Ok(())
    }

    fn start(&mut self) -> Result<()> {
        let output = self
            .dir
            .output()
            .context("cannot open the log of the daemon")?;
        let (pipe, log) = (self.dir.pipe(), self.dir.log());
        let gpu = self.state.gpu.clone();
        let mut environment = environment(&pipe, &self.programs);
        environment.push(("CUDA_MPS_LOG_DIRECTORY", log.as_os_str()));
        environment.push(("CUDA_VISIBLE_DEVICES", OsStr::new(&gpu)));
        let control = self.programs.control.as_path();
        let mut program = Program {
            path: control,
            arguments: &["-f"],
            environment: &environment,
            capabilities: self.capabilities,
        };
        self.state.multi_user = serves_several_users(program);
        if self.state.multi_user {
            program.arguments = &["-f", "-M"];
        }
        let started = Service::start(program, output);
        self.service = Some(started.with_context(|| format!("cannot start {control:?}"))?);
        Ok(())
    }

    /// Waits until the daemon answers.
    fn contact(&mut self) -> Result<(), End> {
        let end = Instant::now() + START;
        while let Err(why) = self.ask(Command::ServerList) {
            if Instant::now() >= end {
                let why = format!("the daemon does not answer after its start: {why}");
                return Err(End::Failed(why));
            }
            self.pause(PAUSE)?;
        }
        Ok(())
    }

    /// Waits, and then checks everything. Returns what is wrong, which may pass.
    fn round(&mut self) -> Result<Option<String>, End> {
        self.pause(ROUND)?;
        if let Err(error) = self.dir.cut_logs() {
            note(&format!("cannot cut the logs of the daemon: {error}"));
        }
        match self.modes.mode() {
            Ok(Some(SERVED)) => {}
            Ok(_) => {
                note("another program changed the compute mode; setting it again");
                let set = self.modes.set(SERVED);
                set.map_err(|error| End::Failed(line(&error)))?;
            }
            Err(error) => return Ok(Some(line(&error))),
        }
        if let Some(why) = self.server_problem() {
            return Ok(Some(why));
        }
        self.check_limits()?;
        self.enter(Phase::Ready, None);
        Ok(None)
    }

    /// Returns why no server can accept clients. Starts one if there is none: without `-M`, a server ends with its last client, and a program
    /// without MPS could use the GPU until the next client comes.
    fn server_problem(&mut self) -> Option<String> {
        let servers = match self.ask(Command::ServerList) {
            Ok(answer) => control::parse_pids(&answer),
            Err(why) => return Some(why),
        };
        self.state.server = servers.first().copied().and_then(pid);
        if servers.is_empty() {
            let started = self.ask(Command::StartServer);
            return Some(
                started
                    .err()
                    .unwrap_or_else(|| "the server does not start".to_owned()),
            );
        }
        let mut clients = 0;
        for server in servers {
            match self.ask(Command::ServerStatus(server)) {
                Ok(answer) if control::is_active(&answer) => {}
                Ok(answer) => {
                    let status = answer.trim();
                    return Some(format!("the server {server} is not active: {status:?}"));
                }
                Err(why) => return Some(why),
            }
            match self.ask(Command::ClientList(server)) {
                Ok(answer) => clients += control::parse_pids(&answer).len(),
                Err(why) => return Some(why),
            }
        }
        self.state.clients = u32::try_from(clients).unwrap_or(u32::MAX);
        None
    }

    /// Ends the daemon and its clients if root of a container, or another process of root, has changed a limit: a client that has started
    /// since would keep it.
    fn check_limits(&mut self) -> Result<(), End> {
        let server = self.state.server.and_then(|pid| u32::try_from(pid).ok());
        for (limit, amount) in self.limits.clone() {
            let mut questions = vec![Command::Default(limit)];
            questions.extend(server.map(|server| Command::Of(server, limit)));
            for question in questions {
                let answer = self.tell(question)?;
                if limit.parse(&answer) != Some(amount) {
                    let answer = answer.trim();
                    return Err(End::Failed(format!(
                        "another process changed a limit: {question} returns {answer:?}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Sends a command that must succeed.
    fn tell(&mut self, command: Command) -> Result<String, End> {
        self.ask(command).map_err(End::Failed)
    }

    /// Sends a command to the daemon.
    fn ask(&mut self, command: Command) -> Result<String, String> {
        let pipe = self.dir.pipe();
        let program = Program {
            path: self.programs.control.as_path(),
            arguments: &[],
            environment: &environment(&pipe, &self.programs),
            capabilities: CAPABILITIES,
        };
        let deadline = match command {
            Command::Quit(seconds) => ANSWER + Duration::from_secs(seconds.into()),
            _ => ANSWER,
        };
        let why = match service::ask(program, &format!("{command}\n"), deadline) {
            Ok(answer) if answer.succeeded => return Ok(answer.text),
            Ok(answer) => excerpt(&answer.text),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                format!("no answer within {} s", deadline.as_secs())
            }
            Err(error) => error.to_string(),
        };
        // A daemon that has ended is the cause of the failure.
        let ended = self.ended();
        Err(ended.unwrap_or_else(|| format!("the daemon does not obey \"{command}\": {why}")))
    }

    /// Returns how the daemon ended, if it has ended.
    fn ended(&mut self) -> Option<String> {
        match self.service.as_mut()?.ended() {
            Ok(ended) => Some(format!("the daemon ended ({})", ended?)),
            Err(error) => Some(error.to_string()),
        }
    }

    /// Waits, but not longer than until the daemon ends or systemd stops the unit.
    fn pause(&mut self, duration: Duration) -> Result<(), End> {
        let end = Instant::now() + duration;
        loop {
            // The signal of the daemon may have arrived during another action.
            if let Some(how) = self.ended() {
                return Err(End::Failed(how));
            }
            match self.signals.next(end) {
                Ok(Some(Received::Stop)) => return Err(End::Stop),
                Ok(Some(Received::Child)) => {}
                Ok(None) => return Ok(()),
                Err(error) => {
                    return Err(End::Failed(format!("cannot wait for signals: {error}")));
                }
            }
        }
    }

    /// Writes that the supervisor does something else now. The GPU does not depend on the file: that it cannot be written is printed.
    fn enter(&mut self, phase: Phase, why: Option<String>) {
        (self.state.state, self.state.why) = (phase, why);
        if let Err(error) = self.publish() {
            note(&format!("cannot write the state of the daemon: {error}"));
        }
    }

    fn publish(&mut self) -> io::Result<()> {
        self.state.daemon = self.service.as_ref().map(Service::pid).and_then(pid);
        if self
            .published
            .as_ref()
            .is_some_and(|(known, _)| *known == self.state)
        {
            return Ok(());
        }
        let file = self.dir.publish(&self.state)?;
        self.published = Some((self.state.clone(), file));
        notify(&NotifyState::Status(&status(&self.state)));
        Ok(())
    }
}

/// Returns the environment of the driver's program.
fn environment<'a>(pipe: &'a Path, programs: &'a MpsPrograms) -> Vec<(&'static str, &'a OsStr)> {
    vec![
        ("PATH", programs.path.as_os_str()),
        ("LD_LIBRARY_PATH", programs.library_path.as_os_str()),
        ("CUDA_MPS_PIPE_DIRECTORY", pipe.as_os_str()),
    ]
}

/// Whether the server can serve clients of several users at once. Older daemons do not have the option: there, a client of another user
/// waits until the server has no client.
fn serves_several_users(mut program: Program<'_>) -> bool {
    program.arguments = &["--help"];
    let answer = service::ask(program, "", ANSWER);
    answer.is_ok_and(|answer| answer.text.contains("--multiuser-server"))
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

/// Reports to the service manager. The daemon does not depend on it, so a failure is ignored.
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
