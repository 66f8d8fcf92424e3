use super::*;

const SETTINGS: Settings = Settings {
    memory: Some(2048),
    threads: Some(25),
    mode_before: ComputeMode::Default,
};

/// A machine, and the time in milliseconds.
struct Run {
    machine: Machine,
    now: u64,
}

impl Run {
    fn new(settings: Settings) -> Self {
        Self {
            machine: Machine::new(settings),
            now: 0,
        }
    }

    fn next(&mut self, event: Event) -> Action {
        let action = self.machine.next(event, Duration::from_millis(self.now));
        if let Action::Wait(time) = action {
            self.now += u64::try_from(time.as_millis()).unwrap();
        }
        action
    }

    fn answer(&mut self, text: &str) -> Action {
        self.next(Event::Answer(text.to_owned()))
    }

    /// Continues until the daemon is ready.
    fn until_ready(settings: Settings) -> Self {
        let mut run = Self::new(settings);
        let mut event = Event::Begun;
        loop {
            let action = run.next(event);
            event = match action {
                Action::Ask(command) => Event::Answer(daemon(command).to_owned()),
                Action::Wait(ROUND) => return run,
                Action::Exit(why) => panic!("{why:?}"),
                _ => Event::Done,
            };
        }
    }
}

/// The answers of a daemon that works, and has the limits of [`SETTINGS`] and two clients.
fn daemon(command: Command) -> &'static str {
    match command {
        Command::ServerList => "703\n",
        Command::ServerStatus(703) => "ACTIVE\n",
        Command::ClientList(703) => "750\n751\n",
        Command::Default(Limit::Memory) | Command::Of(703, Limit::Memory) => "2G\n",
        Command::Default(Limit::Threads) | Command::Of(703, Limit::Threads) => "25.0\n",
        _ => "",
    }
}

fn failed(why: &str) -> Event {
    Event::Failed(why.to_owned())
}

fn ask(command: Command) -> Action {
    Action::Ask(command)
}

#[test]
fn the_gpu_is_open_only_with_a_daemon_that_has_its_limits() {
    let mut run = Run::new(SETTINGS);
    let prohibited = Action::SetMode(ComputeMode::Prohibited);
    assert_eq!(run.next(Event::Begun), prohibited);
    assert_eq!(run.next(Event::Done), Action::Start);
    assert_eq!(run.next(Event::Done), ask(Command::ServerList));
    assert_eq!(run.next(failed("not yet")), Action::Wait(PAUSE));
    assert_eq!(run.next(Event::Waited), ask(Command::ServerList));
    let memory = Command::SetDefault(Limit::Memory, 2048);
    assert_eq!(run.answer(""), ask(memory));
    assert_eq!(run.answer(""), ask(Command::Default(Limit::Memory)));
    let threads = Command::SetDefault(Limit::Threads, 25);
    assert_eq!(run.answer("2G\n"), ask(threads));
    assert_eq!(run.answer("25.0\n"), ask(Command::Default(Limit::Threads)));
    let exclusive = Action::SetMode(ComputeMode::ExclusiveProcess);
    assert_eq!(run.answer("25.0\n"), exclusive);
    assert_eq!(run.next(Event::Done), ask(Command::StartServer));
    assert_eq!(run.answer(""), ask(Command::ServerList));
    assert_eq!(run.answer(""), Action::Wait(PAUSE));
    assert_eq!(run.next(Event::Waited), ask(Command::ServerList));
    assert_eq!(run.answer("703\n"), ask(Command::ServerStatus(703)));
    assert_eq!(run.answer("INITIALIZING\n"), Action::Wait(PAUSE));
    assert_eq!(*run.machine.public(), Public::Starting);
    assert_eq!(run.next(Event::Waited), ask(Command::ServerList));
    assert_eq!(run.answer("703\n"), ask(Command::ServerStatus(703)));
    assert_eq!(run.answer("ACTIVE\n"), Action::Announce);
    assert_eq!(*run.machine.public(), Public::Ready);
    assert_eq!(run.next(Event::Done), Action::Wait(ROUND));
    assert_eq!(run.machine.server(), Some(703));
}

