//! Containers that podman starts with the precreate stage, and with createContainer, the other stage that is not prestart.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cdi::{GPU_0, GPU_1, cdi};
use crate::cdi_containers::{nodes_at_dev, only_spec};
use crate::driver::FakeDriver;
use crate::engine::{
    Cgroup, IMAGE, NEEDS, NEEDS_CRUN, NEEDS_V1, NEEDS_V2, Podman, make_searchable,
};
use crate::precreate::video;
use crate::support::{private_dir, scratch, source};

tests! {
    NEEDS_V1 => devices_are_the_runtimes_on_cgroup_v1,
        create_container_on_cgroup_v1 = create_container(Cgroup::AsMounted), create_container_in_a_user_namespace;
    NEEDS_V2 => podman_on_cgroup_v2 = podman_in(Cgroup::V2),
        create_container_on_cgroup_v2 = create_container(Cgroup::V2);
    NEEDS_CRUN => podman_with_crun = podman_in(Cgroup::WithCrun),
        create_container_with_crun = create_container(Cgroup::WithCrun);
    NEEDS => a_user_opens_nodes_of_a_group, shapes_of_containers, a_user_namespace, all_ways_at_once,
        errors_are_in_the_log, volumes_at_the_directory_of_libraries, the_drop_in_adds_the_directory;
}

/// A podman whose only hook is the precreate hook, and a log.
fn podman(fake: &FakeDriver) -> (Podman, TempDir, PathBuf) {
    let podman = Podman::with_image();
    podman.remove_hook();
    let private = private_dir();
    let log = private.path().join("log");
    fake.configure(&format!("debug = \"{}\"", log.display()));
    podman.install_precreate(&fake.config);
    (podman, private, log)
}

/// A container that runs until this value is dropped.
struct Running<'a> {
    podman: &'a Podman,
    name: &'static str,
}

impl Running<'_> {
    fn shell(&self, script: &str) -> String {
        self.podman.shell(Cgroup::AsMounted, script).ok()
    }

    fn inspect(&self, what: &str) -> String {
        self.shell(&format!("\"$@\" inspect {} --format '{what}'", self.name))
            .trim()
            .to_owned()
    }

    fn opens(&self, node: &str) -> String {
        self.shell(&format!("\"$@\" exec {} probe-open {node}", self.name))
            .trim()
            .to_owned()
    }

    /// The directory of its rules, with cgroup v1.
    fn cgroup(&self) -> PathBuf {
        let pid = self.inspect("{{.State.Pid}}");
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        let line = text.lines().find(|line| {
            line.split(':')
                .nth(1)
                .unwrap()
                .split(',')
                .any(|name| name == "devices")
        });
        Path::new("/sys/fs/cgroup/devices").join(
            line.unwrap()
                .splitn(3, ':')
                .nth(2)
                .unwrap()
                .trim_start_matches('/'),
        )
    }

    /// Returns the config.json with which the runtime was started: from Podman 5 on, `podman update` writes the file again.
    fn config(&self) -> Value {
        serde_json::from_slice(&fs::read(self.inspect("{{.OCIConfigPath}}")).unwrap()).unwrap()
    }

    /// Does the same as systemd at a daemon-reload: removes all rules and applies the rules of config.json.
    fn apply_rules_again(&self, config: &Value) {
        let (dir, number) = (self.cgroup(), |value: &Value| {
            value
                .as_i64()
                .map_or_else(|| "*".to_owned(), |n| n.to_string())
        });
        fs::write(dir.join("devices.deny"), "a").unwrap();
        for rule in config["linux"]["resources"]["devices"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|rule| rule["allow"] == true)
        {
            let (major, minor) = (number(&rule["major"]), number(&rule["minor"]));
            let text = format!(
                "{} {major}:{minor} {}",
                rule["type"].as_str().unwrap(),
                rule["access"].as_str().unwrap()
            );
            fs::write(dir.join("devices.allow"), text).unwrap();
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.podman.shell(
            Cgroup::AsMounted,
            &format!("\"$@\" rm -f -t 0 {}", self.name),
        );
    }
}

const START: &str =
    "\"$@\" run -d --name c --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=1";

