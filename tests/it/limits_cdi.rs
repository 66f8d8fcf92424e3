//! `[devices]` in config.toml and CDI: a spec that includes a GPU which containers may not have is reported, and the hook entry of our
//! specs stops the containers that get the GPU from it.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::cdi::{GPU_0, GPU_1, MIG_1, cdi, edits_of, generate, write_spec, write_spec_with};
use crate::cdi_containers::{nodes_at_dev, only_spec, with_mounts};
use crate::driver::{FakeDriver, Image, NEEDS};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::nvidia_ctk::link;
use crate::support::{HOOK, Ran, assert_says, read, run, run_with, scratch, unshare, write_file};

tests! {
    engine::NEEDS => an_outdated_spec_with_runc = an_outdated_spec(Cgroup::AsMounted),
        an_outdated_spec_and_user_namespaces, doctor_and_check;
    engine::NEEDS_CRUN => an_outdated_spec_with_crun = an_outdated_spec(Cgroup::WithCrun);
    NEEDS => mig_devices, what_is_asked, entries_of_nvidias_specs;
}

fn limits(table: &str) -> String {
    format!("[devices]\n{table}")
}

/// Returns a container for which the engine has applied these devices of a spec, and the arguments of the hook entry.
fn with_devices(
    fake: &FakeDriver,
    dir: &Path,
    names: &[&str],
) -> (crate::driver::Waiting, Vec<String>) {
    let spec = generate(fake, &["--hook-path", HOOK]);
    let edits = edits_of(&spec, names);
    let image = Image::new(dir, &["--layout", "debian"]);
    (
        with_mounts(dir, &image.rootfs, &edits),
        edits.hooks[0].args[1..].to_vec(),
    )
}

fn an_outdated_spec(cgroup: Cgroup) {
    let (dir, fake, podman) = (
        scratch(),
        FakeDriver::new(&["--gpus", "2"]),
        Podman::with_image(),
    );
    let path = dir.path().join("nvidia.yaml");
    write_spec(&fake, &path);
    let start = |device: &str, option: &str| {
        let device = format!("--device=nvidia.com/gpu={device}");
        podman.run_after(
            &only_spec(&path),
            cgroup,
            &[&device, option, IMAGE, "nvidia-smi", "-L"],
        )
    };
    let gets = |device: &str, option: &str, count: usize| {
        let text = start(device, option).ok();
        assert_eq!(
            text.matches("UUID: GPU-").count(),
            count,
            "{device} {option}: {text}"
        );
    };
    // crun does not print what a hook prints.
    let stopped = |device: &str, option: &str, number: &str| {
        let stderr = start(device, option).failed(126);
        assert!(
            matches!(cgroup, Cgroup::WithCrun) || stderr.contains(number),
            "{device} {option}: {stderr}"
        );
    };
    gets("all", "--tty=false", 2);
    for table in [
        "deny = [\"1\"]".to_owned(),
        "allow = [\"0\"]".to_owned(),
        format!("deny = [{GPU_1:?}]"),
        "allow = [\"01:00.0\"]".to_owned(),
    ] {
        fake.configure(&limits(&table));
        gets("0", "--tty=false", 1);
        for device in ["1", GPU_1, "all"] {
            stopped(device, "--tty=false", "(ONH-032)");
        }
    }
    // The engine lists all nodes of the host for it.
    gets("0", "--privileged", 1);
    // It only may have them.
    gets("0", "--cap-add=SYS_ADMIN", 1);
    stopped("1", "--cap-add=SYS_ADMIN", "(ONH-032)");
    fake.configure(&limits("deny = [\"H100\"]"));
    stopped("0", "--tty=false", "(ONH-005)");
    fake.configure(&limits("deny = [\"1\"]"));
    cdi(&fake, &["refresh", "--output", path.to_str().unwrap()]).ok();
    gets("all", "--tty=false", 1);
    assert!(
        start("1", "--tty=false")
            .failed(126)
            .contains("unresolvable CDI devices")
    );
}

