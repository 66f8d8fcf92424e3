//! WSL 2: the driver is part of Windows, one device node stands for all GPUs, and only NVML lists them.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use cdi_spec::file;
use cdi_spec::spec::{ContainerEdits, Spec};

use crate::cdi::{GPU_0, cdi, check_specs, create_spec, generate, write_spec_with};
use crate::cdi_containers::{only_spec, with_mounts};
use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::support::{HOOK, Ran, assert_lacks, assert_says, read, scratch, shell, write_file};

tests! {
    NEEDS => the_hook_gives_the_files_and_the_node, requests_by_index_and_uuid, limits_are_refused, the_edited_config_lists_the_node,
        the_spec_names_the_files_of_wsl, libdxcore_is_in_the_spec_whatever_the_linker_cache_lists, the_spec_follows_windows,
        the_hook_entry_of_the_spec, commands_of_the_host, windows_without_the_driver, several_packages_of_the_driver;
    engine::NEEDS => podman_runs_nvidia_smi, podman_with_the_spec;
    engine::NEEDS_V2 => podman_on_cgroup_v2;
}

const STORE: &str = "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_7cc7738d8e428783";
const ALL: &str = "NVIDIA_VISIBLE_DEVICES=all";
const EVERYTHING: &str = "NVIDIA_DRIVER_CAPABILITIES=all";

/// A host with this number of GPUs.
fn host(gpus: &str) -> FakeDriver {
    FakeDriver::new(&["--gpus", gpus, "--wsl"])
}

/// Calls the hook for a container with this environment, and returns what it did and the container.
fn start(dir: &Path, fake: &FakeDriver, layout: &str, env: &[&str]) -> (Ran, Waiting) {
    let image = Image::new(dir, &["--layout", layout]);
    let container = Waiting::start(dir, &image.rootfs, env, "");
    (container.hook(&fake.config), container)
}

/// Returns the number of the error that `plan` foresees.
fn error_of(plan: &Value) -> Option<&str> {
    let mut findings = plan["findings"].as_array().unwrap().iter();
    findings.find(|finding| finding["severity"] == "error")?["id"].as_str()
}

fn the_hook_gives_the_files_and_the_node() {
    let fake = host("2");
    for layout in ["debian", "lib64"] {
        let dir = scratch();
        let (ran, container) = start(dir.path(), &fake, layout, &[ALL, EVERYTHING]);
        assert!(!ran.stderr.contains("ONH-"), "{ran:?}");
        ran.ok();
        let listed = container.output("nvidia-smi -L; ls /dev; ls -R /usr/lib/wsl/drivers");
        assert_eq!(listed.matches("UUID: GPU-").count(), 2, "{listed}");
        let lines: Vec<_> = listed.lines().collect();
        assert!(
            lines.contains(&"dxg") && !listed.contains("nvidiactl"),
            "{listed}"
        );
        for file in [
            "libcuda.so.1.1",
            "libnvdxgdmal.so.1",
            "nvcubins.bin",
            "nvngx_dlss.dll",
        ] {
            assert!(lines.contains(&file), "{file} is not in\n{listed}");
        }
        for file in ["nvlddmkm.sys", "nv_dispi.inf", "libamdxc64.so"] {
            assert!(!lines.contains(&file), "{file} is of no use: {listed}");
        }
        // Programs find the loaders by name, and those find the package by path.
        let names = "libcuda.so.1 libcuda.so libnvidia-ml.so.1 libdxcore.so libnvidia-encode.so.1 libd3d12.so";
        let opened = container.output(&format!("probe-dlopen {names} {STORE}/libcuda.so.1.1"));
        assert_eq!(opened.matches(": ok ").count(), 7, "{opened}");
        // The process waits before pivot_root(2), so another one is the container here.
        let mut inside = Command::new("nsenter");
        inside
            .args([
                "--mount",
                "--target",
                &container.pid().to_string(),
                "chroot",
            ])
            .arg(&container.rootfs);
        let mut inside = inside.args(["sleep", "60"]).spawn().unwrap();
        let is_inside = || read(format!("/proc/{}/comm", inside.id())) == "sleep\n";
        while !is_inside() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let checks = fake
            .run(&["doctor", "--all", "--pid", &inside.id().to_string()])
            .stdout;
        inside.kill().and_then(|()| inside.wait()).unwrap();
        for line in [
            "the container has dxg",
            "the host's file of the driver of WSL 2",
            "has permission to open",
        ] {
            assert!(checks.contains(line), "{line} is not in\n{checks}");
        }
        assert!(
            container
                .mount_options(&format!("{STORE}/libcuda.so.1.1"))
                .starts_with("ro,nosuid,nodev")
        );
    }
    let dir = scratch();
    let (ran, container) = start(
        dir.path(),
        &fake,
        "debian",
        &[ALL, "NVIDIA_DRIVER_CAPABILITIES=utility"],
    );
    ran.ok();
    let listed = container
        .output("nvidia-smi -L >/dev/null; ls /usr/lib/*-linux-gnu; ls /usr/lib/wsl/drivers/*");
    assert_says(&listed, &["libdxcore.so", "libnvidia-ml.so.1"]);
    assert_lacks(&listed, &["libcuda.so.1\n", "libd3d12", ".dll"]);
}

