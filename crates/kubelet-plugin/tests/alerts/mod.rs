//! The alert rules and the queries of a dashboard, evaluated by promtool over series that the plugin printed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::fake_host::{Fake, uuid};
use super::fake_kubelet::Container;
use super::harness::Need;
use super::node_extras::{METRICS, address, exchange};
use super::{AT_ONCE, GPU, Node, POLLED, SOON, counts};

tests! {
    &[Need::Root, Need::Program("promtool")] => alerts_over_the_metrics_of_the_plugin, dcgms_dashboard_finds_data;
}

/// All series of one answer, with the labels that Prometheus adds.
type Series = BTreeMap<String, String>;

/// What Prometheus collects, and for how many minutes.
struct Phase<'a> {
    series: &'a Series,
    minutes: usize,
}

pub fn rules() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes/monitoring/alerts.yaml")
}

pub fn promtool(arguments: &[&str], input: &str) -> Result<String, String> {
    let mut command = Command::new("promtool");
    let mut child = command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool, from the package prometheus");
    child.stdin.take().unwrap().write_all(input.as_bytes()).ok();
    let output = child.wait_with_output().unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    if output.status.success() {
        Ok(text)
    } else {
        Err(text)
    }
}

/// Returns the body in the text format of Prometheus.
pub fn scrape(address: SocketAddr) -> String {
    let answer = exchange(
        address,
        b"GET /metrics HTTP/1.1\r\nHost: node\r\nAccept: text/plain;version=0.0.4\r\n\r\n",
    );
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(
        head.contains("content-type: text/plain; version=0.0.4; charset=utf-8"),
        "{head}"
    );
    body.to_owned()
}

fn series(body: &str) -> Series {
    let target = "instance=\"node-1\",job=\"gpu\"";
    let lines = body.lines().filter(|line| {
        ["onh_", "DCGM_"]
            .iter()
            .any(|start| line.starts_with(start))
    });
    let mut series: Series = lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let name = match name.strip_suffix('}') {
                Some(labels) if labels.ends_with('{') => format!("{labels}{target}}}"),
                Some(labels) => format!("{labels},{target}}}"),
                None => format!("{name}{{{target}}}"),
            };
            (name, value.to_owned())
        })
        .collect();
    series.insert(format!("up{{{target}}}"), "1".to_owned());
    series
}

/// Waits until the plugin prints a line that begins with this text.
fn series_with(node: &Node, start: &str) -> Series {
    let mut body = String::new();
    node.until(start, POLLED, || {
        body = scrape(address(node));
        body.lines().any(|line| line.starts_with(start))
    });
    series(&body)
}

/// Returns the values of all series, one for each minute. Prometheus marks a series as stale when it is missing in an answer.
fn input(phases: &[Phase]) -> Vec<Value> {
    let names: BTreeSet<&String> = phases
        .iter()
        .flat_map(|phase| phase.series.keys())
        .collect();
    let values = |name: &String| {
        let minutes = phases
            .iter()
            .flat_map(|phase| std::iter::repeat_n(phase.series.get(name), phase.minutes));
        let mut was_there = false;
        let texts: Vec<&str> = minutes
            .map(|value| match value {
                Some(value) => {
                    was_there = true;
                    value.as_str()
                }
                None if std::mem::take(&mut was_there) => "stale",
                None => "_",
            })
            .collect();
        texts.join(" ")
    };
    names
        .into_iter()
        .map(|name| json!({"series": name, "values": values(name)}))
        .collect()
}

/// An alert that fires, with its labels beside `severity`, and its summary.
struct Fires<'a> {
    name: &'a str,
    labels: Value,
    summary: String,
}

