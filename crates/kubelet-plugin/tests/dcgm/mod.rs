//! Metrics with the names of NVIDIA's DCGM exporter, and the queries of a dashboard that promtool evaluates over them.

use serde_json::json;

use super::alerts::{Phase, input, promtool, scrape, series};
use super::fake_host::{Fake, uuid};
use super::fake_kubelet::Container;
use super::harness::Need;
use super::node_extras::{METRICS, address};
use super::{GPU, Node, POLLED, SOON};

tests! {
    &[Need::Root, Need::Program("promtool")] => dcgms_dashboard_finds_data;
    &[Need::Root] => data_through_nvlinks, values_with_an_old_driver;
}

/// The queries of the dashboard that NVIDIA publishes for its DCGM exporter, without that for DCGM's profiling.
const DASHBOARD: [(&str, f64); 6] = rows! {
    "DCGM_FI_DEV_GPU_TEMP{instance=~\"node-1\", gpu=~\"0\"}", 41.0;
    "avg(DCGM_FI_DEV_GPU_TEMP{instance=~\"node-1\", gpu=~\"0|2\"})", 45.0;
    "sum(DCGM_FI_DEV_POWER_USAGE{instance=~\"node-1\", gpu=~\"0\"})", 62.5;
    "DCGM_FI_DEV_SM_CLOCK{instance=~\"node-1\", gpu=~\"0\"} * 1000000", 1_980_000_000.0;
    "DCGM_FI_DEV_GPU_UTIL{instance=~\"node-1\", gpu=~\"0\"}", 37.0;
    "DCGM_FI_DEV_FB_USED{instance=~\"node-1\", gpu=~\"0\"}", 1024.0;
};

fn dcgms_dashboard_finds_data() {
    let fake = Fake::new(&["--gpus", "3"]);
    fake.add(
        0,
        "util=37 mem-util=12 memory=81559 memory-used=1536 memory-reserved=512 temperature=41 power=62500 sm-clock=1980 mem-clock=2619 \
         mem-temperature=50 encoder=3 decoder=4 energy=123456789012 pcie-replays=5 remapped-cor=6 remapped-unc=7 \
         remap-failure=0 remap-pending=1 power-limit=350000 ecc-corrected=8 ecc=2 clock-reasons=68 nvlinks=2:4 \
         nvlink-sent=1000 nvlink-received=2000",
    );
    fake.add(
        2,
        "temperature=49 sm-clock=none energy=none encoder=none clock-reasons=none",
    );
    let layout = fake.dir.path().join("layout");
    let mig =
        "mig gpu=1 gi=1 ci=0 profile=1g.10gb memory-used=300 memory-reserved=100 uuid=MIG-1\n";
    std::fs::write(&layout, mig).unwrap();
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
        let [name, namespace] = match pod {
            "" => ["", ""],
            _ => ["main", "ns"],
        };
        format!(
            "{{{of}{mig},Hostname=\"{}\",DCGM_FI_DRIVER_VERSION=\"535.183.01\",container=\"{name}\",namespace=\"{namespace}\",pod=\"{pod}\"}}",
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
        ("ROW_REMAP_PENDING", "1.0"),
        ("CLOCK_THROTTLE_REASONS", "68.0"),
        ("CLOCKS_EVENT_REASONS", "68.0"),
        ("NVLINK_BANDWIDTH_TOTAL", "0.0"),
        ("FB_FREE", "80023.0"),
        ("FB_USED", "1024.0"),
        ("FB_RESERVED", "512.0"),
        ("FB_TOTAL", "81559.0"),
    ]
    .map(|(name, value)| format!("DCGM_FI_DEV_{name}{whole} {value}"))
    .into();
    expected.push(format!("DCGM_FI_DEV_FB_TOTAL{part} 9984.0"));
    expected.push(format!("DCGM_FI_DEV_FB_USED{part} 200.0"));
    expected.push(format!("DCGM_FI_DEV_FB_RESERVED{part} 100.0"));
    expected.push(format!("DCGM_FI_DEV_FB_RESERVED{unused} 0.0"));
    expected.push(format!("DCGM_FI_DEV_GPU_TEMP{unused} 49.0"));
    expected.push(format!("DCGM_FI_DEV_XID_ERRORS{unused} 0.0"));
    let mut body = String::new();
    node.until("all values", POLLED, || {
        body = scrape(address(&node));
        expected
            .iter()
            .all(|line| body.lines().any(|found| found == line))
    });
    for absent in [
        "SM_CLOCK",
        "TOTAL_ENERGY_CONSUMPTION",
        "ENC_UTIL",
        "CLOCK_THROTTLE_REASONS",
        "NVLINK_BANDWIDTH_TOTAL",
    ] {
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

/// Waits until a series of GPU 0 has a value for which this holds, and returns the answer.
fn until_value(node: &Node, name: &str, holds: impl Fn(f64) -> bool) -> String {
    let start = format!("DCGM_FI_DEV_{name}{{gpu=\"0\"");
    let mut body = String::new();
    node.until(name, POLLED, || {
        body = scrape(address(node));
        let mut lines = body.lines();
        let line = lines.find(|line| line.starts_with(&start));
        let value = line.and_then(|line| line.rsplit_once(' '));
        value.is_some_and(|(_, value)| holds(value.parse().unwrap()))
    });
    body
}

fn data_through_nvlinks() {
    let fake = Fake::new(&["--gpus", "2"]);
    fake.add(0, "nvlinks=1:4 nvlink-sent=1000 nvlink-received=2000");
    let node = Node::start_on(fake, &[&METRICS[..], &["--metrics-names", "dcgm"]].concat());
    node.wait("the list", SOON, GPU, 2, 2);
    until_value(&node, "NVLINK_BANDWIDTH_TOTAL", |rate| rate == 0.0);
    node.fake.set("nvlink-sent=1000", "nvlink-sent=900001000");
    until_value(&node, "NVLINK_BANDWIDTH_TOTAL", |rate| rate > 1000.0);
    until_value(&node, "NVLINK_BANDWIDTH_TOTAL", |rate| rate == 0.0);
}

/// The functions and fields of newer drivers are missing.
fn values_with_an_old_driver() {
    let fake = Fake::new(&["--gpus", "1"]);
    fake.add(
        0,
        "memory=81559 memory-used=1536 memory-reserved=512 clock-reasons=4",
    );
    fake.set(
        "gpu minor=0 ",
        "missing nvmlDeviceGetMemoryInfo_v2\nmissing nvmlDeviceGetCurrentClocksEventReasons\ngpu minor=0 ",
    );
    let node = Node::start_on(fake, &[&METRICS[..], &["--metrics-names", "dcgm"]].concat());
    node.wait("the list", SOON, GPU, 1, 1);
    let body = until_value(&node, "CLOCK_THROTTLE_REASONS", |reasons| reasons == 4.0);
    assert!(!body.contains("DCGM_FI_DEV_FB_RESERVED"), "{body}");
    until_value(&node, "FB_USED", |used| used == 1536.0);
}
