//! The alert rules, evaluated by promtool over series that the plugin printed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::fake_host::uuid;
use super::harness::Need;
use super::node_extras::{METRICS, address, get};
use super::{AT_ONCE, GPU, Node, POLLED, SOON, counts};

tests! {
    &[Need::Root, Need::Program("promtool")] => alerts_over_the_metrics_of_the_plugin;
}

/// All series of one answer, with the labels that Prometheus adds.
pub type Series = BTreeMap<String, String>;

/// What Prometheus collects, and for how many minutes.
pub struct Phase<'a> {
    pub series: &'a Series,
    pub minutes: usize,
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

/// Returns the body.
pub fn scrape(address: SocketAddr) -> String {
    let answer = get(address, "/metrics");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    body.to_owned()
}

pub fn series(body: &str) -> Series {
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
pub fn input(phases: &[Phase]) -> Vec<Value> {
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
        summary: "The kubelet plugin on node-1 does not answer Prometheus".to_owned(),
    };
    let absent = || Fires {
        name: "GpuPluginAbsent",
        labels: json!({}),
        summary: "Prometheus has no metrics of any kubelet plugin".to_owned(),
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