/// The runtime mounts the nodes of the host there.
fn an_outdated_spec_and_user_namespaces() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    let path = dir.path().join("nvidia.yaml");
    write_spec(&fake, &path);
    let podman = Podman::with_image();
    fake.configure(&limits("deny = [\"1\"]"));
    for (device, code) in [("0", 0), ("1", 126)] {
        let before = format!("{}; {}", only_spec(&path), nodes_at_dev(&fake, dir.path()));
        let device = format!("--device=nvidia.com/gpu={device}");
        let userns = [
            "--uidmap=0:100000:65536",
            "--gidmap=0:100000:65536",
            "--cap-add=SYS_ADMIN",
        ];
        let ran = podman.run_after(
            &before,
            Cgroup::AsMounted,
            &[&userns[..], &[&device, IMAGE, "true"]].concat(),
        );
        assert!(
            ran.code == Some(code) && (code == 0 || ran.stderr.contains("(ONH-032)")),
            "{device}: {ran:?}"
        );
        fs::remove_dir_all(dir.path().join("dev")).unwrap();
    }
}

fn mig_devices() {
    let fake = FakeDriver::new(&["--gpus", "2", "--mig"]);
    let dir = scratch();
    let entry = |table: &str, names: &[&str]| {
        fake.configure("");
        let dir = tempfile::tempdir_in(dir.path()).unwrap();
        let (container, args) = with_devices(&fake, dir.path(), names);
        fake.configure(&limits(table));
        container.create_runtime_hook(&args)
    };
    for (table, names, denied) in [
        ("deny = [\"0\"]", &["0:0"][..], true),
        ("deny = [\"1\"]", &["0:0"], false),
        ("deny = [\"0:1\"]", &["0:0"], false),
        ("deny = [\"0:1\"]", &["0:1"], true),
        ("deny = [\"0:1\"]", &["0:0", "0:1"], true),
        ("deny = [\"0:1\"]", &["1"], false),
        (&format!("deny = [{MIG_1:?}]"), &["0:1"], true),
        ("allow = [\"0:1\"]", &["0:1"], false),
        ("allow = [\"0:1\"]", &["1"], true),
        ("allow = [\"0\"]", &["0:0", "0:1"], false),
        ("deny = [\"MIG-*\"]", &["0:0"], true),
        ("deny = [\"MIG-*\"]", &["1"], false),
    ] {
        let ran = entry(table, names);
        assert_eq!(
            ran.stderr.contains("(ONH-032)\nhint: "),
            denied,
            "{table} {names:?}: {ran:?}"
        );
        assert_eq!(
            ran.code,
            Some(i32::from(denied)),
            "{table} {names:?}: {ran:?}"
        );
    }
}

/// NVML is asked only if an entry depends on what the kernel module does not list.
fn what_is_asked() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    let (container, args) = with_devices(&fake, dir.path(), &["0"]);
    fake.set_nvml(|old| old + "\ninit-error 999\n");
    // A new driver root has no cached inventory.
    let ran = |table: &str| {
        fake.configure(table);
        container.create_runtime_hook(&args)
    };
    for table in [
        "",
        &limits("deny = [\"1\", \"02:00.0\"]"),
        &limits(&format!("allow = [{GPU_0:?}]")),
    ] {
        ran(table).ok();
    }
    ran(&limits("deny = [\"0\", \"*H100*\"]")).failed(1);
    fake.set_nvml(|old| old.replace("init-error 999", "init-error 0"));
    let stderr = ran(&limits("deny = [\"*H100*\"]")).failed(1);
    assert!(stderr.contains("(ONH-032)"), "{stderr}");
    ran(&limits("deny = [\"*A100*\"]")).ok();
    // A container without nodes of GPUs has nothing that could be denied.
    container.set_spec_field("linux", json!({"devices": []}));
    ran(&limits("deny = [\"*\"]")).ok();
    // `plan` describes what the entry does.
    let node = json!({"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1});
    container.set_spec_field("linux", json!({"devices": [node]}));
    fake.configure(&limits("deny = [\"1\"]"));
    let shown = fake.run_with(&["plan", "-", "--json"], &container.state());
    let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
    assert_eq!(
        (&shown["outcome"], &shown["findings"][0]["id"]),
        (&json!("error"), &json!("ONH-032")),
        "{shown}"
    );
}

/// They read the default file, which is in a layer here.
fn entries_of_nvidias_specs() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    let (container, _) = with_devices(&fake, dir.path(), &["1"]);
    let program = link(dir.path(), "nvidia-cdi-hook");
    let before = container.mountinfo();
    let entry = |table: &str| {
        fake.configure(table);
        let etc = dir.path().join("etc");
        fs::create_dir_all(&etc).unwrap();
        fs::copy(&fake.config, etc.join("config.toml")).unwrap();
        let script = format!(
            "mount -t tmpfs layers /mnt; mkdir /mnt/upper /mnt/work\n\
             mount -t overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work overlay /etc\n\
             mkdir -p /etc/nvidia-container-runtime; mount --bind '{}' /etc/nvidia-container-runtime; exec \"$@\"",
            etc.display()
        );
        let mut enter = Command::new("nsenter");
        enter.args([
            "-m",
            "-t",
            &container.pid().to_string(),
            "unshare",
            "-m",
            "sh",
            "-euc",
            &script,
            "sh",
        ]);
        let ran = run_with(
            enter
                .arg(&program)
                .args(["update-ldcache", "--folder", "/usr/lib"])
                .env_clear()
                .env("PATH", "/usr/bin:/bin"),
            container.state().as_bytes(),
        );
        fs::remove_dir_all(etc).unwrap();
        ran
    };
    let stderr = entry(&limits("deny = [\"1\"]")).failed(1);
    assert_says(
        &stderr,
        &["[devices] in config.toml denies this GPU (ONH-032)"],
    );
    let stderr = entry(&limits("deny = [\"H100\"]")).failed(1);
    assert!(stderr.contains("(ONH-005)"), "{stderr}");
    assert_eq!(container.mountinfo(), before);
}