/// The runtime adds the devices, podman knows them, and rules that are applied again include them. A container of the hook mode
/// loses them.
fn devices_are_the_runtimes_on_cgroup_v1() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let (podman, _private, log) = podman(&fake);
    let container = Running {
        podman: &podman,
        name: "c",
    };
    let dir = scratch();
    let start = format!(
        "{}; {START} {IMAGE} sleep 600; \"$@\" inspect c",
        nodes_at_dev(&fake, dir.path())
    );
    let text = container.shell(&start);
    let inspect: Value = serde_json::from_str(
        text.split_once('[')
            .map(|(_, rest)| format!("[{rest}"))
            .unwrap()
            .as_str(),
    )
    .unwrap();
    let devices = inspect[0]["HostConfig"]["Devices"].as_array().unwrap();
    let in_container: BTreeSet<_> = devices
        .iter()
        .map(|device| device["PathInContainer"].as_str().unwrap())
        .collect();
    assert_eq!(
        in_container,
        [
            "/dev/nvidia-uvm",
            "/dev/nvidia-uvm-tools",
            "/dev/nvidia1",
            "/dev/nvidiactl"
        ]
        .into()
    );

    let rules = || fs::read_to_string(container.cgroup().join("devices.list")).unwrap();
    let ours = |rules: &str| -> BTreeSet<String> {
        rules
            .lines()
            .filter(|line| {
                ["c 195:", "c 511:"]
                    .iter()
                    .any(|start| line.starts_with(start))
            })
            .map(str::to_owned)
            .collect()
    };
    let before = ours(&rules());
    assert!(
        before.contains("c 195:1 rw") && before.contains("c 195:255 rw") && before.len() == 4,
        "{before:?}"
    );
    assert_eq!(container.opens("/dev/nvidia1"), "/dev/nvidia1: ENXIO");
    let config = container.config();
    container.shell("\"$@\" update --cpu-shares 500 c");
    assert_eq!(
        (ours(&rules()), container.opens("/dev/nvidia1")),
        (before.clone(), "/dev/nvidia1: ENXIO".to_owned())
    );
    container.apply_rules_again(&config);
    assert_eq!(
        (ours(&rules()), container.opens("/dev/nvidia1")),
        (before, "/dev/nvidia1: ENXIO".to_owned())
    );
    let log = fs::read_to_string(log).unwrap();
    assert!(
        log.contains("added to config.json: ") && log.lines().count() == 1,
        "no other stage did anything: {log}"
    );
    drop(container);

    podman.install_hook(&fake.config);
    fs::remove_file(podman.hooks.join("oci-nvidia-hook-precreate.json")).unwrap();
    let container = Running {
        podman: &podman,
        name: "c",
    };
    container.shell(&format!("{START} {IMAGE} sleep 600"));
    assert_eq!(container.opens("/dev/nvidia1"), "/dev/nvidia1: ENXIO");
    container.apply_rules_again(&container.config());
    assert_eq!(
        container.opens("/dev/nvidia1"),
        "/dev/nvidia1: EPERM",
        "the test can see a difference"
    );
}

const SEE: &str = "nvidia-smi -L; cd /tmp; mknod n0 c 195 0; probe-open /dev/nvidia1 n0; probe-dlopen libcuda.so.1; \
                   cat /proc/driver/nvidia/params 2>/dev/null || true; grep -c nvidia /proc/self/mountinfo";

#[track_caller]
fn assert_gpu_1_alone(text: &str) {
    assert!(text.contains(GPU_1) && !text.contains(GPU_0), "{text}");
    assert!(
        text.contains("/dev/nvidia1: ENXIO") && text.contains("n0: EPERM"),
        "{text}"
    );
    assert!(text.contains("libcuda.so.1: ok /usr/lib/"), "{text}");
}

fn podman_in(cgroup: Cgroup) {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let (podman, _private, _) = podman(&fake);
    let arguments = [
        "--cap-add=MKNOD",
        "-e",
        "NVIDIA_VISIBLE_DEVICES=1",
        IMAGE,
        "sh",
        "-euc",
        SEE,
    ];
    assert_gpu_1_alone(&podman.run(cgroup, &arguments).ok());
}