/// A container has all GPUs or none, and a name that does not exist is an error as on other hosts.
fn requests_by_index_and_uuid() {
    let fake = host("2");
    for name in ["0", GPU_0, "00000000:01:00.0"] {
        let shown = fake.plan(&[&format!("NVIDIA_VISIBLE_DEVICES={name}")]);
        assert_eq!(shown["findings"][0]["id"], "ONH-234", "{shown}");
        assert!(
            shown
                .to_string()
                .contains("requests 1 of 2 GPUs, and can use all of them"),
            "{shown}"
        );
    }
    for name in ["7", "GPU-51eed009", "0:0"] {
        assert_eq!(
            error_of(&fake.plan(&[&format!("NVIDIA_VISIBLE_DEVICES={name}")])),
            Some("ONH-030"),
            "{name}"
        );
    }
    let dir = scratch();
    let (ran, container) = start(dir.path(), &fake, "debian", &["NVIDIA_VISIBLE_DEVICES=1"]);
    assert!(ran.stderr.contains("(ONH-234)"), "{ran:?}");
    ran.ok();
    assert_eq!(
        container
            .output("nvidia-smi -L")
            .matches("UUID: GPU-")
            .count(),
        2
    );
    container.set_env(&["NVIDIA_VISIBLE_DEVICES=2"]);
    assert!(container.hook(&fake.config).failed(1).contains("(ONH-030)"));
    // Without a GPU, there are files only: the node would be all GPUs.
    let dir = scratch();
    let (ran, container) = start(
        dir.path(),
        &fake,
        "debian",
        &["NVIDIA_VISIBLE_DEVICES=none"],
    );
    ran.ok();
    assert!(!container.output("ls /dev").contains("dxg"));
    assert!(
        container
            .output(&format!("ls {STORE}"))
            .contains("libcuda.so.1.1")
    );
    assert_eq!(
        host("1").plan(&["NVIDIA_VISIBLE_DEVICES=0"])["findings"],
        json!([])
    );
}

