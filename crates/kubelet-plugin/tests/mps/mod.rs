//! GPUs that MPS shares. A test is the supervisor of the daemons: it writes their state and holds their locks.

use std::fs::{self, File};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nvidia_host::mps::{DIRECTORY, FORMAT, PIPE, STATE, lock};
use serde_json::{Value, json};

use super::fake_host::{Fake, uuid};
use super::node_extras::{METRICS, address, get};
use super::{GPU, Node, POLLED, ROOT, SOON, check, counts};

tests! {
    ROOT => pods_share_a_gpu_with_limits, a_gpu_is_unhealthy_while_its_daemon_is_not_ready, limits_that_do_not_fit,
        whole_gpus_with_a_daemon, a_gpu_that_is_lost, mig_devices_are_refused, the_cdi_spec_has_no_daemon, nvidias_file_with_mps;
}

/// Adds the GPUs that MPS shares to config.toml.
pub fn share(fake: &Fake, gpus: &[String]) {
    let text = fs::read_to_string(&fake.config).unwrap();
    let text = format!("{text}\n[sharing]\nmps-gpus = {gpus:?}\n");
    fs::write(&fake.config, text).unwrap();
}

/// A host that shares all GPUs.
fn sharing(options: &[&str]) -> Fake {
    let fake = Fake::new(options);
    share(&fake, &["all".to_owned()]);
    fake
}

/// A supervisor of a daemon, as far as the plugin sees it.
pub struct Daemon {
    dir: PathBuf,
    gpu: String,
    lock: Option<File>,
}

impl Daemon {
    /// A daemon that is ready.
    pub fn start(fake: &Fake, gpu: u32, limits: Value) -> Self {
        let gpu = uuid(gpu);
        let dir = fake.root.join(DIRECTORY.trim_start_matches('/')).join(&gpu);
        fs::create_dir_all(dir.join(PIPE)).unwrap();
        let mut daemon = Self {
            dir,
            gpu,
            lock: None,
        };
        daemon.run(limits);
        daemon
    }

    pub fn run(&mut self, limits: Value) {
        self.set("ready", limits);
    }

    pub fn set(&mut self, phase: &str, more: Value) {
        let mut state = json!({"format": FORMAT, "gpu": self.gpu, "state": phase});
        let more = more.as_object().unwrap().clone();
        state.as_object_mut().unwrap().extend(more);
        let new = self.dir.join("new");
        fs::write(&new, state.to_string()).unwrap();
        let file = File::options().write(true).open(&new).unwrap();
        lock(&file).unwrap();
        fs::rename(new, self.dir.join(STATE)).unwrap();
        self.lock = Some(file);
    }

    /// The supervisor is killed.
    pub fn kill(&mut self) {
        self.lock = None;
    }

    /// The unit is stopped.
    pub fn stop(&mut self) {
        fs::remove_file(self.dir.join(STATE)).unwrap();
        self.lock = None;
    }

    fn pipe(&self) -> String {
        self.dir.join(PIPE).display().to_string()
    }
}

fn limit(mib: u64) -> Value {
    json!({"memory_limit_mib": mib, "active_thread_percentage": 25, "clients": 2})
}

fn replica(gpu: u32, number: u32) -> String {
    format!("{}::{number}", uuid(gpu))
}

const SHARED: [&str; 2] = ["--sharing=mps", "--replicas=4"];

/// The mounts of a container as `source target`, and the variable.
fn mps_of(node: &Node, resource: &str, id: &str) -> (Vec<String>, Option<String>) {
    let answer = node.kubelet.allocate(resource, &[&[id.to_owned()]]);
    let mut answer = answer.unwrap().container_responses.remove(0);
    let mut mounts = Vec::new();
    for mount in answer.mounts {
        assert!(mount.read_only, "{mount:?}");
        mounts.push(format!("{} {}", mount.host_path, mount.container_path));
    }
    (mounts, answer.envs.remove("CUDA_MPS_PIPE_DIRECTORY"))
}

fn pods_share_a_gpu_with_limits() {
    let fake = sharing(&["--gpus", "2"]);
    let daemons = [0, 1].map(|gpu| Daemon::start(&fake, gpu, limit(16_384)));
    let node = Node::start_on(fake, &[&SHARED[..], &METRICS].concat());
    node.wait("the list", SOON, GPU, 8, 8);
    for (gpu, number) in [(0, 0), (0, 3), (1, 2)] {
        let (mounts, variable) = mps_of(&node, GPU, &replica(gpu, number));
        let pipe = daemons[usize::try_from(gpu).unwrap()].pipe();
        assert_eq!(mounts, [format!("{pipe} /tmp/nvidia-mps")]);
        assert_eq!(variable.as_deref(), Some("/tmp/nvidia-mps"));
    }
    for second in [replica(0, 1), replica(1, 0)] {
        let refusal = node.kubelet.allocate(GPU, &[&[replica(0, 0), second]]);
        let refusal = refusal.unwrap_err().message().to_owned();
        assert!(
            refusal.contains("but its GPUs are shared (ONH-073); hint: request nvidia.com/gpu: 1"),
            "{refusal}"
        );
    }
    let expected = |text: &str| {
        let id = uuid(0);
        [
            format!("onh_mps_ready{{uuid=\"{id}\"}} 1.0\n"),
            format!("onh_mps_clients{{uuid=\"{id}\"}} 2.0\n"),
            format!("onh_mps_memory_limit_bytes{{uuid=\"{id}\"}} 17179869184.0\n"),
            format!("onh_mps_active_thread_percentage{{uuid=\"{id}\"}} 25.0\n"),
        ]
        .iter()
        .all(|line| text.contains(line))
    };
    let text = get(address(&node), "/metrics");
    assert!(expected(&text), "{text}");
    let (code, text, errors) = check(&node.fake, &SHARED);
    assert!(
        text.contains(&format!(
            "{}: MPS daemon ready, 2 clients, 16384 MiB and 25 % of the threads for each\n",
            uuid(0)
        )),
        "{code:?} {text} {errors}"
    );
}

