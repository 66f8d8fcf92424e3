//! Requests without NVIDIA's variable or in addition to it: device nodes in config.json, mounts, files of other programs; and
//! hosts without a GPU.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::cdi::GPU_1;
use crate::driver::{ALL_GPUS, FakeDriver, Image, NEEDS, Waiting};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::support::{
    HOOK, Need, Ran, assert_lacks, assert_says, read, run_with, scratch, write_file,
};

const NEEDS_DRIVER: &[Need] = &[Need::Root, Need::Program("cc")];

tests! {
    NEEDS => device_nodes_bring_the_files, a_device_in_the_place_of_a_node,
        device_nodes_stop_no_container, a_mount_that_asks_for_all, a_library_alone_sets_nothing_up;
    NEEDS_DRIVER => device_nodes_of_mig_devices, hosts_without_a_gpu;
    engine::NEEDS => podmans_device_option, locked_nodes_and_user_namespaces = locked_podman(Cgroup::AsMounted);
    engine::NEEDS_CRUN => locked_nodes_and_user_namespaces_with_crun = locked_podman(Cgroup::WithCrun);
}

const LOCKED: &str = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n";

/// Keys outside of tables come first in config.toml.
fn configure_first(fake: &FakeDriver, lines: &str) {
    fake.configure("");
    let text = read(&fake.config);
    write_file(&fake.config, format!("{lines}{text}"));
}

fn node(name: &str, major: u32, minor: u32) -> Value {
    json!({"path": format!("/dev/{name}"), "type": "c", "major": major, "minor": minor, "fileMode": 438})
}

/// A config.json as a kubelet writes it for a device plugin that passes GPU 1.
fn gpu_1() -> Value {
    json!({"linux": {"devices": [node("nvidiactl", 195, 255), node("nvidia-uvm", 511, 0), node("nvidia1", 195, 1)]}})
}

fn with(mut spec: Value, env: &[&str], bounding: &[&str]) -> String {
    spec["root"] = json!({"path": "/nowhere"});
    spec["process"] = json!({"env": env, "capabilities": {"bounding": bounding}});
    spec.to_string()
}

fn plan(fake: &FakeDriver, spec: &str) -> Ran {
    fake.run_with(&["plan", "-"], spec)
}

fn device_nodes_bring_the_files() {
    let fake = FakeDriver::new(&["--gpus", "3"]);
    let (_dir, image) = Image::debian();
    for (locked, env) in [("", &[][..]), (LOCKED, &[]), (LOCKED, ALL_GPUS)] {
        configure_first(&fake, locked);
        let dir = scratch();
        let container = Waiting::start(dir.path(), &image.rootfs, &[], "");
        container.set_spec(env, &gpu_1());
        assert_eq!(container.hook(&fake.config).ok(), "", "{locked}{env:?}");
        let listed = container.output("nvidia-smi -L");
        assert!(
            listed.lines().count() == 1 && listed.contains(GPU_1),
            "{locked}{env:?}: {listed}"
        );
        container.output("probe-dlopen libcuda.so.1");
        // The same request with plan and in an edited config.json.
        let spec = with(gpu_1(), env, &[]);
        assert!(
            plan(&fake, &spec)
                .ok()
                .contains(&format!("(UUID: {GPU_1})\n"))
        );
        let edited: Value = serde_json::from_str(&fake.edit_config(&spec).ok()).unwrap();
        let mounts = edited["mounts"].to_string();
        assert_says(&mounts, &["libcuda.so.535", "nvidia-smi"]);
        let devices = edited["linux"]["devices"].as_array().unwrap();
        let gpus: Vec<_> = devices
            .iter()
            .filter(|node| node["path"].as_str().unwrap().starts_with("/dev/nvidia"))
            .collect();
        assert!(
            !edited["linux"]["devices"].to_string().contains("nvidia0"),
            "{gpus:?}"
        );
    }
    // The image can choose the capabilities.
    configure_first(&fake, "");
    let spec = with(gpu_1(), &["NVIDIA_DRIVER_CAPABILITIES=utility"], &[]);
    let shown = plan(&fake, &spec).ok();
    assert_says(&shown, &["driver capabilities: utility\n"]);
    assert_lacks(&shown, &["libcuda"]);
    assert_says(
        &shown,
        &["a device node in config.json requests /dev/nvidia1"],
    );
}

