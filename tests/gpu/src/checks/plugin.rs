//! The device plugin next to a fake kubelet.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::bench::Bench;
use crate::check::{Outcome, Stop, cannot_run, failed};
use crate::checks::host::uuids;
use crate::checks::node;
use crate::kubelet::{Kubelet, devices};

const RESOURCE: &str = "nvidia.com/gpu";

/// Returns the ids of all whole GPUs.
fn expected(bench: &Bench) -> Result<Vec<String>, Stop> {
    let mut ids: Vec<_> = bench
        .driver()?
        .gpus
        .iter()
        .filter(|gpu| !gpu.is_mig)
        .map(|gpu| gpu.uuid.clone())
        .collect();
    ids.sort();
    Ok(ids)
}

fn is_list(line: &str) -> bool {
    line.starts_with(&format!("list {RESOURCE} ")) && !devices(line).is_empty()
}

/// Waits for a list in which exactly these devices are, all of them healthy.
fn healthy(kubelet: &mut Kubelet, ids: &[String], limit: Duration) -> Result<(), String> {
    let all: Vec<_> = ids.iter().map(|id| (id.clone(), true)).collect();
    kubelet
        .wait(|line| is_list(line) && devices(line) == all, limit)
        .map(drop)
}

/// Waits for the first list, which must have all whole GPUs, or the next one must.
fn listed(bench: &Bench, kubelet: &mut Kubelet) -> Result<Vec<String>, Stop> {
    let ids = expected(bench)?;
    let all: Vec<_> = ids.iter().map(|id| (id.clone(), true)).collect();
    let first = kubelet.wait(is_list, bench.left().min(node::STARTED))?;
    if devices(&first) != all {
        let why = |error| format!("the first list has {:?}; {error}", devices(&first));
        healthy(kubelet, &ids, bench.left().min(node::SETTLED)).map_err(why)?;
    }
    Ok(ids)
}

pub fn list_and_allocate(bench: &Bench) -> Outcome {
    bench.isolated()?;
    let gpu = bench.whole_gpu()?;
    let mut kubelet = Kubelet::start(bench, "plugin", &[], &["--device-list-strategy=envvar"])?;
    let ids = listed(bench, &mut kubelet)?;
    let answer = kubelet.ask(
        &format!("allocate {RESOURCE} {}", gpu.uuid),
        &["allocated", "refused", "error"],
        bench.left(),
    )?;
    let variable = format!("\"NVIDIA_VISIBLE_DEVICES\": \"{}\"", gpu.uuid);
    if !answer.contains(&variable) || !answer.contains(&format!("nvidia{}\"", gpu.minor)) {
        return failed(format!("Allocate answered: {answer}"));
    }
    bench.smi()?;
    // The container that the kubelet would start.
    let container = bench
        .container("pod")?
        .args(&["nvidia-smi", "-L"])
        .gpus(&gpu.uuid, &bench.driver()?.config);
    let seen = uuids(&container.run()?.ok()?);
    if seen != [gpu.uuid.clone()] {
        return failed(format!("the container of {} has {seen:?}", gpu.uuid));
    }
    Ok(format!(
        "{} healthy devices; Allocate answers with one, and its container has this GPU",
        ids.len()
    ))
}

/// The value of a series with this name and UUID.
fn value(metrics: &str, name: &str, uuid: &str) -> Option<f64> {
    let line = metrics
        .lines()
        .find(|line| line.starts_with(&format!("{name}{{")) && line.contains(uuid))?;
    line.rsplit(' ').next()?.parse().ok()
}

fn scrape(address: &str, limit: Duration) -> Result<String, String> {
    let error = |error: std::io::Error| format!("cannot read the metrics at {address}: {error}");
    let end = Instant::now() + limit;
    let mut stream = loop {
        match TcpStream::connect(address) {
            Err(refused) if Instant::now() >= end => return Err(error(refused)),
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
            Ok(stream) => break stream,
        }
    };
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .map_err(error)?;
    stream
        .write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        .map_err(error)?;
    let mut text = String::new();
    stream.read_to_string(&mut text).map_err(error)?;
    Ok(text)
}

/// Memory must agree exactly, temperature and power nearly: they change between the two questions.
pub fn metrics(bench: &Bench) -> Outcome {
    bench.isolated()?;
    let gpu = bench.whole_gpu()?;
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let Ok(address) = port.map(|address| address.to_string()) else {
        return cannot_run("there is no loopback address");
    };
    let mut kubelet = Kubelet::start(
        bench,
        "metrics",
        &[],
        &[&format!("--metrics-address={address}")],
    )?;
    listed(bench, &mut kubelet)?;
    let begun = Instant::now();
    let text = loop {
        let text = scrape(&address, bench.left().min(node::STARTED))?;
        if value(&text, "memory_total_gpu_node", &gpu.uuid).is_some()
            || begun.elapsed() > node::STARTED
        {
            break text;
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    let fields = [
        "--query-gpu=uuid,memory.total,temperature.gpu,power.draw",
        "--format=csv,noheader,nounits",
    ];
    let smi = bench.driver()?.smi(&fields, bench.left())?.ok()?;
    let Some(line) = smi.lines().find(|line| line.starts_with(&gpu.uuid)) else {
        return failed(format!("nvidia-smi prints {smi:?}"));
    };
    let of_smi: Vec<Option<f64>> = line
        .split(", ")
        .skip(1)
        .map(|text| text.trim().parse().ok())
        .collect();
    let mut seen = Vec::new();
    for (index, name, unit, tolerance) in [
        (0, "memory_total_gpu_node", 1024.0 * 1024.0, 1.0),
        (1, "onh_gpu_temperature_celsius", 1.0, 8.0),
        (2, "onh_gpu_power_watts", 1.0, 100.0),
    ] {
        let (ours, theirs) = (
            value(&text, name, &gpu.uuid).map(|value| value / unit),
            of_smi.get(index).copied().flatten(),
        );
        match (ours, theirs) {
            (Some(ours), Some(theirs)) if (ours - theirs).abs() <= tolerance => {
                seen.push(format!("{name} {ours:.1} and {theirs:.1}"))
            }
            // A GPU without the sensor
            (None, None) if index > 0 => {
                seen.push(format!("{name}: nvidia-smi has no value either"))
            }
            _ => return failed(format!("{name} is {ours:?}, nvidia-smi prints {theirs:?}")),
        }
    }
    Ok(seen.join(", "))
}

pub fn xid(bench: &Bench) -> Outcome {
    bench.isolated()?;
    node::may_fault(bench)?;
    bench.whole_gpu()?;
    let mut kubelet = Kubelet::start(bench, "xid", &[], &node::FAULT_OPTIONS)?;
    let ids = listed(bench, &mut kubelet)?;
    let begun = Instant::now();
    let error = node::fault(bench)?;
    let is_unhealthy = |line: &str| {
        line.starts_with(&format!("list {RESOURCE} "))
            && devices(line)
                .iter()
                .filter(|(_, is_healthy)| !is_healthy)
                .count()
                == 1
    };
    kubelet.wait(is_unhealthy, bench.left().min(node::NOTICED))?;
    let noticed = begun.elapsed();
    healthy(&mut kubelet, &ids, bench.left().min(node::STARTED))?;
    Ok(format!(
        "{error}; one of {} devices was unhealthy after {} ms, and healthy again after {} ms",
        ids.len(),
        noticed.as_millis(),
        begun.elapsed().as_millis()
    ))
}