#[test]
fn without_limits_nothing_is_set() {
    let settings = Settings {
        memory: None,
        threads: None,
        ..SETTINGS
    };
    let mut run = Run::new(settings);
    run.next(Event::Begun);
    run.next(Event::Done);
    assert_eq!(run.next(Event::Done), ask(Command::ServerList));
    let exclusive = Action::SetMode(ComputeMode::ExclusiveProcess);
    assert_eq!(run.answer(""), exclusive);
}

/// Runs the end after a failure, and returns the reason.
fn end(run: &mut Run, action: Action) -> String {
    assert_eq!(action, Action::SetMode(ComputeMode::Prohibited));
    let Public::Failed(public) = run.machine.public().clone() else {
        panic!("{:?}", run.machine.public());
    };
    assert_eq!(run.next(Event::Done), Action::Kill);
    assert_eq!(run.next(Event::Done), Action::Wait(Duration::ZERO));
    let exit = run.next(Event::Waited);
    assert_eq!(exit, Action::Exit(Some(public.clone())));
    public
}

#[test]
fn a_daemon_that_does_not_start_is_given_up() {
    let mut run = Run::new(SETTINGS);
    run.next(Event::Begun);
    run.next(Event::Done);
    run.next(Event::Done);
    let mut action = run.next(failed("no daemon"));
    while action == Action::Wait(PAUSE) {
        run.next(Event::Waited);
        action = run.next(failed("no daemon"));
    }
    let why = end(&mut run, action);
    assert_eq!(why, "the daemon does not answer after its start: no daemon");
    assert!((10_000..10_200).contains(&run.now), "{}", run.now);
}

#[test]
fn a_server_that_does_not_start_is_given_up() {
    for (list, why) in [
        ("", "the server does not start"),
        ("703", "the server 703 is not active: \"FAULT\""),
    ] {
        let mut run = Run::new(SETTINGS);
        let mut event = Event::Begun;
        let action = loop {
            let action = run.next(event);
            event = match &action {
                Action::Ask(Command::ServerList) => Event::Answer(list.to_owned()),
                Action::Ask(Command::ServerStatus(_)) => Event::Answer("FAULT\n".to_owned()),
                Action::Ask(command) => Event::Answer(daemon(*command).to_owned()),
                Action::Wait(_) => Event::Waited,
                _ => Event::Done,
            };
            if matches!(run.machine.public(), Public::Failed(_)) {
                break action;
            }
        };
        assert_eq!(end(&mut run, action), why);
        assert!((60_000..61_000).contains(&run.now), "{}", run.now);
    }
}

#[test]
fn a_limit_that_the_daemon_does_not_take_is_a_failure() {
    let mut run = Run::new(SETTINGS);
    run.next(Event::Begun);
    run.next(Event::Done);
    run.next(Event::Done);
    run.answer("");
    run.answer("Insufficient privileges");
    let action = run.answer("\n");
    let why = end(&mut run, action);
    assert!(
        why.starts_with("the daemon did not take its limit: get_default"),
        "{why}"
    );
}

/// Runs a round, and returns the action after it.
fn round(run: &mut Run, daemon: impl Fn(Command) -> Event) -> (Action, Vec<Command>) {
    let mut asked = Vec::new();
    let mut action = run.next(Event::Waited);
    while let Action::Ask(command) = action {
        asked.push(command);
        action = run.next(daemon(command));
    }
    (action, asked)
}

fn works(command: Command) -> Event {
    Event::Answer(daemon(command).to_owned())
}

#[test]
fn a_round_counts_clients_and_sometimes_compares_limits() {
    let mut run = Run::until_ready(SETTINGS);
    for number in 1..=LIMIT_ROUNDS {
        let (action, asked) = round(&mut run, works);
        assert_eq!(action, Action::Wait(ROUND));
        let expected = if number == LIMIT_ROUNDS { 7 } else { 3 };
        assert_eq!(asked.len(), expected, "{asked:?}");
        assert_eq!(run.machine.clients(), 2);
    }
    assert_eq!(run.machine.take_notes(), [""; 0]);
}

