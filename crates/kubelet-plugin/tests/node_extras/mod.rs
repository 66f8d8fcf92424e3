//! Metrics and labels of the program as it runs on a node.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use super::fake_host::{Fake, uuid};
use super::fake_kubelet::{Container, FakeKubelet};
use super::{AT_ONCE, GPU, Node, POLLED, ROOT, SOON};

tests! {
    ROOT => metrics_name_the_containers, metrics_without_sensors, metrics_of_errors_and_answers,
        metrics_without_a_kubelet, metrics_for_hostile_clients, no_metrics_unless_they_are_wanted,
        labels_follow_the_gpus, labels_are_written_where_they_are_read;
}

pub const METRICS: [&str; 2] = ["--metrics-address", "127.0.0.1:0"];

/// Returns the address at which a plugin serves metrics, from its log.
pub fn address(node: &Node) -> SocketAddr {
    let start = Instant::now();
    loop {
        let log = node.log();
        if let Some((_, rest)) = log.split_once("serving metrics at http://") {
            return rest.split('/').next().unwrap().parse().unwrap();
        }
        assert!(start.elapsed() < SOON, "{log}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends bytes, and returns what comes back until the connection is closed.
pub fn exchange(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    // The server may have closed the connection, with an answer.
    stream.write_all(request).ok();
    read(&mut stream)
}

fn read(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error}"),
        _ => String::from_utf8(answer).unwrap(),
    }
}

pub fn get(address: SocketAddr, path: &str) -> String {
    exchange(
        address,
        format!("GET {path} HTTP/1.1\r\nHost: node\r\n\r\n").as_bytes(),
    )
}

/// Waits until the metrics contain all these lines, and returns them.
#[track_caller]
fn wait(address: SocketAddr, lines: &[String]) -> String {
    let start = Instant::now();
    loop {
        let text = get(address, "/metrics");
        let missing = lines
            .iter()
            .find(|line| !text.lines().any(|found| found == **line));
        let Some(missing) = missing else { return text };
        assert!(start.elapsed() < POLLED, "{missing} is missing in {text}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn metrics_name_the_containers() {
    let fake = Fake::new(&["--gpus", "3"]);
    fake.add(
        0,
        "util=37 memory=81559 memory-used=1024 temperature=41 power=62500",
    );
    fake.add(2, "name=\"Tesla T4\" util=80");
    let layout = fake.dir.path().join("layout");
    std::fs::write(&layout, "mig gpu=1 gi=1 ci=0 profile=1g.10gb uuid=MIG-1\n").unwrap();
    fake.make_root(&["--mig-layout", layout.to_str().unwrap()]);
    let node = Node::start_on(
        fake,
        &[
            &METRICS[..],
            &["--resources", "name=a.b/shared,model=*T4*,replicas=2"],
        ]
        .concat(),
    );
    node.wait("the list", SOON, "nvidia.com/mig-1g.10gb", 1, 1);
    let container = |pod, resource, ids: &[String]| Container {
        namespace: "ns",
        pod,
        name: "main",
        resource,
        ids: ids.to_vec(),
    };
    node.kubelet.state().containers = vec![
        container("whole", GPU, &[uuid(0)]),
        container("part", "nvidia.com/mig-1g.10gb", &["MIG-1".to_owned()]),
        container("one", "a.b/shared", &[format!("{}::0", uuid(2))]),
        container("two", "a.b/shared", &[format!("{}::1", uuid(2))]),
        container("nic", "example.com/nic", &["eth0".to_owned()]),
    ];
    let series = |name: &str, pod: &str, id: &str, model: &str, value: &str| {
        let of = format!("namespace=\"ns\",pod=\"{pod}\",container=\"main\"");
        format!("{name}{{{of},make=\"nvidia\",accelerator_id=\"{id}\",model=\"{model}\"}} {value}")
    };
    let (h100, t4) = ("NVIDIA H100 80GB HBM3", "Tesla T4");
    let bytes = |mib: u64| format!("{}.0", mib << 20);
    let text = wait(
        address(&node),
        &[
            series("duty_cycle", "whole", &uuid(0), h100, "37.0"),
            series("memory_total", "whole", &uuid(0), h100, &bytes(81559)),
            series("memory_used", "whole", &uuid(0), h100, &bytes(1024)),
            series("memory_total", "part", "MIG-1", &format!("{h100} MIG 1g.10gb"), &bytes(9984)),
            series("duty_cycle", "one", &uuid(2), t4, "80.0"),
            series("duty_cycle", "two", &uuid(2), t4, "80.0"),
            "request{namespace=\"ns\",pod=\"two\",container=\"main\",resource_name=\"a.b/shared\"} 1.0".to_owned(),
            format!("duty_cycle_gpu_node{{make=\"nvidia\",accelerator_id=\"{}\",model=\"{h100}\"}} 37.0", uuid(0)),
            format!("onh_gpu_temperature_celsius{{uuid=\"{}\"}} 41.0", uuid(0)),
            format!("onh_gpu_power_watts{{uuid=\"{}\"}} 62.5", uuid(0)),
            format!("onh_gpu_health{{uuid=\"{}\"}} 1.0", uuid(0)),
        ],
    );
    assert!(
        !text.contains("eth0") && !text.contains("sidecar"),
        "{text}"
    );
    assert!(
        !text
            .lines()
            .any(|line| line.starts_with("duty_cycle{") && line.contains("MIG-1")),
        "{text}"
    );
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(
        text.contains("content-type: text/plain; version=0.0.4; charset=utf-8\r\n"),
        "{text}"
    );
    // The GPUs take part in metrics only while they answer.
    node.fake.add(2, "fail=15");
    let start = Instant::now();
    while get(address(&node), "/metrics")
        .lines()
        .any(|line| line.starts_with("duty_cycle{") && line.contains("T4"))
    {
        assert!(start.elapsed() < POLLED);
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn metrics_without_sensors() {
    let fake = Fake::new(&["--gpus", "1"]);
    fake.add(0, "util=none temperature=none power=none");
    let node = Node::start_on(fake, &METRICS);
    let id = uuid(0);
    let total = format!(
        "memory_total_gpu_node{{make=\"nvidia\",accelerator_id=\"{id}\",model=\"NVIDIA H100 80GB HBM3\"}} {}.0",
        81559_u64 << 20
    );
    let text = wait(address(&node), &[total]);
    for name in ["duty_cycle", "onh_gpu_temperature", "onh_gpu_power"] {
        assert!(!text.contains(name), "{text}");
    }
}

fn metrics_of_errors_and_answers() {
    let node = Node::start(&["--gpus", "1"], &METRICS);
    node.wait("the list", SOON, GPU, 1, 1);
    node.kubelet.allocate(GPU, &[&[uuid(0)]]).unwrap();
    node.fake.event("xid 0 13");
    node.fake.event("xid 0 79");
    node.wait("the unhealthy GPU", AT_ONCE, GPU, 0, 1);
    let id = uuid(0);
    let text = wait(
        address(&node),
        &[
            format!("onh_gpu_xid_errors_total{{uuid=\"{id}\",xid=\"13\",ignored=\"true\"}} 1.0"),
            format!("onh_gpu_xid_errors_total{{uuid=\"{id}\",xid=\"79\",ignored=\"false\"}} 1.0"),
            format!("onh_gpu_health{{uuid=\"{id}\"}} 0.0"),
            format!("onh_gpu_unhealthy_info{{uuid=\"{id}\",reason=\"XID 79\"}} 1.0"),
            "onh_driver_up 1.0".to_owned(),
            "onh_allocate_duration_seconds_count 1".to_owned(),
        ],
    );
    let registered = text
        .lines()
        .find(|line| line.starts_with("onh_registration_timestamp_seconds{"))
        .unwrap();
    let (labels, time) = registered.rsplit_once(' ').unwrap();
    assert!(
        labels.ends_with("{resource_name=\"nvidia.com/gpu\"}"),
        "{registered}"
    );
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs_f64();
    assert!(
        (now - 600.0..=now).contains(&time.parse().unwrap()),
        "{registered}"
    );
}

fn metrics_without_a_kubelet() {
    let mut node = Node::start(&["--gpus", "1"], &METRICS);
    node.wait("the list", SOON, GPU, 1, 1);
    let address = address(&node);
    let container = Container {
        namespace: "ns",
        pod: "pod",
        name: "main",
        resource: GPU,
        ids: vec![uuid(0)],
    };
    node.kubelet.state().containers = vec![container];
    let request = "request{namespace=\"ns\",pod=\"pod\",container=\"main\",resource_name=\"nvidia.com/gpu\"} 1.0";
    wait(address, &[request.to_owned()]);
    node.kubelet.state().pods_hang = true;
    std::thread::sleep(Duration::from_millis(1100));
    let start = Instant::now();
    let hanging = std::thread::spawn(move || get(address, "/metrics"));
    assert!(
        get(address, "/healthz").ends_with("\r\n\r\nok\n"),
        "not blocked"
    );
    let text = hanging.join().unwrap();
    assert!(
        start.elapsed() < Duration::from_secs(5 * 2),
        "{:?}",
        start.elapsed()
    );
    assert!(
        text.contains("memory_total_gpu_node{") && !text.contains("request{"),
        "{text}"
    );
    node.kubelet = FakeKubelet::start(&node.kubelet_dir);
    node.wait("the new kubelet", SOON, GPU, 1, 1);
    std::fs::remove_file(node.kubelet_dir.join("pod-resources/kubelet.sock")).unwrap();
    assert!(get(address, "/metrics").contains("memory_total_gpu_node{"));
}

fn metrics_for_hostile_clients() {
    let node = Node::start(&["--gpus", "1"], &METRICS);
    let address = address(&node);
    let ask = |request: &str| exchange(address, request.as_bytes());
    for (request, status) in rows! {
        "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "200 OK";
        "GET /metrics?x=y HTTP/1.0\r\n\r\n".to_owned(), "200 OK";
        "HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "200 OK";
        "GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "404 Not Found";
        "GET /metrics/../healthz HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "404 Not Found";
        "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".to_owned(), "405 Method Not Allowed";
        "DELETE /healthz HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "405 Method Not Allowed";
        format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 16)), "431 ";
        format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "a".repeat(1 << 16)), "431 ";
        format!("GET /metrics HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(500)), "431 ";
        "\0\r\n\r\n".to_owned(), "400 Bad Request";
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(), "";
    } {
        let answer = ask(&request);
        let shown: String = request.chars().take(60).collect();
        let (_, rest) = answer.split_once(' ').unwrap_or_default();
        assert!(rest.starts_with(status), "{shown:?}: {answer:?}");
        if request.starts_with("HEAD") {
            assert!(answer.ends_with("\r\n\r\n"), "{answer}");
        }
    }
    // None of them sends a request, and none of them reads.
    let mut idle: Vec<TcpStream> = (0..100)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    for stream in &mut idle {
        stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ").ok();
    }
    let start = Instant::now();
    assert!(get(address, "/metrics").starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "{:?}",
        start.elapsed()
    );
    let files = || {
        std::fs::read_dir(format!("/proc/{}/fd", node.plugin.id()))
            .unwrap()
            .count()
    };
    assert!(files() < 50, "{}", files());
    // The limit for the time ends the others.
    let before = Instant::now();
    let last = idle.last_mut().unwrap();
    last.set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    read(last);
    assert!(
        before.elapsed() < Duration::from_secs(5 * 6),
        "{:?}",
        before.elapsed()
    );
    node.wait("still there", SOON, GPU, 1, 1);
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.plugin.id())).unwrap();
    assert!(status.contains("Threads:\t1\n"), "{status}");
}

fn no_metrics_unless_they_are_wanted() {
    let node = Node::start(&["--gpus", "1"], &["--metrics-address", ""]);
    node.wait("the list", SOON, GPU, 1, 1);
    let fds = std::fs::read_dir(format!("/proc/{}/fd", node.plugin.id()))
        .unwrap()
        .flatten();
    let links: Vec<String> = fds
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .filter_map(|link| {
            link.to_str()?
                .strip_prefix("socket:[")?
                .strip_suffix(']')
                .map(str::to_owned)
        })
        .collect();
    assert!(!links.is_empty());
    for table in ["tcp", "tcp6"] {
        let table = std::fs::read_to_string(format!("/proc/{}/net/{table}", node.plugin.id()))
            .unwrap_or_default();
        let inodes: Vec<&str> = table
            .lines()
            .filter_map(|line| line.split_whitespace().nth(9))
            .collect();
        assert!(
            !links.iter().any(|link| inodes.contains(&link.as_str())),
            "{table}"
        );
    }
    let (code, _, errors) = super::check(&node.fake, &["--metrics-address", "2112"]);
    assert!(
        code == Some(2) && errors.contains("--metrics-address has an invalid value"),
        "{errors}"
    );
}

/// Waits until the file has these lines among others, and none that begins with `without`.
#[track_caller]
pub fn wait_for_labels(path: &Path, lines: &[&str], without: &str) {
    let start = Instant::now();
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let is_complete = lines
            .iter()
            .all(|line| text.lines().any(|found| found == *line));
        if is_complete && !text.lines().any(|line| line.starts_with(without)) {
            return;
        }
        assert!(start.elapsed() < POLLED, "{lines:?} is not {text}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn labels_follow_the_gpus() {
    let fake = Fake::new(&["--gpus", "2"]);
    let dir = fake.dir.path().join("features.d");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("other"), "a=b\n").unwrap();
    let mut node = Node::start_on(fake, &["--labels-dir", dir.to_str().unwrap()]);
    let file = dir.join("oci-nvidia-kubelet-plugin");
    let whole = [
        "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.count=2",
        "nvidia.com/gpu.memory=81559",
        "nvidia.com/gpu.family=hopper",
        "nvidia.com/cuda.runtime.major=12",
        "nvidia.com/mig.capable=true",
        "nvidia.com/mig.strategy=mixed",
        "nvidia.com/gpu.mode=compute",
        "nvidia.com/mps.capable=false",
    ];
    wait_for_labels(&file, &whole, "nvidia.com/mig-");
    let layout = node.fake.dir.path().join("layout");
    std::fs::write(&layout, "mig gpu=0 gi=1 ci=0 profile=1g.10gb uuid=MIG-1\n").unwrap();
    node.fake
        .make_root(&["--mig-layout", layout.to_str().unwrap()]);
    let mig = [
        "nvidia.com/mig-1g.10gb.product=NVIDIA-H100-80GB-HBM3-MIG-1g.10gb",
        "nvidia.com/mig-1g.10gb.count=1",
        "nvidia.com/mig-1g.10gb.memory=9984",
        "nvidia.com/mig-1g.10gb.multiprocessors=16",
        "nvidia.com/mig-1g.10gb.slices.gi=1",
        "nvidia.com/gpu.count=2",
    ];
    wait_for_labels(&file, &mig, "-");
    // While the driver is replaced, and for a GPU that is lost, the labels stay.
    node.signal("USR1");
    node.wait("a GPU that is not offered", SOON, GPU, 0, 1);
    wait_for_labels(&file, &mig, "-");
    node.signal("TERM");
    node.plugin.wait().unwrap();
    let left: Vec<_> = std::fs::read_dir(&dir)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert_eq!(left, ["other"]);
}

fn labels_are_written_where_they_are_read() {
    let fake = Fake::new(&["--gpus", "1"]);
    let dir = fake.dir.path().join("nfd/features.d");
    let option = ["--labels-dir", dir.to_str().unwrap()];
    let mut node = Node::start_on(fake, &option);
    node.wait("the list", SOON, GPU, 1, 1);
    assert!(
        !dir.exists() && !node.log().contains("features.d"),
        "{}",
        node.log()
    );
    // Node Feature Discovery is installed later.
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("oci-nvidia-kubelet-plugin");
    wait_for_labels(&file, &["nvidia.com/gpu.count=1"], "-");
    node.plugin.kill().unwrap();
    node.plugin.wait().unwrap();
    assert!(file.exists());
    node.plugin = super::start(
        &node.fake,
        &node.kubelet_dir,
        &[&option[..], &["--labels", "false"]].concat(),
    );
    node.wait("the list again", SOON, GPU, 1, 1);
    node.until("labels that are removed", SOON, || !file.exists());
    node.plugin.kill().unwrap();
    node.plugin.wait().unwrap();
    std::fs::remove_dir_all(node.fake.dir.path().join("nfd")).unwrap();
    node.plugin = super::start(
        &node.fake,
        &node.kubelet_dir,
        &[&option[..], &["--labels", "true"]].concat(),
    );
    wait_for_labels(&file, &["nvidia.com/gpu.count=1"], "-");
}