fn device_nodes_of_mig_devices() {
    let fake = FakeDriver::new(&["--gpus", "1", "--mig"]);
    let nodes = |caps: &[u32]| {
        let caps = caps
            .iter()
            .map(|cap| node(&format!("nvidia-caps/nvidia-cap{cap}"), 510, *cap));
        let devices: Vec<_> = [node("nvidiactl", 195, 255), node("nvidia0", 195, 0)]
            .into_iter()
            .chain(caps)
            .collect();
        with(json!({"linux": {"devices": devices}}), &[], &[])
    };
    let shown = plan(&fake, &nodes(&[21, 22])).ok();
    assert_says(&shown, &["(UUID: MIG-51eed000-0002"]);
    assert_lacks(&shown, &["MIG-51eed000-0001"]);
    assert_lacks(&shown, &["(UUID: GPU-", "ONH-230"]);
    let shown = plan(&fake, &nodes(&[])).ok();
    assert_says(&shown, &["(UUID: GPU-", "ONH-230"]);
}

/// The container requests nothing from the hook, and starts as its config.json describes it.
fn device_nodes_stop_no_container() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let container = Waiting::debian(&[], "");
    let before = container.mountinfo();
    let gpu_7 = json!({"linux": {"devices": [node("nvidia7", 195, 7)]}});
    let left_unchanged = |spec: &Value, says: &str| {
        container.set_spec(&[], spec);
        let ran = container.hook(&fake.config);
        assert_says(&ran.stderr, &[says, "(ONH-111)\nhint: "]);
        ran.ok();
        assert_eq!(container.mountinfo(), before);
        let shown = plan(&fake, &with(spec.clone(), &[], &[])).ok();
        assert!(
            shown.starts_with("the hook would do nothing") && shown.contains("ONH-111"),
            "{shown}"
        );
    };
    left_unchanged(&gpu_7, "\"/dev/nvidia7\"");
    fake.configure("[devices]\ndeny = [\"1\"]");
    left_unchanged(&gpu_1(), "\"GPU-51eed001-");
    fake.configure("");
    fake.set_nvml(|old| old + "\ninit-error 999\n");
    fs::remove_file(fake.root.join("dev/nvidia1")).unwrap();
    left_unchanged(&gpu_1(), "NVML");
    // An error in config.toml affects only containers that request GPUs.
    write_file(&fake.config, "nonsense = ");
    container.set_spec(&[], &gpu_1());
    assert_eq!(container.hook(&fake.config).ok(), "");
}

