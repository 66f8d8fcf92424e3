//! The program as it runs on a node: with the fake driver, and with a fake kubelet. The limits are five
//! times as long as in the documentation, for busy machines. Device nodes take root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    clippy::disallowed_types,
    unreachable_pub,
    dead_code,
    missing_docs,
    reason = "tests"
)]

#[macro_use]
#[path = "../../../tests/it/harness.rs"]
mod harness;
#[path = "../../../tests/it/views.rs"]
mod views;

mod alerts;
mod claims;
mod fake_api;
mod fake_host;
mod fake_kubelet;
mod features;
mod limits;
mod node_extras;
mod nri;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use fake_host::{Fake, uuid};
use fake_kubelet::{Event, FakeKubelet, State};
use harness::Need;

const PROGRAM: &str = env!("CARGO_BIN_EXE_oci-nvidia-kubelet-plugin");
const GPU: &str = "nvidia.com/gpu";

/// An event of the driver.
const AT_ONCE: Duration = Duration::from_millis(5 * 200);
/// What the plugin notices by polling.
const POLLED: Duration = Duration::from_secs(5 * 10);
const SOON: Duration = Duration::from_secs(5 * 5);

/// For device nodes.
const ROOT: &[Need] = &[Need::Root];

tests! {
    ROOT => whole_gpus_are_offered_and_given, mig_devices_follow_the_layout, the_cdi_spec_is_there_before_the_list,
        an_unused_cdi_spec_goes, a_gpu_without_a_cdi_device_is_unhealthy, a_sick_gpu_recovers, a_restart_forgets_no_xid, a_lost_gpu_affects_no_other,
        a_driver_that_comes_later, a_driver_that_is_replaced, a_gpu_that_relapses_is_cleared_by_hand,
        a_driver_that_hangs, a_start_shows_no_unhealthy_gpu, a_start_while_the_driver_hangs, a_kubelet_that_restarts,
        replicas, each_strategy, nvidias_manifest_with_this_program, check_prints_what_run_offers,
        check_shows_the_health_that_the_kubelet_has, command_lines, bad_settings, a_small_program;
    &[Need::Root, Need::Program("strace")] => a_kernel_without_openat2;
    &[Need::Root, Need::Program("script")] => what_a_person_reads, a_person_who_waits_sees_a_line;
}

fn main() -> ExitCode {
    let tests = [
        TESTS,
        alerts::TESTS,
        claims::TESTS,
        features::TESTS,
        limits::TESTS,
        node_extras::TESTS,
        nri::TESTS,
    ]
    .into_iter()
    .flatten();
    let trials = tests.map(|test| test.trial(test.name(), |run| run()));
    // Most of the time the tests wait.
    harness::Selection::of(trials).run(8)
}

/// The plugin on a host, and a kubelet.
struct Node {
    fake: Fake,
    kubelet: FakeKubelet,
    kubelet_dir: PathBuf,
    plugin: Child,
}

impl Node {
    fn start(make_root: &[&str], options: &[&str]) -> Self {
        Self::start_on(Fake::new(make_root), options)
    }

    fn start_on(fake: Fake, options: &[&str]) -> Self {
        let kubelet_dir = fake.dir.path().join("kubelet");
        std::fs::create_dir_all(kubelet_dir.join("device-plugins")).unwrap();
        let kubelet = FakeKubelet::start(&kubelet_dir);
        let plugin = start(&fake, &kubelet_dir, options);
        Self {
            fake,
            kubelet,
            kubelet_dir,
            plugin,
        }
    }

    /// Waits for these healthy and unhealthy devices of a resource.
    #[track_caller]
    fn wait(
        &self,
        what: &str,
        limit: Duration,
        resource: &str,
        healthy: usize,
        all: usize,
    ) -> Duration {
        self.kubelet.wait(what, limit, |state| {
            counts(state, resource) == (healthy, all)
        })
    }

    fn until(&self, what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < limit, "{what}: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn monitor(&self) -> Option<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.plugin.id());
        std::fs::read_to_string(path)
            .unwrap()
            .split_whitespace()
            .next()
            .map(|pid| pid.parse().unwrap())
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .arg(format!("-{name}"))
            .arg(self.plugin.id().to_string())
            .status();
        assert!(status.unwrap().success());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.fake.dir.path().join("log")).unwrap()
    }

    /// All lists that the kubelet received.
    fn lists(&self) -> Vec<BTreeMap<String, bool>> {
        let list = |(_, event): &(Instant, Event)| match event {
            Event::List { devices, .. } => Some(devices.clone()),
            _ => None,
        };
        self.kubelet
            .state()
            .events
            .iter()
            .filter_map(list)
            .collect()
    }

    fn refusal(&self, id: &str) -> String {
        self.kubelet
            .allocate(GPU, &[&[id.to_owned()]])
            .unwrap_err()
            .message()
            .to_owned()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.plugin.kill().ok();
        self.plugin.wait().ok();
    }
}

fn start(fake: &Fake, kubelet_dir: &Path, options: &[&str]) -> Child {
    start_with(Command::new(PROGRAM), fake, kubelet_dir, options)
}

