//! Problems that NVIDIA's stack reports badly or not at all, caused through podman: docs/compatibility.md contains its messages
//! next to ours.

use crate::driver::{ALL_GPUS, FakeDriver};
use crate::engine::{Cgroup, IMAGE, NEEDS, NEEDS_V2, Podman};
use crate::support::{HOOK, Ran, assert_lacks, assert_says, read, source};

tests! {
    NEEDS => the_request, config;
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
