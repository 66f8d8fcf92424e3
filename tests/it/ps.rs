//! `ps`: the containers that have GPUs now, and the processes that use them.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::driver::{FakeDriver, NEEDS};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::golden::{self, SCRIPT};
use crate::json_schema;
use crate::records::REMOVED_RECORDS;
use crate::support::{HOOK, Need, assert_says, run, scratch, sh, sh_unshared, write_file};

tests! {
    engine::NEEDS => containers_of_podman, gpus_from_cdi;
    NEEDS => removed_records, processes_of_an_older_driver, the_columns, names_of_gpus_and_an_invalid_configuration;
    GOLDEN => what_a_person_reads;
}

pub const GOLDEN: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare"]),
    Need::CgroupV2,
    SCRIPT,
];

/// A node with more containers than records.
fn removed_records() {
    let fake = FakeDriver::shared();
    let before = fake.run(&["ps"]).ok();
    assert!(!before.contains("removed"), "{before}");
    let document = json_schema::checked("ps", &fake.run(&["ps", "--json"]).ok());
    assert_eq!(document.get("removed_records"), None);
    sh(REMOVED_RECORDS).ok();
    let line = "3 records of running containers were removed since the last boot, because there were too many";
    assert_says(&fake.run(&["ps"]).ok(), &[line]);
    let document = json_schema::checked("ps", &fake.run(&["ps", "--json"]).ok());
    assert_eq!(document["removed_records"], 3);
    let unknown = fake.run(&["why", "nobody"]);
    assert_says(&unknown.stderr, &["unknown container or pod", line]);
}

/// Replaces the processes of the fake driver with these lines.
fn set_processes(fake: &FakeDriver, lines: &str) {
    fake.remove_from_nvml("process ");
    fake.set_nvml(|old| old + lines);
}

/// The elements of a document that are containers of this test: other tests start containers, too.
fn named(text: &str, name: &str) -> Vec<Value> {
    let all = json_schema::part("ps", text, "containers");
    all.into_iter()
        .filter(|container| container["name"] == name)
        .collect()
}

fn containers_of_podman() {
    let (podman, fake) = (Podman::with_image(), FakeDriver::new(&["--gpus", "2"]));
    podman.install_hook(&fake.config);
    let conf = fake.library().with_file_name("nvml.conf");
    let script = format!(
        "ps() {{ {HOOK} --config '{config}' ps \"$@\"; }}; start='run --network=none --log-driver=none'; \
         \"$@\" $start -d --name ps-web -e NVIDIA_VISIBLE_DEVICES=1 {IMAGE} sleep 600 >/dev/null; \
         pid=$(\"$@\" inspect --format '{{{{.State.Pid}}}}' ps-web); \
         printf '\\nprocess gpu=1 pid=%s memory=512\\nprocess gpu=1 pid=%s memory=512 kind=graphics\\n' $pid $pid >>'{conf}'; \
         printf 'process gpu=0 pid=1 memory=100\\n' >>'{conf}'; \
         echo $pid; ps; echo ---; ps --gpu 1; echo ---; ps --gpu 0; echo ---; ps --json; echo ---; \
         \"$@\" $start --rm --name ps-bad -e NVIDIA_VISIBLE_DEVICES=9 {IMAGE} true >/dev/null 2>&1 || true; \
         \"$@\" rm -f -t 0 ps-web >/dev/null; ps; echo ---; ps --all; echo ---; ps --all --json",
        config = fake.config.display(),
        conf = conf.display(),
    );
    let text = podman.shell(Cgroup::AsMounted, &script).ok();
    let parts: Vec<_> = text.split("---\n").collect();
    let [running, gpu_1, gpu_0, document, ended, all, all_document] = parts[..] else {
        panic!("{text}")
    };
    let (pid, running) = running.split_once('\n').unwrap();
    let words = |text: &str, name: &str| -> Vec<String> {
        let row = text
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap_or_else(|| panic!("no {name} in\n{text}"));
        row.split_whitespace().map(str::to_owned).collect()
    };
    assert!(running.starts_with("CONTAINER "), "{running}");
    let row = words(running, "ps-web ");
    assert_eq!(row[2..6], ["1", "1", "512", "MiB"], "{running}");
    assert!(row[6] == "now" || row[7].starts_with("second"), "{running}");
    assert!(
        running.ends_with("1 process outside of containers uses a GPU\n"),
        "{running}"
    );
    assert!(
        gpu_1.contains("ps-web ") && !gpu_0.contains("ps-web "),
        "{gpu_1}\n{gpu_0}"
    );
    let web = named(document, "ps-web").remove(0);
    let pid: u64 = pid.parse().unwrap();
    assert_eq!(
        web["processes"],
        json!([{"pid": pid, "gpu": 1, "memory_bytes": 512 << 20}]),
        "{web:#}"
    );
    assert_eq!(
        (
            &web["state"],
            &web["gpus"][0]["index"],
            &web["memory_bytes"]
        ),
        (&json!("running"), &json!(1), &json!(512 << 20))
    );
    assert_eq!(web.get("finding"), None, "{web:#}");
    for name in ["ps-web", "ps-bad"] {
        assert!(!ended.contains(name), "{ended}");
    }
    let row = words(all, "ps-web ");
    assert_eq!(row[1..5], ["ended", "1", "-", "-"], "{all}");
    let row = words(all, "ps-bad ");
    assert_eq!(
        (
            row[1].as_str(),
            row[2].as_str(),
            row.last().unwrap().as_str()
        ),
        ("failed", "-", "ONH-030"),
        "{all}"
    );
    let bad = named(all_document, "ps-bad").remove(0);
    assert_eq!(
        (&bad["state"], &bad["finding"]["id"], &bad["gpus"]),
        (&json!("failed"), &json!("ONH-030"), &json!([]))
    );
    assert_eq!(
        named(all_document, "ps-web")[0]["state"],
        "ended",
        "{all_document}"
    );
}

