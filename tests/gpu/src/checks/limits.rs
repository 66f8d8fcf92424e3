//! What a container must not get.

use crate::bench::Bench;
use crate::check::{Outcome, cannot_run, failed};
use crate::checks::host::uuids;
use crate::driver::Gpu;

/// A request for one GPU gives this GPU.
pub fn one_gpu(bench: &Bench) -> Outcome {
    let driver = bench.driver()?;
    let [.., last] = &*driver.gpus else {
        return cannot_run("no GPU was found");
    };
    if driver.gpus.len() == 1 {
        return cannot_run("the machine has one GPU");
    }
    bench.smi()?;
    let script = "nvidia-smi -L; ls /dev";
    let container = bench
        .container("one-gpu")?
        .args(&["sh", "-c", script])
        .gpus(&last.index.to_string(), &driver.config);
    let text = container.run()?.ok()?;
    let listed = uuids(&text);
    let others: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("nvidia"))
        .filter(|minor| minor.parse::<u64>().is_ok_and(|minor| minor != last.minor))
        .collect();
    if listed.first() != Some(&last.uuid)
        || listed
            .iter()
            .any(|uuid| is_of_another(uuid, driver.gpus.as_slice(), last))
    {
        return failed(format!("a request for GPU {} gives {listed:?}", last.index));
    }
    if !others.is_empty() {
        return failed(format!(
            "the container has the nodes of other GPUs: {others:?}"
        ));
    }
    Ok(format!("GPU {} of {}", last.index, driver.gpus.len()))
}

fn is_of_another(uuid: &String, gpus: &[Gpu], own: &Gpu) -> bool {
    gpus.iter()
        .filter(|gpu| gpu.uuid != own.uuid)
        .any(|gpu| gpu.uuid == *uuid || gpu.mig_devices.contains(uuid))
}

/// A request for a MIG device gives this device. The checks create none.
pub fn mig(bench: &Bench) -> Outcome {
    let driver = bench.driver()?;
    let Some(gpu) = driver.gpus.iter().find(|gpu| !gpu.mig_devices.is_empty()) else {
        let mode = if driver.gpus.iter().any(|gpu| gpu.is_mig) {
            ", although a GPU is in MIG mode"
        } else {
            ""
        };
        return cannot_run(format!(
            "the machine has no MIG devices{mode}, and the checks create none"
        ));
    };
    bench.smi()?;
    let Some(wanted) = gpu.mig_devices.last() else {
        return cannot_run("the machine has no MIG devices");
    };
    let container = bench
        .container("mig")?
        .args(&["nvidia-smi", "-L"])
        .gpus(wanted, &driver.config);
    let listed: Vec<_> = uuids(&container.run()?.ok()?)
        .into_iter()
        .filter(|uuid| uuid.starts_with("MIG-"))
        .collect();
    if listed != [wanted.clone()] {
        return failed(format!("a request for {wanted} gives {listed:?}"));
    }
    Ok(format!(
        "one of {} MIG devices of GPU {}",
        gpu.mig_devices.len(),
        gpu.index
    ))
}

/// A container with CAP_MKNOD creates the node of a GPU that it did not request. If there is one GPU, it requests none.
pub fn cgroup(bench: &Bench) -> Outcome {
    let driver = bench.driver()?;
    let [.., other] = &*driver.gpus else {
        return cannot_run("no GPU was found");
    };
    let script = format!(
        "cd /tmp; mknod other c 195 {}; probe-open other",
        other.minor
    );
    let words = ["sh", "-euc", &script];
    let without = bench
        .container("no-gpu")?
        .args(&words)
        .create_nodes()
        .run()?;
    if !without.stdout.contains("other: EPERM") {
        return cannot_run(format!(
            "the runtime denies no devices here: {}{}",
            without.stdout.trim(),
            without.stderr.trim()
        ));
    }
    let request = match &*driver.gpus {
        [first, .., _] => first.uuid.clone(),
        _ => "none".to_owned(),
    };
    let container = bench
        .container("cgroup")?
        .args(&words)
        .create_nodes()
        .gpus(&request, &driver.config);
    let text = container.run()?.ok()?;
    if !text.contains("other: EPERM") {
        return failed(format!(
            "a container that requests {request} opens another GPU: {}",
            text.trim()
        ));
    }
    // Otherwise a container that cannot open any GPU would pass.
    let own = bench
        .container("cgroup")?
        .args(&words)
        .create_nodes()
        .gpus(&other.uuid, &driver.config);
    let text = own.run()?.ok()?;
    if text.contains("EPERM") {
        return failed(format!(
            "a container that requests the GPU cannot open it: {}",
            text.trim()
        ));
    }
    Ok(format!(
        "cgroup {}: a container that requests another GPU or none cannot open a node that it creates",
        bench.machine.cgroup
    ))
}

/// `[devices]` in config.toml denies the GPU.
pub fn denied(bench: &Bench) -> Outcome {
    let driver = bench.driver()?;
    let device = bench.device()?;
    let text = std::fs::read_to_string(&driver.config).map_err(|error| error.to_string())?;
    let config = bench.work.join("denied.toml");
    std::fs::write(&config, format!("{text}\n[devices]\ndeny = [{device:?}]\n"))
        .map_err(|error| error.to_string())?;
    stops(bench, &device, &config)
}

pub fn unknown_gpu(bench: &Bench) -> Outcome {
    let config = bench.driver()?.config.clone();
    stops(bench, "GPU-00000000-0000-0000-0000-000000000000", &config)
}

/// A container with this request does not start, and the message has a number.
fn stops(bench: &Bench, request: &str, config: &std::path::Path) -> Outcome {
    let container = bench
        .container("stops")?
        .args(&["true"])
        .gpus(request, config);
    let ran = container.run()?;
    // crun does not print the messages of hooks.
    let why = bench
        .run(bench.hook()?.args(["why", container.id()]))?
        .stdout;
    let output = format!("{} {} {why}", ran.stdout, ran.stderr);
    let number = output
        .split_once("ONH-")
        .and_then(|(_, rest)| rest.get(..3))
        .map(str::to_owned);
    match number {
        Some(number) if !ran.status.success() => {
            Ok(format!("the container does not start: ONH-{number}"))
        }
        _ => failed(format!(
            "a container that requests {request} ended with {}",
            ran.failure()
        )),
    }
}
