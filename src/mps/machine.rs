//! Decides what the supervisor of an MPS daemon does next, without doing it.
//!
//! The compute mode is `PROHIBITED` whenever there is no daemon with limits: a CUDA program that does not find its daemon runs without MPS
//! and without limits (driver 580), and containers look for the daemon in a directory that stays. The mode is `EXCLUSIVE_PROCESS` from
//! the moment at which the daemon has its limits, so that only its server can use the GPU.

use std::collections::VecDeque;
use std::time::Duration;

use base::report::one_line;
use nvidia_host::mps::{self, State};
use nvidia_host::nvml::compute_mode::ComputeMode;

use super::control::{self, Amount, Command, Limit};

/// The time between two checks of the daemon.
pub(crate) const ROUND: Duration = Duration::from_secs(5);
/// The time between two questions while the daemon or its server starts.
const PAUSE: Duration = Duration::from_millis(100);
/// How long the daemon may take to start.
const START: Duration = Duration::from_secs(10);
/// How long the server may take to start. Without persistence mode, the driver initializes the GPU, which takes seconds.
const SERVER: Duration = Duration::from_secs(60);
/// The number of checks that must fail one after the other.
const BAD_ROUNDS: u32 = 2;
/// The limits are compared in each round whose number is a multiple of this one. Each command adds lines to the log of the daemon.
const LIMIT_ROUNDS: u32 = 3;
/// How long the clients have, in seconds, when the daemon is stopped.
pub(crate) const QUIT: u32 = 10;

/// The result of the last action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The first event
    Begun,
    /// The action succeeded.
    Done,
    /// The action failed, for this reason.
    Failed(String),
    /// The answer to a command
    Answer(String),
    /// The time of a wait has passed.
    Waited,
    /// The daemon ended, in this way.
    Ended(String),
    /// The supervisor was asked to stop.
    Stop,
}

/// What the supervisor does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Set the compute mode of the GPU.
    SetMode(ComputeMode),
    /// Start the daemon.
    Start,
    /// Send a command to the daemon.
    Ask(Command),
    /// Wait, but not longer than until the daemon ends or the supervisor is asked to stop.
    Wait(Duration),
    /// Report that the daemon is ready.
    Announce,
    /// Kill the daemon and its servers.
    Kill,
    /// End the supervisor: `None` if it was asked to stop, otherwise the reason.
    Exit(Option<String>),
}

/// The state of the daemon for other programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Public {
    Starting,
    Ready,
    Stopping,
    Failed(String),
}

impl Public {
    /// Writes the state into the file for other programs.
    pub(crate) fn write_to(&self, state: &mut State) {
        state.state = match self {
            Self::Starting => mps::Phase::Starting,
            Self::Ready => mps::Phase::Ready,
            Self::Stopping => mps::Phase::Stopping,
            Self::Failed(_) => mps::Phase::Failed,
        };
        state.why = match self {
            Self::Failed(why) => Some(one_line(why)),
            _ => None,
        };
    }
}

/// What the administrator configured, and what the GPU was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// For each client, in MiB
    pub memory: Option<Amount>,
    /// For each client, in percent
    pub threads: Option<Amount>,
    /// The compute mode that is restored at the end
    pub mode_before: ComputeMode,
}

impl Settings {
    const fn of(&self, limit: Limit) -> Option<Amount> {
        match limit {
            Limit::Memory => self.memory,
            Limit::Threads => self.threads,
        }
    }

    /// Returns the commands that set the limits of the daemon, each followed by a question whether it has the limit.
    fn commands(&self) -> VecDeque<Command> {
        let mut commands = VecDeque::new();
        for limit in [Limit::Memory, Limit::Threads] {
            if let Some(amount) = self.of(limit) {
                commands.push_back(Command::SetDefault(limit, amount));
                commands.push_back(Command::Default(limit));
            }
        }
        commands
    }
}