/// Neither the hook nor a record knows such a container.
fn gpus_from_cdi() {
    let (podman, fake) = (Podman::with_image(), FakeDriver::new(&["--gpus", "2"]));
    podman.remove_hooks();
    let script = format!(
        "\"$@\" run --network=none --log-driver=none -d --name ps-cdi --device '{root}/dev/nvidia1:/dev/nvidia1' \
         {IMAGE} sleep 600 >/dev/null; {HOOK} --config '{config}' ps --json; \"$@\" rm -f -t 0 ps-cdi >/dev/null",
        root = fake.root.display(),
        config = fake.config.display(),
    );
    let text = podman.shell(Cgroup::AsMounted, &script).ok();
    let container = named(&text, "ps-cdi").remove(0);
    let gpu = &container["gpus"][0];
    assert_eq!(
        (&gpu["index"], &gpu["node"]),
        (&json!(1), &json!("/dev/nvidia1")),
        "{container:#}"
    );
    assert_eq!(container["processes"], json!([]), "{container:#}");
}

/// Runs `ps` in separate PID and mount namespaces, in which the processes 4 and 6 belong to the containers `a…` and `b…`, with these
/// records: started so many minutes ago, by id.
pub fn isolated(dir: &Path, fake: &FakeDriver, records: &[(u32, Value)]) -> Command {
    let store = dir.join("records");
    fs::create_dir_all(&store).unwrap();
    let mut times = String::new();
    for (minutes, record) in records {
        let id = record["container"]["id"].as_str().unwrap();
        write_file(store.join(format!("{id}.json")), record.to_string());
        times += &format!(
            "time=$(date -u -d '{minutes} minutes ago' +%FT%T.000Z); sed -i s/TIME/$time/g {id}.json; "
        );
    }
    let script = format!(
        "mount -t cgroup2 none /mnt; for id in {a} {b}; do \
           mkdir -p /mnt/{cgroup}/libpod-$id; sleep 600 & echo $! >/mnt/{cgroup}/libpod-$id/cgroup.procs; done; umount /mnt; \
         mount -t tmpfs -o mode=755 run /run; mkdir -m 700 -p /run/oci-nvidia-hook/containers; \
         cp '{store}'/*.json /run/oci-nvidia-hook/containers; cd /run/oci-nvidia-hook/containers; {times} chmod 600 *; \
         mount -t tmpfs lib /var/lib; cd /; exec \"$@\"",
        a = "a".repeat(64),
        b = "b".repeat(64),
        cgroup = cgroup(dir),
        store = store.display(),
    );
    let mut command = Command::new("unshare");
    command
        .args([
            "-m",
            "-p",
            "-f",
            "--mount-proc",
            "sh",
            "-euc",
            &script,
            "sh",
            HOOK,
            "--config",
        ])
        .arg(&fake.config);
    command
}