/// Limits that cannot be enforced must not seem to be.
fn limits_are_refused() {
    let fake = host("2");
    let dir = scratch();
    for (limits, name, id) in [
        ("allow = [\"0\"]", "0", Some("ONH-025")),
        ("deny = [\"1\"]", "all", Some("ONH-025")),
        ("deny = [\"1\"]", "1", Some("ONH-032")),
        ("allow = [\"0\", \"1\"]", "all", None),
        ("deny = [\"gdrcopy\"]", "all", None),
        ("deny = [\"1\"]", "none", None),
    ] {
        fake.configure(&format!("[devices]\n{limits}"));
        let env = format!("NVIDIA_VISIBLE_DEVICES={name}");
        let shown = fake.plan(&[&env]);
        assert_eq!(error_of(&shown), id, "{limits} {name}: {shown}");
    }
    fake.configure("[devices]\ndeny = [\"1\"]");
    let path = dir.path().join("nvidia.yaml");
    let ran = cdi(&fake, &["generate", "--output", path.to_str().unwrap()]);
    assert!(
        !path.exists() && ran.code == Some(1) && ran.stderr.contains("ONH-025"),
        "{ran:?}"
    );
    let doctor = fake.run(&["doctor", "--all"]);
    assert!(doctor.stdout.contains("ONH-025"), "{doctor:?}");
    // A spec from before the limits: the service removes it, and its hook entry refuses a container that still gets the node.
    fake.configure("");
    let output = ["--output", path.to_str().unwrap()];
    cdi(
        &fake,
        &["generate", "--hook-path", HOOK, output[0], output[1]],
    )
    .ok();
    let edits = generate(&fake, &["--hook-path", HOOK]);
    let (all, common) = (
        edits.devices.last().unwrap().container_edits.clone(),
        edits.container_edits,
    );
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let with_node = ContainerEdits {
        device_nodes: all.device_nodes,
        ..common
    };
    let container = with_mounts(dir.path(), &image.rootfs, &with_node);
    fake.configure("[devices]\ndeny = [\"1\"]");
    let stderr = container
        .create_runtime_hook(&with_node.hooks[0].args[1..])
        .failed(1);
    assert!(stderr.contains("ONH-025"), "{stderr}");
    let check = check_specs(&fake, dir.path());
    assert_says(
        &check.stdout,
        &["\"/dev/dxg\", which [devices] in config.toml denies"],
    );
    cdi(&fake, &["refresh", output[0], output[1]]).ok();
    assert!(!path.exists());
}

fn the_edited_config_lists_the_node() {
    let fake = host("1");
    let (_dir, image) = Image::debian();
    let spec = json!({
        "root": {"path": image.rootfs}, "process": {"env": [ALL]}, "mounts": [],
        "linux": {"resources": {"devices": [{"allow": false, "access": "rwm"}]}},
    });
    let edited: Value = serde_json::from_str(&fake.edit_config(&spec.to_string()).ok()).unwrap();
    let devices = edited["linux"]["devices"].as_array().unwrap();
    assert_eq!(
        devices
            .iter()
            .map(|device| device["path"].as_str().unwrap())
            .collect::<Vec<_>>(),
        ["/dev/dxg"]
    );
    let rules = edited["linux"]["resources"]["devices"].as_array().unwrap();
    // The minor number is the same as for the host's node.
    let is_it = |rule: &Value| {
        rule["allow"] == true && (&rule["major"], &rule["minor"]) == (&json!(10), &json!(777))
    };
    assert!(rules.iter().any(is_it), "{rules:?}");
    let mounts = edited["mounts"].as_array().unwrap();
    assert!(
        mounts
            .iter()
            .any(|mount| mount["destination"] == format!("{STORE}/libnvdxgdmal.so.1")),
        "{mounts:?}"
    );
}

/// The paths in containers of a spec's mounts.
fn mounted(spec: &Spec) -> Vec<&str> {
    spec.container_edits
        .mounts
        .iter()
        .map(|mount| mount.container_path.as_str())
        .collect()
}

