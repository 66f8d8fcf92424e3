//! Measures what the device plugin costs on a node with 8 GPUs: size, memory, CPU time while nothing happens, and the time of its
//! answers; and with claims, memory and the requests to the API server. As root, with the fake driver:
//! `cargo bench --profile dist -p oci-nvidia-kubelet-plugin --bench footprint`
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::disallowed_types,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    dead_code,
    missing_docs,
    reason = "a program for developers, which ends at the first surprise"
)]

#[path = "../tests/idle/count.rs"]
mod count;
#[path = "../tests/fake_api/mod.rs"]
mod fake_api;
#[path = "../tests/fake_kubelet/mod.rs"]
mod fake_kubelet;
#[path = "../tests/fleet/mod.rs"]
mod fleet;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fake_api::{Asked, FakeApi};
use fake_kubelet::FakeKubelet;
use fake_kubelet::dra::DraKubelet;
use kubelet_plugin::answer::prefer;
use kubelet_plugin::dra::pace;
use kubelet_plugin::model::ResourceDevice;
use kubelet_plugin::node::closeness::Closeness;
use kubelet_plugin::settings::values::Allocation;

const PROGRAM: &str = env!("CARGO_BIN_EXE_oci-nvidia-kubelet-plugin");
/// How long the plugin is watched.
const IDLE: Duration = Duration::from_secs(20);
/// Where the plugin serves metrics.
const METRICS: &str = "127.0.0.1:21120";

fn main() {
    // More than a half is the client of the API server. The size is not a goal; the memory is.
    row("program without symbols", size() as f64 / 1e6, "MB", 8.0);
    preferred();
    idle();
    claims();
    cluster();
}

/// The requests of all nodes of a cluster, simulated, with an API server that is away for ten minutes.
fn cluster() {
    let away = 3600..4200;
    let counts = fleet::requests(pace::PUBLISHER, &away, 7200);
    let most = fleet::MOST as f64;
    let per_node = |seconds| counts.sum(seconds) as f64 / fleet::NODES as f64;
    row(
        "node, requests in an idle hour",
        per_node(0..3600),
        "",
        18.0,
    );
    row(
        "node, attempts in ten minutes without API server",
        per_node(away.clone()),
        "",
        20.0,
    );
    row(
        "node, requests in the minute after them",
        per_node(4200..4260),
        "",
        2.0,
    );
    row(
        "5,000 nodes, idle, in one second",
        counts.peak(1800..3600) as f64,
        "",
        most,
    );
    row(
        "5,000 nodes, no API server, in one second",
        counts.peak(away) as f64,
        "",
        most,
    );
    row(
        "5,000 nodes, after that, in one second",
        counts.peak(4200..7200) as f64,
        "",
        most,
    );
}

fn row(what: &str, value: f64, unit: &str, limit: f64) {
    let verdict = if value <= limit { "" } else { "  OVER" };
    println!("{what:<44} {value:>8.2} {unit:<4} at most {limit}{verdict}");
}

fn size() -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let stripped = dir.path().join("program");
    assert!(
        Command::new("strip")
            .arg("-o")
            .arg(&stripped)
            .arg(PROGRAM)
            .status()
            .unwrap()
            .success()
    );
    std::fs::metadata(stripped).unwrap().len()
}

/// The slowest choice among 16 GPUs, of which one is lost.
fn preferred() {
    let device = |number: u32| ResourceDevice {
        id: format!("GPU-{number}"),
        gpu: format!("GPU-{number}"),
        numa_node: Some(number / 8),
        ..ResourceDevice::default()
    };
    let devices: Vec<ResourceDevice> = (0..16).map(device).collect();
    let available: Vec<String> = devices
        .iter()
        .skip(1)
        .map(|device| device.id.clone())
        .collect();
    let longest = (1..=15).map(|size| {
        let start = Instant::now();
        let chosen = prefer::choose(
            &devices,
            &Closeness::new(),
            Allocation::Distributed,
            &available,
            &[],
            size,
        );
        assert_eq!(chosen.len(), size);
        start.elapsed()
    });
    row(
        "GetPreferredAllocation, 15 of 16 GPUs",
        longest.max().unwrap().as_secs_f64() * 1e3,
        "ms",
        1.0,
    );
}

fn idle() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("kubelet/device-plugins")).unwrap();
    let _kubelet = FakeKubelet::start(&dir.path().join("kubelet"));
    let mut run = command(dir.path());
    run.args([
        "--metrics-address",
        METRICS,
        "--labels",
        "true",
        "--labels-dir",
    ])
    .arg(dir.path().join("features.d"));
    let agent = Running(run.spawn().unwrap());
    std::thread::sleep(Duration::from_secs(5));
    let pids = [agent.0.id(), child_of(agent.0.id())];
    // The first answer needs more memory than those after it.
    assert!(scrape() > 0);
    let before: f64 = pids.iter().map(|pid| cpu_seconds(*pid)).sum();
    std::thread::sleep(IDLE);
    let used = pids.iter().map(|pid| cpu_seconds(*pid)).sum::<f64>() - before;
    row(
        "agent, resident memory",
        status(pids[0], "VmRSS:") / 1024.0,
        "MiB",
        12.0,
    );
    row(
        "agent, memory of its own",
        status(pids[0], "RssAnon:") / 1024.0,
        "MiB",
        3.0,
    );
    let start = Instant::now();
    row(
        "metrics, size of an answer",
        scrape() as f64 / 1e3,
        "kB",
        20.0,
    );
    row(
        "metrics, time of an answer",
        start.elapsed().as_secs_f64() * 1e3,
        "ms",
        20.0,
    );
    row(
        "monitor, memory of its own",
        status(pids[1], "RssAnon:") / 1024.0,
        "MiB",
        3.0,
    );
    row(
        "both, threads",
        pids.iter().map(|pid| status(*pid, "Threads:")).sum(),
        "",
        2.0,
    );
    row(
        "both, CPU time while idle",
        used / IDLE.as_secs_f64() * 100.0,
        "%",
        0.1,
    );
    row(
        "both, wakeups in a minute",
        count::wakeups(pids, 60) as f64,
        "",
        60.0,
    );
    row(
        "both, system calls in a minute",
        count::calls(pids, 60, &dir.path().join("calls")) as f64,
        "",
        1500.0,
    );
}

