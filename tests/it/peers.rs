//! Problems that NVIDIA's stack reports badly or not at all, caused through podman: docs/compatibility.md contains its messages
//! next to ours.

use std::fs;
use std::path::Path;

use crate::driver::{ALL_GPUS, FakeDriver};
use crate::engine::{Cgroup, IMAGE, NEEDS, NEEDS_V2, Podman};
use crate::support::{HOOK, Ran, assert_lacks, assert_says, read, source, write_file};

tests! {
    NEEDS => the_host, the_request, config, what_stops_them_and_not_us;
    NEEDS_V2 => nothing_attached_on_cgroup_v2;
}

struct Case {
    podman: Podman,
    fake: FakeDriver,
}

impl Case {
    fn new() -> Self {
        let (podman, fake) = (Podman::with_image(), FakeDriver::new(&["--gpus", "3"]));
        podman.install_hook(&fake.config);
        Self { podman, fake }
    }

    fn run(&self, env: &[&str], command: &[&str]) -> Ran {
        let env = env.iter().flat_map(|variable| ["-e", variable]);
        let arguments: Vec<_> = env.chain([IMAGE]).chain(command.iter().copied()).collect();
        self.podman.run(Cgroup::AsMounted, &arguments)
    }

    /// Checks that the container does not start, that podman shows our number, these words and a hint, and does not take the
    /// message for its own error; and that docs/compatibility.md has the number next to the messages of NVIDIA's stack.
    #[track_caller]
    fn stops(&self, env: &[&str], id: &str, says: &str) {
        let stderr = self.run(env, &["true"]).failed(126);
        assert!(
            stderr.contains(says) && stderr.contains(&format!("({id})")),
            "{says:?}, {id}:\n{stderr}"
        );
        assert_says(&stderr, &["hint: "]);
        assert_lacks(&stderr, &["command that was not found"]);
        assert_beside_theirs(id);
    }
}

/// Returns the table of docs/compatibility.md with the messages of NVIDIA's stack.
#[track_caller]
fn assert_beside_theirs(id: &str) {
    let text = read(source("docs/compatibility.md"));
    let table = text.split("\n## Comparison of messages\n").nth(1).unwrap();
    assert!(
        table
            .lines()
            .any(|line| line.starts_with("| ") && line.contains(id)),
        "{id} is not in the table"
    );
}

fn the_host() {
    let case = Case::new();
    let root = &case.fake.root;
    let library = root.join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.183.01");
    let whole = fs::read(&library).unwrap();
    write_file(&library, "x");
    case.stops(ALL_GPUS, "ONH-015", "file too short");
    write_file(&library, whole);

    fs::remove_file(root.join("dev/nvidia2")).unwrap();
    case.stops(ALL_GPUS, "ONH-021", "the device node \"/dev/nvidia2\"");
    case.stops(
        &["NVIDIA_VISIBLE_DEVICES=2"],
        "ONH-021",
        "GPU 2: the device node \"/dev/nvidia2\"",
    );
    case.run(&["NVIDIA_VISIBLE_DEVICES=1"], &["nvidia-smi", "-L"])
        .ok();

    fs::remove_dir_all(root.join("proc")).unwrap();
    case.fake.set_nvml(|old| old + "\ninit-error 9\n");
    fs::create_dir_all(root.join("sys/bus/pci/devices/0000:01:00.0")).unwrap();
    for (name, value) in [("vendor", "0x10de"), ("class", "0x030200")] {
        write_file(
            root.join("sys/bus/pci/devices/0000:01:00.0").join(name),
            value,
        );
    }
    case.stops(ALL_GPUS, "ONH-011", "nvidia");
}

fn the_request() {
    let case = Case::new();
    for devices in ["9", "GPU-deadbeef", "0:0"] {
        let variable = format!("NVIDIA_VISIBLE_DEVICES={devices}");
        case.stops(&[&variable], "ONH-030", " 0, ");
    }
    for (variable, id, says) in rows! {
        "NVIDIA_REQUIRE_CUDA=cuda>=13.5", "ONH-034", "NVIDIA_REQUIRE_CUDA=\"cuda>=13.5\", but GPU 0 has cuda 12.";
        "NVIDIA_REQUIRE_CUDA=cuda>>1", "ONH-035", "NVIDIA_REQUIRE_CUDA=\"cuda>>1\"";
        "NVIDIA_DRIVER_CAPABILITIES=computer", "ONH-036", "set to \"all\" or some of compat32,compute,";
        "NVIDIA_MIG_CONFIG_DEVICES=all", "ONH-037", "NVIDIA_MIG_CONFIG_DEVICES=\"all\"";
    } {
        case.stops(&[ALL_GPUS[0], variable], id, says);
    }
}

fn config() {
    let case = Case::new();
    case.fake.configure("a b = 1");
    case.stops(ALL_GPUS, "ONH-005", "config.toml\" line 3: ");
    case.run(&[], &["true"]).ok();

    // A warning: the container starts, and runc does not show the output of a hook that succeeds.
    case.fake.configure("no-cgroup = true");
    let script = format!(
        "\"$@\" run --name c --network=none --log-driver=none -e {} {IMAGE} true; {HOOK} why c; \"$@\" rm c >/dev/null",
        ALL_GPUS[0]
    );
    let shown = case.podman.shell(Cgroup::AsMounted, &script).ok();
    assert_says(&shown, &["ONH-101 warning: ", "no-cgroups"]);
    assert_beside_theirs("ONH-101");
}

fn what_stops_them_and_not_us() {
    let case = Case::new();
    case.fake
        .configure("[nvidia-container-runtime]\nmode = \"cdi\"");
    assert!(
        case.run(ALL_GPUS, &["nvidia-smi", "-L"])
            .ok()
            .contains("GPU 2: ")
    );
    case.fake.configure("ldconfig = \"@/nowhere/ldconfig\"");
    case.run(ALL_GPUS, &["nvidia-smi", "-L"]).ok();
    case.fake.configure("");
    write_file(case.fake.root.join("etc/ld.so.cache"), "");
    case.run(ALL_GPUS, &["nvidia-smi", "-L"]).ok();
    // The container's /proc comes from this kernel, which may lack an NVIDIA driver; this does not stop the hook.
    if !Path::new("/proc/driver/nvidia").exists() {
        case.run(
            ALL_GPUS,
            &[
                "sh",
                "-euc",
                "test ! -e /proc/driver/nvidia; probe-dlopen libcuda.so.1",
            ],
        )
        .ok();
    }
}

fn nothing_attached_on_cgroup_v2() {
    let case = Case::new();
    // A privileged container's cgroup has no device program.
    let arguments = ["--privileged", "-e", ALL_GPUS[0], IMAGE, "nvidia-smi", "-L"];
    assert!(
        case.podman
            .run(Cgroup::V2, &arguments)
            .ok()
            .contains("GPU 0: ")
    );
}