/// The device that config.json lists at the path of a device node is not replaced. A container that requests GPUs does not
/// start.
fn a_device_in_the_place_of_a_node() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let container = Waiting::debian(&[], "");
    let before = container.mountinfo();
    let config = fake.config.display().to_string();
    let edit = |spec: &str| fake.edit_config(spec);
    let explained = |spec: &str| {
        let mut at_prestart = Command::new(HOOK);
        let state = container.state();
        let at_prestart = run_with(
            at_prestart
                .args(["--config", &config, "plan", "-"])
                .env_clear(),
            state.as_bytes(),
        );
        [at_prestart, plan(&fake, spec)]
    };
    let asks = ["NVIDIA_VISIBLE_DEVICES=1"];
    let (null_1, null_ctl) = (node("nvidia1", 1, 3), node("nvidiactl", 1, 3));

    let taken = json!({"linux": {"devices": [null_1]}});
    container.set_spec(&asks, &taken);
    let stderr = container.hook(&fake.config).failed(1);
    let says = "config.json lists another device at \"/dev/nvidia1\" (ONH-044)\nhint: ";
    assert!(stderr.contains(says), "{stderr}");
    let spec = with(taken, &asks, &[]);
    assert!(edit(&spec).failed(1).contains("(ONH-044)\nhint: "));
    for shown in explained(&spec) {
        let stopped =
            shown.stdout.starts_with("the hook would fail: ") && shown.stdout.contains("ONH-044");
        assert!(shown.code == Some(1) && stopped, "{shown:?}");
    }

    // The node of a GPU that was not requested is not at a path that the hook needs.
    let other = with(
        json!({"linux": {"devices": [node("nvidia0", 195, 0)]}}),
        &asks,
        &[],
    );
    edit(&other).ok();

    // A container that only has a GPU's node starts as its config.json describes it.
    let granted = json!({"linux": {"devices": [node("nvidia1", 195, 1), null_ctl]}});
    container.set_spec(&[], &granted);
    let ran = container.hook(&fake.config);
    let says = "another device at \"/dev/nvidiactl\" (ONH-111)\nhint: ";
    assert!(ran.stderr.contains(says), "{ran:?}");
    ran.ok();
    let spec = with(granted, &[], &[]);
    assert_eq!(edit(&spec).ok(), spec);
    for shown in explained(&spec).map(Ran::ok) {
        assert!(
            shown.starts_with("the hook would do nothing") && shown.contains("ONH-111"),
            "{shown}"
        );
    }
    assert_eq!(container.mountinfo(), before);
}

fn podmans_device_option() {
    let root = FakeDriver::shared().root.display().to_string();
    let device = |name: &str| format!("--device={root}/dev/{name}:/dev/{name}");
    let (ctl, gpu) = (device("nvidiactl"), device("nvidia1"));
    let script = "nvidia-smi -L; probe-dlopen libcuda.so.1; probe-open /dev/nvidia1; ls /dev";
    let podman = Podman::shared();
    let words = [&ctl, &gpu, IMAGE, "sh", "-euc", script];
    let text = podman.run(Cgroup::AsMounted, &words).ok();
    assert!(
        text.matches("GPU-51eed").count() == 1 && text.contains(GPU_1),
        "{text}"
    );
    assert!(!text.lines().any(|line| line == "nvidia0"), "{text}");
    let text = podman.run(
        Cgroup::AsMounted,
        &[
            &ctl,
            &gpu,
            "-e",
            "NVIDIA_VISIBLE_DEVICES=void",
            IMAGE,
            "sh",
            "-c",
            "nvidia-smi || true",
        ],
    );
    assert!(!text.ok().contains("NVIDIA-SMI"), "void is nothing");
}

fn a_mount_that_asks_for_all() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    configure_first(
        &fake,
        "accept-nvidia-visible-devices-as-volume-mounts = true\n",
    );
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    for (source, destination) in [
        ("/dev/null", "/var/run/nvidia-container-devices/all"),
        ("/dev/null", "/run/nvidia-container-devices/All"),
        (
            "/dev/../dev/null",
            "/var//run/./nvidia-container-devices//all",
        ),
    ] {
        let dir = scratch();
        let container = Waiting::start(dir.path(), &image.rootfs, &[], "");
        container.set_spec(
            &[],
            &json!({"mounts": [{"source": source, "destination": destination}]}),
        );
        container.hook(&fake.config).ok();
        assert_eq!(
            container.output("cd /dev; echo nvidia[0-9]*").trim(),
            "nvidia0 nvidia1",
            "{destination}"
        );
    }
}