fn a_gpu_is_unhealthy_while_its_daemon_is_not_ready() {
    let node = Node::start_on(sharing(&["--gpus", "2"]), &[&SHARED[..], &METRICS].concat());
    node.wait("no daemon", SOON, GPU, 0, 8);
    let unit = format!("oci-nvidia-mps@{}", uuid(0));
    let not_started = "its MPS daemon is not ready: it was not started";
    let why = format!("{not_started}; run \"systemctl enable --now oci-nvidia-mps\"");
    let unhealthy = |why: &str| format!("{} is unhealthy: {why}", uuid(0));
    assert!(node.log().contains(&unhealthy(&why)), "{}", node.log());
    let refusal = node.refusal(&replica(0, 0));
    assert!(refusal.contains(&format!("{why} (ONH-072)")), "{refusal}");

    let mut daemon = Daemon::start(&node.fake, 0, limit(16_384));
    node.wait("a daemon that appears", SOON, GPU, 4, 8);
    let ended = |what: &str, why: &str| {
        node.wait(what, SOON, GPU, 0, 8);
        let why = format!("its MPS daemon is not ready: {why}; run \"systemctl status {unit}\"");
        assert!(node.log().contains(&unhealthy(&why)), "{}", node.log());
        let refusal = node.refusal(&replica(0, 0));
        assert!(refusal.contains(&why), "{refusal}");
        let text = get(address(&node), "/metrics");
        let line = format!("onh_mps_ready{{uuid=\"{}\"}} 0.0\n", uuid(0));
        assert!(
            text.contains(&line) && !text.contains("onh_mps_clients{"),
            "{text}"
        );
        assert!(text.contains("onh_gpu_unhealthy_info{"), "{text}");
    };
    daemon.kill();
    ended("a supervisor that was killed", "its supervisor has ended");
    daemon.run(limit(16_384));
    node.wait("the daemon runs again", SOON, GPU, 4, 8);
    daemon.set(
        "failed",
        json!({"why": "the driver was updated", "memory_limit_mib": 16_384}),
    );
    ended("a driver that was updated", "the driver was updated");
    daemon.set("ready", limit(16_384));
    node.wait("ready again", SOON, GPU, 4, 8);
    daemon.set("stopping", limit(16_384));
    ended("a daemon that stops", "it is starting or stopping");
    daemon.stop();
    node.until("no daemon again", SOON, || {
        node.log().matches(&unhealthy(not_started)).count() == 2
    });
}

/// The plugin inspects the daemons every second, and a container must not start without limits in between.
fn limits_that_do_not_fit() {
    let fake = sharing(&["--gpus", "1"]);
    let mut daemon = Daemon::start(&fake, 0, json!({}));
    let node = Node::start_on(fake, &SHARED);
    node.wait("no limit", SOON, GPU, 0, 4);
    let said = "is unhealthy: its MPS daemon has no memory limit; set mps-memory-limit = ";
    assert!(node.log().contains(said), "{}", node.log());
    daemon.set("ready", limit(70_000));
    node.until("a limit that is too large", SOON, || {
        let said =
            "4 containers with 70000 MiB each, the memory limit of its MPS daemon, exceed its ";
        node.log().contains(said)
    });
    daemon.set("ready", limit(16_384));
    node.wait("a limit that fits", SOON, GPU, 4, 4);
    daemon.stop();
    let begun = Instant::now();
    let refusal = node.refusal(&replica(0, 0));
    let (of_list, at_once) = ("(ONH-072)", "it was not started (ONH-056)");
    assert!(
        refusal.contains(of_list) || refusal.contains(at_once),
        "{refusal}"
    );
    assert!(begun.elapsed() < Duration::from_secs(5));
    let (code, text, _) = check(&node.fake, &SHARED);
    assert_eq!(code, Some(3), "{text}");
    assert!(
        text.contains("nvidia.com/gpu: 0 of 4 devices can be allocated"),
        "{text}"
    );
}