/// The name of the directory of a test in the cgroup hierarchy. Tests that run at the same time must not remove each other's.
fn cgroup(dir: &Path) -> String {
    let mut names = dir.iter().filter_map(|name| name.to_str());
    format!(
        "onh-{}",
        names.rfind(|name| name.starts_with("it-")).unwrap()
    )
}

/// Removes the cgroups of [`isolated`].
pub fn remove_cgroups(dir: &Path) {
    let script = format!(
        "mount -t cgroup2 none /mnt; rmdir /mnt/{cgroup}/* /mnt/{cgroup} 2>/dev/null || true",
        cgroup = cgroup(dir)
    );
    sh_unshared(&script);
}

/// A record as the hook writes it.
pub fn record(id: &str, name: &str, outcome: &str, more: Value) -> Value {
    let mut record = json!({
        "version": 1, "hook": "0.1.0", "container": {"id": id, "name": name, "bundle": "/nowhere"}, "stage": "prestart",
        "started": "TIME", "pid": 4_000_000, "outcome": outcome, "reason": "", "request": "NVIDIA_VISIBLE_DEVICES",
        "asked": {"visible_devices": ["all"], "driver_capabilities": ["compute", "utility"]},
        "driver": "535.183.01", "devices": [], "findings": [], "steps": [{"name": "request", "milliseconds": 0.304}],
    });
    record
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    record
}

pub fn gpu(index: u32) -> Value {
    let uuid = format!("GPU-51eed00{index}-000{index}-400{index}-8000-0000fa4e000{index}");
    json!({"index": index, "name": "NVIDIA H100 80GB HBM3", "uuid": uuid})
}

pub fn finding() -> Value {
    json!({
        "id": "ONH-030", "severity": "error", "what": "NVIDIA_VISIBLE_DEVICES requests \"9\": this host has no such GPU",
        "why": "the container would start with fewer GPUs than it requested", "fix": "request one of 0, 1, all, none; \"oci-nvidia-hook info\" on the host prints the GPUs",
    })
}

/// Two running containers, one that ended, and one that failed.
fn records() -> Vec<(u32, Value)> {
    let (a, b) = ("a".repeat(64), "b".repeat(64));
    let pod = json!({
        "container": {"id": b, "pod": {"name": "trainer-0", "namespace": "lab", "container": "main"}, "bundle": "/nowhere"},
        "devices": [gpu(1)],
    });
    let failed = json!({"reason": finding()["what"], "findings": [finding()], "devices": []});
    vec![
        (
            2,
            record(&a, "web", "ok", json!({"devices": [gpu(0), gpu(1)]})),
        ),
        (180, record(&b, "", "ok", pod)),
        (
            1500,
            record(
                &"c".repeat(64),
                "batch",
                "ok",
                json!({"devices": [gpu(0)], "ended": "TIME"}),
            ),
        ),
        (5, record(&"d".repeat(64), "bad", "failed", failed)),
    ]
}

const PROCESSES: &str = "process gpu=0 pid=4 memory=20480\nprocess gpu=1 pid=4 memory=24576\nprocess gpu=1 pid=6 memory=512\n\
                         process gpu=1 pid=1 memory=10\n";

fn what_a_person_reads() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    set_processes(&fake, PROCESSES);
    let ps = |args: &[&str]| {
        let mut command = isolated(dir.path(), &fake, &records());
        command.arg("ps").args(args);
        command
    };
    golden::check("ps", "oci-nvidia-hook ps", &ps(&[]));
    golden::check("ps-all", "oci-nvidia-hook ps --all", &ps(&["--all"]));
    golden::check(
        "ps-gpu-9",
        "oci-nvidia-hook ps --gpu 9",
        &ps(&["--gpu", "9"]),
    );
    fake.set_nvml(|old| old + "\ninit-error 999\n");
    golden::check("ps-without-nvml", "oci-nvidia-hook ps", &ps(&[]));
    remove_cgroups(dir.path());
}

