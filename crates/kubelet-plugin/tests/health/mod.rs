//! The health of GPUs as the kubelet sees it: failures of GPUs, and drivers that hang, come later or are replaced.

use std::process::Command;
use std::time::{Duration, Instant};

use super::fake_host::{Fake, uuid};
use super::fake_kubelet::FakeKubelet;
use super::{AT_ONCE, GPU, Node, POLLED, PROGRAM, ROOT, SOON, counts, start};

tests! {
    ROOT => an_unhealthy_gpu_recovers, a_restart_forgets_no_xid, a_lost_gpu_affects_no_other, a_driver_that_comes_later,
        a_driver_that_is_replaced, a_gpu_that_relapses_is_cleared_by_hand, a_driver_that_hangs,
        a_start_shows_no_unhealthy_gpu, a_start_while_the_driver_hangs;
}

fn an_unhealthy_gpu_recovers() {
    let node = Node::start(
        &["--gpus", "2"],
        &["--quiet-period", "2", "--replicas", "3"],
    );
    node.wait("the list", SOON, GPU, 6, 6);
    node.fake.event("xid 1 13");
    node.fake.event("xid 1 79");
    node.wait("all replicas of the unhealthy GPU", AT_ONCE, GPU, 3, 6);
    let id = format!("{}::0", uuid(1));
    assert!(
        node.refusal(&id)
            .contains("does not work: XID 79 (ONH-072); hint: "),
        "{}",
        node.refusal(&id)
    );
    node.kubelet
        .allocate(GPU, &[&[format!("{}::0", uuid(0))]])
        .unwrap();
    node.wait("recovery", SOON, GPU, 6, 6);
    // The driver recommends a reset: no recovery without it.
    node.fake.add(1, "recovery-action=1");
    node.fake.event("recovery 1");
    node.wait("a recommended reset", AT_ONCE, GPU, 3, 6);
    node.kubelet
        .stays("unhealthy", Duration::from_secs(4), |state| {
            counts(state, GPU) == (3, 6)
        });
    node.fake.remove(1, "recovery-action=1");
    node.wait("recovery after the reset", POLLED, GPU, 6, 6);
    assert!(!node.log().contains("XID 13"), "{}", node.log());
}

fn a_restart_forgets_no_xid() {
    let mut node = Node::start(&["--gpus", "2"], &[]);
    node.wait("the list", SOON, GPU, 2, 2);
    node.fake.event("xid 1 79");
    node.wait("the unhealthy GPU", AT_ONCE, GPU, 1, 2);
    for signal in ["TERM", "KILL"] {
        node.signal(signal);
        node.plugin.wait().unwrap();
        node.kubelet = FakeKubelet::start(&node.kubelet_dir);
        node.plugin = start(&node.fake, &node.kubelet_dir, &[]);
        node.wait("the list of the new plugin", SOON, GPU, 1, 2);
        assert!(
            node.refusal(&uuid(1)).contains("does not work: XID 79"),
            "{}",
            node.refusal(&uuid(1))
        );
    }
    // What was before the last start of the host does not matter.
    node.signal("TERM");
    node.plugin.wait().unwrap();
    let file = node.fake.dir.path().join("run/errors.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(
        &file,
        text.replacen("\"driver\":\"", "\"driver\":\"of another boot ", 1),
    )
    .unwrap();
    node.kubelet = FakeKubelet::start(&node.kubelet_dir);
    node.plugin = start(&node.fake, &node.kubelet_dir, &[]);
    node.wait("the list after a boot", SOON, GPU, 2, 2);
    // A driver that recommends a reset reports it to each process.
    node.fake.add(0, "recovery-action=1");
    node.wait("a recommended reset", POLLED, GPU, 1, 2);
    std::fs::remove_file(&file).unwrap();
    node.signal("KILL");
    node.plugin.wait().unwrap();
    node.kubelet = FakeKubelet::start(&node.kubelet_dir);
    node.plugin = start(&node.fake, &node.kubelet_dir, &[]);
    node.wait("the reset is still recommended", SOON, GPU, 1, 2);
}

fn a_lost_gpu_affects_no_other() {
    let node = Node::start(&["--gpus", "4"], &["--quiet-period", "1"]);
    node.wait("the list", SOON, GPU, 4, 4);
    // NVML_ERROR_GPU_IS_LOST
    node.fake.add(2, "fail=15");
    node.wait("the lost GPU", POLLED, GPU, 3, 4);
    let all: Vec<String> = (0..4).map(uuid).collect();
    let preferred = node
        .kubelet
        .prefer(GPU, &[(&[&all[..2], &all[3..]].concat(), &[], 2)])
        .unwrap();
    assert_eq!(preferred[0].len(), 2);
    node.kubelet.allocate(GPU, &[&[uuid(3)]]).unwrap();
    node.fake.remove(2, "fail=15");
    node.wait("the GPU that is back", POLLED, GPU, 4, 4);
}