/// Evaluates the rules. At each of the minutes, exactly these alerts fire.
#[track_caller]
fn expect(node: &Node, phases: &[Phase], expected: &[(usize, &[Fires])]) {
    let text = std::fs::read_to_string(rules()).unwrap();
    let names = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    let names: Vec<&str> = names.collect();
    let mut tests = Vec::new();
    for (minute, fires) in expected {
        assert!(
            fires.iter().all(|fires| names.contains(&fires.name)),
            "{names:?}"
        );
        for name in &names {
            let fires = fires
                .iter()
                .filter(|fires| fires.name == *name)
                .map(|fires| {
                    let mut labels = fires.labels.clone();
                    labels["severity"] = "warning".into();
                    json!({"exp_labels": labels, "exp_annotations": {"summary": fires.summary}})
                });
            let fires: Vec<Value> = fires.collect();
            tests.push(
                json!({"eval_time": format!("{minute}m"), "alertname": name, "exp_alerts": fires}),
            );
        }
    }
    // JSON is YAML.
    let document = json!({
        "rule_files": [rules()],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": input(phases), "alert_rule_test": tests}],
    });
    let file = node.fake.dir.path().join("promtool.yaml");
    std::fs::write(&file, document.to_string()).unwrap();
    promtool(&["test", "rules", file.to_str().unwrap()], "")
        .unwrap_or_else(|error| panic!("{error}"));
}

