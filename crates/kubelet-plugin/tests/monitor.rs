//! The monitor and its supervisor with the fake driver. This program is the supervisor, if its first argument says so.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    unreachable_pub,
    dead_code,
    missing_docs,
    reason = "tests run programs, and end at the first surprise"
)]

#[macro_use]
#[path = "../../../tests/it/harness.rs"]
mod harness;

mod fake_host;

use std::fmt::Debug;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use fake_host::{Fake, uuid};
use harness::Need;
use kubelet_plugin::monitor::message::{
    End, EventKind, Level, Message, Properties, Recovery, Sample, Snapshot,
};
use kubelet_plugin::monitor::supervisor;
use kubelet_plugin::settings::{self, Settings};
use nvidia_host::nvml::monitoring::{AddressingMode, Memory, MemorySlices};
use nvidia_host::nvml::program;
use nvidia_host::nvml::protocol::{Measures, MonitorRequest, Request};

/// A time limit, with slack for a machine under load.
const fn within(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds * 5)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    match words.get(1).map(String::as_str) {
        Some("supervise") => supervise(Path::new(&words[2])),
        _ => {
            let trials = TESTS
                .iter()
                .map(|test| test.trial(test.name(), |run| run()));
            // Most of the time the tests wait.
            harness::Selection::of(trials).run(8)
        }
    }
}

/// `supervise FILE`: prints the updates, with a time limit of one second for a call.
fn supervise(path: &Path) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (sender, mut updates) = tokio::sync::mpsc::channel(64);
        let (mut settings, _) = settings::read_file(Settings::default(), Some(path)).unwrap();
        settings.plugin.nvml_timeout = Duration::from_secs(1);
        let options = supervisor::SupervisorOptions::new(Some(path), &settings, false);
        let print = async {
            while let Some(update) = updates.recv().await {
                println!("{update:?}");
            }
        };
        tokio::select! {
            error = supervisor::supervise(options, sender) => println!("{error:#}"),
            () = print => {}
        }
    });
    ExitCode::SUCCESS
}

/// A program whose lines are read.
struct Program<T> {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<T>,
}