fn a_driver_that_comes_later() {
    let fake = Fake::new(&["--gpus", "1"]);
    let hidden = fake.dir.path().join("hidden");
    for dir in ["dev", "proc", "usr"] {
        std::fs::create_dir_all(&hidden).unwrap();
        std::fs::rename(fake.root.join(dir), hidden.join(dir)).unwrap();
        std::fs::create_dir(fake.root.join(dir)).unwrap();
    }
    let node = Node::start_on(fake, &[]);
    node.kubelet
        .stays("no resource", Duration::from_secs(2), |state| {
            counts(state, GPU).1 == 0
        });
    assert_eq!(
        node.log()
            .matches("the kernel module nvidia is not loaded")
            .count(),
        1,
        "{}",
        node.log()
    );
    for dir in ["usr", "dev", "proc"] {
        std::fs::remove_dir(node.fake.root.join(dir)).unwrap();
        std::fs::rename(hidden.join(dir), node.fake.root.join(dir)).unwrap();
    }
    node.wait("the GPU", SOON, GPU, 1, 1);
    assert_eq!(node.log().matches("has 1 GPU").count(), 1, "{}", node.log());
    assert!(node.log().lines().count() < 10, "{}", node.log());
}

fn a_driver_that_is_replaced() {
    let node = Node::start(&["--gpus", "1"], &[]);
    node.wait("the list", SOON, GPU, 1, 1);
    node.signal("USR1");
    node.wait("a GPU that is not offered", SOON, GPU, 0, 1);
    assert!(
        node.refusal(&uuid(0)).contains("driver is being replaced"),
        "{}",
        node.refusal(&uuid(0))
    );
    let start = Instant::now();
    while node.monitor().is_some() {
        assert!(start.elapsed() < SOON, "the monitor still runs");
    }
    let open = std::fs::read_dir(format!("/proc/{}/fd", node.plugin.id()))
        .unwrap()
        .flatten();
    let open: Vec<_> = open
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .collect();
    assert!(
        !open
            .iter()
            .any(|path| path.starts_with(node.fake.root.join("dev"))),
        "{open:?}"
    );
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", node.plugin.id())).unwrap();
    assert!(!maps.contains("libnvidia"), "{maps}");
    node.signal("USR2");
    node.wait("the GPU of the new driver", SOON, GPU, 1, 1);
}

fn a_gpu_that_relapses_is_cleared_by_hand() {
    let node = Node::start(&["--gpus", "1"], &["--quiet-period", "1"]);
    node.wait("the list", SOON, GPU, 1, 1);
    for _ in 0..3 {
        node.fake.event("xid 0 79");
        node.wait("a unhealthy GPU", AT_ONCE, GPU, 0, 1);
        node.wait("recovery", SOON, GPU, 1, 1);
    }
    node.fake.event("xid 0 79");
    node.wait("a relapse", AT_ONCE, GPU, 0, 1);
    node.kubelet
        .stays("unhealthy", Duration::from_secs(8), |state| {
            counts(state, GPU) == (0, 1)
        });
    let clear = |uuid: &str| {
        let mut command = Command::new(PROGRAM);
        command
            .args(["clear", uuid, "--run-dir"])
            .arg(node.fake.dir.path().join("run"))
            .output()
            .unwrap()
    };
    assert_eq!(clear("GPU-unknown").status.code(), Some(1));
    let cleared = clear(&uuid(0));
    assert!(
        cleared.status.success() && cleared.stdout == b"cleared\n",
        "{cleared:?}"
    );
    node.wait("the cleared GPU", SOON, GPU, 1, 1);
}

fn a_driver_that_hangs() {
    let node = Node::start(
        &["--gpus", "2"],
        &["--nvml-timeout", "1", "--quiet-period", "1"],
    );
    node.wait("the list", SOON, GPU, 2, 2);
    node.fake.add(1, "hang=nvmlDeviceGetFieldValues");
    node.wait("the GPU that hangs", POLLED, GPU, 1, 2);
    assert!(
        node.refusal(&uuid(1)).contains("driver does not answer"),
        "{}",
        node.refusal(&uuid(1))
    );
    node.kubelet.allocate(GPU, &[&[uuid(0)]]).unwrap();
    node.fake.remove(1, "hang=nvmlDeviceGetFieldValues");
    node.wait(
        "the GPU that answers again",
        Duration::from_secs(5 * 40),
        GPU,
        2,
        2,
    );
}

/// A pod that the kubelet admits with an unhealthy device fails for good.
fn a_start_shows_no_unhealthy_gpu() {
    let node = Node::start(&["--gpus", "2"], &[]);
    node.wait("the list", SOON, GPU, 2, 2);
    node.until("the record of the list", SOON, || !node.lists().is_empty());
    let lists = node.lists();
    assert!(
        lists
            .iter()
            .all(|devices| devices.values().all(|healthy| *healthy)),
        "{lists:?}"
    );
}

fn a_start_while_the_driver_hangs() {
    let fake = Fake::new(&["--gpus", "2"]);
    fake.set("cuda 12.2", "cuda 12.2\ninit-delay-ms 60000");
    let start = Instant::now();
    let node = Node::start_on(fake, &[]);
    node.wait("the GPUs, which may work later", SOON, GPU, 0, 2);
    assert!(
        start.elapsed() >= Duration::from_secs(3),
        "{:?}",
        start.elapsed()
    );
    node.until("the record of the list", SOON, || !node.lists().is_empty());
    assert_eq!(node.lists().len(), 1);
}