fn a_library_alone_sets_nothing_up() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(&[], "");
    let env = ALL_GPUS;
    let library = json!({"source": "/lib/libcuda.so.1", "destination": "/opt/mylibs/libcuda.so.1"});
    container.set_spec(
        env,
        &json!({"mounts": [library], "linux": {"devices": [node("nvidiactl", 195, 255)]}}),
    );
    let before = container.mountinfo();
    let ran = container.hook(&fake.config);
    assert_says(
        &ran.stderr,
        &["warning: the container is left unchanged", "ONH-110"],
    );
    assert_eq!((ran.ok(), container.mountinfo()), (String::new(), before));
    container.set_spec(env, &json!({"mounts": [library]}));
    assert_eq!(container.hook(&fake.config).stderr, "");
    assert_eq!(container.output("nvidia-smi -L").lines().count(), 2);
}

fn hosts_without_a_gpu() {
    let fake = FakeDriver::new(&["--gpus", "0", "--no-dev"]);
    let root = &fake.root;
    // Without a driver too, as on a node that has the package but no GPU.
    fs::remove_dir_all(root.join("proc")).unwrap();
    fs::create_dir_all(root.join("sys/bus/pci/devices")).unwrap();
    fs::create_dir_all(root.join("proc/driver/nvidia")).unwrap();
    let asks = |asked: &str| {
        with(
            json!({}),
            &[&format!("NVIDIA_VISIBLE_DEVICES={asked}")],
            &[],
        )
    };
    assert!(
        plan(&fake, &asks("all")).stdout.contains("ONH-010"),
        "the default is an error"
    );
    fake.configure("[oci-nvidia-hook]\nno-gpu = \"start\"");
    let shown = plan(&fake, &asks("all")).ok();
    assert!(
        shown.starts_with("the hook would do nothing: ") && shown.contains("ONH-112"),
        "{shown}"
    );
    let ran = fake.edit_config(&asks("all"));
    assert!(ran.stderr.contains("(ONH-112)\nhint: "), "{ran:?}");
    assert_eq!(ran.ok(), asks("all"), "config.json is unchanged");
    for asked in ["0", GPU_1, "none"] {
        assert_eq!(plan(&fake, &asks(asked)).code, Some(1), "{asked}");
    }
    // A GPU whose driver is not loaded is a different case.
    let device = root.join("sys/bus/pci/devices/0000:01:00.0");
    fs::create_dir(&device).unwrap();
    write_file(device.join("vendor"), "0x10de\n");
    write_file(device.join("class"), "0x030200\n");
    let shown = plan(&fake, &asks("all"));
    assert_eq!(shown.code, Some(1), "{shown:?}");
    assert_says(&shown.stdout, &["ONH-011"]);
    fs::remove_dir_all(&device).unwrap();
    // The GPU of an SoC is not on a PCI bus.
    fs::create_dir_all(root.join("proc/driver/nvidia/gpus/0000:01:00.0")).unwrap();
    assert_eq!(plan(&fake, &asks("all")).code, Some(1));
}

fn locked_podman(cgroup: Cgroup) {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    configure_first(&fake, LOCKED);
    let podman = Podman::with_image();
    let userns = ["--uidmap=0:100000:65536", "--gidmap=0:100000:65536"];
    let run = |options: &[&str], env: &str| {
        let of_image = ["-e", env, IMAGE, "sh", "-c", "nvidia-smi -L || true"];
        podman.run(cgroup, &[options, &of_image].concat())
    };
    podman.install_hook(&fake.config);
    for privilege in ["--cap-add=SYS_ADMIN", "--privileged"] {
        for env in ["NVIDIA_VISIBLE_DEVICES=all", "CUDA_VERSION=9.0"] {
            let text = run(&[privilege], env).ok();
            assert_eq!(
                text.matches("UUID: GPU-").count(),
                2,
                "{privilege} {env}: {text}"
            );
            let text = run(&[&userns[..], &[privilege]].concat(), env).ok();
            assert!(!text.contains("GPU-"), "{privilege} {env}: {text}");
        }
    }
}
