//! A check and its verdict, and how the checks are performed.

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bench::Bench;
use crate::checks;
use crate::options::Options;

/// Why a check did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The program that is checked does not work.
    Failed(String),
    /// The machine lacks something that the check needs.
    CannotRun(String),
}

/// An error is a failure, unless a check knows better.
impl From<String> for Stop {
    fn from(error: String) -> Self {
        Self::Failed(error)
    }
}

/// What was seen, or why the check did not pass.
pub type Outcome = Result<String, Stop>;

/// A failure with this text.
pub fn failed<T>(why: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Failed(why.into()))
}

/// A check that cannot run on this machine.
pub fn cannot_run<T>(why: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::CannotRun(why.into()))
}

/// A check.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    pub name: &'static str,
    /// What it checks, for the report
    pub about: &'static str,
    /// The time limit in seconds
    pub limit: u64,
    pub run: fn(&Bench) -> Outcome,
}

/// The time that a check gets at least: with less, the rest of the total time is not worth an attempt.
const LEAST: Duration = Duration::from_secs(2);

/// Performs the checks in this process, and prints a line of JSON for the machine and for each check.
///
/// # Errors
/// If an option names a check that does not exist, or the process that reads the lines has ended.
pub fn perform(options: &Options) -> Result<bool, String> {
    let known = |name: &String| checks::ALL.iter().any(|check| check.name == name);
    if let Some(unknown) = options.only.iter().find(|name| !known(name)) {
        return Err(format!("unknown check \"{unknown}\"; hint: --list"));
    }
    let end = Instant::now() + options.time;
    let mut bench = Bench::new(options, end);
    print_line(&json!({ "machine": bench.description(), "secrets": bench.secrets() }))?;
    for check in checks::ALL
        .iter()
        .filter(|check| options.only.is_empty() || is_selected(options, check))
    {
        print_line(&json!({ "begun": check.name }))?;
        let begun = Instant::now();
        let left = end.saturating_duration_since(begun);
        let outcome = if left < LEAST {
            cannot_run(format!(
                "the time limit of {} s was reached",
                options.time.as_secs()
            ))
        } else {
            bench.begin(begun + left.min(Duration::from_secs(check.limit)));
            (check.run)(&bench)
        };
        print_line(&result(check, &outcome, begun.elapsed()))?;
    }
    Ok(true)
}

fn is_selected(options: &Options, check: &Check) -> bool {
    options.only.iter().any(|name| name == check.name)
}

/// Returns the result of a check as the report has it.
pub fn result(check: &Check, outcome: &Outcome, time: Duration) -> Value {
    let (verdict, text) = match outcome {
        Ok(seen) => ("passed", seen),
        Err(Stop::Failed(why)) => ("failed", why),
        Err(Stop::CannotRun(why)) => ("cannot run", why),
    };
    json!({
        "check": check.name,
        "about": check.about,
        "verdict": verdict,
        "seen": text,
        "seconds": (time.as_secs_f64() * 100.0).round() / 100.0,
    })
}

fn print_line(line: &Value) -> Result<(), String> {
    writeln!(std::io::stdout(), "{line}").map_err(|error| format!("cannot print: {error}"))
}
