//! Tests which GPU a name denotes while some GPUs do not work: in all modes, an index never denotes another physical GPU.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::cdi::{GPU_0, GPU_1, cdi, generate};
use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::json_schema;
use crate::support::{Need, Ran, assert_says, read, run, scratch, write_file};

const NEEDS_DRIVER: &[Need] = &[Need::Root, Need::Program("cc")];

tests! {
    NEEDS => a_missing_node_moves_no_index, an_excluded_gpu_does_not_exist;
    NEEDS_DRIVER => a_lost_gpu_is_reported_once, info_json_can_be_replayed;
}

fn spec(asked: &str) -> String {
    format!(
        r#"{{"root":{{"path":"/nowhere"}},"process":{{"env":["NVIDIA_VISIBLE_DEVICES={asked}"]}}}}"#
    )
}

/// Runs `ARGUMENTS` with the config.json of a container that requests these GPUs on stdin.
fn for_container(fake: &FakeDriver, asked: &str, arguments: &[&str]) -> Ran {
    fake.run_with(arguments, &spec(asked))
}

pub fn plan(fake: &FakeDriver, asked: &str) -> Ran {
    for_container(fake, asked, &["plan", "-"])
}

/// The state of a GPU in /proc.
fn information(fake: &FakeDriver, bus: &str) -> std::path::PathBuf {
    fake.root
        .join("proc/driver/nvidia/gpus")
        .join(bus)
        .join("information")
}

fn replace(path: &Path, old: &str, new: &str) {
    let text = read(path);
    assert!(text.contains(old), "{text}");
    write_file(path, text.replace(old, new));
}

/// NVML counts the GPUs that it can open, so its GPU 0 is the second one of the host here.
fn a_missing_node_moves_no_index() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "3"]));
    fs::remove_file(fake.root.join("dev/nvidia0")).unwrap();
    let naive = fake.on_host("nvidia-smi -L");
    assert!(
        naive.starts_with("GPU 0: ") && naive.lines().next().unwrap().contains(GPU_1),
        "NVML's count: {naive}"
    );

    let missing = "GPU 0: the device node \"/dev/nvidia0\"";
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::start(dir.path(), &image.rootfs, &["NVIDIA_VISIBLE_DEVICES=0"], "");
    for asked in ["0", "0,1", "all", GPU_0, "0000:01:00.0"] {
        container.set_env(&[&format!("NVIDIA_VISIBLE_DEVICES={asked}")]);
        let stderr = container.hook(&fake.config).failed(1);
        assert!(
            stderr.contains(missing) && stderr.contains("(ONH-021)"),
            "{asked}: {stderr}"
        );
        let shown = plan(&fake, asked);
        assert!(
            shown.code == Some(1) && shown.stdout.contains(missing),
            "{asked}: {shown:?}"
        );
        let ran = for_container(&fake, asked, &["edit-config"]);
        assert!(
            ran.stdout.is_empty() && ran.failed(1).contains(missing),
            "{asked}"
        );
    }
    assert_eq!(container.output("cd /dev; echo nvidia*").trim(), "nvidia*");
    container.set_env(&["NVIDIA_VISIBLE_DEVICES=1"]);
    container.hook(&fake.config).ok();
    assert_eq!(
        container.output("cd /dev; echo nvidia[0-9]*").trim(),
        "nvidia1"
    );

    let info = fake.run(&["info"]).ok();
    let columns = |index: &str| {
        info.lines()
            .find(|line| line.starts_with(&format!("{index}    NVIDIA ")))
            .unwrap()
    };
    assert!(
        columns("1").contains("  00000000:02:00.0  1      -    ok          GPU-"),
        "{info}"
    );
    assert!(
        columns("0").contains("  0      -    not usable  "),
        "{info}"
    );
    assert!(info.contains(&format!("not usable: {missing}")), "{info}");
    let spec = generate(&fake, &[]);
    let device = |name: &str| spec.devices.iter().find(|device| device.name == name);
    assert!(device("0").is_none());
    let nodes = &device("1").unwrap().container_edits.device_nodes;
    assert!(
        nodes.iter().any(|node| node.path == "/dev/nvidia1"),
        "{nodes:?}"
    );

    let link = crate::nvidia_cli::link(dir.path(), "nvidia-container-cli");
    let cli = |device: &str| {
        let mut cli = Command::new(&link);
        run(cli
            .arg("--root")
            .arg(&fake.root)
            .args(["list", "--device", device])
            .env_clear())
    };
    assert!(cli("0").failed(1).contains(missing));
    assert!(cli("1").ok().contains("/dev/nvidia1\n"));

    // The administrator's limits by index also denote the same GPU as before.
    fake.configure("[devices]\nallow = [\"1\"]");
    assert!(
        plan(&fake, "all")
            .ok()
            .contains(&format!("(UUID: {GPU_1})\n"))
    );
}

