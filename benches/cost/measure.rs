//! Times of programs: each in turn, in the same run, so that what else the machine does meets all of them.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Something to be timed: it gets ready, and then says how long the rest took.
pub struct Case<'a> {
    pub name: String,
    run: Box<dyn FnMut() -> Duration + 'a>,
    times: Vec<Duration>,
}

impl<'a> Case<'a> {
    pub fn new(name: impl Into<String>, run: impl FnMut() -> Duration + 'a) -> Self {
        Self { name: name.into(), run: Box::new(run), times: Vec::new() }
    }

    pub fn median(&self) -> Duration {
        self.at(50)
    }

    /// The value below which so many hundredths lie.
    fn at(&self, percent: usize) -> Duration {
        let mut times = self.times.clone();
        times.sort();
        times[(times.len() - 1) * percent / 100]
    }
}

/// Runs all, one after the other, so often.
pub fn take_turns(cases: &mut [Case<'_>], rounds: usize) {
    for _ in 0..rounds {
        for case in &mut *cases {
            let time = (case.run)();
            case.times.push(time);
        }
    }
}

/// Median, and where the middle four fifths lie, in milliseconds, and the ratio to the first one.
pub fn print(cases: &[Case<'_>]) {
    let first = cases[0].median();
    for case in cases {
        let ratio = case.median().as_secs_f64() / first.as_secs_f64();
        println!(
            "{:<44} {:>9.3} ms  ({:.3} – {:.3})  {ratio:>8.2}",
            case.name,
            ms(case.median()),
            ms(case.at(10)),
            ms(case.at(90))
        );
    }
    println!();
}

pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// From the start of a program to its end.
pub fn time(command: &mut Command) -> Duration {
    command.stdout(Stdio::null());
    let start = Instant::now();
    let status = command.status().unwrap();
    let time = start.elapsed();
    assert!(status.success(), "{command:?}");
    time
}

/// From the start of the first of these programs to the end of the last.
pub fn time_all(mut commands: Vec<Command>) -> Duration {
    let start = Instant::now();
    let started: Vec<_> = commands.iter_mut().map(|command| command.stdout(Stdio::null()).spawn().unwrap()).collect();
    for mut program in started {
        assert!(program.wait().unwrap().success());
    }
    start.elapsed()
}

/// The most memory that a program had resident, in KiB: read while strace holds it back at its end.
pub fn peak_rss(words: &[String], stdin: std::fs::File) -> u64 {
    let mut strace = Command::new("strace");
    strace.args(["-qq", "-o", "/dev/null", "-e", "trace=exit_group", "-e", "inject=exit_group:delay_enter=400000"]);
    let mut strace =
        strace.args(words).env_clear().env("PATH", "/usr/bin:/bin").stdin(stdin).stdout(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(250));
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", strace.id())).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", children.trim())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    assert!(strace.wait().unwrap().success());
    peak.trim().trim_end_matches(" kB").parse().unwrap()
}
