use std::time::{Duration, Instant};

use super::*;
use crate::kubelet::Registration;
use crate::metrics::text::{latency, text};
use crate::model::{Resource, ResourceDevice};
use crate::monitor::message::{EventKind, GpuEvent, Measured, Sample};
use crate::monitor::update::{Driver, Update};
use crate::node::gpus::tests::gpu;

fn resource(name: &str, ids: &[(&str, &str)]) -> Resource {
    let device = |(id, gpu): &(&str, &str)| ResourceDevice {
        id: (*id).into(),
        gpu: (*gpu).into(),
        ..ResourceDevice::default()
    };
    Resource {
        name: name.to_owned(),
        devices: ids.iter().map(device).collect(),
    }
}

fn container(pod: &str, devices: &[(&str, &[&str])]) -> PodContainer {
    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
    PodContainer {
        namespace: "default".to_owned(),
        pod: pod.to_owned(),
        name: "main".to_owned(),
        devices: devices
            .iter()
            .map(|(name, list)| ((*name).to_owned(), ids(list)))
            .collect(),
        claims: BTreeMap::new(),
    }
}

fn sample(gpu: &str, utilization: Option<u32>, migs: &[&str]) -> Update {
    let mig_memory = migs
        .iter()
        .map(|uuid| {
            (
                (*uuid).to_owned(),
                Memory {
                    total: 100,
                    used: 30,
                },
            )
        })
        .collect();
    let measured = Measured {
        utilization,
        temperature: Some(41),
        power: Some(62_500),
        mig_memory,
        more: None,
    };
    let memory = migs.is_empty().then_some(Memory {
        total: 1000,
        used: 250,
    });
    Update::Sample(Sample {
        gpu: gpu.into(),
        memory,
        measured: Some(measured),
        ..Sample::default()
    })
}

/// A shared GPU, one with MIG devices, and one that is not used.
fn facts() -> MetricSources {
    let gpus = vec![
        gpu(0, "H100", &[]),
        gpu(1, "A100", &["1g.5gb", "2g.10gb"]),
        gpu(2, "T4", &[]),
    ];
    let resources = vec![
        resource(
            "nvidia.com/gpu",
            &[
                ("GPU-0::0", "GPU-0"),
                ("GPU-0::1", "GPU-0"),
                ("nvidia2", "GPU-2"),
            ],
        ),
        resource("nvidia.com/mig-1g.5gb", &[("MIG-1-0", "GPU-1")]),
    ];
    let mut readings = Readings::default();
    for update in [
        sample("GPU-0", Some(40), &[]),
        sample("GPU-1", None, &["MIG-1-0", "MIG-1-1"]),
        Update::Event(GpuEvent {
            gpu: "GPU-1".into(),
            kind: EventKind::Xid(79),
        }),
    ] {
        readings.apply(&update, Instant::now());
    }
    readings.health = [
        ("GPU-0".to_owned(), None),
        ("GPU-1".to_owned(), Some("XID \"79\"".to_owned())),
    ]
    .into();
    let registration = Registration {
        registered: Some(UNIX_EPOCH + Duration::from_millis(1500)),
        ..Registration::default()
    };
    MetricSources {
        offer: Offer {
            resources: resources.into(),
            gpus,
            ..Offer::default()
        },
        readings,
        containers: Vec::new(),
        status: [
            ("nvidia.com/gpu".to_owned(), registration),
            ("a.b/waiting".to_owned(), Registration::default()),
        ]
        .into(),
        names: vec![MetricsNames::Gke],
        node: "node".to_owned(),
        ignored_xids: vec![13],
    }
}

fn lines(facts: &MetricSources, names: &[&str]) -> Vec<String> {
    let text = text(series(facts), latency()).unwrap();
    let is_named = |line: &&str| {
        names
            .iter()
            .any(|name| line.starts_with(&format!("{name}{{")))
    };
    text.lines().filter(is_named).map(str::to_owned).collect()
}