#[test]
fn limits_that_root_changed_are_set_again() {
    let mut run = Run::until_ready(SETTINGS);
    run.machine.round = LIMIT_ROUNDS - 1;
    let (action, asked) = round(&mut run, |command| match command {
        Command::Default(Limit::Memory) => Event::Answer("4G".to_owned()),
        Command::Of(_, Limit::Threads) => Event::Answer("100.0".to_owned()),
        command => works(command),
    });
    assert_eq!(action, Action::Wait(ROUND));
    let set = [
        Command::Set(703, Limit::Threads, 25),
        Command::SetDefault(Limit::Memory, 2048),
    ];
    assert!(asked.ends_with(&set), "{asked:?}");
    assert_eq!(run.machine.take_notes().len(), 2);
}

#[test]
fn a_server_that_ended_is_started_again() {
    let mut run = Run::until_ready(SETTINGS);
    let (action, asked) = round(&mut run, |_| Event::Answer(String::new()));
    assert_eq!(action, Action::Wait(ROUND));
    assert_eq!(asked, [Command::ServerList, Command::StartServer]);
    assert_eq!(run.machine.server(), None);
}

#[test]
fn two_bad_rounds_in_a_row_are_a_failure() {
    let fault = |command| match command {
        Command::ServerStatus(_) => Event::Answer("FAULT".to_owned()),
        command => works(command),
    };
    let hangs = |_| failed("no answer within 5 s");
    let mut run = Run::until_ready(SETTINGS);
    for _ in 0..3 {
        assert_eq!(round(&mut run, fault).0, Action::Wait(ROUND));
        assert_eq!(round(&mut run, works).0, Action::Wait(ROUND));
        assert_eq!(run.machine.take_notes().len(), 1);
    }
    assert_eq!(round(&mut run, fault).0, Action::Wait(ROUND));
    let action = round(&mut run, fault).0;
    let why = end(&mut run, action);
    assert_eq!(why, "the server 703 is not active: \"FAULT\"");
    let mut run = Run::until_ready(SETTINGS);
    assert_eq!(round(&mut run, hangs).0, Action::Wait(ROUND));
    let action = round(&mut run, hangs).0;
    assert_eq!(end(&mut run, action), "no answer within 5 s");
}

#[test]
fn a_daemon_that_ends_is_a_failure_at_once() {
    let mut run = Run::until_ready(SETTINGS);
    let action = run.next(Event::Ended("SIGKILL".to_owned()));
    assert_eq!(end(&mut run, action), "the daemon ended (SIGKILL)");
    // The GPU cannot be closed, for example because it is lost: the daemon is killed all the same.
    let mut run = Run::until_ready(SETTINGS);
    run.next(Event::Ended("SIGKILL".to_owned()));
    assert_eq!(run.next(failed("GPU is lost")), Action::Kill);
    assert_eq!(run.machine.take_notes(), ["GPU is lost"]);
}

#[test]
fn a_stop_restores_the_mode() {
    let settings = Settings {
        mode_before: ComputeMode::ExclusiveThread,
        ..SETTINGS
    };
    let restored = Action::SetMode(ComputeMode::ExclusiveThread);
    let mut run = Run::until_ready(settings);
    assert_eq!(run.next(Event::Stop), ask(Command::Quit(QUIT)));
    assert_eq!(*run.machine.public(), Public::Stopping);
    assert_eq!(run.next(failed("no answer")), Action::Kill);
    assert_eq!(run.next(Event::Done), restored);
    assert_eq!(run.next(Event::Done), Action::Exit(None));
    // The mode cannot be restored.
    let mut run = Run::until_ready(settings);
    run.next(Event::Stop);
    run.answer("");
    run.next(Event::Done);
    let exit = Action::Exit(Some("GPU is lost".to_owned()));
    assert_eq!(run.next(failed("GPU is lost")), exit);
}

#[test]
fn a_stop_after_a_failure_restores_the_mode() {
    let mut run = Run::until_ready(SETTINGS);
    run.next(Event::Ended("SIGKILL".to_owned()));
    run.next(Event::Done);
    run.next(Event::Done);
    let restored = Action::SetMode(ComputeMode::Default);
    assert_eq!(run.next(Event::Stop), restored);
    assert_eq!(run.next(Event::Done), Action::Exit(None));
}

#[test]
fn a_gpu_that_cannot_be_closed_starts_no_daemon() {
    let mut run = Run::new(SETTINGS);
    run.next(Event::Begun);
    let exit = Action::Exit(Some("not permitted".to_owned()));
    assert_eq!(run.next(failed("not permitted")), exit);
}