/// The files are those that NVIDIA's container toolkit lists for WSL 2, and more.
fn the_spec_names_the_files_of_wsl() {
    let spec = generate(&host("1"), &[]);
    let names: Vec<_> = spec
        .devices
        .iter()
        .map(|device| device.name.as_str())
        .collect();
    assert_eq!(names, ["0", GPU_0, "all"]);
    for device in &spec.devices {
        let nodes: Vec<_> = device
            .container_edits
            .device_nodes
            .iter()
            .map(|node| node.path.as_str())
            .collect();
        assert_eq!(nodes, ["/dev/dxg"]);
    }
    assert!(spec.container_edits.device_nodes.is_empty());
    let mounted = mounted(&spec);
    for name in [
        "libcuda.so.1.1",
        "libcuda_loader.so",
        "libnvidia-ptxjitcompiler.so.1",
        "libnvidia-ml.so.1",
        "libnvidia-ml_loader.so",
        "libnvdxgdmal.so.1",
        "nvcubins.bin",
    ] {
        assert!(
            mounted.contains(&format!("{STORE}/{name}").as_str()),
            "{name}: {mounted:?}"
        );
    }
    assert!(
        mounted.contains(&"/usr/bin/nvidia-smi")
            && mounted.contains(&"/usr/lib/wsl/lib/libcuda.so.1"),
        "{mounted:?}"
    );
    // CUDA compatibility libraries need the kernel module nvidia.
    let entry = spec.container_edits.hooks[0].args.join(" ");
    assert_lacks(&entry, &["--cuda-compat"]);
    assert_says(&entry, &["--library /usr/lib/wsl/lib/libdxcore.so"]);
    let two = cdi(&host("2"), &["generate", "--output", "-"]);
    assert!(two.stderr.contains("(ONH-234)"), "{two:?}");
}

/// NVIDIA's generator searches for libdxcore in the wrong directories on some hosts, and writes a spec without it (issue 1739 of
/// nvidia-container-toolkit): then no library finds a GPU. Nor may packages of a Linux driver, which users install by mistake, take the
/// place of Windows' libraries.
fn libdxcore_is_in_the_spec_whatever_the_linker_cache_lists() {
    let fake = host("1");
    let linux = "usr/lib/x86_64-linux-gnu";
    let mistake = format!(
        "cd '{}'; mkdir -p {linux}; cp usr/lib/wsl/lib/libcuda.so {linux}/libcuda.so.460.91; \
         cp usr/lib/wsl/lib/libdxcore.so {linux}/libnvidia-ml.so.460.91; ln -s libnvidia-ml.so.460.91 {linux}/libnvidia-ml.so.1; \
         echo /{linux} >etc/ld.so.conf",
        fake.root.display()
    );
    let everything = "echo /usr/lib/wsl/lib >>etc/ld.so.conf";
    for change in [":", &mistake, everything, "rm etc/ld.so.cache; exit 0"] {
        shell!(
            "cd '{}'; {change}; /sbin/ldconfig -r . 2>/dev/null",
            fake.root.display()
        );
        let spec = generate(&fake, &[]);
        let mounted = mounted(&spec);
        assert!(
            mounted.contains(&"/usr/lib/wsl/lib/libdxcore.so"),
            "{change}: {mounted:?}"
        );
        assert!(
            !mounted.iter().any(|path| path.contains("linux-gnu")),
            "{change}: {mounted:?}"
        );
    }
    // If it is missing, there is no spec.
    shell!(
        "rm '{}'",
        fake.root.join("usr/lib/wsl/lib/libdxcore.so").display()
    );
    let stderr = cdi(&fake, &["generate", "--output", "-"]).failed(1);
    assert!(stderr.contains("wsl --shutdown"), "{stderr}");
}