/// What the last action was for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// Before the first action
    New,
    /// The GPU is closed.
    Closing,
    /// The daemon is started.
    Starting,
    /// The daemon is asked until it answers. The time at which it is given up.
    Contacting(Duration),
    /// The daemon gets its limits. The command that is under way is the first one.
    Limiting(VecDeque<Command>),
    /// The GPU is opened for the server.
    Opening,
    /// The server is asked until it is active. The time at which it is given up.
    Serving(Duration, Command),
    /// Others learn that the daemon is ready.
    Announcing,
    /// Between two rounds
    Resting,
    /// A round of questions. The question that is under way is the first one.
    Checking(VecDeque<Command>),
    /// The daemon is asked to end.
    Quitting,
    /// What is left of it is killed.
    Killing,
    /// The GPU gets its mode back.
    Restoring,
    /// After a failure: the GPU is closed, the daemon is killed, and a request to stop is looked for.
    FailedClosing,
    FailedKilling,
    FailedWaiting,
}

/// The supervisor of one daemon.
#[derive(Debug)]
pub(crate) struct Machine {
    settings: Settings,
    phase: Phase,
    public: Public,
    servers: Vec<u32>,
    clients: usize,
    /// The clients that this round has counted so far
    counted: usize,
    bad: Option<String>,
    bad_rounds: u32,
    round: u32,
    notes: Vec<String>,
}

impl Machine {
    pub(crate) const fn new(settings: Settings) -> Self {
        Self {
            settings,
            phase: Phase::New,
            public: Public::Starting,
            servers: Vec::new(),
            clients: 0,
            counted: 0,
            bad: None,
            bad_rounds: 0,
            round: 0,
            notes: Vec::new(),
        }
    }

    /// Returns the state for other programs. It is published before the next action.
    pub(crate) const fn public(&self) -> &Public {
        &self.public
    }

    /// Returns the server that the daemon has, if it has one.
    pub(crate) fn server(&self) -> Option<u32> {
        self.servers.first().copied()
    }

    /// Returns the number of client processes at the last check.
    pub(crate) const fn clients(&self) -> usize {
        self.clients
    }

    /// Returns what happened since the last call, for the journal.
    pub(crate) fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Returns the next action. `now` is the time since the supervisor started.
    pub(crate) fn next(&mut self, event: Event, now: Duration) -> Action {
        let phase = std::mem::replace(&mut self.phase, Phase::New);
        match (phase, event) {
            (Phase::New, _) => self.enter(Phase::Closing, Action::SetMode(ComputeMode::Prohibited)),
            (Phase::Closing, Event::Failed(why)) => Action::Exit(Some(why)),
            (Phase::Closing, _) => self.enter(Phase::Starting, Action::Start),
            (
                phase @ (Phase::FailedClosing | Phase::FailedKilling | Phase::FailedWaiting),
                event,
            ) => self.after_failure(&phase, event),
            (phase @ (Phase::Quitting | Phase::Killing | Phase::Restoring), event) => {
                self.after_stop(&phase, event)
            }
            (_, Event::Stop) => self.stop(),
            (_, Event::Ended(how)) => self.fail(format!("the daemon ended ({how})")),
            (Phase::Starting, Event::Failed(why)) => self.fail(why),
            (Phase::Starting, _) => self.contact(now + START),
            (Phase::Contacting(end), event) => self.contacted(end, event, now),
            (Phase::Limiting(commands), event) => self.limited(commands, event),
            (Phase::Opening, Event::Failed(why)) => self.fail(why),
            (Phase::Opening, _) => self.serve(now + SERVER, Command::StartServer),
            (Phase::Serving(end, asked), event) => self.served(end, asked, event, now),
            (Phase::Announcing, _) => self.rest(),
            (Phase::Resting, _) => self.begin_round(),
            (Phase::Checking(questions), event) => self.checked(questions, event),
        }
    }

    fn enter(&mut self, phase: Phase, action: Action) -> Action {
        self.phase = phase;
        action
    }

    fn contact(&mut self, end: Duration) -> Action {
        self.enter(Phase::Contacting(end), Action::Ask(Command::ServerList))
    }

