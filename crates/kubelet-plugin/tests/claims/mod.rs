//! The program as a driver for claims: with the fake driver, a fake kubelet and a fake API server.

use std::io::Write;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use plugin_api::control::{self, OfferedDriver};
use serde_json::{Value, json};

use crate::fake_api::{FakeApi, Fault, NODE};
use crate::fake_host::{Fake, uuid};
use crate::fake_kubelet::dra::DraKubelet;
use crate::fake_kubelet::{Container, FakeKubelet};
use crate::mps::{Daemon, share};
use crate::{AT_ONCE, GPU, POLLED, PROGRAM, ROOT, SOON};

tests! {
    ROOT => claims_get_the_gpus_of_the_node, claims_need_the_nodes_and_the_spec, claims_of_an_unhealthy_gpu, claims_and_a_driver_that_is_replaced,
        claims_and_a_driver_that_comes_later, claims_after_a_reboot, claims_while_nvml_hangs,
        claims_and_a_gpu_that_hangs, a_device_plugin_waits_for_the_end_of_claims,
        metrics_name_the_containers_of_claims, the_running_driver_is_described, the_spec_exists_during_a_restart, claims_of_mig_devices,
        check_prints_the_slices, check_without_credentials, check_without_the_api, little_memory, restarts_in_any_order,
        a_display_card_is_not_published, claims_share_a_gpu_with_mps;
}

const DRIVER: &str = "gpu.nvidia.com";

/// A host with GPUs, a kubelet and an API server.
pub struct Host {
    fake: Fake,
    pub api: FakeApi,
    kubelet: Option<DraKubelet>,
    pub program: Option<Child>,
    options: Vec<String>,
    /// A directory whose path is short enough for sockets
    pub dir: tempfile::TempDir,
}

impl Host {
    pub fn new(make_root: &[&str], options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let api = FakeApi::start(dir.path());
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let kubelet = Some(DraKubelet::start(dir.path()));
        Self {
            fake: Fake::new(make_root),
            api,
            kubelet,
            program: None,
            options,
            dir,
        }
    }

    fn start(make_root: &[&str], options: &[&str]) -> Self {
        let mut host = Self::new(make_root, options);
        host.run();
        host
    }

    fn command(&self, command: &str) -> Command {
        let mut program = Command::new(PROGRAM);
        program
            .arg(command)
            .arg("--config")
            .arg(&self.fake.config)
            .args(["--interface", "dra"]);
        program
            .arg("--kubelet-dir")
            .arg(self.dir.path())
            .arg("--kubeconfig")
            .arg(self.api.kubeconfig());
        program
            .arg("--run-dir")
            .arg(self.dir.path().join("run"))
            .args(&self.options);
        program
    }