/// A daemon that the settings of the plugin do not concern.
fn whole_gpus_with_a_daemon() {
    let fake = Fake::new(&["--gpus", "3"]);
    share(&fake, &[uuid(0)]);
    let mut daemon = Daemon::start(&fake, 0, json!({}));
    let node = Node::start_on(fake, &[]);
    node.wait("the list", SOON, GPU, 3, 3);
    let all: Vec<String> = (0..3).map(uuid).collect();
    for (size, expected) in [(2, vec![uuid(1), uuid(2)]), (3, all.clone())] {
        let mut preferred = node.kubelet.prefer(GPU, &[(&all, &[], size)]).unwrap();
        preferred[0].sort();
        assert_eq!(preferred[0], expected);
    }
    let (mounts, variable) = mps_of(&node, GPU, &uuid(0));
    assert_eq!(mounts, [format!("{} /tmp/nvidia-mps", daemon.pipe())]);
    assert!(variable.is_some());
    assert_eq!(mps_of(&node, GPU, &uuid(1)), (vec![], None));
    let both = node
        .kubelet
        .allocate(GPU, &[&[uuid(0), uuid(1)]])
        .unwrap_err();
    let said = "is shared through MPS, and the container requests 2 GPUs (ONH-057); hint: ";
    assert!(both.message().contains(said), "{both}");
    daemon.kill();
    node.wait("no container can use the GPU", SOON, GPU, 2, 3);
    daemon.stop();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(counts(&node.kubelet.state(), GPU), (2, 3));
    node.kubelet.allocate(GPU, &[&[uuid(1), uuid(2)]]).unwrap();
}

fn a_gpu_that_is_lost() {
    let fake = sharing(&["--gpus", "2"]);
    let mut daemons = [0, 1].map(|gpu| Daemon::start(&fake, gpu, limit(16_384)));
    let node = Node::start_on(fake, &SHARED);
    node.wait("the list", SOON, GPU, 8, 8);
    node.fake.event("xid 0 79");
    node.wait("the other GPU works", POLLED, GPU, 4, 8);
    // The driver has the last word, whatever its daemon reports.
    daemons[0].set("failed", json!({"why": "the GPU is lost"}));
    std::thread::sleep(Duration::from_secs(3));
    daemons[0].set("ready", limit(16_384));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(counts(&node.kubelet.state(), GPU), (4, 8));
    assert!(node.refusal(&replica(0, 0)).contains("XID 79"));
    mps_of(&node, GPU, &replica(1, 0));
}

fn mig_devices_are_refused() {
    let fake = sharing(&["--gpus", "1"]);
    let layout = fake.dir.path().join("layout");
    fs::write(&layout, "mig gpu=0 gi=1 ci=0 profile=1g.10gb uuid=MIG-1\n").unwrap();
    fake.make_root(&["--mig-layout", layout.to_str().unwrap()]);
    let node = Node::start_on(fake, &SHARED);
    node.wait("the list", SOON, "nvidia.com/mig-1g.10gb", 0, 4);
    let said = "MPS shares whole GPUs only, and the GPU is in MIG mode";
    assert!(node.log().contains(said), "{}", node.log());
}

/// The hook entry finds the daemon when the container starts.
fn the_cdi_spec_has_no_daemon() {
    let fake = sharing(&["--gpus", "1"]);
    let cdi = fake.dir.path().join("cdi");
    let options = [
        "--device-list-strategy=cdi-cri",
        "--cdi-dir",
        cdi.to_str().unwrap(),
    ];
    let node = Node::start_on(fake, &[&SHARED[..], &options].concat());
    node.wait("no daemon", SOON, GPU, 0, 4);
    let spec = || fs::read_to_string(cdi.join("k8s.device-plugin.nvidia.com-gpu.json")).unwrap();
    let before = spec();
    let daemon = Daemon::start(&node.fake, 0, limit(16_384));
    node.wait("the daemon", SOON, GPU, 4, 4);
    assert_eq!(spec(), before);
    assert!(!before.contains("nvidia-mps"), "{before}");
    let (mounts, _) = mps_of(&node, GPU, &replica(0, 0));
    assert_eq!(mounts, [format!("{} /tmp/nvidia-mps", daemon.pipe())]);
}

fn nvidias_file_with_mps() {
    let fake = sharing(&["--gpus", "2"]);
    let file = fake.dir.path().join("config.yaml");
    let text = "version: v1\nsharing:\n  mps:\n    renameByDefault: true\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 2\n";
    fs::write(&file, text).unwrap();
    let _daemons = [0, 1].map(|gpu| Daemon::start(&fake, gpu, limit(16_384)));
    let node = Node::start_on(fake, &["--config-file", file.to_str().unwrap()]);
    let name = "nvidia.com/gpu.shared";
    node.wait("the list", SOON, name, 4, 4);
    mps_of(&node, name, &replica(1, 1));
    let all = [replica(0, 0), replica(0, 1)];
    let refusal = node.kubelet.allocate(name, &[&all]).unwrap_err();
    assert!(refusal.message().contains("(ONH-073)"), "{refusal}");
    assert!(!node.log().contains("has no effect"), "{}", node.log());
}