fn a_user_opens_nodes_of_a_group() {
    let fake = FakeDriver::new(&["--gpus", "2", "--dev-mode", "0660", "--dev-group", "video"]);
    let (podman, _private, _) = podman(&fake);
    let script = "id -G; nvidia-smi -L; probe-open /dev/nvidia1 /dev/nvidiactl";
    let arguments = [
        "--user=1000:1000",
        "-e",
        "NVIDIA_VISIBLE_DEVICES=1",
        IMAGE,
        "sh",
        "-euc",
        script,
    ];
    let text = podman.run(Cgroup::AsMounted, &arguments).ok();
    assert!(text.starts_with(&format!("1000 {}\n", video())), "{text}");
    assert!(
        text.contains(GPU_1) && text.contains("/dev/nvidia1: ENXIO\n/dev/nvidiactl: ENXIO"),
        "{text}"
    );
}

fn shapes_of_containers() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let (podman, _private, _) = podman(&fake);
    let device = format!("--device={}/dev/nvidia1:/dev/nvidia1", fake.root.display());
    let works = "nvidia-smi -L; probe-dlopen libcuda.so.1; probe-open /dev/nvidia1; ls /proc/driver/nvidia/gpus 2>/dev/null || true";
    for shape in [
        &["--read-only"][..],
        &["--privileged"],
        &["--privileged", "-v", "/dev:/dev"],
        &["--tmpfs", "/run"],
        &["--cap-drop=all"],
        &["--security-opt=no-new-privileges"],
        &[&device],
    ] {
        let (empty, full) = (scratch(), scratch());
        let mut arguments = shape.to_vec();
        arguments.extend(["-e", "NVIDIA_VISIBLE_DEVICES=1", IMAGE, "sh", "-euc", works]);
        // A separate /dev of this test. If the container uses it too, nothing can be created there.
        let elsewhere = format!("{}; rm -r /dev/nvidia*", nodes_at_dev(&fake, empty.path()));
        let elsewhere = Some(elsewhere).filter(|_| !shape.contains(&"/dev:/dev"));
        for before in elsewhere
            .into_iter()
            .chain([nodes_at_dev(&fake, full.path())])
        {
            let text = podman
                .run_after(&before, Cgroup::AsMounted, &arguments)
                .ok();
            assert!(
                text.contains(GPU_1) && text.contains("/dev/nvidia1: ENXIO"),
                "{shape:?}: {text}"
            );
        }
    }
}

/// A volume on the directory of the driver's libraries, also with CDI. The runtime creates mount points on it, as for any mount.
fn volumes_at_the_directory_of_libraries() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let (podman, _private, _) = podman(&fake);
    let works = "nvidia-smi -L; probe-dlopen libcuda.so.1 libnvidia-ml.so.1; (: >/usr/lib/x86_64-linux-gnu/x) 2>/dev/null || echo ro";
    for cgroup in [Cgroup::AsMounted, Cgroup::WithCrun] {
        let volume = "v:/usr/lib/x86_64-linux-gnu";
        let arguments = [
            "-v",
            volume,
            "-e",
            "NVIDIA_VISIBLE_DEVICES=1",
            IMAGE,
            "sh",
            "-euc",
            works,
        ];
        // The second container finds what the first one left.
        for start in ["first", "second"] {
            let text = podman.run(cgroup, &arguments).ok();
            assert!(
                text.contains(GPU_1) && text.matches(": ok ").count() == 2,
                "{cgroup:?} {start}: {text}"
            );
            assert!(text.ends_with("ro\n"), "{cgroup:?} {start}: {text}");
        }
        let left = podman.shell(
            cgroup,
            "cd \"$(\"$@\" volume inspect v --format '{{.Mountpoint}}')\"; ls libcuda.* libnvidia-ml.*; \"$@\" volume rm v >/dev/null",
        );
        assert_eq!(
            left.stdout, "libcuda.so.535.183.01\nlibnvidia-ml.so.535.183.01\n",
            "{cgroup:?}: {left:?}"
        );
    }
}

