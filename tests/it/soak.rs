//! Starts a thousand containers in sequence and a hundred at once, and checks that nothing remains of them.

use std::path::{Path, PathBuf};

use crate::driver::{FakeDriver, Image};
use crate::harness::part;
use crate::support::{HOOK, Need, host_wide_name, read, sh, shell, write_file};

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Programs(&["runc", "cc"]),
    Need::CgroupV1,
    Need::Part(part::ENDURANCE),
];

tests! {
    NEEDS => a_thousand_in_sequence_and_a_hundred_at_once;
}

/// The numbers that would increase on a host if something remained.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    mounts: usize,
    /// Our processes: a hook or an NVML child that did not end
    processes: String,
    cgroups: String,
}

fn left(id: &str) -> Left {
    let text = |script: &str| sh(script).stdout.trim().to_owned();
    Left {
        mounts: read("/proc/thread-self/mountinfo").lines().count(),
        // In brackets, so that the pattern does not match the shell that runs this command.
        processes: text(&format!("pgrep -f '[{}]{}' || true", &id[..1], &id[1..])),
        cgroups: text(&format!(
            "find /sys/fs/cgroup -maxdepth 3 -name '{id}*' 2>/dev/null || true"
        )),
    }
}

/// A memory cgroup for the hooks of this test. tmpfs pages stay charged to it while they exist, so it shows the memory
/// of mounts that have leaked, without the memory of other programs on the machine.
struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    fn new(name: &str) -> Self {
        let dir = Path::new("/sys/fs/cgroup/memory").join(name);
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    /// KiB
    fn tmpfs(&self) -> u64 {
        let text = read(self.0.join("memory.stat"));
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("total_shmem "))
            .unwrap();
        line.parse::<u64>().unwrap() / 1024
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        std::fs::remove_dir(&self.0).ok();
    }
}

fn a_thousand_in_sequence_and_a_hundred_at_once() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let id = host_wide_name("soak");
    write_bundle(dir.path(), &fake.config);
    let memory = MemoryCgroup::new(&id);
    let run = |script: &str| {
        let text = format!(
            "echo $$ >'{}/cgroup.procs'; mkdir -p -m 700 /run/oci-nvidia-hook; mount -t tmpfs -o mode=700 run /run/oci-nvidia-hook\ncd '{}'\none() {{\n mkdir -p $1/upper $1/work $1/rootfs\n cp config.json $1\n \
             mount -t overlay -o lowerdir='{}',upperdir=$1/upper,workdir=$1/work none $1/rootfs\n \
             runc --root $PWD/runc run --bundle $1 {id}-$1 >$1/said 2>&1 || cat $1/said >>failed\n \
             umount $1/rootfs\n rm -r $1\n}}\n{script}\n\
             cd /run/oci-nvidia-hook; ls containers | grep -c json; ls -A . containers | grep -v -e json -e '^inventory' -e '^located' || true",
            memory.0.display(),
            dir.path().display(),
            image.rootfs.display()
        );
        let mut unshare = std::process::Command::new("unshare");
        let kept = crate::support::run(unshare.args(["-m", "sh", "-euc", &text])).ok();
        let failed = std::fs::read_to_string(dir.path().join("failed")).unwrap_or_default();
        assert_eq!(failed, "");
        // The number of records is limited, and there is nothing else: no temporary file.
        let (records, others) = kept.split_once('\n').unwrap();
        assert!(
            (1..=400).contains(&records.parse::<usize>().unwrap()),
            "{records} records"
        );
        assert_eq!(others.trim(), ".:\ncontainers\n\ncontainers:");
    };
    run("one warm");
    let (before, tmpfs) = (left(&id), memory.tmpfs());
    run("n=0; while [ $n -lt 1000 ]; do one $n; n=$((n+1)); done");
    assert_eq!(left(&id), before, "after a thousand in sequence");
    run("n=0; while [ $n -lt 100 ]; do one $n & n=$((n+1)); done; wait");
    assert_eq!(left(&id), before, "after a hundred at once");
    let grown = memory.tmpfs().saturating_sub(tmpfs);
    // One page for each container would be 4400.
    assert!(grown < 1000, "{grown} KiB of tmpfs are left");
}

/// The output of `runc spec`, with the hook.
fn write_bundle(dir: &Path, config: &Path) {
    shell!("cd '{}' && runc spec", dir.display());
    let path = dir.join("config.json");
    let mut spec: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    spec["process"]["terminal"] = false.into();
    spec["process"]["args"] = serde_json::json!(["nvidia-smi", "-L"]);
    spec["process"]["env"] =
        serde_json::json!(["PATH=/usr/bin:/bin", "NVIDIA_VISIBLE_DEVICES=all"]);
    // Raising a limit needs CAP_SYS_RESOURCE.
    spec["process"].as_object_mut().unwrap().remove("rlimits");
    let args = [
        "oci-nvidia-hook",
        "--config",
        config.to_str().unwrap(),
        "prestart",
    ];
    let hook = serde_json::json!({"path": HOOK, "args": args, "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]});
    spec["hooks"] = serde_json::json!({"prestart": [hook]});
    write_file(path, spec.to_string());
}
