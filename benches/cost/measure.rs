//! Measures programs in turn, so that other load on the machine affects all of them.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::resource::{Usage, UsageWho, getrusage};
use nix::sys::time::{TimeVal, TimeValLike};

/// The duration, the CPU time and the page faults of a run. Other programs increase only the duration.
#[derive(Clone, Copy)]
pub struct Took {
    pub wall: Duration,
    pub cpu: Duration,
    pub faults: i64,
}

/// A measured case. `run` prepares itself, and returns the time of the rest.
pub struct Case<'a> {
    pub name: String,
    run: Box<dyn FnMut() -> Took + 'a>,
    times: Vec<Took>,
}

impl<'a> Case<'a> {
    pub fn new(name: impl Into<String>, run: impl FnMut() -> Took + 'a) -> Self {
        Self {
            name: name.into(),
            run: Box::new(run),
            times: Vec::new(),
        }
    }

    pub fn median(&self) -> Duration {
        self.at(50, |took| took.wall)
    }

    /// Drops what was measured so far.
    pub fn forget(&mut self) {
        self.times.clear();
    }

    /// Returns the median of the CPU time.
    pub fn cpu(&self) -> Duration {
        self.at(50, |took| took.cpu)
    }

    /// Returns the median of the ratios to another case in the same rounds. Other load on the machine affects all cases of a round, so
    /// these ratios can be repeated within a few percent, while the ratio of two medians cannot.
    pub fn ratio(&self, base: &Self, of: fn(&Took) -> Duration) -> f64 {
        let mut ratios = Vec::new();
        for (took, base) in self.times.iter().zip(&base.times) {
            ratios.push(of(took).as_secs_f64() / of(base).as_secs_f64());
        }
        ratios.sort_by(f64::total_cmp);
        ratios[(ratios.len() - 1) / 2]
    }

    /// Returns the median of the page faults.
    fn faults(&self) -> i64 {
        let mut faults: Vec<_> = self.times.iter().map(|took| took.faults).collect();
        faults.sort_unstable();
        faults[(faults.len() - 1) / 2]
    }

    /// Returns a percentile.
    fn at(&self, percent: usize, of: fn(&Took) -> Duration) -> Duration {
        let mut times: Vec<_> = self.times.iter().map(of).collect();
        times.sort();
        times[(times.len() - 1) * percent / 100]
    }
}

/// Runs all cases in turn, `rounds` times.
pub fn take_turns(cases: &mut [Case<'_>], rounds: usize) {
    for _ in 0..rounds {
        for case in &mut *cases {
            let time = (case.run)();
            case.times.push(time);
        }
    }
}

/// Prints the median, the first and last decile, and the CPU time in milliseconds, with the ratios to the first case, and the page faults.
pub fn print(cases: &[Case<'_>]) {
    for case in cases {
        println!(
            "{:<42} {:>9.3} ms ({:.3} – {:.3}) {:>7.2} x   cpu {:>8.3} ms {:>7.2} x {:>7} faults",
            case.name,
            ms(case.median()),
            ms(case.at(10, |took| took.wall)),
            ms(case.at(90, |took| took.wall)),
            case.ratio(&cases[0], |took| took.wall),
            ms(case.cpu()),
            case.ratio(&cases[0], |took| took.cpu),
            case.faults(),
        );
    }
    println!();
}

/// Describes the machine, without which times mean nothing.
pub fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let model = model
        .unwrap_or_default()
        .trim_start_matches(['\t', ' ', ':']);
    format!("{cores} cores, {model}, Linux {}", kernel.trim())
}

pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Returns the time from the start of a program to its end.
pub fn time(command: &mut Command) -> Took {
    command.stdout(Stdio::null());
    took(|| assert!(command.status().unwrap().success(), "{command:?}"))
}

/// Starts all programs, and returns the time until the last one ends.
pub fn time_all(mut commands: Vec<Command>) -> Took {
    took(|| {
        let start = |command: &mut Command| command.stdout(Stdio::null()).spawn().unwrap();
        let started: Vec<_> = commands.iter_mut().map(start).collect();
        for mut program in started {
            assert!(program.wait().unwrap().success());
        }
    })
}

/// Measures `run`, including the programs that it starts and waits for.
pub fn took(run: impl FnOnce()) -> Took {
    let (before, start) = (of_children(), Instant::now());
    run();
    let (wall, after) = (start.elapsed(), of_children());
    Took {
        wall,
        cpu: cpu(&after) - cpu(&before),
        faults: after.minor_page_faults() - before.minor_page_faults(),
    }
}

fn of_children() -> Usage {
    getrusage(UsageWho::RUSAGE_CHILDREN).unwrap()
}

fn cpu(usage: &Usage) -> Duration {
    let time =
        |time: TimeVal| Duration::from_micros(u64::try_from(time.num_microseconds()).unwrap());
    time(usage.user_time()) + time(usage.system_time())
}

/// Returns the peak resident memory of a program in KiB, read while strace delays its exit.
pub fn peak_rss(words: &[String], stdin: std::fs::File) -> u64 {
    let mut strace = Command::new("strace");
    strace.args([
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=exit_group",
        "-e",
        "inject=exit_group:delay_enter=400000",
    ]);
    let mut strace = strace
        .args(words)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .stdin(stdin)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(250));
    let children =
        std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", strace.id())).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", children.trim())).unwrap();
    let peak = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    assert!(strace.wait().unwrap().success());
    peak.trim().trim_end_matches(" kB").parse().unwrap()
}
