//! Measures the hook for a container that requests no GPU, relative to `/bin/true`. Both are started in turn.
//!
//! `cargo bench --bench start [-- OTHER-BUILD-OF-THE-HOOK...]`
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "a program for developers, which ends at the first surprise"
)]

use std::fs::File;
use std::process::Command;
use std::time::{Duration, Instant};

const RUNS: usize = 1500;

fn main() {
    let dir = tempfile::tempdir().unwrap();
    let spec = r#"{"ociVersion":"1.0.2","process":{"args":["sh"],"env":["PATH=/bin"]},"root":{"path":"/tmp"}}"#;
    std::fs::write(dir.path().join("config.json"), spec).unwrap();
    let state = serde_json::json!({"id": "bench", "pid": std::process::id(), "bundle": dir.path()});
    let stdin = dir.path().join("state");
    std::fs::write(&stdin, state.to_string()).unwrap();

    let others = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"));
    let hooks = [env!("CARGO_BIN_EXE_oci-nvidia-hook").to_owned()]
        .into_iter()
        .chain(others);
    let mut programs = vec![("/bin/true".to_owned(), Vec::new())];
    programs.extend(hooks.map(|hook| (hook, Vec::new())));
    for _ in 0..RUNS {
        for (program, times) in &mut programs {
            let mut command = Command::new(&*program);
            command
                .arg("prestart")
                .env_clear()
                .stdin(File::open(&stdin).unwrap());
            let start = Instant::now();
            assert!(command.status().unwrap().success(), "{program}");
            times.push(start.elapsed());
        }
    }
    let baseline = tenth(&mut programs[0].1);
    for (program, times) in &mut programs {
        let tenth = tenth(times);
        let ratio = tenth.as_secs_f64() / baseline.as_secs_f64();
        println!(
            "{:.3} ms  {ratio:.2} x /bin/true  {program}",
            tenth.as_secs_f64() * 1e3
        );
    }
}

/// Returns the first decile. Other programs on the machine delay the slower runs by more than the hook varies.
fn tenth(times: &mut [Duration]) -> Duration {
    times.sort();
    times[times.len() / 10]
}
