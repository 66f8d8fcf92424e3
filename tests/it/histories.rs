//! What happens to a host over time, in any order: after each event, a start with everything that was stored gives what a start without it
//! gives, and a container of the CDI spec gets what a new spec gives it, or is refused with the number that `cdi check` names.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use cdi_spec::file;
use cdi_spec::spec::{ContainerEdits, Device, Spec};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::json;

use crate::builds::rebuilt;
use crate::cdi::{GPU_1, MIG_1, edits_of, verdict};
use crate::driver::{FakeDriver, NEEDS};
use crate::support::{HOOK, Ran, run, run_with, scratch, shell, unshare, write_file};

tests! {
    NEEDS => whatever_happens_to_a_host;
}

/// What can happen to a host.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The modules assign other numbers, and everything in /run is gone
    Boot,
    UvmLoadedAgain,
    DriverUpdate,
    /// The package is replaced by another build of the same version, in either direction
    Rebuild,
    GpuOut,
    GpuIn,
    /// GPU 0 gets other MIG devices, one of which has the number of an earlier one
    MigChange,
    SpecEdited,
    SpecDeleted,
    SpecRefreshed,
}

const EVENTS: [Event; 10] = [
    Event::Boot,
    Event::UvmLoadedAgain,
    Event::DriverUpdate,
    Event::Rebuild,
    Event::GpuOut,
    Event::GpuIn,
    Event::MigChange,
    Event::SpecEdited,
    Event::SpecDeleted,
    Event::SpecRefreshed,
];

/// The GPU that comes and goes.
const GPU_2: &str = "GPU-51eed002-0002-4002-8000-0000fa4e0002";

struct Host {
    fake: FakeDriver,
    dir: tempfile::TempDir,
    /// The installed program, and the other build
    programs: [PathBuf; 2],
    boot: u32,
    /// Numbers that the kernel assigns
    next_major: u32,
    driver: &'static str,
    has_gpu_2: bool,
    mig: u32,
}

impl Host {
    fn new() -> Self {
        let dir = scratch();
        let programs = [PathBuf::from(HOOK), rebuilt(dir.path())];
        let host = Self {
            fake: FakeDriver::new(&["--gpus", "3", "--mig"]),
            dir,
            programs,
            boot: 0,
            next_major: 500,
            driver: "535.183.01",
            has_gpu_2: true,
            mig: 0,
        };
        host.write_boot();
        fs::create_dir(host.dir.path().join("cdi")).unwrap();
        host.run(&["cdi", "refresh", "--create"], "run", "").ok();
        host
    }

    fn write_boot(&self) {
        let id = format!("00000000-0000-4000-8000-{:012}\n", self.boot);
        write_file(self.dir.path().join("boot"), id);
    }

    /// Runs the installed program with this run-time directory, in the current boot.
    fn run(&self, args: &[&str], run_dir: &str, input: &str) -> Ran {
        let dir = self.dir.path();
        fs::create_dir_all(dir.join(run_dir)).unwrap();
        let script = format!(
            "cd '{}'; mount --bind boot /proc/sys/kernel/random/boot_id; mount -t tmpfs run /run; mkdir -p /run/oci-nvidia-hook /run/cdi; \
             mount --bind {run_dir} /run/oci-nvidia-hook; mount --bind cdi /run/cdi; exec \"$@\"",
            dir.display()
        );
        let mut command = unshare(&script);
        command
            .arg(&self.programs[0])
            .arg("--config")
            .arg(&self.fake.config)
            .args(args);
        run_with(
            command
                .env_clear()
                .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            input.as_bytes(),
        )
    }

    fn spec_file(&self) -> PathBuf {
        self.dir.path().join("cdi/nvidia.yaml")
    }

    fn spec(&self) -> Option<Spec> {
        Some(file::parse(&fs::read(self.spec_file()).ok()?).unwrap())
    }

    fn change(&self, script: &str) {
        shell!("cd '{}'; {script}", self.fake.root.display());
    }

    fn renumber(&mut self, node: &str) {
        self.next_major -= 1;
        let major = self.next_major;
        self.change(&format!(
            "for node in {node}; do minor=$((0x$(stat -c %T $node))); rm $node; mknod -m 666 $node c {major} $minor; done"
        ));
    }