fn alerts_over_the_metrics_of_the_plugin() {
    promtool(&["check", "rules", rules().to_str().unwrap()], "").unwrap();
    let node = Node::start(&["--gpus", "2"], &METRICS);
    node.wait("the list", SOON, GPU, 2, 2);
    let healthy = series_with(&node, "onh_registration_timestamp_seconds{");
    // An error of an application: no alert.
    node.fake.event("xid 0 94");
    let healthy_after = series_with(
        &node,
        &format!("onh_gpu_xid_errors_total{{uuid=\"{}\",xid=\"94\"", uuid(0)),
    );
    assert_eq!(counts(&node.kubelet.state(), GPU), (2, 2));
    node.fake.event("xid 0 109");
    node.wait("the failing GPU", AT_ONCE, GPU, 1, 2);
    let xid = format!(
        "onh_gpu_unhealthy_info{{uuid=\"{}\",reason=\"XID 109",
        uuid(0)
    );
    let failing = series_with(&node, &format!("{xid}\"}}"));
    node.fake.add(0, "recovery-action=1");
    let worse = series_with(&node, &format!("{xid}; "));
    node.fake.remove(0, "recovery-action=1");
    let last = scrape(address(&node));
    let printed = promtool(&["check", "metrics"], &last);
    assert_eq!(printed.as_deref(), Ok(""), "{last}");

    // GPU 1 falls off the bus: NVML, the kernel module and the PCI bus do not list it any more.
    let conf = std::fs::read_to_string(node.fake.file("nvml.conf")).unwrap();
    let line = conf
        .lines()
        .find(|line| line.starts_with("gpu minor=1 "))
        .unwrap();
    node.fake.set(&format!("{line}\n"), "");
    for path in [
        "proc/driver/nvidia/gpus/0000:02:00.0",
        "sys/bus/pci/devices/0000:02:00.0",
    ] {
        std::fs::remove_dir_all(node.fake.root.join(path)).unwrap();
    }
    std::fs::remove_file(node.fake.root.join("dev/nvidia1")).unwrap();
    node.until("the GPU that disappeared", POLLED, || {
        !scrape(address(&node)).contains(&uuid(1))
    });
    let gone = series(&scrape(address(&node)));
    let said = format!(
        "{} has disappeared: neither the driver nor the kernel lists it",
        uuid(1)
    );
    assert_eq!(node.log().matches(&said).count(), 1, "{}", node.log());

    // The module is unloaded.
    std::fs::rename(node.fake.root.join("proc"), node.fake.root.join("was-proc")).unwrap();
    std::fs::rename(node.fake.root.join("dev"), node.fake.root.join("was-dev")).unwrap();
    let unloaded = series_with(&node, "onh_driver_up 0");
    let down = unloaded
        .keys()
        .find_map(|name| name.split_once("onh_driver_down_info{reason=\""))
        .unwrap()
        .1;
    let down = down
        .split_once("\",instance")
        .unwrap()
        .0
        .replace("\\\"", "\"");
    let restarted: Series = unloaded
        .clone()
        .into_iter()
        .filter(|(name, _)| !name.contains("uuid="))
        .collect();
    let lost = Series::from([(
        "up{instance=\"node-1\",job=\"gpu\"}".to_owned(),
        "0".to_owned(),
    )]);

    let of_gpu = |gpu| json!({"instance": "node-1", "job": "gpu", "uuid": uuid(gpu)});
    let unhealthy = |why: &str| Fires {
        name: "GpuUnhealthy",
        labels: of_gpu(0),
        summary: format!("GPU {} on node-1 cannot be used: {why}", uuid(0)),
    };
    let errors = || Fires {
        name: "GpuXidErrors",
        labels: json!({"instance": "node-1", "uuid": uuid(0), "xid": "109"}),
        summary: format!("The driver reports XID 109 for GPU {} on node-1", uuid(0)),
    };
    let missing = || Fires {
        name: "GpuMissing",
        labels: of_gpu(1),
        summary: format!("GPU {} has disappeared from node-1", uuid(1)),
    };
    let driver = || Fires {
        name: "GpuDriverDown",
        labels: json!({"instance": "node-1", "job": "gpu"}),
        summary: format!("The driver on node-1 does not answer: {down}"),
    };
    let plugin = || Fires {
        name: "GpuPluginDown",
        labels: json!({"instance": "node-1", "job": "gpu"}),
        summary: "The device plugin on node-1 does not answer Prometheus".to_owned(),
    };
    let absent = || Fires {
        name: "GpuPluginAbsent",
        labels: json!({}),
        summary: "Prometheus has no metrics of any device plugin".to_owned(),
    };
    let phase = |series, minutes| Phase { series, minutes };

    expect(&node, &[phase(&healthy, 40)], &[(1, &[]), (39, &[])]);
    expect(
        &node,
        &[phase(&healthy, 20), phase(&healthy_after, 10)],
        &[(21, &[]), (26, &[])],
    );
    // The first XID, and its recovery after ten minutes.
    expect(
        &node,
        &[phase(&healthy, 20), phase(&failing, 10)],
        &[
            (19, &[]),
            (20, &[errors()]),
            (22, &[errors()]),
            (26, &[errors(), unhealthy("XID 109")]),
        ],
    );
    let quiet: Series = failing
        .iter()
        .map(|(name, value)| (name.clone(), value.clone()))
        .chain(healthy.clone())
        .collect();
    let quiet: Series = quiet
        .into_iter()
        .filter(|(name, _)| !name.contains("unhealthy"))
        .collect();
    expect(
        &node,
        &[phase(&healthy, 5), phase(&failing, 5), phase(&quiet, 40)],
        &[(12, &[errors()]), (40, &[])],
    );
    // The reason changes before the five minutes are over, and after them.
    let why = worse
        .keys()
        .find_map(|name| name.split_once("reason=\"XID 109; "))
        .unwrap()
        .1;
    let why = format!("XID 109; {}", why.split_once('"').unwrap().0);
    expect(
        &node,
        &[
            phase(&healthy, 1),
            phase(&failing, 3),
            phase(&worse, 4),
            phase(&failing, 4),
        ],
        &[
            (5, &[errors()]),
            (7, &[errors(), unhealthy(&why)]),
            (9, &[errors(), unhealthy("XID 109")]),
        ],
    );
    // Only what was new in this phase: GPU 0 had an XID before.
    let without = |series: &Series| -> Series {
        let is_of_xid = |name: &str| name.contains("unhealthy") || name.contains("xid=");
        let kept = series.iter().filter(|(name, _)| !is_of_xid(name));
        kept.map(|(name, value)| {
            (
                name.clone(),
                if name.contains("health{") {
                    "1.0".into()
                } else {
                    value.clone()
                },
            )
        })
        .collect()
    };
    let gone = without(&gone);
    expect(
        &node,
        &[phase(&healthy, 10), phase(&gone, 20)],
        &[(11, &[]), (16, &[missing()]), (29, &[missing()])],
    );
    expect(
        &node,
        &[phase(&healthy, 10), phase(&restarted, 20)],
        &[(11, &[]), (16, &[driver()]), (29, &[driver()])],
    );
    expect(
        &node,
        &[phase(&healthy, 10), phase(&lost, 30)],
        &[(11, &[]), (16, &[plugin()]), (29, &[plugin(), absent()])],
    );
}

