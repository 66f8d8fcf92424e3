use super::*;
use crate::monitor::message::{EventKind, GpuEvent, Sample};
use crate::node::gpus::tests::gpu;
use crate::node::mps::tests::daemon;
use nvidia_host::inventory::FailedGpu;
use nvidia_host::mps::Status;
use std::time::Duration;

fn snapshot(gpus: &[NodeGpu], failed: Vec<FailedGpu>) -> Update {
    let inventory = Inventory {
        gpus: gpus.iter().map(|gpu| gpu.gpu.clone()).collect(),
        failed,
        ..Inventory::default()
    };
    let mig_profiles = gpus.iter().flat_map(|gpu| gpu.profiles.clone()).collect();
    Update::Snapshot(Box::new(Snapshot {
        inventory,
        mig_profiles,
        ..Snapshot::default()
    }))
}

fn good(uuid: &str) -> Update {
    Update::Sample(Sample {
        gpu: uuid.to_owned(),
        ..Sample::default()
    })
}

/// The unhealthy ids, and the number of all ids.
fn unhealthy(node: &Node) -> (Vec<String>, usize) {
    let offer = node.offer();
    let devices: Vec<_> = offer
        .resources
        .iter()
        .flat_map(|resource| &resource.devices)
        .collect();
    let unhealthy = devices.iter().filter(|device| device.unhealthy.is_some());
    (
        unhealthy.map(|device| device.id.clone()).collect(),
        devices.len(),
    )
}

#[test]
fn from_the_first_answer_to_recovery() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let gpus = [gpu(0, "A", &["1g.5gb", "1g.5gb"]), gpu(1, "B", &[])];
    let mut node = Node::new(Settings::default(), Vec::new(), start);
    assert_eq!(unhealthy(&node), (vec![], 0));
    node.apply(&snapshot(&gpus, vec![]), at(1));
    assert_eq!(unhealthy(&node).1, 3);
    for uuid in ["GPU-0", "GPU-1"] {
        node.apply(&good(uuid), at(2));
    }
    assert_eq!(unhealthy(&node), (vec![], 3));
    let xid = Update::Event(GpuEvent {
        gpu: "GPU-0".to_owned(),
        kind: EventKind::Xid(79),
    });
    node.apply(&xid, at(3));
    assert_eq!(unhealthy(&node).0, ["MIG-0-0", "MIG-0-1"]);
    node.apply(&good("GPU-0"), at(10));
    node.tick(at(62));
    assert_eq!(unhealthy(&node).0.len(), 2, "within the quiet period");
    node.tick(at(63));
    assert_eq!(unhealthy(&node), (vec![], 3));
}

#[test]
fn a_gpu_without_a_cdi_device_is_unhealthy() {
    let now = Instant::now();
    let gpus = [gpu(0, "A", &["1g.5gb", "1g.5gb"]), gpu(1, "B", &[])];
    let mut node = Node::new(Settings::default(), Vec::new(), now);
    node.apply(&snapshot(&gpus, vec![]), now);
    assert!(!node.is_measured());
    for uuid in ["GPU-0", "GPU-1"] {
        node.apply(&good(uuid), now);
    }
    assert!(node.is_measured());
    let mut in_specs = InSpecs {
        error: Some("libcuda.so.1 is missing".to_owned()),
        ..InSpecs::default()
    };
    node.set_in_specs(in_specs.clone());
    assert_eq!(unhealthy(&node), (vec![], 3), "the specs are not needed");
    in_specs.are_needed = true;
    node.set_in_specs(in_specs.clone());
    assert_eq!(unhealthy(&node).0.len(), 3);
    let why = "the node has no CDI device for it: libcuda.so.1 is missing";
    assert_eq!(node.health()["GPU-1"].as_deref(), Some(why));
    let names = ["MIG-0-1", "GPU-1"].map(str::to_owned);
    in_specs.devices = Arc::new(names.into_iter().collect());
    node.set_in_specs(in_specs);
    assert_eq!(unhealthy(&node).0, ["MIG-0-0"]);
    assert_eq!(node.health()["GPU-1"], None);
    // A denied device has no CDI device, and needs none.
    let deny = vec!["0:0".into()];
    node.set_limits(Limits {
        deny,
        ..Limits::default()
    });
    assert_eq!(
        (unhealthy(&node), node.health()["GPU-0"].clone()),
        ((vec![], 2), None)
    );
}

