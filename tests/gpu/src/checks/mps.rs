//! Containers that share a GPU through the MPS daemon of the driver, which `oci-nvidia-mps` runs.

use std::time::{Duration, Instant};

use crate::bench::Bench;
use crate::check::{Outcome, Stop, failed};
use crate::checks::containers::{USER, edits};
use crate::container::Container;
use crate::shared_gpu::{MEMORY_MIB, PERCENTAGE, SharedGpu};

/// Memory that two clients can have at the same time.
const FITS: u64 = 1000;
/// How long the clients run that others end.
const LONG: &str = "60";

/// What a CUDA program may use of a GPU, as `cuda-check` prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    multiprocessors: u64,
    free_mib: u64,
}

/// Parses the line `multiprocessors N, compute mode N, free N MiB`.
fn share(output: &str) -> Option<Share> {
    let line = output
        .lines()
        .find(|line| line.starts_with("multiprocessors "))?;
    let numbers: Vec<u64> = line
        .split(' ')
        .filter_map(|word| word.trim_end_matches(',').parse().ok())
        .collect();
    match *numbers {
        [multiprocessors, _, free_mib] => Some(Share {
            multiprocessors,
            free_mib,
        }),
        _ => None,
    }
}

/// Checks that a program has no more than its limits. The driver gives multiprocessors in groups.
fn is_limited(output: &str, whole: Share) -> Result<Share, Stop> {
    let Some(share) = share(output) else {
        return failed(format!("a client of MPS prints {output:?}"));
    };
    let most = whole.multiprocessors * PERCENTAGE / 100 + 2;
    if share.multiprocessors > most || share.free_mib > MEMORY_MIB {
        return failed(format!(
            "a client with limits may use {} of {} multiprocessors and {} MiB",
            share.multiprocessors, whole.multiprocessors, share.free_mib
        ));
    }
    Ok(share)
}

/// The command of a container that allocates memory and uses it for this time.
fn use_memory(mib: u64, seconds: &str) -> [String; 4] {
    let words = ["cuda-check", "memory", &mib.to_string(), seconds];
    words.map(str::to_owned)
}

/// A container that gets the GPU from the hook.
fn by_hook<'a>(
    bench: &'a Bench,
    name: &str,
    shared: &SharedGpu<'_>,
    words: &[String],
) -> Result<Container<'a>, Stop> {
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let container = bench.container(name)?.args(&words);
    Ok(container.gpus(&shared.gpu.uuid, &shared.config))
}

/// Runs the program without MPS, on the host. It shows what the GPU has.
fn on_host(bench: &Bench) -> Result<Share, Stop> {
    let mut program = bench
        .driver()?
        .on_host(&bench.options.program("cuda-check"));
    program.env("CUDA_VISIBLE_DEVICES", &bench.whole_gpu()?.uuid);
    let text = bench.run(program.args(["memory", "64", "0"]))?.ok()?;
    match share(&text) {
        Some(share) => Ok(share),
        None => failed(format!("a CUDA program on the host prints {text:?}")),
    }
}

/// One container has the GPU from the hook, the other one from CDI. Where the daemon serves several users, their users differ.
pub fn limits(bench: &Bench) -> Outcome {
    let (whole, begun) = (on_host(bench)?, Instant::now());
    let shared = SharedGpu::start(bench)?;
    let ready = begun.elapsed();
    let user = match shared.state()["multi_user"] == true {
        true => USER,
        false => 0,
    };
    let mut first = by_hook(bench, "mps-hook", &shared, &use_memory(FITS, LONG))?.start()?;
    if !first.wait_for("allocated", bench.left()) {
        return failed(first.wait(Duration::ZERO)?.failure());
    }
    let add = "cuda-check vector-add /cuda/kernels.ptx && cuda-check memory 1000 0";
    let second = bench
        .container("mps-cdi")?
        .args(&["sh", "-euc", add])
        .user(user)
        .edits(edits(bench, &shared.config, &shared.gpu.uuid)?);
    let text = second.run()?.ok()?;
    let share = is_limited(&text, whole)?;
    if !text.contains("Test PASSED") || !text.contains("allocated 1000 MiB") {
        return failed(format!("a client next to another one prints {text:?}"));
    }
    let beyond = by_hook(bench, "mps-beyond", &shared, &use_memory(MEMORY_MIB, "0"))?.run()?;
    if beyond.status.success() || !beyond.stdout.contains("CUDA_ERROR_OUT_OF_MEMORY") {
        return failed(format!(
            "an allocation beyond the limit ends with {}",
            beyond.failure()
        ));
    }
    match on_host(bench) {
        Err(Stop::Failed(why)) if why.contains("CUDA_ERROR_") => {}
        other => {
            return failed(format!(
                "a program that is not a client of MPS gets {other:?}"
            ));
        }
    }
    drop(first);
    shared.stop()?;
    Ok(format!(
        "{} of {} multiprocessors and {} of {} MiB for each client, users 0 and {user}; more memory is refused, and a program without MPS; \
         ready after {} ms, and the compute mode is restored",
        share.multiprocessors,
        whole.multiprocessors,
        share.free_mib,
        whole.free_mib,
        ready.as_millis()
    ))
}