    fn contacted(&mut self, end: Duration, event: Event, now: Duration) -> Action {
        match event {
            Event::Answer(_) => self.limit(self.settings.commands()),
            Event::Failed(why) if now >= end => {
                self.fail(format!("the daemon does not answer after its start: {why}"))
            }
            Event::Failed(_) => self.enter(Phase::Contacting(end), Action::Wait(PAUSE)),
            _ => self.contact(end),
        }
    }

    /// Continues with the first command.
    fn limit(&mut self, commands: VecDeque<Command>) -> Action {
        match commands.front().copied() {
            Some(command) => self.enter(Phase::Limiting(commands), Action::Ask(command)),
            None => self.enter(
                Phase::Opening,
                Action::SetMode(ComputeMode::ExclusiveProcess),
            ),
        }
    }

    fn limited(&mut self, mut commands: VecDeque<Command>, event: Event) -> Action {
        let asked = commands.pop_front();
        let answer = match event {
            Event::Answer(answer) => answer,
            Event::Failed(why) => return self.fail(why),
            _ => String::new(),
        };
        if let Some(Command::Default(limit)) = asked
            && limit.parse(&answer) != self.settings.of(limit)
        {
            let command = Command::Default(limit);
            return self.fail(format!(
                "the daemon did not take its limit: {command} returns {:?}",
                answer.trim()
            ));
        }
        self.limit(commands)
    }

    fn serve(&mut self, end: Duration, command: Command) -> Action {
        self.enter(Phase::Serving(end, command), Action::Ask(command))
    }

    fn served(&mut self, end: Duration, asked: Command, event: Event, now: Duration) -> Action {
        let is_over = now >= end;
        match (asked, event) {
            (_, Event::Failed(why)) if is_over => self.fail(why),
            (Command::StartServer, Event::Answer(_)) => self.serve(end, Command::ServerList),
            (Command::ServerList, Event::Answer(answer)) => {
                self.servers = control::parse_pids(&answer);
                match self.server() {
                    Some(server) => self.serve(end, Command::ServerStatus(server)),
                    None if is_over => self.fail("the server does not start".to_owned()),
                    None => self.pause_for_server(end),
                }
            }
            (Command::ServerStatus(_), Event::Answer(answer)) if control::is_active(&answer) => {
                self.public = Public::Ready;
                self.enter(Phase::Announcing, Action::Announce)
            }
            (Command::ServerStatus(server), Event::Answer(answer)) if is_over => {
                let status = answer.trim();
                self.fail(format!("the server {server} is not active: {status:?}"))
            }
            (_, Event::Waited) => self.serve(end, Command::ServerList),
            _ => self.pause_for_server(end),
        }
    }

    fn pause_for_server(&mut self, end: Duration) -> Action {
        let phase = Phase::Serving(end, Command::ServerList);
        self.enter(phase, Action::Wait(PAUSE))
    }

    fn rest(&mut self) -> Action {
        self.enter(Phase::Resting, Action::Wait(ROUND))
    }

    fn begin_round(&mut self) -> Action {
        self.round = self.round.wrapping_add(1);
        self.bad = None;
        self.counted = 0;
        self.ask(VecDeque::from([Command::ServerList]))
    }

    /// Continues with the first question, or ends the round.
    fn ask(&mut self, questions: VecDeque<Command>) -> Action {
        if let Some(question) = questions.front().copied() {
            return self.enter(Phase::Checking(questions), Action::Ask(question));
        }
        match self.bad.take() {
            None => {
                self.bad_rounds = 0;
                self.clients = self.counted;
                self.rest()
            }
            Some(why) => self.end_bad_round(why),
        }
    }

    fn end_bad_round(&mut self, why: String) -> Action {
        self.bad_rounds += 1;
        if self.bad_rounds >= BAD_ROUNDS {
            return self.fail(why);
        }
        self.notes.push(why);
        self.rest()
    }