#[test]
fn every_device_belongs_to_its_container() {
    let mut facts = facts();
    facts.containers = vec![
        container("first", &[("nvidia.com/gpu", &["GPU-0::1"])]),
        container("second", &[("nvidia.com/gpu", &["GPU-0::0"])]),
        container("mig", &[("nvidia.com/mig-1g.5gb", &["MIG-1-0"])]),
        // The id of the GKE layout, and a device that no longer exists.
        container("other", &[("nvidia.com/gpu", &["nvidia2", "GPU-7"])]),
    ];
    let h100 = r#"make="nvidia",accelerator_id="GPU-0",model="H100""#;
    let mig = r#"make="nvidia",accelerator_id="MIG-1-0",model="A100 MIG 1g.5gb""#;
    let of = |pod: &str| format!(r#"namespace="default",pod="{pod}",container="main""#);
    assert_eq!(
        lines(&facts, &["duty_cycle", "memory_total", "memory_used"]),
        [
            format!("duty_cycle{{{},{h100}}} 40.0", of("first")),
            format!("duty_cycle{{{},{h100}}} 40.0", of("second")),
            format!("memory_total{{{},{h100}}} 1000.0", of("first")),
            format!("memory_total{{{},{h100}}} 1000.0", of("second")),
            format!("memory_total{{{},{mig}}} 100.0", of("mig")),
            format!("memory_used{{{},{h100}}} 250.0", of("first")),
            format!("memory_used{{{},{h100}}} 250.0", of("second")),
            format!("memory_used{{{},{mig}}} 30.0", of("mig")),
        ]
    );
    assert_eq!(
        lines(&facts, &["request"]),
        [
            format!(
                "request{{{},resource_name=\"nvidia.com/gpu\"}} 1.0",
                of("first")
            ),
            format!(
                "request{{{},resource_name=\"nvidia.com/gpu\"}} 1.0",
                of("second")
            ),
            format!(
                "request{{{},resource_name=\"nvidia.com/mig-1g.5gb\"}} 1.0",
                of("mig")
            ),
            format!(
                "request{{{},resource_name=\"nvidia.com/gpu\"}} 2.0",
                of("other")
            ),
        ]
    );
    facts
        .readings
        .apply(&sample("GPU-2", Some(7), &[]), Instant::now());
    let expected = r#"duty_cycle{namespace="default",pod="other",container="main",make="nvidia",accelerator_id="GPU-2",model="T4"} 7.0"#;
    assert!(lines(&facts, &["duty_cycle"]).contains(&expected.to_owned()));
}

#[test]
fn devices_of_claims() {
    let mut facts = facts();
    let uuids = vec!["GPU-0".to_owned(), "MIG-1-1".to_owned()];
    let claims = [("gpu.nvidia.com".to_owned(), uuids)].into();
    facts.containers = vec![PodContainer {
        claims,
        ..container("claims", &[])
    }];
    let of = r#"namespace="default",pod="claims",container="main""#;
    assert_eq!(
        lines(&facts, &["duty_cycle", "memory_used", "request"]),
        [
            format!(
                "duty_cycle{{{of},make=\"nvidia\",accelerator_id=\"GPU-0\",model=\"H100\"}} 40.0"
            ),
            format!(
                "memory_used{{{of},make=\"nvidia\",accelerator_id=\"GPU-0\",model=\"H100\"}} 250.0"
            ),
            format!(
                "memory_used{{{of},make=\"nvidia\",accelerator_id=\"MIG-1-1\",model=\"A100 MIG 2g.10gb\"}} 30.0"
            ),
            format!("request{{{of},resource_name=\"gpu.nvidia.com\"}} 2.0"),
        ]
    );
}

#[test]
fn without_gkes_names() {
    let mut facts = facts();
    facts.containers = vec![container("first", &[("nvidia.com/gpu", &["GPU-0::1"])])];
    facts.names.clear();
    assert!(
        series(&facts)
            .keys()
            .all(|metric| metric.name.starts_with("onh_"))
    );
}

#[test]
fn series_of_the_node() {
    let facts = facts();
    assert_eq!(
        lines(
            &facts,
            &["duty_cycle", "memory_total", "memory_used", "request"]
        ),
        Vec::<String>::new()
    );
    assert_eq!(
        lines(
            &facts,
            &[
                "duty_cycle_gpu_node",
                "memory_total_gpu_node",
                "memory_used_gpu_node"
            ]
        ),
        [
            r#"duty_cycle_gpu_node{make="nvidia",accelerator_id="GPU-0",model="H100"} 40.0"#,
            r#"memory_total_gpu_node{make="nvidia",accelerator_id="GPU-0",model="H100"} 1000.0"#,
            r#"memory_total_gpu_node{make="nvidia",accelerator_id="MIG-1-0",model="A100 MIG 1g.5gb"} 100.0"#,
            r#"memory_total_gpu_node{make="nvidia",accelerator_id="MIG-1-1",model="A100 MIG 2g.10gb"} 100.0"#,
            r#"memory_used_gpu_node{make="nvidia",accelerator_id="GPU-0",model="H100"} 250.0"#,
            r#"memory_used_gpu_node{make="nvidia",accelerator_id="MIG-1-0",model="A100 MIG 1g.5gb"} 30.0"#,
            r#"memory_used_gpu_node{make="nvidia",accelerator_id="MIG-1-1",model="A100 MIG 2g.10gb"} 30.0"#,
        ]
    );
    let ours = [
        "onh_gpu_health",
        "onh_gpu_unhealthy_info",
        "onh_gpu_temperature_celsius",
        "onh_gpu_power_watts",
        "onh_gpu_xid_errors_total",
        "onh_registration_timestamp_seconds",
    ];
    assert_eq!(
        lines(&facts, &ours),
        [
            r#"onh_gpu_health{uuid="GPU-0"} 1.0"#,
            r#"onh_gpu_health{uuid="GPU-1"} 0.0"#,
            r#"onh_gpu_unhealthy_info{uuid="GPU-1",reason="XID \"79\""} 1.0"#,
            r#"onh_gpu_temperature_celsius{uuid="GPU-0"} 41.0"#,
            r#"onh_gpu_temperature_celsius{uuid="GPU-1"} 41.0"#,
            r#"onh_gpu_power_watts{uuid="GPU-0"} 62.5"#,
            r#"onh_gpu_power_watts{uuid="GPU-1"} 62.5"#,
            r#"onh_gpu_xid_errors_total{uuid="GPU-1",xid="79",ignored="false"} 1.0"#,
            r#"onh_registration_timestamp_seconds{resource_name="nvidia.com/gpu"} 1.5"#,
        ]
    );
}

#[test]
fn the_driver_and_its_reason() {
    let mut facts = MetricSources::default();
    let found = |facts: &MetricSources| -> Vec<String> {
        let text = text(series(facts), latency()).unwrap();
        text.lines()
            .filter(|line| line.starts_with("onh_driver"))
            .map(str::to_owned)
            .collect()
    };
    let down = |reason: &str| {
        [
            "onh_driver_up 0.0".to_owned(),
            format!("onh_driver_down_info{{reason=\"{reason}\"}} 1.0"),
        ]
    };
    assert_eq!(found(&facts), down("the driver has not answered yet"));
    for (update, expected) in [
        (
            Update::Snapshot(Box::default()),
            vec!["onh_driver_up 1.0".to_owned()],
        ),
        (
            Update::Absent("not loaded".into()),
            down("not loaded").into(),
        ),
        (Update::LetGo, down("the driver is being replaced").into()),
        (
            Update::Silent {
                gpu: Some("GPU-0".into()),
                why: "hangs".into(),
            },
            down("the driver is being replaced").into(),
        ),
        (
            Update::Silent {
                gpu: None,
                why: "hangs".into(),
            },
            down("hangs").into(),
        ),
    ] {
        facts.readings.apply(&update, Instant::now());
        assert_eq!(found(&facts), expected, "{update:?}");
    }
    facts.readings.is_without_gpu = true;
    assert_eq!(found(&facts), Vec::<String>::new());
    assert_eq!(facts.readings.driver, Driver::Fails("hangs".to_owned()));
}

#[test]
fn values_that_are_not_supported_are_absent() {
    let mut facts = facts();
    facts.readings = Readings::default();
    let bare = Sample {
        gpu: "GPU-0".into(),
        measured: Some(Measured::default()),
        ..Sample::default()
    };
    facts.readings.apply(&Update::Sample(bare), Instant::now());
    facts.containers = vec![container("first", &[("nvidia.com/gpu", &["GPU-0::1"])])];
    let found = series(&facts);
    assert_eq!(
        found.into_keys().collect::<Vec<_>>(),
        [DRIVER_DOWN, DRIVER, REGISTRATION, REQUEST]
    );
}

#[test]
fn a_histogram_of_all_answers() {
    let latency = latency();
    latency.observe(9.0);
    let text = text(Series::new(), latency).unwrap();
    assert!(
        text.starts_with("# HELP onh_allocate_duration_seconds "),
        "{text}"
    );
    assert!(
        text.contains("onh_allocate_duration_seconds_count 1\n") && !text.contains("# EOF"),
        "{text}"
    );
    assert!(
        text.contains("onh_allocate_duration_seconds_bucket{le=\"10.0\"} 1\n"),
        "{text}"
    );
}

/// Returns what names the GPU and its containers in each series of a metric with DCGM's names.
fn dcgm(facts: &MetricSources) -> Vec<[String; 4]> {
    let mut all = Series::new();
    crate::metrics::dcgm::extend(facts, &mut all);
    let is_xid = |metric: &&Metric| metric.name == "DCGM_FI_DEV_XID_ERRORS";
    let mut found = Vec::new();
    for (labels, _) in &all[all.keys().find(is_xid).unwrap()] {
        let value = |name| labels.iter().find(|(key, _)| *key == name).unwrap();
        found.push(["UUID", "container", "namespace", "pod"].map(|name| value(name).1.clone()));
    }
    found
}

/// Two containers of one pod, and then a pod of the namespace and one of another one.
#[test]
fn labels_on_which_the_containers_of_a_gpu_agree() {
    let mut facts = facts();
    facts.names = vec![MetricsNames::Dcgm];
    for (namespace, pod, expected) in [
        ("team", "train", ["main", "team", "train"]),
        ("team", "train", ["", "team", "train"]),
        ("team", "other", ["", "team", ""]),
        ("ops", "train", ["", "", ""]),
    ] {
        facts.containers.push(PodContainer {
            namespace: namespace.to_owned(),
            ..container(pod, &[("nvidia.com/gpu", &["GPU-0::0"])])
        });
        let all = dcgm(&facts);
        let found = all.iter().find(|[uuid, ..]| uuid == "GPU-0").unwrap();
        assert_eq!(found[1..], expected);
    }
}

/// NVIDIA's exporter counts a shared GPU once, unless KUBERNETES_VIRTUAL_GPUS is set.
#[test]
fn a_shared_gpu_in_sums() {
    let mut facts = facts();
    let resource = "nvidia.com/gpu";
    facts.containers = vec![
        container("a", &[(resource, &["GPU-0::0"])]),
        container("b", &[(resource, &["GPU-0::1"])]),
        container("c", &[(resource, &["nvidia2"])]),
    ];
    for (names, expected) in [
        (MetricsNames::Dcgm, &["GPU-0 ", "GPU-1 ", "GPU-2 c"][..]),
        (
            MetricsNames::DcgmPerContainer,
            &["GPU-0 a", "GPU-0 b", "GPU-1 ", "GPU-2 c"],
        ),
    ] {
        facts.names = vec![names];
        let mut found = Vec::new();
        for [uuid, _, _, pod] in dcgm(&facts) {
            found.push(format!("{uuid} {pod}"));
        }
        assert_eq!(found, expected);
    }
}
