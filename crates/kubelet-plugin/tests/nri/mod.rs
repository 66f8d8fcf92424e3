//! The command `nri`, with a fake engine and the fake driver. The limits are five times as long for busy machines.

mod fake_engine;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fake_engine::{CONTAINER, FakeEngine, Plugin, container, names, request};
use records::{NRI, Outcome, Pod, Record};

use crate::fake_host::{Fake, uuid};
use crate::fake_kubelet::FakeKubelet;
use crate::{PROGRAM, ROOT};

const ALL: &str = "NVIDIA_VISIBLE_DEVICES=all";

const SOON: Duration = Duration::from_secs(5 * 5);
/// How long the engine may wait for an answer, at the 99th percentile.
const QUICK: Duration = Duration::from_millis(5 * 20);

tests! {
    ROOT => gpus_are_granted, devices_next_to_the_gpus, the_engine_finds_what_is_granted,
        refusals_read_well, a_refusal_has_a_record,
        limits_that_change, a_locked_node, two_containers_at_once, an_engine_that_restarts,
        an_engine_that_starts_later, an_engine_that_refuses, hostile_bytes, large_containers, answers_are_quick,
        a_driver_that_hangs, kubelet_and_engine_in_one_process, bad_options;
}

/// A host with GPUs, an engine that the plugin has found, and the plugin.
struct Node {
    fake: Fake,
    engine: Option<FakeEngine>,
    plugin: Option<Plugin>,
    process: Child,
}

impl Node {
    /// `keys` are lines of config.toml.
    fn start(gpus: u32, keys: &str) -> Self {
        Self::start_on(host(gpus, keys))
    }

    fn start_on(fake: Fake) -> Self {
        let engine = FakeEngine::start(&socket(&fake));
        let process = start(&fake, &["nri", "--socket"], &[]);
        Self::serve(fake, engine, process)
    }

    /// Waits until the plugin has connected, and knows the GPUs.
    fn serve(fake: Fake, engine: FakeEngine, process: Child) -> Self {
        let plugin = engine.accept(SOON);
        let mut node = Self {
            fake,
            engine: Some(engine),
            plugin: Some(plugin),
            process,
        };
        node.wait_for_driver();
        node
    }

    /// Until the driver has answered, containers that request GPUs are refused.
    fn wait_for_driver(&mut self) {
        soon(|| match self.ask(&["CUDA_VERSION=1.0"]) {
            Ok(_) => Some(()),
            Err(why) if why.contains("the driver does not answer") => None,
            Err(why) => panic!("{why}"),
        });
    }