    fn set_mig(&self) {
        let mut layout = String::new();
        for (instance, profile) in [(1, "1g.10gb"), (2 + self.mig % 2, "2g.20gb")] {
            writeln!(
                layout,
                "mig gpu=0 gi={instance} ci=0 profile={profile} uuid=MIG-51eed000-000{instance}-4000-8000-{:012}",
                self.mig
            )
            .unwrap();
        }
        let file = self.dir.path().join("layout");
        write_file(&file, layout);
        let mut make = Command::new(crate::support::source("tests/fake-driver/make-root"));
        run(make.arg(&self.fake.root).arg("--mig-layout").arg(file)).ok();
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Boot => {
                self.boot += 1;
                self.write_boot();
                fs::remove_dir_all(self.dir.path().join("run")).ok();
                self.renumber("dev/nvidia-uvm dev/nvidia-uvm-tools");
                self.renumber("dev/nvidia-caps/*");
            }
            Event::UvmLoadedAgain => self.renumber("dev/nvidia-uvm dev/nvidia-uvm-tools"),
            Event::DriverUpdate => self.update_driver(),
            Event::Rebuild => self.programs.swap(0, 1),
            Event::GpuOut | Event::GpuIn => self.plug(matches!(event, Event::GpuIn)),
            Event::MigChange => {
                self.mig += 1;
                self.set_mig();
            }
            Event::SpecEdited => self.edit_spec(),
            Event::SpecDeleted => drop(fs::remove_file(self.spec_file())),
            Event::SpecRefreshed => drop(self.run(&["cdi", "refresh", "--create"], "run", "").ok()),
        }
    }

    fn update_driver(&mut self) {
        let new = match self.driver {
            "535.183.01" => "550.54.14",
            _ => "535.183.01",
        };
        let old = std::mem::replace(&mut self.driver, new);
        self.change(&format!(
            "for file in $(find usr -name '*.so.{old}'); do mv $file ${{file%.so.{old}}}.so.{new}; done; \
             /sbin/ldconfig -r .; sed -i 's/{old}/{new}/' proc/driver/nvidia/version"
        ));
        self.fake
            .set_nvml(|conf| conf.replace(&format!("driver {old}"), &format!("driver {new}")));
    }

    /// Plugs GPU 2 in or out.
    fn plug(&mut self, is_in: bool) {
        if self.has_gpu_2 == is_in {
            return;
        }
        self.has_gpu_2 = is_in;
        let gpu = "proc/driver/nvidia/gpus/0000:03:00.0";
        self.change(&match is_in {
            true => format!("mv kept-gpu {gpu}; mknod -m 666 dev/nvidia2 c 195 2"),
            false => format!("mv {gpu} kept-gpu; rm dev/nvidia2"),
        });
        let line = format!("gpu minor=2 uuid={GPU_2}");
        self.fake.set_nvml(|conf| match is_in {
            true => conf.replace(&format!("#{line}"), &line),
            false => conf.replace(&line, &format!("#{line}")),
        });
    }

    fn edit_spec(&self) {
        if let Ok(text) = fs::read_to_string(self.spec_file()) {
            write_file(self.spec_file(), text.replacen("minor: 0", "minor: 1", 1));
        }
    }

    /// A start that uses what was stored gives the same as one that finds nothing stored.
    fn starts_are_fresh(&self) {
        for request in ["all", MIG_1] {
            let spec = json!({
                "root": {"path": "/nowhere"}, "process": {"env": [format!("NVIDIA_VISIBLE_DEVICES={request}")]},
            });
            let plan = |run_dir| self.run(&["plan", "-", "--json"], run_dir, &spec.to_string());
            let (warm, cold) = (plan("run"), plan("cold"));
            fs::remove_dir_all(self.dir.path().join("cold")).unwrap();
            assert_eq!(
                (warm.code, warm.stdout),
                (cold.code, cold.stdout),
                "{request}"
            );
        }
    }

    /// Containers of the spec get what a new spec has for them, or do not start.
    fn specs_are_fresh(&self, seen: &mut Seen) {
        let Some(spec) = self.spec() else { return };
        let new = self
            .run(&["cdi", "generate", "--output", "-"], "cold", "")
            .ok();
        fs::remove_dir_all(self.dir.path().join("cold")).unwrap();
        let new = file::parse(new.as_bytes()).unwrap();
        for device in &spec.devices {
            // One of each kind. An index can belong to another device later; a UUID cannot.
            if ![GPU_1, GPU_2, MIG_1].contains(&device.name.as_str()) {
                continue;
            }
            let (number, why) = self.check(&device.name);
            let lacks_file = why.contains("is missing on the host");
            let refused = match self.start(&spec, device) {
                _ if lacks_file => continue,
                ran if ran.code == Some(0) => None,
                ran => Some(ran.stdout + &ran.stderr),
            };
            match (&refused, &number) {
                (Some(text), Some(number)) => {
                    assert!(text.contains(number), "{}: {text}, {why}", device.name);
                    seen.refused.insert(number.clone());
                }
                (None, None) => {
                    self.is_fresh(&spec, &new, device);
                    seen.started += 1;
                }
                _ => panic!(
                    "{}: start {refused:?}, check {number:?} {why:?}",
                    device.name
                ),
            }
        }
    }

    /// Returns the number of the finding of `cdi check`, and its reason.
    fn check(&self, device: &str) -> (Option<String>, String) {
        let name = format!("nvidia.com/gpu={device}");
        let ran = self.run(
            &["cdi", "check", "--json", "--spec-dir", "/run/cdi", &name],
            "run",
            "",
        );
        verdict(&ran)
    }

    /// Plans the start of a container for which an engine has applied the device: as `plan` decides, the hook entry does.
    fn start(&self, spec: &Spec, device: &Device) -> Ran {
        let edits = edits_of(spec, &[&device.name]);
        let mut devices = Vec::new();
        for node in &edits.device_nodes {
            devices.push(
                json!({"path": node.path, "type": "c", "major": node.major, "minor": node.minor}),
            );
        }
        let config = json!({
            "root": {"path": "/nowhere"}, "process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]},
            "linux": {"devices": devices}, "hooks": {"createRuntime": edits.hooks},
        });
        self.run(&["plan", "-"], "run", &config.to_string())
    }

    fn is_fresh(&self, spec: &Spec, new: &Spec, device: &Device) {
        let mut others = new.devices.iter();
        let other = others.find(|other| other.name == device.name);
        let other = other.unwrap_or_else(|| panic!("{} is gone", device.name));
        for (old, new) in [
            (&device.container_edits, &other.container_edits),
            (&spec.container_edits, &new.container_edits),
        ] {
            assert_eq!(words(old), words(new), "{}", device.name);
        }
    }
}