/// A GPU that fell off the bus fails in NVML's first call: NVML reports an index, the kernel module the rest.
fn a_lost_gpu_is_reported_once() {
    let fake = FakeDriver::new(&["--gpus", "3"]);
    fake.set_nvml(|old| old.replace("gpu minor=1 ", "gpu minor=1 fail-handle=15 "));
    let shown = plan(&fake, "all").ok();
    assert_eq!(shown.matches("ONH-201").count(), 1, "{shown}");
    assert_says(&shown, &["GPU 1: nvmlDeviceGetHandleByIndex"]);
    let info = fake.run(&["info"]).ok();
    assert_eq!(info.matches("not usable: ").count(), 1, "{info}");
    let stderr = cdi(&fake, &["generate", "--output", "-"]).stderr;
    assert_eq!(stderr.matches("ONH-401").count(), 1, "{stderr}");
    for asked in ["1", "0000:02:00.0", GPU_1] {
        let shown = plan(&fake, asked);
        assert_eq!(shown.code, Some(1), "{shown:?}");
        assert_says(&shown.stdout, &["GPU 1: nvmlDeviceGetHandleByIndex"]);
        assert!(shown.stdout.contains("ONH-033"), "{asked}: {shown:?}");
    }
}

/// NVreg_ExcludedGpus: the module lists the GPU and refuses to open it, and NVML does not count it.
fn an_excluded_gpu_does_not_exist() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "3"]));
    replace(
        &information(&fake, "0000:02:00.0"),
        "GPU Excluded:\t No",
        "GPU Excluded:\t Yes",
    );
    fake.remove_from_nvml("gpu minor=1 ");
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    let ran = container.hook(&fake.config);
    assert_eq!(ran.stderr, "", "nothing is left out");
    ran.ok();
    assert_eq!(
        container.output("cd /dev; echo nvidia[0-9]*").trim(),
        "nvidia0 nvidia2"
    );
    for asked in [GPU_1, "0000:02:00.0"] {
        let shown = plan(&fake, asked);
        assert_eq!(shown.code, Some(1), "{shown:?}");
        assert_says(&shown.stdout, &["NVreg_ExcludedGpus"]);
        assert!(shown.stdout.contains("ONH-033"), "{shown:?}");
    }
    let info = fake.run(&["info"]).ok();
    let row = info
        .lines()
        .find(|line| line.contains(" 00000000:02:00.0 "))
        .unwrap();
    assert!(row.ends_with(&format!("  excluded  {GPU_1}")), "{info}");
    assert!(!info.contains("not usable"), "{info}");
    assert_eq!(cdi(&fake, &["generate", "--output", "-"]).stderr, "");
    // The GPU needs no node, and NVML's answer is cached although the GPU never works.
    fs::remove_file(fake.root.join("dev/nvidia1")).unwrap();
    plan(&fake, "all").ok();
    fake.configure("[oci-nvidia-hook]\nnvml-timeout = 1");
    fake.set_nvml(|old| old + "\ninit-hang\n");
    assert_eq!(plan(&fake, "all").ok().matches("(UUID: GPU-").count(), 2);
    assert!(
        plan(&fake, "1").ok().contains("(UUID: GPU-51eed002"),
        "NVML's own index"
    );
}

fn info_json_can_be_replayed() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "3", "--mig"]));
    // NVML numbers the MIG devices that it can open; an instance that was destroyed leaves a gap.
    fake.set_nvml(|old| old.replace("gpu minor=1 ", "gpu minor=1 fail-handle=15 "));
    replace(
        &information(&fake, "0000:03:00.0"),
        "GPU Excluded:\t No",
        "GPU Excluded:\t Yes",
    );
    fake.remove_from_nvml("gpu minor=2 ");
    let json = fake.run(&["info", "--json"]).ok();
    let mut report = json_schema::checked("info", &json);
    assert_eq!(report["not_usable"][0]["uuid"], GPU_1, "{report:#}");
    assert_eq!(report["not_usable"][0]["index"], 1);
    assert_eq!(report["excluded"][0]["bus_id"], "00000000:03:00.0");
    let devices = report["gpus"][0]["mig"]["devices"].as_array_mut().unwrap();
    assert_eq!(
        (&devices[0]["index"], &devices[1]["index"]),
        (&0.into(), &1.into())
    );
    devices.remove(0);
    let file = dir.path().join("inventory.json");
    write_file(&file, report.to_string());
    let replay = |asked: &str| {
        let file = file.to_str().unwrap();
        for_container(&fake, asked, &["plan", "-", "--inventory", file])
    };
    assert!(replay("0:1").ok().contains("device: MIG-51eed000-0002"));
    assert!(replay("0:0").stdout.contains("ONH-030"));
    assert!(replay("all").ok().contains("ONH-201"));
    assert!(replay(GPU_1).stdout.contains("ONH-033"));
    assert!(replay("0000:03:00.0").stdout.contains("NVreg_ExcludedGpus"));
}