fn doctor_and_check() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    let files = [
        ("nvidia.yaml", "nvidia.com"),
        ("plugin.json", "k8s.device-plugin.nvidia.com"),
        ("mine.json", "example.com"),
    ];
    let path = |name: &str| dir.path().join(name);
    for (file, vendor) in files {
        write_spec_with(&fake, &path(file), &["--vendor", vendor]);
    }
    // The spec of another program has no entry of ours.
    let theirs = read(path("mine.json"));
    let mut theirs: Value = serde_json::from_str(&theirs).unwrap();
    let edits = theirs["containerEdits"].as_object_mut().unwrap();
    assert!(edits.remove("hooks").is_some());
    write_file(path("mine.json"), theirs.to_string());
    let at_host = |arguments: &[&str]| -> Ran {
        let script = format!(
            "{}; cp '{}'/*.* /run/cdi; exec \"$@\"",
            only_spec(&path("nvidia.yaml")),
            dir.path().display()
        );
        let mut unshare = unshare(&script);
        unshare
            .args([HOOK, "--config"])
            .arg(&fake.config)
            .args(arguments);
        run(unshare
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"))
    };
    let doctor = || {
        let text = at_host(&["doctor", "--json"]).stdout;
        let found = crate::json_schema::part("doctor", &text, "checks");
        found
            .into_iter()
            .filter(|check| check["check"] == "specs")
            .collect::<Vec<_>>()
    };
    assert!(
        doctor().iter().all(|check| check["id"] != "ONH-062"),
        "{:?}",
        doctor()
    );
    for table in [
        "deny = [\"1\"]",
        "allow = [\"0\"]",
        "deny = [\"GPU-51eed001*\"]",
    ] {
        fake.configure(&limits(table));
        let found = doctor();
        let denied: Vec<_> = found
            .iter()
            .filter(|check| check["id"] == "ONH-062")
            .collect();
        assert!(
            !denied.is_empty() && denied.iter().all(|check| check["status"] == "error"),
            "{table}: {found:?}"
        );
        let ran = at_host(&["cdi", "check", "--json"]);
        assert_eq!(ran.code, Some(1), "{table}");
        let groups = crate::json_schema::part("cdi-check", &ran.stdout, "groups");
        for result in groups[0]["results"].as_array().unwrap() {
            let name = result["device"]
                .as_str()
                .unwrap()
                .split_once('=')
                .unwrap()
                .1;
            let is_denied = ["1", GPU_1, "all"].contains(&name);
            assert_eq!(result["usable"], !is_denied, "{table}: {result}");
            let says = "it includes \"/dev/nvidia1\", which [devices] in config.toml denies";
            assert_eq!(result["why"] == says, is_denied, "{table}: {result}");
        }
    }
    // A model needs NVML's answer.
    fake.configure(&limits("deny = [\"*H100*\"]"));
    assert!(doctor().iter().any(|check| check["id"] == "ONH-062"));
    for (file, vendor) in &files[..2] {
        fake.configure(&limits("deny = [\"1\"]"));
        cdi(
            &fake,
            &[
                "refresh",
                "--vendor",
                vendor,
                "--output",
                path(file).to_str().unwrap(),
            ],
        )
        .ok();
    }
    fs::remove_file(path("mine.json")).unwrap();
    assert!(
        doctor().iter().all(|check| check["status"] == "ok"),
        "{:?}",
        doctor()
    );
    at_host(&["cdi", "check"]).ok();
}