/// What the histories were about.
#[derive(Default)]
struct Seen {
    started: usize,
    /// The numbers of the findings
    refused: BTreeSet<String>,
}

/// Returns what a container gets from these edits, without the stamp of the host.
fn words(edits: &ContainerEdits) -> Vec<String> {
    let mut words = Vec::new();
    for node in &edits.device_nodes {
        words.push(format!("{node:?}"));
    }
    for mount in &edits.mounts {
        words.push(format!("{mount:?}"));
    }
    words
}

fn whatever_happens_to_a_host() {
    let config = Config {
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let events = prop::collection::vec(prop::sample::select(EVENTS.to_vec()), 40);
    let history = events.new_tree(&mut runner).unwrap().current();
    let (mut host, mut seen) = (Host::new(), Seen::default());
    for (number, event) in history.iter().enumerate() {
        println!("{number}: {event:?}");
        host.happen(*event);
        host.starts_are_fresh();
        host.specs_are_fresh(&mut seen);
        // Without this, most events would meet a spec that is refused.
        if number % 3 == 2 {
            host.happen(Event::SpecRefreshed);
            host.specs_are_fresh(&mut seen);
        }
    }
    assert!(seen.started > 30, "{}", seen.started);
    let numbers: Vec<_> = seen.refused.iter().map(String::as_str).collect();
    assert_eq!(numbers, ["ONH-013", "ONH-030", "ONH-063"]);
}