/// A misspelled GPU is not "free", and a bus id names a GPU. During the outage that an invalid config.toml causes, the list is complete.
fn names_of_gpus_and_an_invalid_configuration() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    set_processes(&fake, PROCESSES);
    let ps = |args: &[&str]| run(isolated(dir.path(), &fake, &records()).arg("ps").args(args));
    let by_index = ps(&["--gpu", "0"]).ok();
    assert_eq!(ps(&["--gpu", "00000000:01:00.0"]).ok(), by_index);
    for name in ["7", "banana", "00000000:7f:00.0"] {
        let stderr = ps(&["--gpu", name]).failed(1);
        assert_says(&stderr, &["unknown GPU", "(ONH-030)"]);
    }
    let all = ps(&["--all"]).ok();
    fake.configure("[devices]\ndeny = \"all of them\"");
    let ran = ps(&["--all"]);
    assert!(ran.stderr.contains("(ONH-005)"), "{ran:?}");
    assert_eq!(
        ran.ok().lines().count(),
        all.lines().count() - 1,
        "without the line about other processes"
    );
    remove_cgroups(dir.path());
}

/// Before driver 510, the functions have another name; a GPU that fails has no processes.
fn processes_of_an_older_driver() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    set_processes(&fake, PROCESSES);
    let missing = ["Compute", "Graphics", "MPSCompute"]
        .map(|kind| format!("missing nvmlDeviceGet{kind}RunningProcesses_v3\n"));
    fake.set_nvml(|old| old + &missing.concat());
    let ps = |args: &[&str]| run(isolated(dir.path(), &fake, &records()).arg("ps").args(args));
    let document = ps(&["--json"]).ok();
    let web = named(&document, "web").remove(0);
    assert_eq!(
        web["memory_bytes"],
        json!((20480_u64 + 24576) << 20),
        "{document}"
    );
    fake.set_nvml(|old| old.replace("gpu minor=1 ", "gpu minor=1 fail=15 "));
    let ran = ps(&["--json"]);
    assert_says(
        &ran.stderr,
        &[
            "warning: cannot list the processes on GPU 1: ",
            "gpu is lost",
        ],
    );
    let document = ran.ok();
    let web = named(&document, "web").remove(0);
    assert_eq!(
        (web.get("processes"), web.get("memory_bytes")),
        (None, None),
        "{document}"
    );
    remove_cgroups(dir.path());
}

/// `ps -a` prints the state and the number, `--gpu` also takes a UUID, and a GPU also has its MIG devices.
fn the_columns() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    let mut all = records();
    let mig = json!({"devices": [{"index": 1, "mig_index": 2, "name": "H100", "uuid": "MIG-7"}], "ended": "TIME"});
    all.push((9, record(&"e".repeat(64), "part", "ok", mig)));
    let ps = |args: &[&str]| run(isolated(dir.path(), &fake, &all).arg("ps").args(args)).ok();
    for (gpu, names) in [
        ("0", &["web", "batch"][..]),
        ("1", &["web", "lab/trainer-0/main", "part"]),
        ("1:2", &["part"]),
        ("mig-7", &["part"]),
        (
            "GPU-51eed000-0000-4000-8000-0000fa4e0000",
            &["web", "batch"],
        ),
    ] {
        let text = ps(&["-a", "--gpu", gpu]);
        let mut found: Vec<_> = text
            .lines()
            .skip(1)
            .filter_map(|line| line.split(' ').next())
            .collect();
        found.retain(|name| !name.starts_with(|c: char| c.is_ascii_digit()));
        let mut names = names.to_vec();
        found.sort_unstable();
        names.sort_unstable();
        assert_eq!(found, names, "{gpu}: {text}");
    }
    remove_cgroups(dir.path());
}
