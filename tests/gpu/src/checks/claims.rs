//! The DRA driver next to a fake kubelet and a fake API server.

use std::time::{Duration, Instant};

use crate::bench::Bench;
use crate::cdi;
use crate::check::{Outcome, Stop, failed};
use crate::checks::host::uuids;
use crate::checks::node;
use crate::kubelet::{Kubelet, kept_spec};

const DRIVER: &str = "gpu.nvidia.com";

/// The CDI spec that the driver keeps.
const SPEC: &str = "k8s.gpu.nvidia.com-gpu.json";

fn start(bench: &Bench, name: &str, more: &[&str]) -> Result<Kubelet, Stop> {
    let kubeconfig = format!(
        "--kubeconfig={}",
        bench.work.join(name).join("node/kubelet.conf").display()
    );
    let options = [&["--interface=dra", &kubeconfig], more].concat();
    Kubelet::start(bench, name, &["--claims"], &options)
}

/// The names of the devices of whole GPUs.
fn names(bench: &Bench) -> Result<Vec<String>, Stop> {
    let whole = bench.driver()?.gpus.iter().filter(|gpu| !gpu.is_mig);
    Ok(whole.map(|gpu| format!("gpu-{}", gpu.minor)).collect())
}

/// Waits until the devices of whole GPUs are published without taints, and returns their number.
fn free(bench: &Bench, kubelet: &mut Kubelet, limit: Duration) -> Result<usize, Stop> {
    let whole = names(bench)?;
    kubelet.wait(|line| are_free(line, &whole), bench.left().min(limit))?;
    Ok(whole.len())
}

/// Waits for the first slice, which must have all whole GPUs, or the next one must.
fn published(bench: &Bench, kubelet: &mut Kubelet) -> Result<usize, Stop> {
    let first = kubelet.wait(
        |line| !devices_of(line).is_empty(),
        bench.left().min(node::STARTED),
    )?;
    let whole = names(bench)?;
    if are_free(&first, &whole) {
        return Ok(whole.len());
    }
    free(bench, kubelet, node::SETTLED).map_err(|error| match error {
        Stop::Failed(error) => Stop::Failed(format!(
            "the first slice has {:?}; {error}",
            devices_of(&first)
        )),
        other => other,
    })
}

fn are_free(line: &str, names: &[String]) -> bool {
    let found = devices_of(line);
    names
        .iter()
        .all(|name| found.contains(&(name.clone(), true)))
        && found.iter().all(|(_, is_free)| *is_free)
}

/// The devices of a line `published NAME=Free…`, and whether each is free of taints.
fn devices_of(line: &str) -> Vec<(String, bool)> {
    let words = line
        .strip_prefix("published ")
        .into_iter()
        .flat_map(|rest| rest.split(' '));
    words
        .filter_map(|word| word.split_once('='))
        .map(|(name, state)| (name.to_owned(), state == "Free"))
        .collect()
}

pub fn prepare(bench: &Bench) -> Outcome {
    bench.isolated()?;
    let gpu = bench.whole_gpu()?;
    let mut kubelet = start(bench, "claims", &[])?;
    let count = published(bench, &mut kubelet)?;
    let limit = bench.left();
    kubelet.ask(
        &format!("claim train u-1 gpu-{}", gpu.minor),
        &["ok"],
        limit,
    )?;
    let begun = Instant::now();
    let answer = loop {
        let answer = kubelet.ask(
            &format!("prepare {DRIVER} train u-1"),
            &["prepared", "refused", "error"],
            limit,
        )?;
        // The kubelet tries again.
        if answer.starts_with("prepared") || begun.elapsed() > node::NOTICED {
            break answer;
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    let Some(ids) = answer.strip_prefix("prepared ") else {
        return failed(answer);
    };
    let spec = kept_spec(&kubelet.dir.join("cdi"), SPEC)?;
    let mut container = bench.container("claim")?.args(&["nvidia-smi", "-L"]);
    for id in ids.split(' ') {
        let name = id.split_once('=').map_or(id, |(_, name)| name);
        container = container.edits(cdi::edits_of(&spec, name)?);
    }
    bench.smi()?;
    let seen = uuids(&container.run()?.ok()?);
    if seen != [gpu.uuid.clone()] {
        return failed(format!("the container of the claim has {seen:?}"));
    }
    kubelet.ask(
        &format!("unprepare {DRIVER} train u-1"),
        &["unprepared"],
        limit,
    )?;
    Ok(format!(
        "{count} devices published; a claim is prepared, its container has the GPU, and it is released"
    ))
}

pub fn xid(bench: &Bench) -> Outcome {
    bench.isolated()?;
    node::may_fault(bench)?;
    bench.whole_gpu()?;
    let mut kubelet = start(bench, "claims-xid", &node::FAULT_OPTIONS)?;
    published(bench, &mut kubelet)?;
    let begun = Instant::now();
    let error = node::fault(bench)?;
    let is_tainted =
        |line: &str| line.starts_with("published ") && line.matches("=Tainted").count() == 1;
    let line = kubelet.wait(is_tainted, bench.left().min(node::NOTICED))?;
    let noticed = begun.elapsed();
    free(bench, &mut kubelet, node::STARTED)?;
    Ok(format!(
        "{error}; one of {} devices was tainted after {} ms, and free again after {} ms",
        devices_of(&line).len(),
        noticed.as_millis(),
        begun.elapsed().as_millis()
    ))
}