/// The queries of the dashboard that NVIDIA publishes for its DCGM exporter, without that for DCGM's profiling.
const DASHBOARD: [(&str, f64); 6] = [
    (
        "DCGM_FI_DEV_GPU_TEMP{instance=~\"node-1\", gpu=~\"0\"}",
        41.0,
    ),
    (
        "avg(DCGM_FI_DEV_GPU_TEMP{instance=~\"node-1\", gpu=~\"0|2\"})",
        45.0,
    ),
    (
        "sum(DCGM_FI_DEV_POWER_USAGE{instance=~\"node-1\", gpu=~\"0\"})",
        62.5,
    ),
    (
        "DCGM_FI_DEV_SM_CLOCK{instance=~\"node-1\", gpu=~\"0\"} * 1000000",
        1_980_000_000.0,
    ),
    (
        "DCGM_FI_DEV_GPU_UTIL{instance=~\"node-1\", gpu=~\"0\"}",
        37.0,
    ),
    (
        "DCGM_FI_DEV_FB_USED{instance=~\"node-1\", gpu=~\"0\"}",
        1024.0,
    ),
];

fn dcgms_dashboard_finds_data() {
    let fake = Fake::new(&["--gpus", "3"]);
    fake.add(
        0,
        "util=37 mem-util=12 memory=81559 memory-used=1024 temperature=41 power=62500 sm-clock=1980 mem-clock=2619 \
         mem-temperature=50 encoder=3 decoder=4 energy=123456789012 pcie-replays=5 remapped-cor=6 remapped-unc=7 \
         remap-failure=0 power-limit=350000 ecc-corrected=8 ecc=2",
    );
    fake.add(2, "temperature=49 sm-clock=none energy=none encoder=none");
    let layout = fake.dir.path().join("layout");
    std::fs::write(&layout, "mig gpu=1 gi=1 ci=0 profile=1g.10gb uuid=MIG-1\n").unwrap();
    fake.make_root(&["--mig-layout", layout.to_str().unwrap()]);
    let node = Node::start_on(fake, &[&METRICS[..], &["--metrics-names", "dcgm"]].concat());
    node.wait("the list", SOON, GPU, 2, 2);
    let container = |pod, resource, id: &str| Container {
        namespace: "ns",
        pod,
        name: "main",
        resource,
        ids: vec![id.to_owned()],
    };
    node.kubelet.state().containers = vec![
        container("whole", GPU, &uuid(0)),
        container("part", "nvidia.com/mig-1g.10gb", "MIG-1"),
    ];
    node.fake.event("xid 0 13");
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let labels = |gpu: u32, mig: &str, pod: &str| {
        let of = format!(
            "gpu=\"{gpu}\",UUID=\"{}\",pci_bus_id=\"00000000:0{}:00.0\",device=\"nvidia{gpu}\",modelName=\"NVIDIA H100 80GB HBM3\"",
            uuid(gpu),
            gpu + 1
        );
        let pod = if pod.is_empty() {
            String::new()
        } else {
            format!(",container=\"main\",namespace=\"ns\",pod=\"{pod}\"")
        };
        format!(
            "{{{of}{mig},Hostname=\"{}\",DCGM_FI_DRIVER_VERSION=\"535.183.01\"{pod}}}",
            host.trim()
        )
    };
    let (whole, unused) = (labels(0, "", "whole"), labels(2, "", ""));
    let part = labels(1, ",GPU_I_PROFILE=\"1g.10gb\",GPU_I_ID=\"1\"", "part");
    let mut expected: Vec<String> = [
        ("SM_CLOCK", "1980.0"),
        ("MEM_CLOCK", "2619.0"),
        ("MEMORY_TEMP", "50.0"),
        ("GPU_TEMP", "41.0"),
        ("POWER_USAGE", "62.5"),
        ("TOTAL_ENERGY_CONSUMPTION", "123456789012.0"),
        ("PCIE_REPLAY_COUNTER", "5.0"),
        ("GPU_UTIL", "37.0"),
        ("MEM_COPY_UTIL", "12.0"),
        ("ENC_UTIL", "3.0"),
        ("DEC_UTIL", "4.0"),
        ("UNCORRECTABLE_REMAPPED_ROWS", "7.0"),
        ("CORRECTABLE_REMAPPED_ROWS", "6.0"),
        ("ROW_REMAP_FAILURE", "0.0"),
        ("POWER_MGMT_LIMIT", "350.0"),
        ("ECC_SBE_VOL_TOTAL", "8.0"),
        ("ECC_DBE_VOL_TOTAL", "2.0"),
        ("XID_ERRORS", "13.0"),
        ("FB_FREE", "80535.0"),
        ("FB_USED", "1024.0"),
        ("FB_TOTAL", "81559.0"),
    ]
    .map(|(name, value)| format!("DCGM_FI_DEV_{name}{whole} {value}"))
    .into();
    expected.push(format!("DCGM_FI_DEV_FB_TOTAL{part} 9984.0"));
    expected.push(format!("DCGM_FI_DEV_GPU_TEMP{unused} 49.0"));
    expected.push(format!("DCGM_FI_DEV_XID_ERRORS{unused} 0.0"));
    let mut body = String::new();
    node.until("all values", POLLED, || {
        body = scrape(address(&node));
        expected
            .iter()
            .all(|line| body.lines().any(|found| found == line))
    });
    for absent in ["SM_CLOCK", "TOTAL_ENERGY_CONSUMPTION", "ENC_UTIL"] {
        assert!(
            !body.contains(&format!("DCGM_FI_DEV_{absent}{unused}")),
            "{body}"
        );
    }
    assert!(!body.contains("duty_cycle"), "{body}");
    // It only complains about DCGM's names, which do not follow its rules for names.
    let said = promtool(&["check", "metrics"], &body).unwrap_or_else(|said| said);
    assert!(said.lines().all(|line| line.starts_with("DCGM_")), "{said}");
    let series = series(&body);
    let queries = DASHBOARD.map(|(query, value)| {
        let plain = query.starts_with("DCGM") && !query.contains('*');
        let name = plain.then(|| query.split('{').next().unwrap().to_owned());
        let of = series.keys().find(|key| key.starts_with("DCGM_FI_DEV_GPU_TEMP{gpu=\"0\"")).unwrap();
        let labels = match query.starts_with("DCGM") {
            true => format!("{}{{{}", name.unwrap_or_default(), of.split_once('{').unwrap().1),
            false => "{}".to_owned(),
        };
        json!({"expr": query, "eval_time": "1m", "exp_samples": [{"labels": labels, "value": value}]})
    });
    let document = json!({
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": input(&[Phase { series: &series, minutes: 3 }]),
            "promql_expr_test": queries,
        }],
    });
    let file = node.fake.dir.path().join("promtool.yaml");
    std::fs::write(&file, document.to_string()).unwrap();
    promtool(&["test", "rules", file.to_str().unwrap()], "")
        .unwrap_or_else(|error| panic!("{error}"));
}