/// `command` ends with the program.
fn start_with(mut command: Command, fake: &Fake, kubelet_dir: &Path, options: &[&str]) -> Child {
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(fake.dir.path().join("log"))
        .unwrap();
    command
        .arg("run")
        .arg("--config")
        .arg(&fake.config)
        .arg("--kubelet-dir")
        .arg(kubelet_dir);
    command
        .arg("--run-dir")
        .arg(fake.dir.path().join("run"))
        .args(options);
    // Otherwise the choice depends on the engines of this machine.
    if !options
        .iter()
        .any(|option| option.starts_with("--device-list-strategy"))
    {
        command.arg("--device-list-strategy=envvar");
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

/// The healthy devices and all devices of a resource.
fn counts(state: &State, resource: &str) -> (usize, usize) {
    let all = state
        .resources
        .get(resource)
        .map_or(0, |resource| resource.devices.len());
    (state.allocatable(resource), all)
}

fn whole_gpus_are_offered_and_given() {
    let node = Node::start(&["--gpus", "3", "--numa", "2"], &[]);
    node.wait("the list", SOON, GPU, 3, 3);
    let answer = node
        .kubelet
        .allocate(GPU, &[&[uuid(2), uuid(0)]])
        .unwrap()
        .container_responses
        .remove(0);
    assert_eq!(
        answer.envs["NVIDIA_VISIBLE_DEVICES"],
        format!("{},{}", uuid(0), uuid(2))
    );
    let paths: BTreeSet<_> = answer
        .devices
        .iter()
        .map(|spec| spec.container_path.as_str())
        .collect();
    let expected = [
        "/dev/nvidia0",
        "/dev/nvidia2",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidia-modeset",
    ];
    assert_eq!(paths, BTreeSet::from(expected));
    let host = |path: &str| {
        node.fake
            .root
            .join(path.trim_start_matches('/'))
            .display()
            .to_string()
    };
    assert!(
        answer
            .devices
            .iter()
            .all(|spec| spec.host_path == host(&spec.container_path)),
        "{answer:?}"
    );
    // The two GPUs of one NUMA node.
    let all: Vec<String> = (0..3).map(uuid).collect();
    let preferred = node.kubelet.prefer(GPU, &[(&all, &[uuid(1)], 2)]).unwrap();
    assert_eq!(preferred[0], [uuid(1), uuid(0)]);
    std::fs::remove_file(node.fake.root.join("dev/nvidia1")).unwrap();
    let refusal = node.refusal(&uuid(1));
    assert!(
        refusal.contains("/dev/nvidia1") && refusal.contains("(ONH-021); hint: "),
        "{refusal}"
    );
    assert!(
        node.refusal("GPU-unknown")
            .contains("GPU-unknown does not exist (ONH-071); hint: ")
    );
}

fn mig_devices_follow_the_layout() {
    let node = Node::start(&["--gpus", "2"], &[]);
    node.wait("whole GPUs", SOON, GPU, 2, 2);
    let layout = node.fake.dir.path().join("layout");
    let line = |gi: u32| format!("mig gpu=0 gi={gi} ci=0 profile=1g.10gb uuid=MIG-{gi}\n");
    std::fs::write(&layout, format!("{}{}", line(1), line(2))).unwrap();
    node.fake
        .make_root(&["--mig-layout", layout.to_str().unwrap()]);
    node.wait("MIG devices", SOON, "nvidia.com/mig-1g.10gb", 2, 2);
    node.wait("the other GPU", SOON, GPU, 1, 1);
    let answer = node
        .kubelet
        .allocate("nvidia.com/mig-1g.10gb", &[&["MIG-2".to_owned()]])
        .unwrap();
    let answer = &answer.container_responses[0];
    assert_eq!(answer.envs["NVIDIA_VISIBLE_DEVICES"], "MIG-2");
    let caps = answer
        .devices
        .iter()
        .filter(|spec| spec.container_path.contains("nvidia-caps"))
        .count();
    assert_eq!(caps, 2, "{answer:?}");
    let said = format!("{} is offered as 2 MIG devices: 1g.10gb, 1g.10gb", uuid(0));
    assert!(node.log().contains(&said), "{}", node.log());
    node.fake.event("xid 0 79");
    node.wait("all of a sick GPU", AT_ONCE, "nvidia.com/mig-1g.10gb", 0, 2);
    assert_eq!(counts(&node.kubelet.state(), GPU), (1, 1));
    std::fs::write(&layout, "").unwrap();
    node.fake
        .make_root(&["--mig-layout", layout.to_str().unwrap()]);
    node.wait("whole GPUs again", POLLED, GPU, 1, 2);
    assert!(
        node.log()
            .contains(&format!("{} is offered as a whole GPU\n", uuid(0))),
        "{}",
        node.log()
    );
    assert!(
        node.log()
            .contains("the node has no device of nvidia.com/mig-1g.10gb any more\n"),
        "{}",
        node.log()
    );
}

/// Engines look for the devices as soon as the kubelet has assigned them.
fn the_cdi_spec_is_there_before_the_list() {
    let fake = Fake::new(&["--gpus", "2"]);
    let cdi = fake.dir.path().join("cdi");
    let file = cdi.join("k8s.device-plugin.nvidia.com-gpu.json");
    std::fs::create_dir(&cdi).unwrap();
    std::fs::write(&file, "of a driver that is gone").unwrap();
    let node = Node::start_on(fake, &["--cdi-dir", cdi.to_str().unwrap()]);
    let names = || {
        let spec: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(spec["kind"], "k8s.device-plugin.nvidia.com/gpu");
        let names = spec["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| device["name"].as_str().unwrap().to_owned());
        names.collect::<BTreeSet<_>>()
    };
    node.wait("the list", SOON, GPU, 2, 2);
    assert_eq!(
        names(),
        ["0", "1", "all", &uuid(0), &uuid(1)]
            .map(str::to_owned)
            .into()
    );

    let layout = node.fake.dir.path().join("layout");
    std::fs::write(
        &layout,
        "mig gpu=0 gi=1 ci=0 profile=1g.10gb uuid=MIG-new\n",
    )
    .unwrap();
    node.fake
        .make_root(&["--mig-layout", layout.to_str().unwrap()]);
    node.wait("the MIG device", SOON, "nvidia.com/mig-1g.10gb", 1, 1);
    assert_eq!(
        names(),
        ["0:0", "1", "all", "MIG-new", &uuid(1)]
            .map(str::to_owned)
            .into()
    );

    std::fs::remove_file(&file).unwrap();
    node.until("the file that another program removed", POLLED, || {
        file.is_file()
    });
    node.signal("USR1");
    node.until("no file without a driver", SOON, || !file.is_file());
    node.signal("USR2");
    node.until("the file of the new driver", SOON, || file.is_file());
}

/// An engine would not find the CDI device, and would not know the reason.
fn a_gpu_without_a_cdi_device_is_unhealthy() {
    for strategy in ["cdi-cri", "cdi-annotations"] {
        let fake = Fake::new(&["--gpus", "1"]);
        let cdi = fake.dir.path().join("cdi");
        let hidden = fake.dir.path().join("hidden");
        std::fs::create_dir(&hidden).unwrap();
        move_libcuda(&fake.file(""), &hidden);
        let options = [
            "--cdi-dir",
            cdi.to_str().unwrap(),
            "--device-list-strategy",
            strategy,
        ];
        let node = Node::start_on(fake, &options);
        node.wait("an unhealthy GPU", SOON, GPU, 0, 1);
        let refusal = node.refusal(&uuid(0));
        assert!(
            refusal.contains("the node has no CDI device for it: ")
                && refusal.contains("libcuda.so")
                && refusal.contains("(ONH-072); hint: "),
            "{refusal}"
        );
        move_libcuda(&hidden, &node.fake.file(""));
        node.wait("the GPU with a CDI device", POLLED, GPU, 1, 1);
        node.kubelet.allocate(GPU, &[&[uuid(0)]]).unwrap();
    }
    // A directory that cannot exist
    let fake = Fake::new(&["--gpus", "1"]);
    let cdi = fake.config.join("cdi");
    let options = ["--cdi-dir", cdi.to_str().unwrap()];
    let node = Node::start_on(
        fake,
        &[&options[..], &["--device-list-strategy=cdi-cri"]].concat(),
    );
    node.wait("an unhealthy GPU", SOON, GPU, 0, 1);
    let refusal = node.refusal(&uuid(0));
    assert!(refusal.contains("cannot write "), "{refusal}");
}

fn move_libcuda(from: &Path, to: &Path) {
    for file in std::fs::read_dir(from).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        if name.starts_with("libcuda.so") {
            std::fs::rename(from.join(&name), to.join(&name)).unwrap();
        }
    }
}

/// A strategy without CDI: nothing would keep the spec of an earlier run current. The spec of NVIDIA's plugin has the same name.
fn an_unused_cdi_spec_goes() {
    let fake = Fake::new(&["--gpus", "1"]);
    let run = fake.dir.path().join("run-of-the-host");
    let cdi = run.join("cdi");
    let file = cdi.join("k8s.device-plugin.nvidia.com-gpu.json");
    let mut node = Node::start_on(fake, &["--cdi-dir", cdi.to_str().unwrap()]);
    node.wait("the list", SOON, GPU, 1, 1);
    let spec = std::fs::read_to_string(&file).unwrap();
    let mut restart = |strategy: &str, before: &str| {
        node.plugin.kill().unwrap();
        node.plugin.wait().unwrap();
        node.kubelet = FakeKubelet::start(&node.kubelet_dir);
        let mut command = Command::new("unshare");
        let script = format!("mount --bind '{}' /run; {before}exec \"$@\"", run.display());
        command.args(["-m", "bash", "-euc", &script, "bash", PROGRAM]);
        node.plugin = start_with(command, &node.fake, &node.kubelet_dir, &[strategy]);
        node.wait("the list", SOON, GPU, 1, 1);
        file.is_file()
    };
    // As the process of the unit for NRI does, which keeps the same spec
    let lock = cdi.join(".k8s.device-plugin.nvidia.com.lock");
    let other = std::fs::File::open(&lock).unwrap();
    rustix::fs::flock(&other, rustix::fs::FlockOperation::LockShared).unwrap();
    assert!(
        restart("--device-list-strategy=envvar", ""),
        "another process keeps the spec"
    );
    drop(other);
    assert!(!restart("--device-list-strategy=envvar", ""));
    assert!(restart("--device-list-strategy=cdi-cri", ""));
    let theirs = spec
        .replace("oci-nvidia-hook", "nvidia-cdi-hook")
        .replace("\"rootfs\"", "\"update-ldcache\"");
    std::fs::write(&file, theirs).unwrap();
    assert!(restart("--device-list-strategy=volume-mounts", ""));
    assert_eq!(
        node.log()
            .matches("removed the CDI spec of an earlier run")
            .count(),
        1,
        "{}",
        node.log()
    );
}

fn a_sick_gpu_recovers() {
    let node = Node::start(
        &["--gpus", "2"],
        &["--quiet-period", "2", "--replicas", "3"],
    );
    node.wait("the list", SOON, GPU, 6, 6);
    node.fake.event("xid 1 13");
    node.fake.event("xid 1 79");
    node.wait("all replicas of the sick GPU", AT_ONCE, GPU, 3, 6);
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
    node.wait("the sick GPU", AT_ONCE, GPU, 1, 2);
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
        node.wait("a sick GPU", AT_ONCE, GPU, 0, 1);
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

fn a_kubelet_that_restarts() {
    let mut node = Node::start(&["--gpus", "1"], &[]);
    node.wait("the list", SOON, GPU, 1, 1);
    node.kubelet = FakeKubelet::start(&node.kubelet_dir);
    node.wait("the new kubelet", SOON, GPU, 1, 1);
    // The plugin restarts as well: the ids stay.
    node.signal("TERM");
    node.plugin.wait().unwrap();
    assert!(
        !node
            .kubelet_dir
            .join("device-plugins/oci-nvidia-gpu.sock")
            .exists()
    );
    node.kubelet.wait("the end of the plugin", SOON, |state| {
        state.allocatable(GPU) == 0
    });
    node.plugin = start(&node.fake, &node.kubelet_dir, &[]);
    node.wait("the new plugin", SOON, GPU, 1, 1);
    node.kubelet.allocate(GPU, &[&[uuid(0)]]).unwrap();
}

fn replicas() {
    let node = Node::start(
        &["--gpus", "2"],
        &[
            "--resources",
            "name=example.com/h100,model=*H100*,replicas=2",
        ],
    );
    let name = "example.com/h100";
    node.wait("the list", SOON, name, 4, 4);
    let id = |gpu, replica: u32| format!("{}::{replica}", uuid(gpu));
    let all: Vec<String> = [(0, 0), (0, 1), (1, 0), (1, 1)]
        .map(|(gpu, replica)| id(gpu, replica))
        .into();
    let preferred = node.kubelet.prefer(name, &[(&all, &[], 2)]).unwrap();
    assert_eq!(preferred[0], [id(0, 0), id(1, 0)]);
    let refusal = node.kubelet.allocate(name, &[&preferred[0]]).unwrap_err();
    assert!(refusal.message().contains(
        "2 devices of example.com/h100 are requested, but its GPUs are shared (ONH-073)"
    ));
    node.kubelet.allocate(name, &[&[id(1, 1)]]).unwrap();
}

/// What Allocate answers for one GPU, as text.
fn answer(kubelet: &FakeKubelet, resource: &str, id: &str) -> String {
    let mut answer = kubelet
        .allocate(resource, &[&[id.to_owned()]])
        .unwrap()
        .container_responses
        .remove(0);
    let mut lines: Vec<String> = answer
        .envs
        .drain()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    lines.extend(
        answer
            .mounts
            .iter()
            .map(|mount| format!("{} {}", mount.host_path, mount.container_path)),
    );
    lines.extend(answer.cdi_devices.iter().map(|device| device.name.clone()));
    lines.extend(
        answer
            .annotations
            .iter()
            .map(|(key, value)| format!("{key}: {value}")),
    );
    lines.extend((!answer.devices.is_empty()).then(|| "nodes".to_owned()));
    lines.join("\n")
}

fn each_strategy() {
    let mut node = Node::start(
        &["--gpus", "1"],
        &[
            "--device-list-strategy=volume-mounts",
            "--device-id-strategy=index",
        ],
    );
    let restart = |node: &mut Node, options: &[&str]| {
        node.plugin.kill().unwrap();
        node.plugin.wait().unwrap();
        node.kubelet = FakeKubelet::start(&node.kubelet_dir);
        let cdi = node.fake.dir.path().join("cdi");
        node.plugin = start(
            &node.fake,
            &node.kubelet_dir,
            &[options, &["--cdi-dir", cdi.to_str().unwrap()]].concat(),
        );
        node.wait("the list", SOON, GPU, 1, 1);
        answer(&node.kubelet, GPU, &uuid(0))
    };
    node.wait("the list", SOON, GPU, 1, 1);
    let mounts = "NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices\n/dev/null /var/run/nvidia-container-devices/";
    assert_eq!(
        answer(&node.kubelet, GPU, &uuid(0)),
        format!("{mounts}0\nnodes")
    );
    let found = restart(
        &mut node,
        &[
            "--device-list-strategy=envvar,cdi-annotations",
            "--pass-device-specs=false",
        ],
    );
    let (id, name) = (
        uuid(0),
        format!("k8s.device-plugin.nvidia.com/gpu={}", uuid(0)),
    );
    assert_eq!(
        found,
        format!("NVIDIA_VISIBLE_DEVICES={id}\ncdi.k8s.io/nvidia-device-plugin_{id}: {name}")
    );
    // Without a setting: the kubelet uses containerd, which does not start the hook.
    let engine = "containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n";
    std::fs::write(node.kubelet_dir.join("config.yaml"), engine).unwrap();
    assert_eq!(restart(&mut node, &["--device-list-strategy="]), name);
    let chosen = "containers get their devices with cdi-cri (containerd does not read hook files)";
    assert_eq!(node.log().matches(chosen).count(), 1, "{}", node.log());
    // The engine that runs when a container starts decides. The choice is used for ten seconds.
    std::fs::write(
        node.kubelet_dir.join("config.yaml"),
        engine.replace("/containerd", "/other"),
    )
    .unwrap();
    let chosen = "with cdi-cri (the engine at \"/run/other/other.sock\" does not read hook files)";
    node.until("the choice for another engine", POLLED, || {
        assert_eq!(answer(&node.kubelet, GPU, &uuid(0)), name);
        node.log().contains(chosen)
    });
    let files = node.fake.dir.path().join("nvidia");
    std::fs::create_dir_all(files.join("vulkan/icd.d")).unwrap();
    let shared = node.fake.dir.path().join("gpu_config.json");
    let text =
        r#"{"GPUSharingConfig":{"GPUSharingStrategy":"time-sharing","MaxSharedClientsPerGPU":1}}"#;
    std::fs::write(&shared, text).unwrap();
    let options = [
        "--device-list-strategy=host-path",
        &format!("--host-path={}", files.display()),
        &format!("--gpu-config={}", shared.display()),
    ];
    let found = restart(&mut node, &options);
    let files = files.display();
    let mounts =
        format!("{files} /usr/local/nvidia\n{files}/vulkan/icd.d /etc/vulkan/icd.d\nnodes");
    assert_eq!(found, format!("NVIDIA_VISIBLE_DEVICES={id}\n{mounts}"));
    let missing = format!("--host-path={files}/missing");
    let (code, report, _) = check(&node.fake, &[options[0], &missing]);
    assert_eq!(code, Some(3), "{report}");
    assert!(
        report.contains("ONH-077 error: device-list-strategy is \"host-path\", and the directory "),
        "{report}"
    );
    assert!(
        report.contains("nvidia.com/gpu: 0 of 1 devices can be allocated"),
        "{report}"
    );
    std::fs::write(&shared, text.replace('1', "2").replace("time", "Time")).unwrap();
    let (code, _, errors) = check(&node.fake, &options);
    assert_eq!(code, Some(1));
    assert!(
        errors.contains("line 1: GPUSharingConfig.GPUSharingStrategy has an invalid value"),
        "{errors}"
    );
    std::fs::write(&shared, text).unwrap();
    let ids = ["--device-id-strategy=index"];
    node.plugin.kill().unwrap();
    node.plugin.wait().unwrap();
    node.plugin = start(
        &node.fake,
        &node.kubelet_dir,
        &[&options[..], &ids].concat(),
    );
    node.kubelet.wait("GKE's id", SOON, |state| {
        state
            .resources
            .get(GPU)
            .is_some_and(|gpu| gpu.devices.get("nvidia0") == Some(&true))
    });
    assert_eq!(
        answer(&node.kubelet, GPU, "nvidia0"),
        format!("NVIDIA_VISIBLE_DEVICES=0\n{mounts}")
    );
    let moved = node.fake.dir.path().join("moved");
    std::fs::rename(node.fake.dir.path().join("nvidia"), &moved).unwrap();
    let refusal = node.refusal("nvidia0");
    assert!(
        refusal.contains("is missing (ONH-077); hint: ") && !refusal.contains('\n'),
        "{refusal}"
    );
    std::fs::rename(&moved, node.fake.dir.path().join("nvidia")).unwrap();
    std::fs::write(&shared, text.replace('1', "2")).unwrap();
    let (code, text, _) = check(&node.fake, &options);
    assert_eq!(code, Some(0));
    assert!(
        text.contains("nvidia.com/gpu: 2 of 2 devices can be allocated"),
        "{text}"
    );
    assert!(
        text.contains("\ncontainers get their devices with host-path (configured)\n"),
        "{text}"
    );
}

/// The command, the variables and the configuration file of NVIDIA's DaemonSet.
fn nvidias_manifest_with_this_program() {
    let fake = Fake::new(&["--gpus", "2", "--mig"]);
    let dir = fake.dir.path();
    let kubelet_dir = dir.join("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("device-plugins")).unwrap();
    let kubelet = FakeKubelet::start(&kubelet_dir);
    let (program, file) = (dir.join("nvidia-device-plugin"), dir.join("config.yaml"));
    std::os::unix::fs::symlink(PROGRAM, &program).unwrap();
    let sharing = "sharing:\n  timeSlicing:\n    renameByDefault: true\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 2\n";
    std::fs::write(
        &file,
        format!("version: v1\nflags:\n  plugin:\n    deviceListStrategy: envvar\n{sharing}"),
    )
    .unwrap();
    let variables = [
        ("MPS_ROOT", "/run/nvidia/mps"),
        ("FAIL_ON_INIT_ERROR", "true"),
        ("PASS_DEVICE_SPECS", "false"),
        ("DEVICE_LIST_STRATEGY", "volume-mounts"),
        ("GDS_ENABLED", "true"),
        ("NVIDIA_DRIVER_ROOT", fake.root.to_str().unwrap()),
        ("CONFIG_FILE", file.to_str().unwrap()),
        (
            "KUBELET_SOCKET",
            &kubelet_dir
                .join("device-plugins/kubelet.sock")
                .display()
                .to_string(),
        ),
    ];
    // Not the configuration of the fake host: the variables name the driver root.
    let empty = dir.join("empty.toml");
    std::fs::write(&empty, "").unwrap();
    let log = dir.join("log");
    let mut command = Command::new(program);
    command
        .arg("--config")
        .arg(&empty)
        .arg("--run-dir")
        .arg(dir.join("run"))
        .envs(variables);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap());
    let plugin = command.spawn().unwrap();
    let node = Node {
        fake,
        kubelet,
        kubelet_dir,
        plugin,
    };
    let name = "nvidia.com/gpu.shared";
    // NVIDIA's default for the MIG strategy is "none": both GPUs are whole.
    node.wait("the list", SOON, name, 4, 4);
    let directory = "/var/run/nvidia-container-devices";
    let expected = format!(
        "NVIDIA_VISIBLE_DEVICES={directory}\n/dev/null {directory}/{}",
        uuid(1)
    );
    assert_eq!(
        answer(&node.kubelet, name, &format!("{}::1", uuid(1))),
        expected
    );
    // Its default permits several replicas.
    let all: Vec<String> = (0..2)
        .map(|replica| format!("{}::{replica}", uuid(0)))
        .collect();
    node.kubelet.allocate(name, &[&all]).unwrap();
    let missing = "extra-devices contains \"gds\" (GPUDirect Storage), but \"/dev/nvidia-fs*\" is missing below ";
    assert_eq!(node.log().matches(missing).count(), 1, "{}", node.log());
    assert!(!node.log().contains("has no effect"), "{}", node.log());
    std::fs::write(&file, "version: v1\nflags:\n  migStrategy: both\n").unwrap();
    let (code, _, errors) = check(&node.fake, &["--config-file", file.to_str().unwrap()]);
    assert_eq!(code, Some(1));
    assert!(
        errors.contains("line 3: flags.migStrategy has an invalid value; it must be \"none\", "),
        "{errors}"
    );
}

fn check(fake: &Fake, options: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(PROGRAM);
    let output = command
        .arg("check")
        .arg("--config")
        .arg(&fake.config)
        .args(options)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

fn check_prints_what_run_offers() {
    let fake = Fake::new(&["--gpus", "2", "--mig"]);
    let (code, text, errors) = check(&fake, &[]);
    assert_eq!((code, errors.as_str()), (Some(0), ""), "{text}");
    assert!(
        text.contains(&format!(
            "nvidia.com/gpu: 1 of 1 devices can be allocated\n  {} healthy",
            uuid(1)
        )),
        "{text}"
    );
    assert!(text.contains("nvidia.com/mig-1g.10gb: 1 of 1"), "{text}");
    let (_, json, _) = check(&fake, &["--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["resources"][0]["devices"][0]["id"], uuid(1));
    assert_eq!(json["resources"][0]["devices"][0]["health"], "Healthy");
    assert!(
        json["strategy"]["names"][0].is_string() && json["strategy"]["why"].is_string(),
        "{json}"
    );
    // The monitor runs in another directory.
    let mut command = Command::new(PROGRAM);
    command
        .args(["check", "--config", "config.toml"])
        .current_dir(fake.dir.path());
    assert_eq!(command.output().unwrap().status.code(), Some(0));
    fake.add(1, "fail=15");
    let (code, text, _) = check(&fake, &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("nvidia.com/gpu: 0 of 1 devices can be allocated"),
        "{text}"
    );
    std::fs::remove_file(fake.root.join("dev/nvidiactl")).unwrap();
    let (code, text, _) = check(&fake, &[]);
    assert_eq!(code, Some(3), "{text}");
    assert!(
        text.contains("ONH-074 error: ") && text.contains("  hint: "),
        "{text}"
    );
    // A host without GPUs is in order.
    let (code, text, _) = check(&Fake::new(&["--gpus", "0"]), &[]);
    assert_eq!(
        (code, text.as_str()),
        (
            Some(0),
            "this node has no GPU to offer\na pod that requests a GPU would not start: the node has no GPU\n"
        )
    );
}

/// The plugin's messages about its command line have the form of the hook's, and its common options stand anywhere.
fn command_lines() {
    let fake = Fake::new(&["--gpus", "1"]);
    let run = |arguments: &[&str]| {
        let output = Command::new(PROGRAM).args(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    let dir = fake.dir.path().display().to_string();
    let document = fake.dir.path().join("bad.yaml").display().to_string();
    std::fs::write(&document, "version: v1\nsharing: [\n").unwrap();
    let missing = format!("{dir}/missing.yaml");
    for (arguments, code, message, hint) in [
        (
            &["chek"][..],
            2,
            "invalid command line: unknown command \"chek\" (ONH-002)",
            "did you mean check? See \"oci-nvidia-kubelet-plugin --help\"",
        ),
        (
            &["ps"],
            2,
            "invalid command line: unknown command \"ps\" (ONH-002)",
            "run \"oci-nvidia-kubelet-plugin --help\"",
        ),
        (
            &["check", "--jsno"],
            2,
            "invalid command line: unexpected argument \"--jsno\" found (ONH-002)",
            "did you mean --json? See \"oci-nvidia-kubelet-plugin check --help\"",
        ),
        (
            &["check", "--replicas", "x"],
            2,
            "invalid command line: --replicas has an invalid value; it must be ",
            "run \"oci-nvidia-kubelet-plugin run --help\"",
        ),
        (&["check", "--config-file", &document], 1, "cannot", ""),
        (
            &["check", "--config-file", &missing],
            1,
            "no such file or directory (ENOENT) (ONH-0",
            "",
        ),
        (
            &["clear", "GPU-0", "--run-dir", &dir],
            1,
            "cannot clear \"GPU-0\" in the running plugin: no device plugin runs on this host (ONH-001)",
            "start the plugin with",
        ),
    ] {
        let (found, stdout, stderr) = run(arguments);
        assert_eq!(
            (found, stdout.as_str()),
            (Some(code), ""),
            "{arguments:?}: {stderr}"
        );
        let mut lines = stderr.lines();
        let first = lines.next().unwrap();
        assert!(first.starts_with("oci-nvidia-kubelet-plugin: "), "{stderr}");
        let is_config = message == "cannot";
        assert!(
            is_config || first.contains(message),
            "{arguments:?}: {stderr}"
        );
        let second = lines.next().unwrap_or_default();
        assert_eq!(
            (hint.is_empty(), lines.next()),
            (second.is_empty(), None),
            "{arguments:?}: {stderr}"
        );
        assert!(
            second.starts_with(&format!("hint: {hint}")) || hint.is_empty(),
            "{stderr}"
        );
        assert!(
            !stderr.contains("os error") && !stderr.contains('\u{1b}'),
            "{stderr}"
        );
    }
    // Without a command: help and an error.
    let (code, stdout, stderr) = run(&[]);
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    assert!(
        stderr.contains("\nUsage: ")
            && stderr.contains(": invalid command line: a command is missing (ONH-002)\n"),
        "{stderr}"
    );
    let config = fake.config.to_str().unwrap();
    for arguments in [
        &["--config", config, "--color", "always", "--debug", "check"][..],
        &["check", "--config", config, "--color", "always", "--debug"],
    ] {
        let (code, stdout, log) = run(arguments);
        assert!(
            code == Some(0) && stdout.contains(" \u{1b}[32mhealthy\u{1b}[0m"),
            "{stdout}"
        );
        for text in [
            format!(": read \"{config}\""),
            format!(": driver root {:?}", fake.root),
        ] {
            assert!(log.contains(&text), "{text}: {log}");
        }
        assert!(log.contains(": the driver was asked for "), "{log}");
    }
    let help = run(&["--help"]).1;
    assert!(
        help.contains("Exit status:") && help.lines().all(|line| line.len() <= 80),
        "{help}"
    );
    assert_eq!(
        run(&["--version"]).1,
        concat!(
            "oci-nvidia-kubelet-plugin ",
            env!("CARGO_PKG_VERSION"),
            "\n"
        )
    );
}

/// The driver reports nothing wrong about a GPU that had an XID, and only the running plugin remembers it.
fn check_shows_the_health_that_the_kubelet_has() {
    let mut node = Node::start(&["--gpus", "2"], &["--replicas", "2"]);
    let run = node.fake.dir.path().join("run").display().to_string();
    node.wait("the list", SOON, GPU, 4, 4);
    let checked = |node: &Node, options: &[&str]| {
        let (code, text, _) = check(&node.fake, &[&["--run-dir", &run], options].concat());
        (code, text)
    };
    let (code, text) = checked(&node, &["--replicas", "2"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("\nthe running plugin reports this health to the kubelet\n"),
        "{text}"
    );
    assert!(
        text.ends_with("\na pod that requests a GPU would start\n"),
        "{text}"
    );
    node.fake.event("xid 1 79");
    node.wait("the sick GPU", AT_ONCE, GPU, 2, 4);
    let (code, text) = checked(&node, &["--replicas", "2"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("nvidia.com/gpu: 2 of 4 devices can be allocated\n"),
        "{text}"
    );
    assert!(
        text.contains(&format!("  {}::0 unhealthy: XID 79 (since 20", uuid(1))),
        "{text}"
    );
    // With other settings, the health also comes from the running plugin, and a note names the difference.
    let (code, json) = checked(&node, &["--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (code, &json["running"]["active"]),
        (Some(1), &true.into()),
        "{json}"
    );
    assert_eq!(
        json["verdict"],
        serde_json::json!({"starts": true}),
        "{json}"
    );
    let resource = &json["resources"][0];
    assert_eq!(resource["registered"], true, "{json}");
    assert_eq!(
        (
            &resource["devices"][0]["why"],
            &resource["devices"][0]["since"]
        ),
        (&().into(), &().into()),
        "{json}"
    );
    assert_eq!(
        (
            &resource["devices"][1]["health"],
            &resource["devices"][1]["why"]
        ),
        (&"Unhealthy".into(), &"XID 79".into())
    );
    assert!(
        resource["devices"][1]["since"]
            .as_str()
            .unwrap()
            .ends_with('Z'),
        "{json}"
    );
    assert_eq!(
        (&json["findings"][0]["id"], &json["findings"][0]["severity"]),
        (&"ONH-605".into(), &"note".into())
    );
    // A plugin that is killed leaves its socket.
    node.plugin.kill().unwrap();
    node.plugin.wait().unwrap();
    let (code, text) = checked(&node, &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("\nno device plugin runs on this host: this is what it would offer\n"),
        "{text}"
    );
}

/// The strategy is configured, because the default depends on the engine of the node.
fn what_a_person_reads() {
    let of = |fake: &Fake| {
        let mut command = Command::new(PROGRAM);
        command
            .args([
                "check",
                "--device-list-strategy=envvar",
                "--run-dir=/nowhere",
                "--config",
            ])
            .arg(&fake.config);
        command
    };
    let fake = Fake::new(&["--gpus", "2"]);
    views::check("check", "oci-nvidia-kubelet-plugin check", &of(&fake));
    fake.add(1, "fail=15");
    views::check("check-sick", "oci-nvidia-kubelet-plugin check", &of(&fake));
    views::check(
        "check-no-gpu",
        "oci-nvidia-kubelet-plugin check",
        &of(&Fake::new(&["--gpus", "0"])),
    );
}

fn a_person_who_waits_sees_a_line() {
    let fake = Fake::new(&["--gpus", "1"]);
    let mut check = Command::new(PROGRAM);
    check
        .args(["check", "--run-dir=/nowhere", "--config"])
        .arg(&fake.config);
    let terminal = views::View::Terminal { color: false };
    let quick = views::text(&terminal.output(&check).stdout);
    assert!(!quick.contains("waiting for NVML"), "{quick}");
    let conf = fake.file("nvml.conf");
    std::fs::write(
        &conf,
        format!(
            "init-delay-ms 2000\n{}",
            std::fs::read_to_string(&conf).unwrap()
        ),
    )
    .unwrap();
    let slow = views::text(&terminal.output(&check).stdout);
    assert!(
        slow.starts_with("waiting for NVML, at most 15 s; press Ctrl-C to stop\n"),
        "{slow}"
    );
    assert_eq!(slow.matches("waiting for NVML").count(), 1, "{slow}");
    let piped = views::View::Pipe.output(&check);
    assert_eq!(views::text(&piped.stderr), "");
}

/// Linux before 5.6, and services with RestrictSUIDSGID=.
fn a_kernel_without_openat2() {
    let fake = Fake::new(&["--gpus", "2"]);
    let mut strace = Command::new("strace");
    strace.args([
        "-f",
        "-qq",
        "-e",
        "trace=openat2",
        "-e",
        "inject=openat2:error=ENOSYS",
        "-o",
    ]);
    strace
        .arg(fake.dir.path().join("calls"))
        .arg(PROGRAM)
        .arg("check")
        .arg("--config")
        .arg(&fake.config);
    let output = strace.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.starts_with("nvidia.com/gpu: 2 of 2 devices can be allocated\n"),
        "{text}"
    );
    let calls = std::fs::read_to_string(fake.dir.path().join("calls")).unwrap();
    assert!(calls.contains("(INJECTED)"), "{calls}");
}

fn bad_settings() {
    let fake = Fake::new(&["--gpus", "1"]);
    for (option, value, says) in [
        (
            "--replicas",
            "0",
            "--replicas has an invalid value; it must be a number from 1 to 100 (ONH-002)",
        ),
        (
            "--mig-strategy",
            "both",
            "it must be \"none\", \"single\" or \"mixed\" (ONH-002)",
        ),
        (
            "--device-list-strategy",
            "cdi",
            "it must be a list of \"envvar\", ",
        ),
        (
            "--device-list-strategy",
            "host-path,envvar",
            "and \"host-path\" alone (ONH-002)",
        ),
        (
            "--nvidia-driver-root",
            "x",
            "--nvidia-driver-root has an invalid value; it must be an absolute path (ONH-002)",
        ),
        ("--resources", "name=a.b/c", "\"a.b/c\" has no model"),
        (
            "--quiet-period",
            "0",
            "it must be a number of seconds from 1 to 600 (ONH-002)",
        ),
    ] {
        let (code, text, errors) = check(&fake, &[option, value]);
        assert_eq!((code, text.as_str()), (Some(2), ""), "{errors}");
        assert!(errors.contains(says), "{errors}");
    }
    let config = std::fs::read_to_string(&fake.config).unwrap();
    std::fs::write(
        &fake.config,
        format!("{config}[kubelet-plugin]\nreplicas = \"2\"\n"),
    )
    .unwrap();
    let (code, _, errors) = check(&fake, &[]);
    assert_eq!(code, Some(1));
    assert!(
        errors.contains(
            "line 4: kubelet-plugin.replicas has an invalid value; it must be a number (ONH-005)"
        ),
        "{errors}"
    );
    let long = fake.dir.path().join("x".repeat(100));
    let ran = Command::new(PROGRAM)
        .args(["run", "--kubelet-dir"])
        .arg(long)
        .output()
        .unwrap();
    let errors = String::from_utf8(ran.stderr).unwrap();
    assert!(
        ran.status.code() == Some(1) && errors.contains("107"),
        "{errors}"
    );
}

/// One thread in each process, and little memory of their own. `make bench` measures the packaged program.
fn a_small_program() {
    let node = Node::start(&["--gpus", "8"], &[]);
    node.wait("the list", SOON, GPU, 8, 8);
    let value = |pid: u32, name: &str| -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    for pid in [node.plugin.id(), node.monitor().unwrap()] {
        assert_eq!(value(pid, "Threads:"), 1);
        assert!(
            value(pid, "RssAnon:") <= 3 << 10,
            "{} kB",
            value(pid, "RssAnon:")
        );
    }
}
