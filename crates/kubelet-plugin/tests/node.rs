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
mod cdi;
mod claims;
mod commands;
mod dcgm;
mod fake_api;
mod fake_host;
mod fake_kubelet;
mod features;
mod health;
mod idle;
mod limits;
mod mps;
mod node_extras;
mod nri;
mod prometheus;
mod states;

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
    ROOT => whole_gpus_are_offered_and_given, mig_devices_follow_the_layout, a_kubelet_that_restarts, replicas,
        each_strategy, nvidias_manifest_with_this_program, a_small_program;
    &[Need::Root, Need::Program("strace")] => a_kernel_without_openat2;
}

fn main() -> ExitCode {
    let tests = [
        TESTS,
        alerts::TESTS,
        cdi::TESTS,
        claims::TESTS,
        commands::TESTS,
        dcgm::TESTS,
        features::TESTS,
        health::TESTS,
        idle::TESTS,
        limits::TESTS,
        mps::TESTS,
        node_extras::TESTS,
        nri::TESTS,
        prometheus::TESTS,
        states::TESTS,
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
        monitor_of(self.plugin.id())
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

/// Returns the monitor that this plugin has started.
fn monitor_of(plugin: u32) -> Option<u32> {
    let path = format!("/proc/{plugin}/task/{plugin}/children");
    let children = std::fs::read_to_string(path).unwrap();
    let mut children = children.split_whitespace();
    children.next().map(|pid| pid.parse().unwrap())
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
    node.wait(
        "all of a unhealthy GPU",
        AT_ONCE,
        "nvidia.com/mig-1g.10gb",
        0,
        2,
    );
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
            "--device-list-strategy=envvar,cdi-annotations",
            "--pass-device-specs=false",
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
    let (id, name) = (
        uuid(0),
        format!("k8s.device-plugin.nvidia.com/gpu={}", uuid(0)),
    );
    assert_eq!(
        answer(&node.kubelet, GPU, &id),
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
    // No plugin runs in the kubelet's default directory.
    let (code, text, _) = check(&node.fake, &options);
    assert_eq!(code, Some(1));
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