/// As the service at boot, which has no kernel module and no NVIDIA node to wait for.
fn the_spec_follows_windows() {
    let fake = host("1");
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    let refresh = |fake: &FakeDriver| {
        create_spec(fake, &path).ok();
        std::fs::read(&path)
            .ok()
            .map(|text| (inode(&path), file::parse(&text).unwrap()))
    };
    assert_eq!(
        fake.run(&["prepare"]).ok(),
        "",
        "nothing has to be prepared"
    );
    let (first, spec) = refresh(&fake).unwrap();
    assert!(mounted(&spec).iter().any(|path| path.starts_with(STORE)));
    let check = check_specs(&fake, dir.path());
    assert_eq!(check.code, Some(0), "{check:?}");
    assert_eq!(refresh(&fake).unwrap().0, first, "nothing has changed");
    // Only NVML shows another GPU.
    let conf = fake.root.join("usr/lib/wsl/lib/nvml.conf");
    let text = read(&conf);
    write_file(&conf, text.replace("51eed000", "77777777"));
    let (second, spec) = refresh(&fake).unwrap();
    assert!(
        second != first && spec.devices[1].name.contains("77777777"),
        "{:?}",
        spec.devices
    );
    // Windows has another driver.
    let drivers = fake.root.join("usr/lib/wsl/drivers").display().to_string();
    shell!(
        "cd '{drivers}'; mv nv_dispi.inf_amd64_7cc7738d8e428783 nv_dispi.inf_amd64_0123456789abcdef"
    );
    let check = check_specs(&fake, dir.path());
    assert_eq!(check.code, Some(1), "{check:?}");
    assert_says(&check.stdout, &["nv_dispi.inf_amd64_0123456789abcdef"]);
    let (_, spec) = refresh(&fake).unwrap();
    assert!(
        mounted(&spec)
            .iter()
            .any(|path| path.contains("0123456789abcdef"))
    );
    // And none at last.
    shell!("cd '{drivers}'; rm -r nv_dispi*; rm ../lib/libcuda* ../lib/libnv*");
    assert!(refresh(&fake).is_none());
}

fn inode(path: &Path) -> u64 {
    rustix::fs::stat(path).unwrap().st_ino
}

/// What the engine cannot do: names for the dynamic loader.
fn the_hook_entry_of_the_spec() {
    let dir = scratch();
    let fake = host("1");
    let edits = generate(&fake, &["--hook-path", HOOK]).container_edits;
    let image = Image::new(dir.path(), &["--layout", "lib64"]);
    let container = with_mounts(dir.path(), &image.rootfs, &edits);
    container
        .create_runtime_hook(&edits.hooks[0].args[1..])
        .ok();
    let opened = container.output(
        "probe-dlopen libcuda.so libcuda.so.1 libnvidia-ml.so.1 libdxcore.so libnvcuvid.so.1",
    );
    assert_eq!(opened.matches(": ok ").count(), 5, "{opened}");
}

fn commands_of_the_host() {
    let fake = host("2");
    let info = fake.run(&["info"]).ok();
    assert_says(&info, &["NVIDIA GeForce RTX 4090", "GPU-51eed001"]);
    let json: Value = serde_json::from_str(&fake.run(&["info", "--json"]).ok()).unwrap();
    assert_eq!(json["gpus"][1]["device_node"], "/dev/dxg");
    let files = fake.run(&["files"]).ok();
    assert!(
        files.starts_with("/dev/dxg\n") && files.contains(&format!("\n{STORE}/libcuda.so.1.1\n")),
        "{files}"
    );
    assert_says(&files, &["\n/usr/lib/wsl/lib/nvidia-smi\n"]);
    assert_lacks(&files, &["/dev/nvidia"]);
    let shown = fake.plan(&[ALL]);
    assert_eq!(
        (&shown["outcome"], &shown["findings"]),
        (&json!("inject"), &json!([])),
        "{shown}"
    );
    assert!(
        shown.to_string().contains("/dev/dxg") && !shown.to_string().contains("/dev/nvidia"),
        "{shown}"
    );
    let doctor = fake.run(&["doctor", "--all"]).stdout;
    for line in [
        "this host is WSL 2, whose driver is part of Windows",
        "Windows has the driver package nv_dispi.inf_amd64_7cc7738d8e428783",
        "\"/dev/dxg\" exists",
        "2 GPUs answered",
    ] {
        assert!(doctor.contains(line), "{line} is not in\n{doctor}");
    }
    assert_lacks(&doctor, &["modprobe", "seated"]);
    shell!("rm '{}'", fake.root.join("dev/dxg").display());
    let stderr = fake.run(&["info"]).failed(1);
    assert!(!stderr.contains("modprobe"), "{stderr}");
}