    fn ask(&mut self, env: &[&str]) -> Result<Vec<String>, String> {
        self.plugin.as_mut().unwrap().create(container(env))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.fake.dir.path().join("log")).unwrap()
    }

    #[track_caller]
    fn wait_for_log(&self, text: &str) {
        soon(|| self.log().contains(text).then_some(()));
    }

    /// Returns a file in the directory of CDI specs.
    fn spec(&self, name: &str) -> PathBuf {
        self.fake
            .dir
            .path()
            .join(format!("cdi/k8s.device-plugin.nvidia.com-{name}.json"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Waits until the function has a value.
#[track_caller]
fn soon<T>(mut value: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = value() {
            return value;
        }
        assert!(start.elapsed() < SOON);
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn host(gpus: u32, keys: &str) -> Fake {
    let fake = Fake::new(&["--gpus", &gpus.to_string()]);
    configure(&fake, keys);
    fake
}

/// Replaces config.toml in one step.
fn configure(fake: &Fake, keys: &str) {
    let text = format!("{keys}\n[nvidia-container-cli]\nroot = {:?}\n", fake.root);
    let new = fake.config.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, &fake.config).unwrap();
}

fn socket(fake: &Fake) -> PathBuf {
    fake.dir.path().join("nri/nri.sock")
}

/// The last word of `command` takes the socket.
fn start(fake: &Fake, command: &[&str], options: &[&str]) -> Child {
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(fake.dir.path().join("log"))
        .unwrap();
    // A /run of its own, for the records
    let run = fake.dir.path().join("run");
    std::fs::create_dir_all(&run).unwrap();
    let script = format!("mount --bind '{}' /run; exec \"$@\"", run.display());
    let mut program = Command::new("unshare");
    program
        .args(["-m", "sh", "-euc", &script, "sh", PROGRAM])
        .args(command)
        .arg(socket(fake))
        .arg("--config")
        .arg(&fake.config)
        .args(options);
    program.arg("--cdi-dir").arg(fake.dir.path().join("cdi"));
    program
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

fn device(gpu: u32) -> String {
    format!("k8s.device-plugin.nvidia.com/gpu={}", uuid(gpu))
}

fn visible(gpus: &str) -> String {
    format!("NVIDIA_VISIBLE_DEVICES={gpus}")
}

fn gpus_are_granted() {
    let mut node = Node::start(3, "accept-nvidia-visible-devices-as-volume-mounts = true");
    let everything = vec![device(0), device(1), device(2)];
    for (env, expected) in [
        (ALL.to_owned(), everything.clone()),
        ("CUDA_VERSION=11.0".to_owned(), everything),
        (visible("2,0"), vec![device(0), device(2)]),
        (visible(&uuid(1)), vec![device(1)]),
        (visible("void"), vec![]),
        (visible("none"), vec![]),
        ("PATH=/bin".to_owned(), vec![]),
    ] {
        assert_eq!(node.ask(&[&env]), Ok(expected), "{env}");
    }
    let destination = format!("/var/run/nvidia-container-devices/{}", uuid(1));
    let mounts = vec![kubelet_plugin::proto::nri::Mount {
        destination,
        source: "/dev/null".to_owned(),
    }];
    let by_mount = kubelet_plugin::proto::nri::Container {
        mounts,
        ..container(&[ALL])
    };
    assert_eq!(
        node.plugin.as_mut().unwrap().create(by_mount),
        Ok(vec![device(1)])
    );
    let log = node.log();
    assert!(log.contains("fake v1 asks about its containers"), "{log}");
    assert!(
        log.contains(&format!("lab/cuda/main gets {}, {}", device(0), device(2))),
        "{log}"
    );
    assert_eq!(
        node.plugin
            .as_ref()
            .map(|plugin| (plugin.index.as_str(), plugin.name.as_str())),
        Some(("10", "oci-nvidia"))
    );
}

/// The devices next to the GPUs are in specs of the plugin too.
fn devices_next_to_the_gpus() {
    let fake = Fake::new(&["--gpus", "1"]);
    let path = fake.root.join("dev/gdrdrv");
    assert!(
        Command::new("mknod")
            .arg(&path)
            .args(["c", "508", "0"])
            .status()
            .unwrap()
            .success()
    );
    let mut node = Node::start_on(fake);
    let gdrcopy = "k8s.device-plugin.nvidia.com/gdrcopy=all".to_owned();
    assert_eq!(
        node.ask(&[ALL, "NVIDIA_GDRCOPY=enabled"]),
        Ok(vec![device(0), gdrcopy])
    );
    assert!(node.spec("gdrcopy").exists());
    assert_eq!(node.ask(&[ALL, "NVIDIA_GDS=enabled"]), Ok(vec![device(0)]));
    node.wait_for_log(
        "NVIDIA_GDS requests GPUDirect Storage, but \"/dev/nvidia-fs*\" is missing below ",
    );
}

/// The CDI spec has the devices when the engine learns their names. With its variable, the hook leaves the container unchanged.
fn the_engine_finds_what_is_granted() {
    let fake = Fake::new(&["--gpus", "2", "--mig"]);
    let mut node = Node::start_on(fake);
    let names = node.ask(&[ALL]).unwrap();
    let spec = std::fs::read(node.spec("gpu")).unwrap();
    let spec: serde_json::Value = serde_json::from_slice(&spec).unwrap();
    assert!(names.len() == 3, "{names:?}");
    for name in &names {
        let (kind, device) = name.split_once('=').unwrap();
        assert_eq!(spec["kind"], kind);
        assert!(
            spec["devices"]
                .as_array()
                .unwrap()
                .iter()
                .any(|known| known["name"] == device),
            "{name}"
        );
    }
    let env = spec["containerEdits"]["env"].as_array().unwrap();
    assert!(
        env.iter()
            .any(|entry| entry == "NVIDIA_VISIBLE_DEVICES=void"),
        "{env:?}"
    );
    // The driver is replaced: the spec is removed, and containers that request GPUs wait.
    Command::new("kill")
        .arg("-USR1")
        .arg(node.process.id().to_string())
        .status()
        .unwrap();
    soon(|| node.ask(&[ALL]).err());
    assert_eq!(node.ask(&["PATH=/bin"]), Ok(vec![]));
}

fn refusals_read_well() {
    let mut node = Node::start(1, "");
    let refusal = node.ask(&[&visible("9")]).unwrap_err();
    let beginning = "cannot set up container \"main\": NVIDIA_VISIBLE_DEVICES requests \"9\"";
    assert!(
        refusal.starts_with(beginning) && refusal.contains("(ONH-030); hint: "),
        "{refusal}"
    );
    assert!(
        refusal.bytes().all(|byte| (b' '..=b'~').contains(&byte)),
        "one line: {refusal}"
    );
    let refusal = node
        .ask(&[ALL, "NVIDIA_REQUIRE_CUDA=cuda>=99.0"])
        .unwrap_err();
    assert!(refusal.contains("(ONH-034); hint: "), "{refusal}");
    node.wait_for_log("cannot set up container \"lab/cuda/main\"");
    configure(&node.fake, "no-such = [");
    let refusal = node.ask(&[ALL]).unwrap_err();
    assert!(refusal.contains("config.toml"), "{refusal}");
    assert_eq!(
        node.ask(&["PATH=/bin"]),
        Ok(vec![]),
        "an invalid config.toml stops no other container"
    );
}

/// `oci-nvidia-hook why lab/cuda` reads it.
fn a_refusal_has_a_record() {
    let mut node = Node::start(2, "[devices]\ndeny = [\"1\"]");
    let path = node
        .fake
        .dir
        .path()
        .join(format!("run/oci-nvidia-hook/containers/{CONTAINER}.json"));
    let mut record = |env: &str, number: &str| {
        node.ask(&[&visible(env)]).unwrap_err();
        soon(|| {
            let record = Record::parse(&std::fs::read(&path).ok()?).unwrap();
            let has_it = record.findings.iter().any(|found| found.id == number);
            has_it.then_some(record)
        })
    };
    let denied = record("1", "ONH-032");
    assert_eq!(
        (denied.stage.as_str(), denied.outcome, denied.findings.len()),
        (NRI, Outcome::Failed, 1)
    );
    assert!(
        denied.reason.starts_with("NVIDIA_VISIBLE_DEVICES requests"),
        "{}",
        denied.reason
    );
    let pod = Pod {
        name: "cuda".to_owned(),
        namespace: "lab".to_owned(),
        container: "main".to_owned(),
    };
    assert_eq!(denied.container.pod, pod);
    let unknown = record("9", "ONH-030");
    assert_eq!(
        unknown.findings.len(),
        1,
        "each start has a record of its own"
    );
    node.ask(&["PATH=/bin"]).unwrap();
}

/// A denied GPU is not granted from then on. A GPU that is allowed again is granted when the CDI spec has it.
fn limits_that_change() {
    let mut node = Node::start(2, "");
    let spec = node.spec("gpu");
    let has = |gpu| {
        std::fs::read_to_string(&spec)
            .unwrap()
            .contains(&format!("\"{}\"", uuid(gpu)))
    };
    assert_eq!(node.ask(&[ALL]), Ok(vec![device(0), device(1)]));
    configure(&node.fake, "[devices]\ndeny = [\"1\"]");
    assert_eq!(node.ask(&[ALL]), Ok(vec![device(0)]));
    assert!(
        node.ask(&[&visible("1")])
            .unwrap_err()
            .contains("(ONH-032)")
    );
    node.wait_for_log("these limits: allow = [], deny = [\"1\"]");
    assert!(has(0) && !has(1));
    // An editor has truncated the file.
    std::fs::write(&node.fake.config, "").unwrap();
    assert_eq!(node.ask(&[ALL]), Ok(vec![device(0)]));
    assert!(
        node.ask(&[&visible("1")])
            .unwrap_err()
            .contains("which config.toml allows now, but the CDI spec lacks")
    );
    configure(&node.fake, "");
    soon(|| match node.ask(&[&visible("1")]) {
        Ok(_) => Some(()),
        Err(refusal) if refusal.contains("(ONH-032)") => None,
        Err(refusal) => panic!("{refusal}"),
    });
    assert!(has(1), "before it is granted");
    assert_eq!(node.ask(&[ALL]), Ok(vec![device(0), device(1)]));
}

/// A change of config.toml needs no restart, as with the hook.
fn a_locked_node() {
    let mut node = Node::start(1, "");
    assert_eq!(node.ask(&[ALL]), Ok(vec![device(0)]));
    configure(
        &node.fake,
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false",
    );
    assert_eq!(node.ask(&[ALL]), Ok(vec![]));
    node.wait_for_log("(ONH-103)");
    node.wait_for_log("lab/cuda/main: NVIDIA_VISIBLE_DEVICES is ignored");
}

fn two_containers_at_once() {
    let mut node = Node::start(2, "");
    let plugin = node.plugin.as_mut().unwrap();
    let calls: Vec<u32> = (0..2)
        .map(|gpu| {
            plugin.send_call(
                "CreateContainer",
                request(container(&[&visible(&gpu.to_string())])),
            )
        })
        .collect();
    for (gpu, id) in (0..).zip(calls) {
        assert_eq!(names(&plugin.answer(id).unwrap()), [device(gpu)]);
    }
}

fn an_engine_that_restarts() {
    let mut node = Node::start(1, "");
    for _ in 0..3 {
        (node.plugin, node.engine) = (None, None);
        std::thread::sleep(Duration::from_millis(200));
        let engine = FakeEngine::start(&socket(&node.fake));
        node.plugin = Some(engine.accept(SOON));
        node.engine = Some(engine);
        assert_eq!(node.ask(&[ALL]), Ok(vec![device(0)]));
    }
    let log = node.log();
    assert_eq!(log.matches("asks about its containers").count(), 4, "{log}");
    assert!(
        log.matches("cannot serve NRI").count() <= 3 * 3,
        "repeated errors are logged once: {log}"
    );
}

fn an_engine_that_starts_later() {
    let fake = host(1, "");
    let process = start(
        &fake,
        &["nri", "--socket"],
        &["--name", "gpus", "--index", "07"],
    );
    std::thread::sleep(Duration::from_secs(3));
    let engine = FakeEngine::start(&socket(&fake));
    let started = Instant::now();
    let node = Node::serve(fake, engine, process);
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
    let plugin = node.plugin.as_ref().unwrap();
    assert_eq!(
        (plugin.index.as_str(), plugin.name.as_str()),
        ("07", "gpus")
    );
    assert_eq!(
        node.log().matches("cannot connect").count(),
        1,
        "{}",
        node.log()
    );
}

fn an_engine_that_refuses() {
    let mut node = Node::start(1, "");
    node.plugin = None;
    let engine = node.engine.take().unwrap();
    let mut refused = Plugin::new(engine.connection(SOON));
    refused.refuse_registration("NRI is disabled");
    assert!(refused.is_closed());
    node.wait_for_log("the engine refuses the registration: NRI is disabled");
    node.plugin = Some(engine.accept(SOON));
    assert_eq!(node.ask(&[ALL]), Ok(vec![device(0)]));
}

fn hostile_bytes() {
    let mut node = Node::start(1, "");
    let too_long = [0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff];
    let too_long_inside = [
        0, 0, 0, 1, 0, 0, 0, 10, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 1, 0,
    ];
    for bytes in [
        &too_long[..],
        &too_long_inside,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ] {
        let plugin = node.plugin.as_mut().unwrap();
        plugin.send_bytes(bytes);
        assert!(plugin.is_closed(), "{bytes:?}");
        node.plugin = Some(node.engine.as_ref().unwrap().accept(SOON));
        assert_eq!(node.ask(&[ALL]), Ok(vec![device(0)]));
    }
    // A call that cannot be read, an unknown one, a connection that does not exist
    let plugin = node.plugin.as_mut().unwrap();
    assert!(plugin.call("CreateContainer", vec![0xff; 50]).is_err());
    assert!(
        plugin
            .call("Unknown", vec![])
            .unwrap_err()
            .contains("unknown method")
    );
    plugin.send_bytes(&[0, 0, 0, 7, 0, 0, 0, 2, 1, 2]);
    assert_eq!(plugin.call("Shutdown", vec![]), Ok(vec![]));
    assert_eq!(node.ask(&[ALL]), Ok(vec![device(0)]));
}

fn large_containers() {
    let mut node = Node::start(1, "");
    let filler: Vec<String> = (0..3000)
        .map(|number| format!("FILLER_{number}={}", "x".repeat(1000)))
        .collect();
    let env: Vec<&str> = std::iter::once(ALL)
        .chain(filler.iter().map(String::as_str))
        .collect();
    assert_eq!(node.ask(&env), Ok(vec![device(0)]));
}

fn answers_are_quick() {
    let mut node = Node::start(8, "");
    let mut times: Vec<Duration> = Vec::new();
    for _ in 0..300 {
        let start = Instant::now();
        assert_eq!(
            node.ask(&[ALL, "NVIDIA_REQUIRE_CUDA=cuda>=11.0"])
                .unwrap()
                .len(),
            8
        );
        times.push(start.elapsed());
    }
    times.sort();
    assert!(times[296] < QUICK, "{:?}, {:?}", times[150], times[296]);
}

/// The answer comes from memory.
fn a_driver_that_hangs() {
    let mut node = Node::start(1, "");
    node.fake.add(0, "hang");
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        let asked = Instant::now();
        assert_eq!(node.ask(&[ALL]), Ok(vec![device(0)]));
        assert!(asked.elapsed() < Duration::from_secs(1));
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn kubelet_and_engine_in_one_process() {
    let fake = host(1, "");
    let kubelet_dir = fake.dir.path().join("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("device-plugins")).unwrap();
    let kubelet = FakeKubelet::start(&kubelet_dir);
    let engine = FakeEngine::start(&socket(&fake));
    let log = std::fs::File::create(fake.dir.path().join("log")).unwrap();
    let mut program = Command::new(PROGRAM);
    program
        .arg("run")
        .arg("--config")
        .arg(&fake.config)
        .arg("--kubelet-dir")
        .arg(&kubelet_dir);
    program.arg("--run-dir").arg(fake.dir.path().join("run"));
    program
        .arg(format!("--nri={}", socket(&fake).display()))
        .arg("--cdi-dir")
        .arg(fake.dir.path().join("cdi"));
    let process = program
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let mut node = Node::serve(fake, engine, process);
    assert_eq!(node.ask(&[ALL]), Ok(vec![device(0)]));
    kubelet.wait("the list", SOON, |state| {
        state.allocatable("nvidia.com/gpu") == 1
    });
    let of_process = Path::new("/proc").join(node.process.id().to_string());
    assert_eq!(
        std::fs::read_dir(of_process.join("task")).unwrap().count(),
        1,
        "one thread"
    );
    let children = of_process.join(format!("task/{}/children", node.process.id()));
    assert_eq!(
        std::fs::read_to_string(children)
            .unwrap()
            .split_whitespace()
            .count(),
        1,
        "the monitor"
    );
}

fn bad_options() {
    for (option, value) in [
        ("--index", "7"),
        ("--index", "x1"),
        ("--name", ""),
        ("--name", "a b"),
    ] {
        let output = Command::new(PROGRAM)
            .args(["nri", option, value])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(option), "{text}");
    }
}
