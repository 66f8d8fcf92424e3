//! The tests that take longest, which are printed at the end of a complete run.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How many are printed. A run with fewer tests prints none.
const COUNT: usize = 10;

static TIMES: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// Calls a test and notes its time, if it passes.
pub fn timed(name: &str, test: fn()) {
    let start = Instant::now();
    test();
    TIMES
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push((start.elapsed(), name.to_owned()));
}

/// Prints the slowest tests.
pub fn print() {
    let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
    if times.len() > COUNT {
        times.sort();
        println!("slowest tests:");
        times
            .iter()
            .rev()
            .take(COUNT)
            .for_each(|(time, name)| println!("{:6.1} s  {name}", time.as_secs_f64()));
    }
}