/// A computer with GPUs of other vendors, or without a driver.
fn windows_without_the_driver() {
    let fake = host("1");
    shell!(
        "cd '{}'; rm -r usr/lib/wsl/drivers/nv_dispi*; rm usr/lib/wsl/lib/lib[cn]*",
        fake.root.display()
    );
    let shown = fake.plan(&[ALL]);
    assert_eq!(error_of(&shown), Some("ONH-012"), "{shown}");
    assert!(
        shown.to_string().contains("NVIDIA driver in Windows"),
        "{shown}"
    );
    let doctor = fake.run(&["doctor", "--all"]).stdout;
    assert_says(&doctor, &["NVIDIA's driver for Windows is missing"]);
    assert_lacks(&doctor, &["modprobe", "seated"]);
    // An image that can do without GPUs starts.
    fake.configure("[oci-nvidia-hook]\nno-gpu = \"start\"");
    let shown = fake.plan(&[ALL]);
    assert!(
        error_of(&shown).is_none() && shown["outcome"] == "none",
        "{shown}"
    );
}

/// Windows keeps packages of earlier drivers, and only libdxcore knows which one is in use. Packages of manufacturers have other names.
fn several_packages_of_the_driver() {
    let fake = host("1");
    let drivers = fake.root.join("usr/lib/wsl/drivers");
    let packages = |fake: &FakeDriver| {
        let spec = generate(fake, &[]);
        let dirs: std::collections::BTreeSet<PathBuf> = mounted(&spec)
            .iter()
            .filter(|path| path.contains("/drivers/"))
            .filter_map(|path| Some(Path::new(path).parent()?.into()))
            .collect();
        dirs.into_iter()
            .map(|dir| dir.file_name().unwrap().to_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    shell!(
        "cd '{}'; cp -r nv_dispi* nvltwi.inf_amd64_08cf6d985207979a",
        drivers.display()
    );
    assert_eq!(
        packages(&fake),
        [
            "nv_dispi.inf_amd64_7cc7738d8e428783",
            "nvltwi.inf_amd64_08cf6d985207979a"
        ]
    );
    shell!(
        "cd '{}'; rm -r nvltwi*; mv nv_dispi* 6_oem.inf_amd64_1",
        drivers.display()
    );
    assert_eq!(packages(&fake), ["6_oem.inf_amd64_1"]);
}

/// With the permission to create nodes, the container can open the node and no other misc device.
const IN_PODMAN: &str = "nvidia-smi -L; cd /tmp; mknod ours c 10 777; mknod other c 10 778; probe-open /dev/dxg ours other; ls /dev";

fn assert_dxg(text: &str) {
    assert_eq!(text.matches("UUID: GPU-").count(), 2, "{text}");
    for line in ["/dev/dxg: ENODEV", "ours: ENODEV", "other: EPERM"] {
        assert!(
            text.lines().any(|found| found == line),
            "{line} is not in\n{text}"
        );
    }
    assert!(!text.contains("nvidiactl"), "{text}");
}

fn podman_in(cgroup: Cgroup) {
    let (podman, fake) = (Podman::with_image(), host("2"));
    podman.install_hook(&fake.config);
    assert_dxg(
        &podman
            .run(
                cgroup,
                &["--cap-add=MKNOD", "-e", ALL, IMAGE, "sh", "-euc", IN_PODMAN],
            )
            .ok(),
    );
}

fn podman_runs_nvidia_smi() {
    podman_in(Cgroup::AsMounted);
}

fn podman_on_cgroup_v2() {
    podman_in(Cgroup::V2);
}

fn podman_with_the_spec() {
    let (podman, fake, dir) = (Podman::with_image(), host("2"), scratch());
    let path = dir.path().join("nvidia.yaml");
    write_spec_with(&fake, &path, &["--hook-path", HOOK]);
    for name in ["all", "0", GPU_0] {
        let device = format!("--device=nvidia.com/gpu={name}");
        let words = [&device, "--cap-add=MKNOD", IMAGE, "sh", "-euc", IN_PODMAN];
        assert_dxg(
            &podman
                .run_after(&only_spec(&path), Cgroup::AsMounted, &words)
                .ok(),
        );
    }
}