    fn checked(&mut self, mut questions: VecDeque<Command>, event: Event) -> Action {
        let asked = questions.pop_front();
        let answer = match event {
            Event::Answer(answer) => answer,
            Event::Failed(why) => return self.end_bad_round(why),
            _ => String::new(),
        };
        match asked {
            Some(Command::ServerList) => self.list_questions(&answer, &mut questions),
            Some(Command::ServerStatus(server)) if !control::is_active(&answer) => {
                let status = answer.trim();
                self.bad = Some(format!("the server {server} is not active: {status:?}"));
            }
            Some(Command::ClientList(_)) => self.counted += control::parse_pids(&answer).len(),
            Some(Command::Default(limit)) => self.compare(None, limit, &answer, &mut questions),
            Some(Command::Of(server, limit)) => {
                self.compare(Some(server), limit, &answer, &mut questions);
            }
            _ => {}
        }
        self.ask(questions)
    }

    /// Adds the questions about these servers. A server ends with its last client if the daemon does not serve several users at once,
    /// and when it crashes. The daemon would start another one for the next client, and meanwhile a program without MPS could use the
    /// GPU.
    fn list_questions(&mut self, answer: &str, questions: &mut VecDeque<Command>) {
        self.servers = control::parse_pids(answer);
        if self.servers.is_empty() {
            questions.push_back(Command::StartServer);
            return;
        }
        let compares = self.round.is_multiple_of(LIMIT_ROUNDS);
        for server in self.servers.iter().copied() {
            questions.extend([Command::ServerStatus(server), Command::ClientList(server)]);
            if compares {
                questions.extend([Limit::Memory, Limit::Threads].map(|l| Command::Of(server, l)));
            }
        }
        if compares {
            questions.extend([Limit::Memory, Limit::Threads].map(Command::Default));
        }
    }

    /// Sets a limit again that root has changed with the control program.
    fn compare(
        &mut self,
        server: Option<u32>,
        limit: Limit,
        answer: &str,
        questions: &mut VecDeque<Command>,
    ) {
        let Some(amount) = self.settings.of(limit) else {
            return;
        };
        if limit.parse(answer) == Some(amount) {
            return;
        }
        let command = match server {
            Some(server) => Command::Set(server, limit, amount),
            None => Command::SetDefault(limit, amount),
        };
        let answer = answer.trim();
        self.notes.push(format!(
            "another process changed a limit of the daemon to {answer:?}; setting it again: {command}"
        ));
        questions.push_back(command);
    }

    /// The administrator stops the daemon.
    fn stop(&mut self) -> Action {
        self.public = Public::Stopping;
        self.enter(Phase::Quitting, Action::Ask(Command::Quit(QUIT)))
    }

    fn after_stop(&mut self, phase: &Phase, event: Event) -> Action {
        match phase {
            Phase::Quitting => self.enter(Phase::Killing, Action::Kill),
            Phase::Killing => self.restore(),
            _ => match event {
                Event::Failed(why) => Action::Exit(Some(why)),
                _ => Action::Exit(None),
            },
        }
    }

    fn restore(&mut self) -> Action {
        let mode = Action::SetMode(self.settings.mode_before);
        self.enter(Phase::Restoring, mode)
    }

    fn fail(&mut self, why: String) -> Action {
        self.public = Public::Failed(why);
        let mode = Action::SetMode(ComputeMode::Prohibited);
        self.enter(Phase::FailedClosing, mode)
    }

    fn after_failure(&mut self, phase: &Phase, event: Event) -> Action {
        match phase {
            Phase::FailedClosing => {
                if let Event::Failed(error) = event {
                    self.notes.push(error);
                }
                self.enter(Phase::FailedKilling, Action::Kill)
            }
            // A request to stop may have arrived meanwhile. After a failure, systemd would not restore the mode.
            Phase::FailedKilling => self.enter(Phase::FailedWaiting, Action::Wait(Duration::ZERO)),
            _ if event == Event::Stop => self.restore(),
            _ => match &self.public {
                Public::Failed(why) => Action::Exit(Some(why.clone())),
                _ => Action::Exit(None),
            },
        }
    }
}

#[cfg(test)]
mod tests;