#[test]
fn limits_that_change() {
    let now = Instant::now();
    let gpus = [gpu(0, "A", &["1g.5gb", "1g.5gb"]), gpu(1, "B", &[])];
    let settings = Settings::default();
    let mut node = Node::new(settings, Vec::new(), now);
    let deny = |entries: &[&str]| Limits {
        deny: entries.iter().map(|&entry| entry.into()).collect(),
        ..Limits::default()
    };
    let unmatched = |node: &Node| node.offer().findings.len();
    node.set_limits(deny(&["7"]));
    assert_eq!(unmatched(&node), 0, "the driver has not answered");
    node.apply(&snapshot(&gpus, vec![]), now);
    assert_eq!((unhealthy(&node).1, unmatched(&node)), (3, 1));
    node.set_limits(deny(&["0:1"]));
    assert_eq!(
        (unhealthy(&node).1, unmatched(&node), node.offer().limits),
        (2, 0, deny(&["0:1"]))
    );
    node.set_limits(deny(&["0"]));
    assert_eq!(unhealthy(&node).1, 1);
    node.apply(&snapshot(&gpus, vec![]), now);
    assert_eq!(unhealthy(&node).1, 1, "the limits last");
    node.set_limits(deny(&["*"]));
    assert_eq!((node.offer().resources.len(), node.gpus().len()), (0, 2));
    node.set_limits(Limits::default());
    assert_eq!((unhealthy(&node).1, unmatched(&node)), (3, 0));
}

#[test]
fn a_gpu_that_the_driver_loses() {
    let now = Instant::now();
    let gpus = [gpu(0, "A", &["1g.5gb"]), gpu(1, "B", &[])];
    let mut node = Node::new(Settings::default(), Vec::new(), now);
    node.apply(&snapshot(&gpus, vec![]), now);
    for uuid in ["GPU-0", "GPU-1"] {
        node.apply(&good(uuid), now);
    }
    let lost = FailedGpu {
        uuid: Some("GPU-0".into()),
        why: "the GPU is lost".into(),
        ..FailedGpu::default()
    };
    node.apply(&snapshot(&gpus[1..], vec![lost]), now);
    assert_eq!(unhealthy(&node), (vec!["MIG-0-0".to_owned()], 2));
    assert_eq!(node.offer().inventory().gpus.len(), 1);
    node.apply(&Update::LetGo, now);
    assert_eq!(unhealthy(&node).0.len(), 2);
}

/// Claims need a known error. Lists and `check` show the first reason, whatever it is.
#[test]
fn which_obstacles_count() {
    let now = Instant::now();
    let mut unanswered = gpu(0, "A", &[]);
    unanswered.failure = Some(NOT_ANSWERED.to_owned());
    let mut node = Node::new(Settings::default(), vec![unanswered], now);
    let reasons = |node: &Node| {
        let gpu = &node.gpus()[0];
        let failure = node.failure(gpu).map(|failure| failure.why);
        let offered = node.offer().devices().next().unwrap().unhealthy.clone();
        assert_eq!(node.health()["GPU-0"], offered);
        (failure, offered)
    };
    let text = |why: &str| Some(why.to_owned());
    assert_eq!(reasons(&node), (None, text(NOT_ANSWERED)));
    let error = OpenError {
        cause: "XID 79".to_owned(),
        since: now,
        last: now,
        driver_silent: false,
        is_stuck: false,
    };
    node.restore([("GPU-0".to_owned(), error)].into(), now);
    assert_eq!(reasons(&node), (text("XID 79"), text(NOT_ANSWERED)));
    node.apply(&snapshot(&[gpu(0, "A", &[])], vec![]), now);
    assert_eq!(reasons(&node), (text("XID 79"), text("XID 79")));
    node.clear("GPU-0");
    assert_eq!(reasons(&node), (None, text(health::UNKNOWN)));
    node.apply(&good("GPU-0"), now);
    assert_eq!(reasons(&node), (None, None));
    node.set_mps(vec![daemon(Status::Dead, None)]);
    let (failure, offered) = reasons(&node);
    assert!(failure.is_some() && failure == offered, "{failure:?}");
}
