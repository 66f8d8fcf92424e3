//! How long starts take, compared with starts of the same container without a GPU.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::bench::Bench;
use crate::check::{Outcome, Stop, cannot_run, failed};
use crate::driver::Gpu;

const STARTS: usize = 10;
const AT_ONCE: usize = 20;

/// The file with the cached inventory in the hook's directory.
const CACHE: &str = "/run/oci-nvidia-hook";

/// Returns the times of starts without and with all GPUs, alternating.
fn measure(
    bench: &Bench,
    before: fn() -> Result<(), String>,
) -> Result<(Vec<Duration>, Vec<Duration>), Stop> {
    let driver = bench.driver()?;
    let start = |has_gpus: bool| -> Result<Duration, Stop> {
        let container = bench.container("time")?.args(&["true"]);
        let container = if has_gpus {
            container.gpus("all", &driver.config)
        } else {
            container
        };
        let ran = container.run()?;
        let time = ran.time;
        ran.ok()?;
        Ok(time)
    };
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..STARTS {
        without.push(start(false)?);
        before()?;
        with.push(start(true)?);
    }
    Ok((without, with))
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn report((mut without, mut with): (Vec<Duration>, Vec<Duration>)) -> String {
    let slowest = with.iter().max().copied().unwrap_or_default();
    let (base, own) = (median(&mut without), median(&mut with));
    format!(
        "medians of {STARTS}: {} ms with all GPUs, {} ms without ({:.1} times); the slowest {} ms",
        own.as_millis(),
        base.as_millis(),
        own.as_secs_f64() / base.as_secs_f64().max(1e-9),
        slowest.as_millis()
    )
}

pub fn warm(bench: &Bench) -> Outcome {
    if bench.driver()?.gpus.iter().any(Gpu::lacks_mig_devices) {
        return cannot_run("the inventory is not cached while a GPU in MIG mode has no MIG device");
    }
    bench.run(bench.hook()?.arg("info"))?.ok()?;
    Ok(report(measure(bench, || Ok(()))?))
}

pub fn cold(bench: &Bench) -> Outcome {
    bench.isolated()?;
    Ok(report(measure(bench, forget)?))
}

/// Removes the cached inventories. The directory belongs to the mount namespace.
fn forget() -> Result<(), String> {
    for entry in std::fs::read_dir(Path::new(CACHE))
        .into_iter()
        .flatten()
        .flatten()
    {
        if entry.file_name().to_string_lossy().starts_with("inventory") {
            std::fs::remove_file(entry.path()).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

/// The first of them asks NVML, and the others wait for it or ask too.
pub fn at_once(bench: &Bench) -> Outcome {
    bench.isolated()?;
    bench.smi()?;
    forget()?;
    let driver = bench.driver()?;
    let count = driver.gpus.len();
    let begun = Instant::now();
    let containers: Result<Vec<_>, Stop> = (0..AT_ONCE)
        .map(|number| {
            let container = bench.container(&format!("at-once-{number}"))?;
            Ok(container
                .args(&["nvidia-smi", "-L"])
                .gpus("all", &driver.config))
        })
        .collect();
    let containers = containers?;
    let results: Vec<Result<String, String>> = std::thread::scope(|scope| {
        let started: Vec<_> = containers
            .iter()
            .map(|container| scope.spawn(|| container.run()?.ok()))
            .collect();
        let ended = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err("a panic".to_owned()))
        };
        started.into_iter().map(ended).collect()
    });
    for result in results {
        let listed = result?
            .lines()
            .filter(|line| line.starts_with("GPU "))
            .count();
        if listed != count {
            return failed(format!("one of them has {listed} GPUs instead of {count}"));
        }
    }
    Ok(format!(
        "all have {count} GPUs; together {} ms",
        begun.elapsed().as_millis()
    ))
}