/// Returns the command that runs the program on a node with 8 GPUs.
fn command(dir: &Path) -> Command {
    let root = dir.join("root");
    let make_root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fake-driver/make-root");
    let made = Command::new(make_root)
        .arg(&root)
        .args(["--gpus", "8"])
        .stdout(Stdio::null())
        .status();
    assert!(made.unwrap().success());
    let config = dir.join("config.toml");
    std::fs::write(
        &config,
        format!("[nvidia-container-cli]\nroot = \"{}\"\n", root.display()),
    )
    .unwrap();
    let mut run = Command::new(PROGRAM);
    run.arg("run")
        .arg("--config")
        .arg(config)
        .arg("--kubelet-dir")
        .arg(dir.join("kubelet"));
    run.arg("--run-dir")
        .arg(dir.join("run"))
        .stderr(Stdio::null());
    run
}

/// How long the program may take until the API server has a state.
const SOON: Duration = Duration::from_secs(30);
/// How long the library lets a watch last, in seconds: an idle hour has so many requests.
const WATCH: f64 = 247.0;

fn claims() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet_dir = dir.path().join("kubelet");
    std::fs::create_dir_all(&kubelet_dir).unwrap();
    let (api, _kubelet) = (
        FakeApi::start(&kubelet_dir),
        DraKubelet::start(&kubelet_dir),
    );
    let mut run = command(dir.path());
    run.args(["--interface", "dra", "--kubeconfig"])
        .arg(api.kubeconfig());
    run.args(["--cdi-dir"]).arg(dir.path().join("cdi"));
    run.args([
        "--metrics-address",
        METRICS,
        "--labels",
        "true",
        "--labels-dir",
    ])
    .arg(dir.path().join("features.d"));
    let agent = Running(run.spawn().unwrap());
    api.wait("the watch", SOON, |state| {
        state.devices().len() == 8
            && state
                .asked
                .last()
                .is_some_and(|asked| asked.query.contains("watch=true"))
    });
    std::thread::sleep(Duration::from_secs(5));
    assert!(scrape() > 0);
    let start = api.state().asked.len();
    traffic("claims, start", &api.state().asked, 6.0);
    let before = cpu_seconds(agent.0.id());
    std::thread::sleep(IDLE);
    let used = cpu_seconds(agent.0.id()) - before;
    row(
        "claims, requests while idle",
        (api.state().asked.len() - start) as f64,
        "",
        0.0,
    );
    row(
        "claims, agent, CPU time while idle",
        used / IDLE.as_secs_f64() * 100.0,
        "%",
        0.1,
    );
    // An idle hour is the end and the begin of watches.
    api.state().cut();
    let is_watch = "watch=true";
    api.wait("the next watch", SOON, |state| {
        let mut asked = state.asked.iter().skip(start);
        asked.any(|request| request.query.contains(is_watch))
    });
    let asked = api.state().asked[start..].to_vec();
    let mut asked = asked.into_iter();
    let watch = asked
        .find(|request| request.query.contains(is_watch))
        .unwrap();
    row("claims, idle hour, requests", 3600.0 / WATCH, "", 15.0);
    let line = watch.path.len() + watch.query.len();
    row(
        "claims, idle hour, bytes without headers",
        3600.0 / WATCH * line as f64,
        "B",
        5000.0,
    );
    let before = api.state().asked.len();
    let events = dir.path().join(format!(
        "root/usr/lib/{}-linux-gnu/nvml.events",
        std::env::consts::ARCH
    ));
    std::fs::write(events, "xid 1 79\n").unwrap();
    api.wait("the taint", SOON, |state| state.devices()["gpu-1"]);
    traffic(
        "claims, first change of health",
        &api.state().asked[before..],
        2.0,
    );
    row(
        "claims, agent, resident memory",
        status(agent.0.id(), "VmRSS:") / 1024.0,
        "MiB",
        16.0,
    );
    row(
        "claims, agent, memory of its own",
        status(agent.0.id(), "RssAnon:") / 1024.0,
        "MiB",
        6.0,
    );
}

/// Prints how many requests there were, and the bytes of their bodies in both directions.
fn traffic(what: &str, asked: &[Asked], most: f64) {
    row(&format!("{what}, requests"), asked.len() as f64, "", most);
    row(
        &format!("{what}, bytes in bodies"),
        asked.iter().map(|asked| asked.bytes).sum::<usize>() as f64,
        "B",
        2e4,
    );
}

/// Returns the length of the metrics.
fn scrape() -> usize {
    let mut stream = TcpStream::connect(METRICS).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    answer.len()
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn child_of(pid: u32) -> u32 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

fn status(pid: u32, name: &str) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The time on a CPU, from the scheduler, which counts nanoseconds.
fn cpu_seconds(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
    text.split_whitespace()
        .next()
        .unwrap()
        .parse::<f64>()
        .unwrap()
        / 1e9
}