/// Nodes cannot be created there, and the runtime would not find the nodes of this driver root, so they are mounted.
fn a_user_namespace() {
    let fake = FakeDriver::new(&["--gpus", "2", "--dev-mode", "0660", "--dev-group", "video"]);
    let (podman, _private, _) = podman(&fake);
    let script = "nvidia-smi -L; probe-dlopen libcuda.so.1; probe-open /dev/nvidia1; id -G";
    let mapped = video();
    for (gids, group) in [
        ("0:100000:65536".to_owned(), None),
        (
            format!("0:100000:40,40:{mapped}:1,41:100041:1000"),
            Some(40),
        ),
    ] {
        let mut arguments = vec!["--uidmap=0:100000:65536".to_owned()];
        arguments.extend(gids.split(',').map(|map| format!("--gidmap={map}")));
        arguments.extend(
            ["-e", "NVIDIA_VISIBLE_DEVICES=1", IMAGE, "sh", "-c", script].map(str::to_owned),
        );
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let ran = podman.run(Cgroup::AsMounted, &arguments);
        let groups: Vec<_> = ran
            .stdout
            .lines()
            .last()
            .unwrap_or_default()
            .split(' ')
            .map(str::to_owned)
            .collect();
        let opens = if group.is_some() {
            "/dev/nvidia1: ENXIO"
        } else {
            "/dev/nvidia1: EACCES"
        };
        assert!(ran.stdout.contains(opens), "{ran:?}");
        assert_eq!(
            ran.stdout.contains("UUID: GPU-51eed001"),
            group.is_some(),
            "{ran:?}"
        );
        assert!(
            ran.stdout
                .contains("libcuda.so.1: ok /usr/lib/x86_64-linux-gnu/libcuda.so.1"),
            "{ran:?}"
        );
        assert_eq!(
            groups.contains(&"40".to_owned()),
            group.is_some(),
            "{ran:?}"
        );
    }
}

/// precreate, prestart and CDI: the first one sets up the container, and the others detect that.
fn all_ways_at_once() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let (podman, _private, log) = podman(&fake);
    podman.install_hook(&fake.config);
    let dir = scratch();
    let spec = dir.path().join("nvidia.yaml");
    let script = format!("{SEE}; cut -d' ' -f5 /proc/self/mountinfo");
    let look = |text: &str, nodes: usize| {
        assert_gpu_1_alone(text);
        let mut points: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with("/usr/") || line.starts_with("/dev/nvidia"))
            .collect();
        points.retain(|line| !line.contains(':'));
        let each: BTreeSet<_> = points.iter().collect();
        assert_eq!(each.len(), points.len(), "mounted twice: {points:?}");
        assert!(points.len() > 8, "{points:?}");
        assert_eq!(
            points
                .iter()
                .filter(|point| point.starts_with("/dev/"))
                .count(),
            nodes,
            "{points:?}"
        );
    };
    let request = ["--cap-add=MKNOD", "-e", "NVIDIA_VISIBLE_DEVICES=1"];
    let of_image = [IMAGE, "sh", "-euc", &script];
    let text = podman
        .run(Cgroup::AsMounted, &[&request[..], &of_image].concat())
        .ok();
    look(&text, 0);
    let said = fs::read_to_string(&log).unwrap();
    assert_eq!(
        (
            said.matches("added to config.json: ").count(),
            said.matches("is left unchanged").count()
        ),
        (1, 1),
        "{said}"
    );
    assert!(!said.contains("injected"), "{said}");

    cdi(&fake, &["generate", "--output", spec.to_str().unwrap()]).ok();
    fs::remove_file(&log).unwrap();
    let arguments = [&["--device=nvidia.com/gpu=1"], &request[..], &of_image].concat();
    look(
        &podman
            .run_after(&only_spec(&spec), Cgroup::AsMounted, &arguments)
            .ok(),
        0,
    );
    let said = fs::read_to_string(&log).unwrap_or_default();
    assert!(
        !said.contains("injected") && !said.contains("nodes of driver"),
        "{said}"
    );
}