pub fn client_killed(bench: &Bench) -> Outcome {
    let shared = SharedGpu::start(bench)?;
    let mut killed = by_hook(bench, "mps-killed", &shared, &use_memory(FITS, LONG))?.start()?;
    let mut other = by_hook(bench, "mps-other", &shared, &use_memory(FITS, "3"))?.start()?;
    for container in [&mut killed, &mut other] {
        if !container.wait_for("allocated", bench.left()) {
            return failed("two clients of MPS do not run at the same time");
        }
    }
    let server = shared.state()["server"].clone();
    killed.kill()?;
    let ran = killed.wait(bench.left())?;
    if ran.status.success() {
        return failed("a killed client succeeds");
    }
    let text = other.wait(bench.left())?.ok()?;
    if !text.ends_with("done\n") {
        return failed(format!("the other client prints {text:?}"));
    }
    let next = by_hook(bench, "mps-next", &shared, &use_memory(FITS, "0"))?.run()?;
    next.ok()?;
    if shared.state()["server"] != server {
        return failed("the server is another one after a client was killed");
    }
    shared.stop()?;
    Ok("the other client and the next one run with the same server".to_owned())
}

/// What the driver does without the supervisor: programs find no daemon, and use the GPU without limits.
pub fn daemon_killed(bench: &Bench) -> Outcome {
    let whole = on_host(bench)?;
    let mut shared = SharedGpu::start(bench)?;
    // A container that runs already has the directory of the daemon, and starts another program after the daemon's end.
    let script = "cuda-check memory 64 0 >/dev/null && echo ready; sleep 4; cuda-check memory 64 0";
    let words = ["sh", "-c", script].map(str::to_owned);
    let mut running = by_hook(bench, "mps-running", &shared, &words)?.start()?;
    if !running.wait_for("ready", bench.left()) {
        return failed("a client of MPS does not run");
    }
    let killed = Instant::now();
    shared.kill_daemon()?;
    let closed = killed.elapsed();
    let mode = shared.mode()?;
    if mode != "Prohibited" {
        return failed(format!(
            "the compute mode is {mode:?} after the daemon was killed"
        ));
    }
    let next = by_hook(bench, "mps-without", &shared, &use_memory(64, "0"))?.run()?;
    if next.status.success() || next.stdout.contains("allocated") {
        return failed(format!(
            "a container uses the GPU without its daemon: {}",
            next.stdout
        ));
    }
    let after = running.wait(bench.left())?;
    if after.status.success() {
        return failed(format!(
            "a program uses the GPU without limits: {}",
            after.stdout
        ));
    }
    shared.supervise()?;
    let again = by_hook(bench, "mps-again", &shared, &use_memory(FITS, "0"))?.run()?;
    is_limited(&again.ok()?, whole)?;
    shared.stop()?;
    Ok(format!(
        "closed after at most {} ms, for new containers and for those that run; limited again after the restart",
        closed.as_millis()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Share = Share {
        multiprocessors: 132,
        free_mib: 142_629,
    };

    #[test]
    fn shares_are_parsed_and_compared_with_the_limits() {
        let line = |multiprocessors, free| {
            format!(
                "CUDA 13.0, 1 devices\nmultiprocessors {multiprocessors}, compute mode 3, free {free} MiB\n"
            )
        };
        assert_eq!(share(&line(132, 142_629)), Some(WHOLE));
        assert!(is_limited(&line(52, 1830), WHOLE).is_ok());
        for output in [line(132, 1830), line(52, 142_629), String::new()] {
            assert!(is_limited(&output, WHOLE).is_err(), "{output}");
        }
    }
}