    pub fn run(&mut self) {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.path().join("log"))
            .unwrap();
        let mut program = self.command("run");
        program
            .arg("--cdi-dir")
            .arg(self.cdi())
            .arg("--labels=false");
        self.program = Some(
            program
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log)
                .spawn()
                .unwrap(),
        );
    }

    fn cdi(&self) -> std::path::PathBuf {
        self.dir.path().join("cdi")
    }

    fn kill(&mut self) {
        if let Some(mut program) = self.program.take() {
            program.kill().unwrap();
            program.wait().unwrap();
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn kubelet(&self) -> &DraKubelet {
        self.kubelet.as_ref().unwrap()
    }

    pub fn registered(&self) {
        let start = Instant::now();
        while !self.kubelet().state().drivers.contains_key(DRIVER) {
            assert!(start.elapsed() < SOON, "not registered: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for these devices and whether they are tainted.
    #[track_caller]
    fn published(&self, what: &str, most: Duration, devices: &[(&str, bool)]) -> Duration {
        let expected = devices
            .iter()
            .map(|(name, tainted)| ((*name).to_owned(), *tainted))
            .collect();
        self.api
            .wait(what, most, |state| state.devices() == expected)
    }

    fn prepare(&self, name: &str, uid: &str) -> Result<Vec<String>, String> {
        let answer = self
            .kubelet()
            .try_prepare(DRIVER, &[(name, uid)])?
            .remove(uid)
            .unwrap();
        let ids = answer
            .devices
            .into_iter()
            .flat_map(|device| device.cdi_device_ids)
            .collect();
        if answer.error.is_empty() {
            Ok(ids)
        } else {
            Err(answer.error)
        }
    }

    /// Prepares a claim as the kubelet does: it tries again. Then the engine finds each CDI device.
    fn starts(&self, name: &str, uid: &str, most: Duration) -> Duration {
        let start = Instant::now();
        loop {
            match self.prepare(name, uid) {
                Ok(ids) => {
                    let unknown: Vec<_> =
                        ids.iter().filter(|id| !self.has_cdi_device(id)).collect();
                    assert!(unknown.is_empty(), "unresolvable CDI devices {unknown:?}");
                    return start.elapsed();
                }
                Err(error) => assert!(start.elapsed() < most, "{error}: {}", self.log()),
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn has_cdi_device(&self, id: &str) -> bool {
        let file = self.cdi().join("k8s.gpu.nvidia.com-gpu.json");
        let Ok(text) = std::fs::read_to_string(file) else {
            return false;
        };
        let spec: Value = serde_json::from_str(&text).unwrap();
        let (kind, name) = id.split_once('=').unwrap();
        spec["kind"] == kind
            && spec["devices"]
                .as_array()
                .unwrap()
                .iter()
                .any(|device| device["name"] == name)
    }

    /// Sends a signal as soon as the program handles it: before, SIGUSR1 ends a process.
    fn signal(&self, name: &str) {
        const CAUGHT: u64 = 1 << 9 | 1 << 11;
        let pid = self.program.as_ref().unwrap().id().to_string();
        let start = Instant::now();
        let handles = || {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let mask = status
                .lines()
                .find_map(|line| line.strip_prefix("SigCgt:"))
                .unwrap();
            u64::from_str_radix(mask.trim(), 16).unwrap() & CAUGHT == CAUGHT
        };
        while !handles() {
            assert!(start.elapsed() < SOON, "{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(
            Command::new("kill")
                .arg(format!("-{name}"))
                .arg(pid)
                .status()
                .unwrap()
                .success()
        );
    }

    fn check(&self, more: &[&str]) -> Output {
        self.command("check").args(more).output().unwrap()
    }
}

impl Host {
    /// Adds a line to the log, which failed assertions print.
    fn note(&self, what: &str) {
        let mut log = std::fs::OpenOptions::new()
            .append(true)
            .open(self.dir.path().join("log"))
            .unwrap();
        writeln!(log, "{what}").unwrap();
    }

    fn stop(&mut self, what: &str) {
        self.note(&format!("stop {what}"));
        match what {
            "plugin" => self.kill(),
            "kubelet" => {
                drop(self.kubelet.take());
                self.api.state().wipe();
            }
            "api" => self.api.stop(),
            _ if self.program.is_some() => self.signal("USR1"),
            _ => {}
        }
    }

    fn start_again(&mut self, what: &str) {
        self.note(&format!("start {what}"));
        match what {
            "plugin" => self.run(),
            "kubelet" => self.kubelet = Some(DraKubelet::start(self.dir.path())),
            "api" => self.api.run(),
            _ if self.program.is_some() => self.signal("USR2"),
            _ => {}
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill();
    }
}

fn claims_get_the_gpus_of_the_node() {
    let host = Host::start(&["--gpus", "2", "--numa", "2"], &[]);
    host.registered();
    host.published("the GPUs", SOON, &[("gpu-0", false), ("gpu-1", false)]);
    host.api.state().allocate("train", "u-1", &["gpu-1"]);
    host.starts("train", "u-1", SOON);
    assert_eq!(
        host.prepare("train", "u-1").unwrap(),
        [format!("k8s.gpu.nvidia.com/gpu={}", uuid(1))]
    );
    let state = host.api.state();
    let device = &state.slices.values().next().unwrap()["spec"]["devices"][0];
    for attribute in [
        "type",
        "uuid",
        "productName",
        "brand",
        "architecture",
        "cudaComputeCapability",
        "driverVersion",
    ] {
        assert!(
            device["attributes"][attribute].is_object(),
            "{attribute}: {device}"
        );
    }
    assert_eq!(
        device["attributes"]["resource.kubernetes.io/numaNode"]["int"],
        0
    );
    assert!(
        device["capacity"]["memory"]["value"]
            .as_str()
            .unwrap()
            .ends_with('i'),
        "{device}"
    );
    assert!(!host.dir.path().join("device-plugins").exists());
}

/// The card in a DGX Station that only drives its display.
fn a_display_card_is_not_published() {
    let mut host = Host::new(&["--gpus", "2"], &[]);
    host.fake.rename(1, "DGX Display");
    host.run();
    host.registered();
    host.published("the other GPU", SOON, &[("gpu-0", false)]);
}

/// An engine that misses a node or the CDI spec starts no container, and names neither the cause nor a fix.
fn claims_need_the_nodes_and_the_spec() {
    let host = Host::start(&["--gpus", "2"], &[]);
    host.registered();
    host.published("the GPUs", SOON, &[("gpu-0", false), ("gpu-1", false)]);
    host.api.state().allocate("train", "u-1", &["gpu-1"]);
    host.api.state().allocate("other", "u-2", &["gpu-0"]);
    host.starts("train", "u-1", SOON);
    let node = host.fake.root.join("dev/nvidia1");
    let kept = host.fake.dir.path().join("nvidia1");
    std::fs::rename(&node, &kept).unwrap();
    let error = host.prepare("train", "u-1").unwrap_err();
    for part in ["default/train", "/dev/nvidia1", "(ONH-", "; hint: "] {
        assert!(error.contains(part), "{error}");
    }
    assert!(host.prepare("other", "u-2").is_ok(), "it does not need it");
    std::fs::rename(&kept, &node).unwrap();
    host.starts("train", "u-1", SOON);
    // A lost spec is written before the answer. The plugin also searches for lost files each second, so the answers are many.
    let file = host.cdi().join("k8s.gpu.nvidia.com-gpu.json");
    let ours = std::fs::read_to_string(&file).unwrap();
    for _ in 0..5 {
        for other in [None, Some("{"), Some(&*ours.replace(&uuid(1), "GPU-other"))] {
            match other {
                None => std::fs::remove_file(&file).unwrap(),
                Some(text) => std::fs::write(&file, text).unwrap(),
            }
            host.prepare("train", "u-1").unwrap();
            let found = std::fs::read_to_string(&file).unwrap_or_default();
            assert!(found == ours, "{other:?}: {found}");
        }
    }
    // A directory that cannot exist
    std::fs::remove_dir_all(host.cdi()).unwrap();
    std::fs::write(host.cdi(), "").unwrap();
    let error = host.prepare("train", "u-1").unwrap_err();
    assert!(
        error.contains("CDI") && error.contains("(ONH-074)"),
        "{error}"
    );
    std::fs::remove_file(host.cdi()).unwrap();
    host.starts("train", "u-1", POLLED + SOON);
}

fn claims_of_an_unhealthy_gpu() {
    let host = Host::start(&["--gpus", "2"], &["--quiet-period=1"]);
    host.registered();
    host.published("the GPUs", SOON, &[("gpu-0", false), ("gpu-1", false)]);
    host.api.state().allocate("train", "u-1", &["gpu-1"]);
    host.fake.event("xid 1 79");
    host.published(
        "the taint",
        Duration::from_secs(15),
        &[("gpu-0", false), ("gpu-1", true)],
    );
    host.kubelet().wait("the reason", SOON, |state| {
        state
            .health
            .get("gpu-1")
            .is_some_and(|(is_healthy, why)| !is_healthy && why == "XID 79 (ONH-072)")
    });
    host.published(
        "recovery",
        POLLED + SOON,
        &[("gpu-0", false), ("gpu-1", false)],
    );
    host.starts("train", "u-1", AT_ONCE);
}

fn claims_and_a_driver_that_is_replaced() {
    let host = Host::start(&["--gpus", "1"], &[]);
    host.registered();
    host.published("the GPU", SOON, &[("gpu-0", false)]);
    host.api.state().allocate("train", "u-1", &["gpu-0"]);
    host.starts("train", "u-1", SOON);
    host.signal("USR1");
    host.published("the taint", SOON, &[("gpu-0", true)]);
    let error = host.prepare("train", "u-1").unwrap_err();
    assert!(
        error.contains("the driver is being replaced (ONH-074)"),
        "{error}"
    );
    let released = host.kubelet().unprepare(DRIVER, &[("train", "u-1")]);
    assert!(released["u-1"].error.is_empty(), "a pod can be deleted");
    host.signal("USR2");
    host.published("the new driver", POLLED + SOON, &[("gpu-0", false)]);
    host.starts("train", "u-1", SOON);
}

fn claims_and_a_driver_that_comes_later() {
    let mut host = Host::new(&["--gpus", "1"], &[]);
    let hidden = host.fake.dir.path().join("hidden");
    for dir in ["dev", "proc", "usr"] {
        std::fs::create_dir_all(&hidden).unwrap();
        std::fs::rename(host.fake.root.join(dir), hidden.join(dir)).unwrap();
        std::fs::create_dir(host.fake.root.join(dir)).unwrap();
    }
    host.run();
    host.registered();
    host.api.state().allocate("train", "u-1", &["gpu-0"]);
    let error = host.prepare("train", "u-1").unwrap_err();
    assert!(error.contains("(ONH-074)"), "{error}");
    assert!(
        host.kubelet().unprepare(DRIVER, &[("train", "u-1")])["u-1"]
            .error
            .is_empty()
    );
    for dir in ["usr", "dev", "proc"] {
        std::fs::remove_dir(host.fake.root.join(dir)).unwrap();
        std::fs::rename(hidden.join(dir), host.fake.root.join(dir)).unwrap();
    }
    host.published("the GPU", POLLED + SOON, &[("gpu-0", false)]);
    host.starts("train", "u-1", SOON);
}

fn claims_after_a_reboot() {
    let mut host = Host::start(&["--gpus", "1"], &[]);
    host.registered();
    host.published("the GPU", SOON, &[("gpu-0", false)]);
    host.api.state().allocate("train", "u-1", &["gpu-0"]);
    host.starts("train", "u-1", SOON);
    let generation = host.api.state().generation();
    // /var/run is empty after a reboot, and the kubelet may believe that the claim is prepared.
    host.kill();
    std::fs::remove_dir_all(host.cdi()).unwrap();
    std::fs::remove_dir_all(host.dir.path().join("run")).unwrap();
    host.run();
    let start = Instant::now();
    let id = format!("k8s.gpu.nvidia.com/gpu={}", uuid(0));
    while !host.has_cdi_device(&id) {
        assert!(start.elapsed() < SOON, "{}", host.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    host.registered();
    host.starts("train", "u-1", SOON);
    assert_eq!(
        host.api.state().generation(),
        generation,
        "the slices of the earlier run are used again"
    );
}

/// The limit for Prepare while NVML hangs.
const PREPARED: Duration = Duration::from_secs(2);

fn claims_while_nvml_hangs() {
    let mut host = Host::start(&["--gpus", "2"], &["--nvml-timeout=4", "--quiet-period=1"]);
    host.registered();
    host.published("the GPUs", SOON, &[("gpu-0", false), ("gpu-1", false)]);
    host.api.state().allocate("train", "u-1", &["gpu-1"]);
    host.starts("train", "u-1", SOON);
    let generation = host.api.state().generation();
    let attributes = |host: &Host| {
        let state = host.api.state();
        let device = &state.slices.values().next().unwrap()["spec"]["devices"][1];
        (device["attributes"].clone(), device["capacity"].clone())
    };
    let before = attributes(&host);
    // A restart of the plugin, with the spec of the earlier run
    host.kill();
    host.fake.set("gpu minor=0 ", "init-hang\ngpu minor=0 ");
    host.run();
    host.registered();
    host.starts("train", "u-1", PREPARED);
    assert_eq!(host.api.state().generation(), generation);
    // NVML does not answer in time.
    host.published("the taints", SOON, &[("gpu-0", true), ("gpu-1", true)]);
    assert_eq!(attributes(&host), before, "the scheduler needs them");
    host.starts("train", "u-1", PREPARED);
    // A reboot: /var/run is empty.
    host.kill();
    std::fs::remove_dir_all(host.cdi()).unwrap();
    std::fs::remove_dir_all(host.dir.path().join("run")).unwrap();
    host.run();
    host.registered();
    host.starts("train", "u-1", PREPARED);
    host.fake.set("init-hang\n", "");
    host.published(
        "recovery",
        2 * POLLED + SOON,
        &[("gpu-0", false), ("gpu-1", false)],
    );
    assert_eq!(attributes(&host), before);
    host.starts("train", "u-1", PREPARED);
}

fn claims_and_a_gpu_that_hangs() {
    let host = Host::start(&["--gpus", "2"], &["--nvml-timeout=3"]);
    host.registered();
    host.published("the GPUs", SOON, &[("gpu-0", false), ("gpu-1", false)]);
    host.api.state().allocate("good", "u-1", &["gpu-1"]);
    host.api.state().allocate("bad", "u-2", &["gpu-0"]);
    host.starts("good", "u-1", SOON);
    host.fake.add(0, "hang=nvmlDeviceGetFieldValues");
    let start = Instant::now();
    while host.api.state().devices()
        != [("gpu-0".to_owned(), true), ("gpu-1".to_owned(), false)].into()
    {
        host.starts("good", "u-1", PREPARED);
        assert!(start.elapsed() < SOON + POLLED, "{}", host.log());
    }
    let error = host.prepare("bad", "u-2").unwrap_err();
    assert!(
        error.contains("the driver does not answer within 3 s (ONH-072)"),
        "{error}"
    );
    host.starts("good", "u-1", PREPARED);
}

/// Only one of the two interfaces has the GPUs of a node.
fn a_device_plugin_waits_for_the_end_of_claims() {
    let mut host = Host::start(&["--gpus", "1"], &[]);
    host.registered();
    let resources = FakeKubelet::start(host.dir.path());
    let log = host.dir.path().join("plugin.log");
    let mut plugin = Command::new(PROGRAM);
    plugin
        .args(["run", "--labels=false", "--config"])
        .arg(&host.fake.config);
    plugin
        .arg("--kubelet-dir")
        .arg(host.dir.path())
        .arg("--run-dir")
        .arg(host.dir.path().join("run-of-plugin"));
    let stderr = std::fs::File::create(&log).unwrap();
    let mut plugin = plugin
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .unwrap();
    let start = Instant::now();
    let text = || std::fs::read_to_string(&log).unwrap();
    while !text().contains("a DRA driver with the name \"gpu.nvidia.com\" answers at") {
        assert!(start.elapsed() < SOON, "{}", text());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(
        text().contains("(ONH-601)") && text().contains("hint: "),
        "{}",
        text()
    );
    assert_eq!(resources.state().registrations(GPU), 0);
    host.kill();
    resources.wait("after the end of the driver", POLLED + SOON, |state| {
        state.allocatable(GPU) == 1
    });
    plugin.kill().unwrap();
    plugin.wait().unwrap();
}

fn metrics_name_the_containers_of_claims() {
    let host = Host::start(
        &["--gpus", "2"],
        &["--metrics-address=127.0.0.1:0", "--metrics-names=gke,dcgm"],
    );
    host.registered();
    host.published("the GPUs", SOON, &[("gpu-0", false), ("gpu-1", false)]);
    host.api.state().allocate("train", "u-1", &["gpu-1"]);
    host.starts("train", "u-1", SOON);
    let resources = FakeKubelet::start(host.dir.path());
    let ids = host.prepare("train", "u-1").unwrap();
    resources.state().claims = vec![Container {
        namespace: "ns",
        pod: "pod",
        name: "main",
        resource: DRIVER,
        ids,
    }];
    let log = host.log();
    let (_, address) = log.split_once("serving metrics at http://").unwrap();
    let address: std::net::SocketAddr = address.split('/').next().unwrap().parse().unwrap();
    let of = "namespace=\"ns\",pod=\"pod\",container=\"main\"";
    let accelerator = format!(
        "memory_total{{{of},make=\"nvidia\",accelerator_id=\"{}\"",
        uuid(1)
    );
    let request = format!("request{{{of},resource_name=\"{DRIVER}\"}} 1.0");
    let dcgm = format!("UUID=\"{}\"", uuid(1));
    let start = Instant::now();
    loop {
        let text = crate::node_extras::get(address, "/metrics");
        let has = |parts: &[&str]| {
            text.lines()
                .any(|line| parts.iter().all(|part| line.contains(part)))
        };
        if has(&[&accelerator])
            && has(&[&request])
            && has(&["DCGM_FI_DEV_FB_USED", &dcgm, "pod=\"pod\""])
        {
            break;
        }
        assert!(start.elapsed() < POLLED, "{text}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// For the hook's `doctor`
fn the_running_driver_is_described() {
    let mut host = Host::start(&["--gpus", "1"], &[]);
    host.registered();
    host.published("the GPU", SOON, &[("gpu-0", false)]);
    let run = host.dir.path().join("run");
    let until = |what: &str, is: &dyn Fn(&OfferedDriver) -> bool| {
        let start = Instant::now();
        loop {
            let driver = control::devices(&run).unwrap().driver.unwrap();
            if is(&driver) {
                return;
            }
            assert!(start.elapsed() < SOON, "{what}: {driver:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    until("works", &|driver| {
        driver.is_registered && driver.problem.is_none() && driver.unpublished.is_none()
    });
    // A change of the devices ends the pause of the publisher.
    host.api.stop();
    host.signal("USR1");
    until("replaced", &|driver| {
        driver.problem.as_deref() == Some("the driver is being replaced")
    });
    until("away", &|driver| {
        driver
            .unpublished
            .as_ref()
            .is_some_and(|why| why.starts_with("cannot publish"))
    });
    host.api.run();
    host.signal("USR2");
    until("back", &|driver| driver.unpublished.is_none());
}

/// A container that restarts has its CDI names, and the kubelet does not ask for them again.
fn the_spec_exists_during_a_restart() {
    let mut host = Host::start(&["--gpus", "1"], &[]);
    host.registered();
    let id = format!("k8s.gpu.nvidia.com/gpu={}", uuid(0));
    host.published("the GPU", SOON, &[("gpu-0", false)]);
    for _ in 0..3 {
        host.kill();
        let log = host.log().len();
        host.run();
        let start = Instant::now();
        while !host.log()[log..].contains("the node has 1 GPU") {
            assert!(host.has_cdi_device(&id), "{}", host.log());
            assert!(start.elapsed() < SOON, "{}", host.log());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(host.has_cdi_device(&id));
    }
}

fn claims_of_mig_devices() {
    let host = Host::start(&["--gpus", "2"], &[]);
    host.registered();
    host.published("whole GPUs", SOON, &[("gpu-0", false), ("gpu-1", false)]);
    let layout = host.fake.dir.path().join("layout");
    let line = |gi: u32| format!("mig gpu=0 gi={gi} ci=0 profile=1g.10gb uuid=MIG-{gi}\n");
    std::fs::write(&layout, format!("{}{}", line(1), line(2))).unwrap();
    host.fake
        .make_root(&["--mig-layout", layout.to_str().unwrap()]);
    let expected = [
        ("gpu-0-mig-1g10gb-1-0", false),
        ("gpu-0-mig-1g10gb-2-0", false),
        ("gpu-1", false),
    ];
    host.published("MIG devices", SOON, &expected);
    selectors_match(host.api.state().slices.values().next().unwrap());
    host.api
        .state()
        .allocate("small", "u-1", &["gpu-0-mig-1g10gb-2-0"]);
    host.starts("small", "u-1", SOON);
    assert_eq!(
        host.prepare("small", "u-1").unwrap(),
        ["k8s.gpu.nvidia.com/gpu=MIG-2"]
    );
    host.api.state().allocate("old", "u-2", &["gpu-0"]);
    let error = host.prepare("old", "u-2").unwrap_err();
    assert!(
        error.contains("the device does not exist on the node (ONH-071)"),
        "{error}"
    );
}

/// The classes and the samples select by attributes and capacities that devices have, with the kind of value that the expression needs. The
/// expressions are not evaluated: `semver` and `quantity` are functions of Kubernetes, which no interpreter in Rust has.
fn selectors_match(slice: &Value) {
    let devices = slice["spec"]["devices"].as_array().unwrap();
    let has = |kind: &str, name: &str, value: &str| {
        devices
            .iter()
            .any(|device| device[kind][name][value].is_string())
    };
    let dir =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes/claims");
    let files = [dir.clone(), dir.join("samples")]
        .into_iter()
        .flat_map(|dir| std::fs::read_dir(dir).unwrap());
    let files = files
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "yaml"));
    let mut found = 0;
    for text in files.map(|path| std::fs::read_to_string(path).unwrap()) {
        for kind in ["attributes", "capacity"] {
            for part in text
                .split(&format!("device.{kind}['gpu.nvidia.com']."))
                .skip(1)
            {
                let (name, rest) =
                    part.split_at(part.find(|c: char| !c.is_alphanumeric()).unwrap());
                let value = match rest {
                    _ if rest.starts_with(".compareTo(semver('") => "version",
                    _ if rest.starts_with(".compareTo(quantity('") => "value",
                    _ if rest.starts_with(" == '") => "string",
                    _ => panic!("{name}{rest}"),
                };
                assert!(has(kind, name, value), "{kind} {name} {value}: {slice}");
                found += 1;
            }
        }
    }
    assert!(found >= 5, "{found}");
}

fn check_prints_the_slices() {
    let host = Host::new(&["--gpus", "1"], &[]);
    let limits = json!({"memory_limit_mib": 8192, "active_thread_percentage": 25});
    share(&host.fake, &["all".to_owned()]);
    let _daemon = Daemon::start(&host.fake, 0, limits);
    let text = host.check(&[]);
    let stdout = String::from_utf8(text.stdout).unwrap();
    // No driver for claims runs, so a pod would not start.
    assert_eq!(text.status.code(), Some(1), "{stdout}");
    for part in [
        "gpu.nvidia.com: 1 of 1 devices can be allocated",
        "gpu-0 healthy",
        "node: node-1",
        "write slices: yes",
        "published: 0 devices, generation 0, not as above",
    ] {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    assert!(host.api.state().slices.is_empty(), "nothing is written");
    let document: Value = serde_json::from_slice(&host.check(&["--json"]).stdout).unwrap();
    let schema: Value = serde_json::from_str(include_str!(
        "../../../../docs/schemas/kubelet-plugin-check-dra.json"
    ))
    .unwrap();
    let keys = |value: &Value| {
        value
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(keys(&document), keys(&schema["properties"]));
    let daemons = &schema["properties"]["mps"]["items"]["properties"];
    assert!(keys(&document["mps"][0]).is_subset(&keys(daemons)));
    assert!(keys(&document["api"]).is_subset(&keys(&schema["properties"]["api"]["properties"])));
    assert_eq!(
        (&document["api"]["node"], &document["slices"][0]["nodeName"]),
        (&NODE.into(), &NODE.into())
    );
    assert_eq!(document["devices"][0]["uuid"], uuid(0));
}

/// Kubernetes before 1.34.
fn check_without_the_api() {
    let mut host = Host::new(&["--gpus", "1"], &[]);
    host.api.state().faults.push(Fault {
        method: "GET",
        path: "resource.k8s.io",
        code: 404,
        times: 99,
    });
    host.run();
    host.registered();
    let start = Instant::now();
    let no_api = "the API server has no resource.k8s.io/v1, which needs Kubernetes 1.34 or newer";
    while !host.log().contains(no_api) {
        assert!(start.elapsed() < SOON, "{}", host.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let text = host.check(&[]);
    let stdout = String::from_utf8(text.stdout).unwrap();
    assert_eq!(text.status.code(), Some(1), "{stdout}");
    let last = stdout.lines().last().unwrap();
    assert!(
        last.starts_with("a pod that requests a GPU would not start: ") && last.contains(no_api),
        "{stdout}"
    );
    assert!(
        stdout.contains("hint: use the device-plugin mode on this cluster"),
        "{stdout}"
    );
}

fn check_without_credentials() {
    let host = Host::new(&["--gpus", "1"], &["--node-name=node-2"]);
    let text = host.check(&[]);
    let stdout = String::from_utf8(text.stdout).unwrap();
    assert_eq!(text.status.code(), Some(1), "{stdout}");
    assert!(
        stdout.contains(
            "ONH-608 warning: cannot list the slices of the node: the API server answered 403: "
        ),
        "{stdout}"
    );
    // Nothing runs in this test. The device plugin is not what is missing.
    let verdict = "a pod that requests a GPU would not start: no DRA driver runs on this host";
    assert_eq!(stdout.lines().last(), Some(verdict));
}

fn little_memory() {
    let host = Host::start(&["--gpus", "8"], &[]);
    host.registered();
    host.api
        .wait("the GPUs", SOON, |state| state.devices().len() == 8);
    std::thread::sleep(Duration::from_secs(1));
    let pid = host.program.as_ref().unwrap().id();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let anonymous = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .unwrap();
    let kib: u64 = anonymous.trim().trim_end_matches(" kB").parse().unwrap();
    // The goal of 16 MiB includes the code, which is larger in a debug build.
    assert!(kib < 6 * 1024, "{kib} KiB");
}

/// How many orders of stops and starts are tried.
const ORDERS: u64 = 100;
/// How many hosts are tested side by side. Most of the time they wait.
const HOSTS: u64 = 10;

/// Whatever starts and stops in which order: in the end the claim is prepared, its CDI device exists, and the pod can be deleted.
fn restarts_in_any_order() {
    let orders = std::env::var("ONH_RESTARTS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(ORDERS);
    std::thread::scope(|scope| {
        for number in 0..HOSTS {
            let orders = orders / HOSTS + u64::from(number < orders % HOSTS);
            scope.spawn(move || restarts(&mut Random(0x2545_f491_4f6c_dd1d + number), orders));
        }
    });
}

/// Marsaglia's xorshift
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(most).unwrap()).unwrap()
    }

    fn take<T>(&mut self, from: &mut Vec<T>) -> T {
        let at = self.below(from.len());
        from.remove(at)
    }

    fn wait(&mut self) {
        std::thread::sleep(Duration::from_millis(
            u64::try_from(self.below(300)).unwrap(),
        ));
    }
}

fn restarts(random: &mut Random, orders: u64) {
    let mut host = Host::start(&["--gpus", "1"], &["--quiet-period=1"]);
    host.registered();
    host.published("the GPU", SOON, &[("gpu-0", false)]);
    host.api.state().allocate("train", "u-1", &["gpu-0"]);
    for _ in 0..orders {
        let mut up = vec!["plugin", "kubelet", "api", "driver"];
        let mut is_first = true;
        for _ in 0..2 {
            let mut down = Vec::new();
            while !up.is_empty() && (is_first || random.below(4) != 0) {
                is_first = false;
                let next = random.take(&mut up);
                host.stop(next);
                down.push(next);
                random.wait();
            }
            while !down.is_empty() {
                let next = random.take(&mut down);
                host.start_again(next);
                up.push(next);
                random.wait();
            }
        }
        host.registered();
        // New credentials end the pause of a publisher whose API server was away.
        host.api.certificates.rotate(1);
        host.published("the GPU", POLLED + SOON, &[("gpu-0", false)]);
        host.starts("train", "u-1", POLLED);
        let start = Instant::now();
        while let Err(error) = host.kubelet().try_unprepare(DRIVER, &[("train", "u-1")]) {
            assert!(start.elapsed() < SOON, "{error}: {}", host.log());
        }
    }
}

/// Each claim gets a share of the memory that the daemon limits.
fn claims_share_a_gpu_with_mps() {
    let mut host = Host::new(&["--gpus", "2"], &[]);
    share(&host.fake, &[uuid(0)]);
    let limits = json!({"memory_limit_mib": 8192});
    let mut daemon = Daemon::start(&host.fake, 0, limits.clone());
    host.run();
    host.registered();
    host.published("the GPUs", SOON, &[("gpu-0", false), ("gpu-1", false)]);
    let published = |host: &Host| {
        let state = host.api.state();
        let slice = state.slices.values().next().unwrap();
        slice["spec"]["devices"].clone()
    };
    let devices = published(&host);
    assert_eq!(devices[0]["allowMultipleAllocations"], true);
    let policy = &devices[0]["capacity"]["memory"]["requestPolicy"];
    assert_eq!(*policy, json!({"default": "8Gi", "validValues": ["8Gi"]}));
    let policy = &devices[0]["capacity"]["clients"]["requestPolicy"];
    assert_eq!(*policy, json!({"default": "1", "validValues": ["1"]}));
    let types = [0, 1].map(|at: usize| devices[at]["attributes"]["type"]["string"].clone());
    assert_eq!(types, ["mps", "gpu"]);
    assert!(devices[1]["allowMultipleAllocations"].is_null());

    let config = |limit: &str| {
        let mps = json!({"defaultPinnedDeviceMemoryLimit": limit});
        let sharing = json!({"strategy": "MPS", "mpsConfig": mps});
        let parameters = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing});
        json!([{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": parameters}}])
    };
    for (name, uid, config) in [
        ("a", "u-1", config("8Gi")),
        ("b", "u-2", json!([])),
        ("c", "u-3", config("4Gi")),
    ] {
        host.api.state().share(name, uid, "gpu-0", &config);
    }
    for (name, uid) in [("a", "u-1"), ("b", "u-2")] {
        host.starts(name, uid, SOON);
    }
    let error = host.prepare("c", "u-3").unwrap_err();
    assert!(
        error.contains(
            "MPS daemon of the GPU 8192 MiB (ONH-083); hint: set mps-memory-limit = \"4096M\""
        ),
        "{error}"
    );
    daemon.kill();
    host.published("the taint", SOON, &[("gpu-0", true), ("gpu-1", false)]);
    let error = host.prepare("b", "u-2").unwrap_err();
    assert!(
        error.contains("its MPS daemon is not ready: its supervisor has ended"),
        "{error}"
    );
    assert_eq!(
        published(&host)[0]["allowMultipleAllocations"],
        true,
        "its claims still have their shares"
    );
    daemon.run(limits);
    host.published(
        "the daemon runs again",
        SOON,
        &[("gpu-0", false), ("gpu-1", false)],
    );
    host.starts("a", "u-1", SOON);
    let output = host.check(&[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains(
            ": MPS daemon ready, 0 clients, 8192 MiB and 100 % of the threads for each\n"
        ),
        "{text}"
    );
    assert!(text.contains(", as above\n"), "{text}");
}