impl<T: Send + Debug + 'static> Program<T> {
    fn start(mut command: Command, parse: fn(&str) -> T) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(parse(&line)).is_err() {
                    return;
                }
            }
        });
        Self {
            stdin: child.stdin.take(),
            child,
            lines,
        }
    }

    /// Waits for the next line from which `find` returns something.
    fn next<U>(&self, what: &str, limit: Duration, find: impl Fn(T) -> Option<U>) -> U {
        let end = Instant::now() + limit;
        loop {
            match self
                .lines
                .recv_timeout(end.saturating_duration_since(Instant::now()))
            {
                Ok(line) => {
                    if let Some(found) = find(line) {
                        return found;
                    }
                }
                Err(error) => panic!("{what}: {error}"),
            }
        }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    fn expect_end(&mut self, limit: Duration) {
        let end = Instant::now() + limit;
        while self.is_running() {
            assert!(Instant::now() < end, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl<T> Drop for Program<T> {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

type Monitor = Program<Message>;

fn parse(line: &str) -> Message {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

fn start_monitor(fake: &Fake) -> Monitor {
    let request = Request::Monitor(MonitorRequest {
        config: Some(fake.config.clone()),
        driver_root: fake.root.clone(),
        dev_root: None,
        skip: Vec::new(),
        measures: Measures::Nothing,
    });
    let mut command = Command::new(fake_host::nvml_program());
    command.args(&program::arguments(&request).unwrap()[1..]);
    Program::start(command, parse)
}

fn snapshot(message: Message) -> Option<Snapshot> {
    match message {
        Message::Snapshot(snapshot) => Some(*snapshot),
        _ => None,
    }
}

fn sample_of(gpu: u32) -> impl Fn(Message) -> Option<Sample> {
    move |message| match message {
        Message::Sample(sample) if sample.gpu == uuid(gpu) => Some(sample),
        _ => None,
    }
}

impl Monitor {
    /// Waits until the monitor waits for events.
    fn expect_start(&self) -> Snapshot {
        let first = self.next("a snapshot", within(2000), snapshot);
        self.next("a wait", within(2000), |message| match message {
            Message::Polled { .. } => Some(()),
            _ => None,
        });
        first
    }
}

type Supervisor = Program<String>;

fn start_supervisor(fake: &Fake) -> Supervisor {
    fake_host::nvml_program();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg("supervise").arg(&fake.config);
    Program::start(command, str::to_owned)
}

impl Supervisor {
    fn expect(&self, limit: Duration, texts: &[&str]) -> String {
        let matches = |line: String| texts.iter().all(|text| line.contains(text)).then_some(line);
        self.next(&format!("{texts:?}"), limit, matches)
    }

    fn expect_healthy(&self, limit: Duration, gpu: u32) {
        self.expect(limit, &["Sample", &uuid(gpu), "error: None"]);
    }

    fn children(&self) -> Vec<u32> {
        let pid = self.pid();
        let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        text.split_whitespace()
            .map(|pid| pid.parse().unwrap())
            .collect()
    }

    fn signal(&self, signal: rustix::process::Signal) {
        send(self.pid(), signal);
    }
}

fn send(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// For device nodes.
const ROOT: &[Need] = &[Need::Root];

tests! {
    ROOT => a_snapshot_describes_the_gpus, an_event_is_reported_at_once, a_gpu_without_events_is_polled,
        a_lost_gpu_is_reported_and_the_others_are_watched, mig_devices_change,
        a_missing_node_and_a_new_gpu_need_another_process, a_monitor_of_root_ends_when_mig_devices_change,
        a_library_that_attacks, the_monitor_has_few_privileges_and_little_memory, the_monitor_ends_with_its_parent,
        a_driver_that_hangs_costs_one_gpu, a_driver_that_crashes_costs_one_gpu, a_monitor_that_is_killed, a_driver_that_hangs_everywhere,
        a_driver_comes_and_goes, a_gpu_is_added_and_removed, the_driver_is_let_go;
}

fn a_snapshot_describes_the_gpus() {
    let fake = Fake::new(&["--gpus", "4", "--mig", "--numa", "2"]);
    fake.add(
        1,
        "nvlinks=2:4 addressing=1 recovery-action=1 ecc=7 remap-failure=1",
    );
    fake.add(
        2,
        "nvlinks=1:4 recovery-action=none ecc=none remap-failure=none",
    );
    fake.add(3, "events=0");
    let monitor = start_monitor(&fake);
    let snapshot = monitor.next("a snapshot", within(2000), snapshot);
    assert_eq!(snapshot.inventory.gpus.len(), 4);
    assert_eq!(snapshot.inventory.driver_version, "535.183.01");
    let profiles: Vec<_> = snapshot.mig_profiles.values().map(String::as_str).collect();
    assert_eq!(profiles, ["1g.10gb", "2g.20gb"]);
    assert_eq!(snapshot.without_events, [uuid(3)]);
    let link = |a: u32, b: u32| {
        snapshot
            .links
            .iter()
            .find(|link| link.gpus == (uuid(a), uuid(b)))
            .unwrap()
    };
    assert_eq!(
        (link(0, 1).level, link(0, 1).nvlinks),
        (Level::HostBridge, 0)
    );
    assert_eq!((link(1, 2).level, link(1, 2).nvlinks), (Level::System, 4));
    assert_eq!(snapshot.links.len(), 6);

    let sample = monitor.next("a sample", within(2000), sample_of(1));
    let expected = Sample {
        gpu: uuid(1),
        recovery: Some(Recovery::Reset),
        remap_failed: Some(true),
        uncorrectable_ecc: Some(7),
        memory: Some(Memory {
            total: 81559 << 20,
            used: 0,
        }),
        ..Sample::default()
    };
    assert_eq!(sample, expected);
    let sample = monitor.next("a sample", within(2000), sample_of(2));
    assert_eq!(
        sample,
        Sample {
            gpu: uuid(2),
            memory: expected.memory,
            ..Sample::default()
        }
    );
    let addressing_mode = Some(AddressingMode::Hmm);
    let properties = Properties {
        memory_mib: Some(81559),
        mig_capable: true,
        addressing_mode,
    };
    assert_eq!(snapshot.properties.get(&uuid(1)), Some(&properties));
    assert_eq!(
        snapshot
            .mig_attributes
            .values()
            .map(|parts| parts.memory_mib)
            .max(),
        Some(20224)
    );
    let mut slices: Vec<_> = snapshot
        .memory_slices
        .values()
        .map(|MemorySlices { start, size }| (*start, *size))
        .collect();
    slices.sort_unstable();
    assert_eq!(slices, [(1, 1), (4, 2)]);
}

fn an_event_is_reported_at_once() {
    let fake = Fake::new(&["--gpus", "3"]);
    fake.event("xid 0 1");
    let monitor = start_monitor(&fake);
    monitor.expect_start();
    for (line, gpu, kind) in [
        ("xid 1 79", 1, EventKind::Xid(79)),
        ("unavailable 2", 2, EventKind::Unavailable),
        ("recovery 0", 0, EventKind::RecoveryAction),
    ] {
        if kind == EventKind::RecoveryAction {
            fake.add(0, "recovery-action=2");
        }
        let start = Instant::now();
        fake.event(line);
        let event = monitor.next(line, within(200), |message| match message {
            Message::Event(event) => Some(event),
            _ => None,
        });
        assert_eq!(
            (event.gpu, event.kind),
            (uuid(gpu), kind),
            "{:?}",
            start.elapsed()
        );
        // The state of the GPU follows at once.
        let sample = monitor.next("a sample", within(200), sample_of(gpu));
        let recovery = if gpu == 0 {
            Recovery::Reboot
        } else {
            Recovery::None
        };
        assert_eq!(sample.recovery, Some(recovery));
    }
}

fn a_gpu_without_events_is_polled() {
    let fake = Fake::new(&["--gpus", "1"]);
    fake.set("cuda 12.2", "cuda 12.2\nnot-supported nvmlEventSetCreate");
    let mut monitor = start_monitor(&fake);
    monitor.expect_start();
    fake.add(0, "recovery-action=4");
    monitor.next("a sample", within(5000), |message| {
        sample_of(0)(message).filter(|sample| sample.recovery == Some(Recovery::DrainAndReset))
    });
    monitor.stdin.take();
    monitor.expect_end(within(2000));
}

fn a_lost_gpu_is_reported_and_the_others_are_watched() {
    let fake = Fake::new(&["--gpus", "2"]);
    let monitor = start_monitor(&fake);
    monitor.expect_start();
    fake.add(0, "fail=15");
    let sample = monitor.next("a bad sample", within(10_000), |message| {
        sample_of(0)(message).filter(|sample| sample.error.is_some())
    });
    assert!(sample.error.unwrap().contains("gpu is lost"));
    monitor.next("a wait", within(5000), |message| {
        matches!(message, Message::Polled { .. }).then_some(())
    });
    fake.event("xid 1 48");
    monitor.next("an event", within(200), |message| {
        matches!(message, Message::Event(event) if event.gpu == uuid(1)).then_some(())
    });
    fake.remove(0, "fail=15");
    monitor.next("a good sample", within(5000), |message| {
        sample_of(0)(message).filter(|sample| sample.error.is_none())
    });
    // Its events are waited for again.
    monitor.next("a wait", within(5000), |message| {
        matches!(message, Message::Polled { .. }).then_some(())
    });
    fake.event("xid 0 48");
    monitor.next("an event", within(200), |message| {
        matches!(message, Message::Event(event) if event.gpu == uuid(0)).then_some(())
    });
}

fn mig_devices_change() {
    let fake = Fake::new(&["--gpus", "2", "--mig"]);
    let monitor = start_monitor(&fake);
    assert_eq!(
        monitor.expect_start().inventory.gpus[0].mig_devices.len(),
        2
    );
    let layout = fake.dir.path().join("layout");
    let new = "MIG-51eed000-0011-4000-8000-0000fa4e0011";
    std::fs::write(
        &layout,
        format!("mig gpu=1 gi=1 ci=0 profile=3g.40gb uuid={new}\n"),
    )
    .unwrap();
    fake.make_root(&["--mig-layout", layout.to_str().unwrap()]);
    let changed = monitor.next("the new layout", within(5000), |message| {
        snapshot(message).filter(|snapshot| snapshot.mig_profiles.contains_key(new))
    });
    let gpus = &changed.inventory.gpus;
    assert!(!gpus[0].mig_enabled && gpus[0].mig_devices.is_empty());
    assert_eq!(
        gpus[1]
            .mig_devices
            .iter()
            .map(|mig| mig.uuid.as_str())
            .collect::<Vec<_>>(),
        [new]
    );
    assert_eq!(changed.mig_profiles[new], "3g.40gb");
}

fn a_missing_node_and_a_new_gpu_need_another_process() {
    let fake = Fake::new(&["--gpus", "2"]);
    std::fs::remove_file(fake.root.join("dev/nvidia1")).unwrap();
    let mut monitor = start_monitor(&fake);
    let snapshot = monitor.expect_start();
    assert!(snapshot.inventory.failed[0].node_missing);
    assert_eq!(snapshot.inventory.failed[0].uuid, Some(uuid(1)));
    let node = fake.root.join("dev/nvidia1");
    let made = Command::new("mknod")
        .args(["-m", "0666"])
        .arg(node)
        .args(["c", "195", "1"])
        .status()
        .unwrap();
    assert!(made.success());
    let end = monitor.next("the end", within(5000), |message| match message {
        Message::End(end) => Some(end),
        _ => None,
    });
    assert_eq!(end, End::Changed);
    monitor.expect_end(within(500));
}

/// A monitor that runs as root reads only the nodes that existed when it started.
fn a_monitor_of_root_ends_when_mig_devices_change() {
    let fake = Fake::new(&["--gpus", "2", "--mig", "--dev-mode", "0600"]);
    let mut monitor = start_monitor(&fake);
    assert_eq!(
        monitor.expect_start().inventory.gpus[0].mig_devices.len(),
        2
    );
    let status = std::fs::read_to_string(format!("/proc/{}/status", monitor.pid())).unwrap();
    assert!(status.contains("\nUid:\t0\t0\t0\t0\n"), "{status}");
    let layout = fake.dir.path().join("layout");
    std::fs::write(
        &layout,
        "mig gpu=0 gi=1 ci=0 profile=1g.10gb uuid=MIG-new\n",
    )
    .unwrap();
    fake.make_root(&["--mig-layout", layout.to_str().unwrap()]);
    let end = monitor.next("the end", within(5000), |message| match message {
        Message::End(end) => Some(end),
        _ => None,
    });
    assert_eq!(end, End::Changed);
    monitor.expect_end(within(500));
    let monitor = start_monitor(&fake);
    assert_eq!(
        monitor.expect_start().inventory.gpus[0].mig_devices.len(),
        1
    );
}

/// The attacks of the library, which tests/it/hostile/nvml.rs runs in the hook too.
fn a_library_that_attacks() {
    for (mode, group, user, uid) in [
        ("0660", "video", "root:video", 65534),
        ("0660", "video", "nobody:video", 65534),
        ("0666", "root", "", 65534),
        ("0600", "root", "root", 0),
    ] {
        let fake = Fake::new(&["--gpus", "1", "--dev-mode", mode, "--dev-group", group]);
        let user = if user.is_empty() {
            String::new()
        } else {
            format!("user = \"{user}\"\n")
        };
        let config = std::fs::read_to_string(&fake.config).unwrap() + &user;
        std::fs::write(&fake.config, config).unwrap();
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/probes/hostile-nvml.c");
        let mut cc = Command::new("cc");
        cc.args([
            "-O1",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libnvidia-ml.so.1",
            "-o",
        ]);
        assert!(
            cc.arg(fake.file("libnvidia-ml.so.535.183.01"))
                .arg(source)
                .status()
                .unwrap()
                .success()
        );
        let of_root = "mkdir -p dev/shm run etc; mknod -m 600 dev/kmsg c 1 3; mknod -m 600 dev/root c 1 3; \
                       umask 077; : >etc/passwd; : >etc/shadow; : >dev/shm/root";
        assert!(
            Command::new("sh")
                .current_dir(&fake.root)
                .args(["-euc", of_root])
                .status()
                .unwrap()
                .success()
        );
        let socket = fake.root.join("run/root.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::fs::set_permissions(&socket, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        let monitor = start_monitor(&fake);
        let why = monitor.next("the end", within(5000), |message| match message {
            Message::End(End::Unusable(why)) => Some(why),
            _ => None,
        });
        assert!(
            why.contains(&format!("uid={uid} ")) && why.contains(" ctl=1 "),
            "{why}"
        );
        let succeeded: Vec<_> = why.split_once("passwd=").unwrap().1.matches("=1").collect();
        assert!(
            succeeded.is_empty() || why.contains("landlock=-1"),
            "{mode} {user}: {why}"
        );
    }
}

fn the_monitor_has_few_privileges_and_little_memory() {
    let fake = Fake::new(&["--gpus", "8"]);
    let mut monitor = start_monitor(&fake);
    monitor.expect_start();
    let status = std::fs::read_to_string(format!("/proc/{}/status", monitor.pid())).unwrap();
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap()
            .trim()
            .to_owned()
    };
    let memory: u64 = field("RssAnon:")
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!(memory <= 3 << 10, "{memory} KiB");
    assert_eq!(field("Threads:"), "1");
    for (name, value) in [
        ("CapEff:", "0000000000000000"),
        ("CapBnd:", "0000000000000000"),
        ("NoNewPrivs:", "1"),
    ] {
        assert_eq!(field(name), value, "{name}");
    }
    assert_eq!(field("Seccomp:"), "2");
    assert!(field("Uid:").starts_with("65534"), "{}", field("Uid:"));
    assert!(
        std::fs::read(format!("/proc/{}/environ", monitor.pid()))
            .is_ok_and(|text| !text.starts_with(b"LD_"))
    );
    monitor.stdin.take();
    monitor.expect_end(within(2000));
}

fn the_monitor_ends_with_its_parent() {
    let fake = Fake::new(&["--gpus", "1"]);
    let mut supervisor = start_supervisor(&fake);
    supervisor.expect_healthy(within(2000), 0);
    let monitor = supervisor.children()[0];
    supervisor.child.kill().unwrap();
    supervisor.child.wait().unwrap();
    let end = Instant::now() + within(1000);
    let runs = || {
        let status = std::fs::read_to_string(format!("/proc/{monitor}/status")).unwrap_or_default();
        !status.is_empty() && !status.contains("State:\tZ")
    };
    while runs() {
        assert!(Instant::now() < end, "it still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The driver misbehaves at GPU 1, which is then left out, and the other is watched by another process.
fn expect_one_gpu_lost(keys: &str, why: &str) {
    let fake = Fake::new(&["--gpus", "2"]);
    let supervisor = start_supervisor(&fake);
    supervisor.expect_healthy(within(2000), 1);
    let first = supervisor.children();
    fake.add(1, keys);
    supervisor.expect(within(7000), &["Silent", &uuid(1), why]);
    supervisor.expect(
        within(3000),
        &[
            "Snapshot",
            "does not answer queries about this GPU",
            &uuid(1),
        ],
    );
    supervisor.expect_healthy(within(2000), 0);
    assert_ne!(supervisor.children(), first);
    // The process that watches may just be replaced by another one, which does not report earlier events.
    let is_reported = || {
        fake.event("xid 0 48");
        let end = Instant::now() + within(1000);
        let lines = std::iter::from_fn(|| {
            supervisor
                .lines
                .recv_timeout(end.saturating_duration_since(Instant::now()))
                .ok()
        });
        lines.into_iter().any(|line| {
            line.contains("Event") && line.contains(&uuid(0)) && line.contains("Xid(48)")
        })
    };
    assert!((0..5).any(|_| is_reported()), "the event was not reported");
    fake.remove(1, keys);
    supervisor.expect_healthy(within(31_000), 1);
}

fn a_driver_that_hangs_costs_one_gpu() {
    expect_one_gpu_lost(
        "hang=nvmlDeviceGetFieldValues",
        "does not answer within 1 s",
    );
}

fn a_driver_that_crashes_costs_one_gpu() {
    expect_one_gpu_lost("crash=nvmlDeviceGetFieldValues", "crashes (signal 6)");
}

/// The kernel kills a process when memory is short, which proves nothing about the driver.
fn a_monitor_that_is_killed() {
    let fake = Fake::new(&["--gpus", "1"]);
    let supervisor = start_supervisor(&fake);
    supervisor.expect_healthy(within(2000), 0);
    for _ in 0..3 {
        let monitor = supervisor.children();
        send(monitor[0], rustix::process::Signal::KILL);
        let end = Instant::now() + within(4000);
        while supervisor.children() == monitor || supervisor.children().is_empty() {
            assert!(Instant::now() < end, "no monitor was started");
            std::thread::sleep(Duration::from_millis(20));
        }
        let line = supervisor.next("a snapshot", within(4000), |line| {
            (line.contains("Silent") || line.contains("Snapshot")).then_some(line)
        });
        assert!(line.contains("Snapshot"), "{line}");
        // A second end is believed until the new monitor has polled the GPUs, and says that it waits.
        supervisor.expect_healthy(within(4000), 0);
        std::thread::sleep(Duration::from_millis(300));
    }
}

fn a_driver_that_hangs_everywhere() {
    let fake = Fake::new(&["--gpus", "1"]);
    let supervisor = start_supervisor(&fake);
    supervisor.expect_healthy(within(2000), 0);
    fake.add(0, "hang=nvmlEventSetWait_v2");
    fake.event("xid 0 1");
    // The wait, and the time limit of a call
    supervisor.expect(
        within(6000),
        &["Silent { gpu: None", "does not answer within 1 s"],
    );
    fake.remove(0, "hang=nvmlEventSetWait_v2");
    supervisor.expect_healthy(within(3000), 0);
}

fn a_driver_comes_and_goes() {
    let fake = Fake::new(&["--gpus", "1"]);
    let hidden = fake.dir.path().join("hidden");
    std::fs::rename(&fake.root, &hidden).unwrap();
    std::fs::create_dir(&fake.root).unwrap();
    let supervisor = start_supervisor(&fake);
    supervisor.expect(within(2000), &["Absent", "NVIDIA"]);
    std::fs::remove_dir(&fake.root).unwrap();
    std::fs::rename(&hidden, &fake.root).unwrap();
    supervisor.expect(within(5000), &["Snapshot", &uuid(0)]);
    supervisor.expect_healthy(within(1000), 0);

    std::fs::remove_file(fake.root.join("proc/driver/nvidia/version")).unwrap();
    fake.set("cuda 12.2", "cuda 12.2\ninit-error 9");
    supervisor.expect(within(5000), &["Absent", "not loaded"]);
    // One report for one reason
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(
        supervisor.lines.try_iter().collect::<Vec<_>>(),
        Vec::<String>::new()
    );
}

fn a_gpu_is_added_and_removed() {
    let fake = Fake::new(&["--gpus", "1"]);
    let listed = fake.root.join("proc/driver/nvidia/gpus/0000:01:00.0");
    let node = fake.root.join("dev/nvidia0");
    let hidden = fake.dir.path().join("hidden");
    std::fs::create_dir(&hidden).unwrap();
    let moved = [
        (&listed, hidden.join("listed")),
        (&node, hidden.join("node")),
    ];
    let remove = || {
        fake.set("gpu minor=0 ", "#gpu minor=0 ");
        moved
            .iter()
            .for_each(|(place, hidden)| std::fs::rename(place, hidden).unwrap());
    };
    remove();
    let supervisor = start_supervisor(&fake);
    supervisor.expect(within(2000), &["Snapshot", "gpus: [], failed: []"]);
    fake.set("#gpu minor=0 ", "gpu minor=0 ");
    moved
        .iter()
        .for_each(|(place, hidden)| std::fs::rename(hidden, place).unwrap());
    supervisor.expect(within(5000), &["Snapshot", "gpus: [Gpu", &uuid(0)]);
    supervisor.expect_healthy(within(1000), 0);
    remove();
    supervisor.expect(within(5000), &["Snapshot", "gpus: [], failed: []"]);
}

fn the_driver_is_let_go() {
    use rustix::process::Signal;
    let fake = Fake::new(&["--gpus", "1"]);
    let supervisor = start_supervisor(&fake);
    supervisor.expect_healthy(within(2000), 0);
    // The signals are for the supervisor, and `systemctl kill` sends them to the monitor too.
    let monitor = supervisor.children();
    for signal in [Signal::USR1, Signal::USR2] {
        send(monitor[0], signal);
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(supervisor.children(), monitor);
    }
    // A signal that arrived before does not count.
    supervisor.signal(Signal::USR2);
    std::thread::sleep(Duration::from_millis(200));
    supervisor.signal(Signal::USR1);
    supervisor.expect(within(1000), &["LetGo"]);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(supervisor.children(), Vec::<u32>::new());
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", supervisor.pid())).unwrap();
    assert!(!maps.contains("libnvidia"), "{maps}");
    supervisor.signal(Signal::USR2);
    supervisor.expect_healthy(within(3000), 0);

    // Without a signal, when the module is loaded again
    supervisor.signal(Signal::USR1);
    supervisor.expect(within(1000), &["LetGo"]);
    let version = fake.root.join("proc/driver/nvidia/version");
    std::fs::rename(&version, version.with_extension("old")).unwrap();
    std::thread::sleep(Duration::from_secs(5));
    std::fs::rename(version.with_extension("old"), &version).unwrap();
    supervisor.expect_healthy(within(5000), 0);
}