fn errors_are_in_the_log() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let (podman, _private, log) = podman(&fake);
    let ran = podman.run(
        Cgroup::AsMounted,
        &["-e", "NVIDIA_VISIBLE_DEVICES=9", IMAGE, "true"],
    );
    assert!(
        ran.code != Some(0) && !ran.stderr.contains("requests"),
        "{ran:?}"
    );
    let log = fs::read_to_string(log).unwrap();
    assert!(
        log.contains(": error: ") && log.contains("(ONH-030)") && log.contains(": hint: "),
        "{log}"
    );
}

/// With the files of the packages at other paths: the directory of the drop-in is read in addition to Podman's own.
fn the_drop_in_adds_the_directory() {
    let podman = Podman::shared();
    let dir = scratch();
    let place = |name: &str| dir.path().join(name);
    let drop_in = fs::read_to_string(source("packaging/podman/50-oci-nvidia-hook.conf")).unwrap();
    let conf = fs::read_to_string(podman.dir.path().join("containers.conf")).unwrap();
    let (shared, own) = (place("shared"), place("own"));
    fs::create_dir_all(&shared).unwrap();
    fs::create_dir_all(&own).unwrap();
    let moved = drop_in
        .replace(
            "/usr/share/containers/oci/hooks.d",
            shared.to_str().unwrap(),
        )
        .replace(
            "/usr/share/containers/oci/hooks.podman.d",
            own.to_str().unwrap(),
        );
    assert_ne!(moved, drop_in);
    fs::write(place("containers.conf"), format!("{conf}{moved}")).unwrap();
    for (dir, stage) in [(&shared, "prestart"), (&own, "precreate")] {
        let mark = place(stage);
        let hook = json!({
            "version": "1.0.0", "when": {"always": true}, "stages": [stage],
            "hook": {"path": "/bin/sh", "args": ["sh", "-c", format!("touch '{}'; cat", mark.display())], "env": ["PATH=/bin:/usr/bin"]},
        });
        fs::write(dir.join(format!("{stage}.json")), hook.to_string()).unwrap();
    }
    podman
        .run_with_conf(&place("containers.conf"), &[IMAGE, "true"])
        .ok();
    assert!(place("prestart").exists() && place("precreate").exists());
}

/// At this stage the hook is root of the user namespace and in the device cgroup, so the error names the supported stages.
fn create_container_in_a_user_namespace() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let podman = Podman::with_image();
    podman.install_stage("createContainer", &fake.config);
    let arguments = [
        "--uidmap=0:100000:65536",
        "--gidmap=0:100000:65536",
        "-e",
        "NVIDIA_VISIBLE_DEVICES=1",
        IMAGE,
        "true",
    ];
    let stderr = podman
        .run_after(&make_searchable(), Cgroup::AsMounted, &arguments)
        .failed(126);
    // Podman 5 does not let the hook read config.json.
    let whys = [
        "cannot leave the container's device cgroup",
        "the hook is in the container's user namespace",
    ];
    assert!(whys.iter().any(|why| stderr.contains(why)), "{stderr}");
    assert!(
        stderr.contains("hint: have it called at another stage: precreate"),
        "{stderr}"
    );
}

/// At this stage the hook is in the container's device cgroup, but must ask the driver.
fn create_container(cgroup: Cgroup) {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let podman = Podman::with_image();
    let private = private_dir();
    let log = private.path().join("log");
    fake.configure(&format!("debug = \"{}\"", log.display()));
    podman.install_stage("createContainer", &fake.config);
    let arguments = [
        "--cap-add=MKNOD",
        "-e",
        "NVIDIA_VISIBLE_DEVICES=1",
        IMAGE,
        "sh",
        "-euc",
        SEE,
    ];
    assert_gpu_1_alone(&podman.run(cgroup, &arguments).ok());
    // The hook also leaves a container unchanged at this stage if precreate has set it up.
    podman.install_precreate(&fake.config);
    assert_gpu_1_alone(&podman.run(cgroup, &arguments).ok());
    let log = fs::read_to_string(log).unwrap();
    assert_eq!(
        (
            log.matches("injected").count(),
            log.matches("is left unchanged").count()
        ),
        (1, 1),
        "{log}"
    );
}
