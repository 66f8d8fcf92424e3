//! What the plugin and its monitor cost a node on which nothing happens, and a CRI-O that does not answer.

pub mod count;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::claims::Host;
use super::fake_api::State;
use super::harness::Need;
use super::{AT_ONCE, Fake, FakeKubelet, GPU, Node, SOON, monitor_of, uuid};

/// The most system calls of both processes in a minute, without the assertions of debug builds.
const MOST_CALLS: u64 = 1_500;
/// How often both processes may wake in a minute.
const MOST_WAKEUPS: u64 = 60;
/// How long each is counted, in seconds.
const WINDOW: u64 = 30;
/// The search for other plugins after the kubelet's start becomes rare.
const SETTLING: Duration = Duration::from_secs(20);
/// On a busy machine, a file can be slow, and a process waits for it.
const TRIES: usize = 3;

const NEEDS: &[Need] = &[Need::Root, Need::Program("strace")];

tests! {
    NEEDS => an_idle_node, an_idle_node_with_crio, an_idle_node_with_mig_devices, an_idle_node_in_dra_mode;
    &[Need::Root] => a_crio_that_hangs_delays_no_pod;
}

/// Starts the plugin with metrics and labels on this host.
fn start(fake: Fake) -> Node {
    let kubelet_dir = fake.dir.path().join("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("device-plugins")).unwrap();
    let kubelet = FakeKubelet::start(&kubelet_dir);
    let labels = fake.dir.path().join("features.d");
    let options = [
        "--metrics-address=127.0.0.1:0",
        "--labels=true",
        &format!("--labels-dir={}", labels.display()),
        "--device-list-strategy=cdi-cri",
    ];
    let plugin = super::start(&fake, &kubelet_dir, &options);
    Node {
        fake,
        kubelet,
        kubelet_dir,
        plugin,
    }
}

fn an_idle_node() {
    let node = start(Fake::new(&["--gpus", "8"]));
    node.wait("the list", SOON, GPU, 8, 8);
    check(node.plugin.id(), node.fake.dir.path());
}

fn an_idle_node_with_crio() {
    let fake = Fake::new(&["--gpus", "8"]);
    let _socket = crio_socket();
    let calls = install_crio(&fake, "echo '[crio.runtime]'");
    let node = start(fake);
    node.wait("the list", SOON, GPU, 8, 8);
    check(node.plugin.id(), node.fake.dir.path());
    let calls = std::fs::read_to_string(calls).unwrap();
    assert_eq!(
        calls.lines().filter(|line| line.contains("status")).count(),
        1,
        "CRI-O is asked when its socket changes: {calls}"
    );
}

fn an_idle_node_with_mig_devices() {
    let fake = Fake::new(&["--gpus", "8"]);
    let layout = fake.dir.path().join("layout");
    let mut text = String::new();
    for gpu in 0..8 {
        for gi in 1..8 {
            text += &format!("mig gpu={gpu} gi={gi} ci=0 profile=1g.10gb uuid=MIG-{gpu}-{gi}\n");
        }
    }
    std::fs::write(&layout, text).unwrap();
    fake.make_root(&["--mig-layout", layout.to_str().unwrap()]);
    let node = start(fake);
    node.wait("the list", SOON, "nvidia.com/mig-1g.10gb", 56, 56);
    check(node.plugin.id(), node.fake.dir.path());
}

/// The watch of the API server stays open, and no pod has devices.
fn an_idle_node_in_dra_mode() {
    let mut host = Host::new(&["--gpus", "8"], &["--metrics-address=127.0.0.1:0"]);
    let _kubelet = FakeKubelet::start(host.dir.path());
    host.run();
    host.registered();
    let is_published = |state: &State| state.devices().len() == 8;
    host.api.wait("the GPUs", SOON, is_published);
    check(host.program.as_ref().unwrap().id(), host.dir.path());
}

/// The engine is asked again because its socket is another one. The kubelet's calls are answered in the meantime.
fn a_crio_that_hangs_delays_no_pod() {
    let fake = Fake::new(&["--gpus", "1"]);
    let first = crio_socket();
    let calls = install_crio(&fake, "exec sleep 30");
    let node = start(fake);
    node.wait("the list", SOON, GPU, 1, 1);
    let count = || {
        let calls = std::fs::read_to_string(&calls).unwrap_or_default();
        calls.lines().count()
    };
    node.until("CRI-O is asked", SOON, || count() > 0);
    std::thread::sleep(Duration::from_secs(3));
    let before = count();
    drop(first);
    let _second = crio_socket();
    let end = Instant::now() + Duration::from_secs(5 * 30);
    let mut asked = None;
    // A question to CRI-O ends after two seconds.
    while asked.is_none_or(|since: Instant| since.elapsed() < Duration::from_secs(4)) {
        let start = Instant::now();
        node.kubelet.allocate(GPU, &[&[uuid(0)]]).unwrap();
        let took = start.elapsed();
        assert!(took < AT_ONCE, "{took:?}");
        if count() > before {
            asked.get_or_insert_with(Instant::now);
        }
        assert!(Instant::now() < end, "CRI-O was not asked again");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Creates the socket of CRI-O in the /run of this test.
fn crio_socket() -> UnixListener {
    let dir = Path::new("/run/crio");
    std::fs::create_dir_all(dir).unwrap();
    let path = dir.join("crio.sock");
    std::fs::remove_file(&path).ok();
    UnixListener::bind(path).unwrap()
}

/// Installs a program `crio` that does this, for this test alone. Returns the file with a line for each call.
fn install_crio(fake: &Fake, does: &str) -> PathBuf {
    let dir = Path::new("/usr/local/sbin");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "mode=755", "programs"])
        .arg(dir)
        .status();
    assert!(mounted.unwrap().success());
    let (program, calls) = (dir.join("crio"), fake.dir.path().join("crio-calls"));
    let text = format!("#!/bin/sh\necho \"$*\" >>{}\n{does}\n", calls.display());
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    calls
}

/// Compares the plugin and its monitor with the limits.
#[expect(
    clippy::print_stdout,
    reason = "docs/performance.md has these figures: --nocapture shows them"
)]
fn check(plugin: u32, scratch: &Path) {
    std::thread::sleep(SETTLING);
    let processes = [plugin, monitor_of(plugin).unwrap()];
    let mut seen = Vec::new();
    for _ in 0..TRIES {
        let wakeups = count::wakeups(processes, WINDOW) * 60 / WINDOW;
        let calls = count::calls(processes, WINDOW, &scratch.join("calls")) * 60 / WINDOW;
        assert!(calls > 100, "strace counted {calls} calls");
        println!("{wakeups} wakeups and {calls} system calls in a minute");
        if wakeups <= MOST_WAKEUPS && calls <= MOST_CALLS {
            return;
        }
        seen.push((wakeups, calls));
    }
    panic!("wakeups and system calls in a minute: {seen:?}");
}
