//! A real Prometheus collects the metrics of the plugin, and its sums are right.

use std::fs;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::alerts::promtool;
use super::fake_host::{Fake, uuid};
use super::fake_kubelet::Container;
use super::harness::Need;
use super::node_extras::{METRICS, address};
use super::{GPU, Node, SOON};

tests! {
    &[Need::Root, Need::Program("promtool"), Need::Program("prometheus")] =>
        sums_over_shared_gpus;
}

/// A Prometheus that collects the metrics of nodes each second.
struct Prometheus {
    program: Child,
    url: String,
    _dir: tempfile::TempDir,
}

/// Returns the object in a file of deploy/kubernetes.
fn object(file: &str) -> Value {
    let path = super::alerts::rules().with_file_name(file);
    cdi_spec::yaml::parse(&fs::read_to_string(path).unwrap()).unwrap()
}

impl Prometheus {
    /// The targets have the labels with which Prometheus Operator finds pods for this PodMonitor. Debian's Prometheus cannot ask an API server.
    /// The label `instance` of a node is its name here.
    fn start(monitor: &Value, nodes: &[(&str, &Node)]) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let set = object("../base/daemon-set.yaml");
        let mut targets = Vec::new();
        for (name, node) in nodes {
            let labels = json!({
                "instance": name,
                "namespace": monitor["metadata"]["namespace"],
                "pod": format!("plugin-{name}"),
                "container": set["spec"]["template"]["spec"]["containers"][0]["name"],
            });
            targets.push(json!({"targets": [address(node).to_string()], "labels": labels}));
        }
        let honors_labels = &monitor["spec"]["podMetricsEndpoints"][0]["honorLabels"];
        let job =
            json!({"job_name": "gpu", "static_configs": targets, "honor_labels": honors_labels});
        let global = json!({"scrape_interval": "1s", "scrape_timeout": "1s"});
        let config = dir.path().join("prometheus.yml");
        // JSON is YAML.
        let text = json!({"global": global, "scrape_configs": [job]}).to_string();
        fs::write(&config, text).unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let program = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                dir.path().join("data").display()
            ))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            program,
            url: format!("http://{address}"),
            _dir: dir,
        }
    }

    /// Returns the values of the series that a query finds, sorted; none before Prometheus listens.
    fn query(&self, query: &str) -> Vec<f64> {
        let answer = promtool(&["query", "instant", &self.url, query], "");
        let mut values = Vec::new();
        for line in answer.unwrap_or_default().lines() {
            // `{labels} => VALUE @[TIME]`
            let Some((_, rest)) = line.rsplit_once(" => ") else {
                assert!(line.is_empty(), "{line}");
                continue;
            };
            let (value, _) = rest.split_once(" @[").unwrap();
            values.push(value.parse().unwrap());
        }
        values.sort_by(f64::total_cmp);
        values
    }

    /// Waits until a query finds these values.
    #[track_caller]
    fn expect(&self, query: &str, expected: &[f64]) {
        let start = Instant::now();
        loop {
            let found = self.query(query);
            if found == expected {
                return;
            }
            assert!(
                start.elapsed() < SOON,
                "{query}: {found:?}, not {expected:?}"
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        self.program.kill().ok();
        self.program.wait().ok();
    }
}

fn container(
    namespace: &'static str,
    pod: &'static str,
    resource: &'static str,
    id: String,
) -> Container {
    Container {
        namespace,
        pod,
        name: "main",
        resource,
        ids: vec![id],
    }
}

/// GPU 0 is shared by two pods, GPU 1 has one, and GPU 2 none.
fn shared_gpus(names: &str) -> Node {
    let fake = Fake::new(&["--gpus", "3"]);
    fake.add(0, "util=30 power=62500 temperature=40 memory-used=1000");
    fake.add(1, "util=60 power=100000 temperature=50 memory-used=2000");
    fake.add(2, "util=0 power=40000 temperature=30 memory-used=0");
    let options = ["--replicas", "2", "--metrics-names", names];
    let node = Node::start_on(fake, &[&METRICS[..], &options].concat());
    node.wait("the list", SOON, GPU, 6, 6);
    node.kubelet.state().containers = vec![
        container("one", "a", GPU, format!("{}::0", uuid(0))),
        container("one", "b", GPU, format!("{}::1", uuid(0))),
        container("two", "c", GPU, format!("{}::0", uuid(1))),
    ];
    node
}

/// The queries of dashboards for DCGM's exporter, with one series for each GPU.
const BY_GPU: [(&str, &[f64]); 9] = [
    ("sum(DCGM_FI_DEV_POWER_USAGE{instance=\"gpu\"})", &[202.5]),
    ("sum(DCGM_FI_DEV_FB_USED{instance=\"gpu\"})", &[3000.0]),
    ("avg(DCGM_FI_DEV_GPU_UTIL{instance=\"gpu\"})", &[30.0]),
    ("avg(DCGM_FI_DEV_GPU_TEMP{instance=\"gpu\"})", &[40.0]),
    ("count(DCGM_FI_DEV_GPU_TEMP{instance=\"gpu\"})", &[3.0]),
    ("DCGM_FI_DEV_GPU_UTIL{instance=\"gpu\", pod=\"c\"}", &[60.0]),
    ("DCGM_FI_DEV_GPU_UTIL{instance=\"gpu\", pod=\"a\"}", &[]),
    (
        "sum by (namespace) (DCGM_FI_DEV_POWER_USAGE{instance=\"gpu\", pod!=\"\"})",
        &[100.0],
    ),
    ("sum(onh_gpu_power_watts{instance=\"gpu\"})", &[202.5]),
];

/// The same with one series for each pod, as the page describes them.
const BY_POD: [(&str, &[f64]); 7] = rows! {
    "sum(DCGM_FI_DEV_POWER_USAGE{instance=\"pod\"})", &[265.0];
    "sum(max by (UUID) (DCGM_FI_DEV_POWER_USAGE{instance=\"pod\"}))", &[202.5];
    "sum(max by (UUID) (DCGM_FI_DEV_FB_USED{instance=\"pod\"}))", &[3000.0];
    "avg(max by (UUID) (DCGM_FI_DEV_GPU_UTIL{instance=\"pod\"}))", &[30.0];
    "count(DCGM_FI_DEV_GPU_TEMP{instance=\"pod\"})", &[4.0];
    "DCGM_FI_DEV_GPU_UTIL{instance=\"pod\", pod=~\"a|b\"}", &[30.0, 30.0];
    "DCGM_FI_DEV_GPU_UTIL{instance=\"pod\", pod=\"\"}", &[0.0];
};

/// What the panels of dashboard.json show for the node `gpu`, by their titles. The others need a rate or an error.
const PANELS: [(&str, &[f64]); 6] = [
    ("Utilization by pod", &[30.0, 30.0, 60.0]),
    ("Memory by pod", &[1048576000.0, 1048576000.0, 2097152000.0]),
    ("Requested devices by namespace", &[1.0, 2.0]),
    ("Utilization by GPU", &[0.0, 30.0, 60.0]),
    ("Temperature", &[30.0, 40.0, 50.0]),
    ("Power", &[40.0, 62.5, 100.0]),
];

/// Without `honor_labels`, the labels of the metrics are renamed.
const NOT_HONORED: [(&str, &[f64]); 3] = rows! {
    "duty_cycle{instance=\"gpu\", exported_namespace=\"two\", exported_pod=\"c\", exported_container=\"main\"}", &[60.0];
    "sum(request{namespace=\"oci-nvidia-hook\", pod=\"plugin-gpu\", container=\"plugin\"})", &[3.0];
    "duty_cycle{pod=\"c\"}", &[];
};

fn sums_over_shared_gpus() {
    let by_gpu = shared_gpus("gke,dcgm");
    let by_pod = shared_gpus("dcgm-per-container");
    let nodes = [("gpu", &by_gpu), ("pod", &by_pod)];
    let mut monitor = object("pod-monitor.yaml");
    let prometheus = Prometheus::start(&monitor, &nodes);
    for (query, expected) in BY_GPU.iter().chain(&BY_POD) {
        prometheus.expect(query, expected);
    }
    let file = super::alerts::rules().with_file_name("dashboard.json");
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    for (title, expected) in PANELS {
        let panel = panels.iter().find(|panel| panel["title"] == title);
        let query = panel.unwrap()["targets"][0]["expr"].as_str().unwrap();
        let query = query
            .replace("$namespace", ".*")
            .replace("$instance", "gpu");
        prometheus.expect(&query, expected);
    }
    drop(prometheus);
    monitor["spec"]["podMetricsEndpoints"][0]["honorLabels"] = json!(false);
    let prometheus = Prometheus::start(&monitor, &nodes);
    for (query, expected) in NOT_HONORED {
        prometheus.expect(query, expected);
    }
}
