//! `plan` with config.json on stdin, and with the name of a container.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::golden;
use crate::hostile::{NEEDS_FUSE, blocking};
use crate::support::{
    HOOK, Need, Ran, assert_says, read, run, run_with, scratch, sh_unshared, shell, unshare,
    write_file,
};
use crate::why::isolated;

tests! {
    NEEDS => stdin_is_config_json_or_a_state;
    SHOWN => what_a_person_reads;
    &[] => nothing_to_plan, gpus_by_cdi;
    &[Need::Root] => a_container_by_its_name;
    &[Need::Root, Need::Programs(&["cc", "podman", "unshare"])] => the_configuration_of_hook_files;
    NEEDS_FUSE => a_file_system_that_does_not_answer;
}

const SHOWN: &[Need] = &[
    golden::SCRIPT,
    Need::Root,
    Need::Programs(&["cc", "unshare"]),
];

fn plan(arguments: &[&str], stdin: &str) -> Ran {
    run_with(
        Command::new(HOOK)
            .args(["plan", "-"])
            .args(arguments)
            .env_clear(),
        stdin.as_bytes(),
    )
}

fn stdin_is_config_json_or_a_state() {
    let (dir, fake) = (scratch(), FakeDriver::shared());
    let rootfs = dir.path().join("rootfs");
    fs::create_dir(&rootfs).unwrap();
    let spec = json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=1"]}, "root": {"path": rootfs}})
        .to_string();
    write_file(dir.path().join("config.json"), &spec);
    let state = json!({"ociVersion": "1.0.2", "id": "c", "status": "creating", "pid": 0, "bundle": dir.path()});
    let config = fake.config.to_str().unwrap();
    let ways = [
        plan(&["--config", config], &spec),
        plan(&["--config", config], &state.to_string()),
    ];
    let texts = ways.map(Ran::ok);
    assert!(
        texts[0].starts_with(
            "the hook would set up the container: NVIDIA_VISIBLE_DEVICES requests GPU 1\n"
        ),
        "{texts:?}"
    );
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:#?}");
    // No engine has mounted the image.
    for says in [
        "\nnot checked: the files of the image: the root file system ",
        "\nnot checked: what the container has at these paths; ",
    ] {
        assert!(texts[0].contains(says), "{texts:?}");
    }
    let document = plan(&["--config", config, "--json"], &spec).ok();
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    assert_eq!(document["unknown"].as_array().map(Vec::len), Some(1));
}

/// The container mounts its own file system at /etc, whose server decides when a lookup ends.
fn a_file_system_that_does_not_answer() {
    let fake = FakeDriver::shared();
    let (dir, image) = Image::debian();
    let mount = format!(
        "mkfifo '{0}/mounted'; '{1}' $rootfs/etc accept >'{0}/mounted' & read line <'{0}/mounted'",
        dir.path().display(),
        blocking::silent_fuse().display()
    );
    let container = Waiting::start(
        dir.path(),
        &image.rootfs,
        &["NVIDIA_VISIBLE_DEVICES=0"],
        &mount,
    );
    let mut plan = Command::new("timeout");
    plan.args(["--signal=KILL", "60", HOOK, "plan", "-", "--config"])
        .arg(&fake.config)
        .env_clear();
    let ran = run_with(&mut plan, container.state().as_bytes());
    let says = "the hook would fail: cannot examine the container's files: no answer in time (ONH-049)\n  hint: ";
    assert!(
        ran.code == Some(1) && ran.stdout.starts_with(says),
        "{ran:?}"
    );
}

fn nothing_to_plan() {
    for stdin in ["", " \n"] {
        let stderr = plan(&[], stdin).failed(2);
        assert!(stderr.contains("stdin is empty (ONH-002)\n"), "{stderr}");
        assert_says(
            &stderr,
            &["\nhint: run \"oci-nvidia-hook plan CONTAINER\", or "],
        );
    }
    let stderr = run(Command::new(HOOK).arg("plan").env_clear()).failed(2);
    assert_says(&stderr, &["not provided: <CONTAINER|-> (ONH-002)\nhint: "]);
    for stdin in ["hello", "3", "{}", r#"{"id":"c"}"#, r#"{"process":"#] {
        let ran = plan(&[], stdin);
        let text = &ran.stdout;
        assert!(
            text.contains("stdin is neither config.json nor the state of a container: "),
            "{stdin}: {ran:?}"
        );
        assert!(
            text.contains("(ONH-003)\n  hint: run \"oci-nvidia-hook plan CONTAINER")
                && ran.code == Some(1),
            "{ran:?}"
        );
        assert_eq!(text.matches("stdin is neither").count(), 1, "once: {text}");
    }
}

/// The container is found by its record and by its pod; the bundle contains config.json.
fn a_container_by_its_name() {
    let dir = scratch();
    for id in ["c1-main", "c2"] {
        let spec = json!({
            "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=nonsense"]},
            "root": {"path": "r"},
            "annotations": {"io.kubernetes.pod.name": "p", "io.kubernetes.pod.namespace": "n",
                            "io.kubernetes.container.name": id},
        });
        let bundle = dir.path().join(id);
        fs::create_dir(&bundle).unwrap();
        write_file(bundle.join("config.json"), spec.to_string());
        let state = json!({"id": id, "pid": 1, "bundle": bundle}).to_string();
        run_with(isolated(dir.path()).arg("prestart"), state.as_bytes()).failed(1);
    }
    let plan = |name: &str| run(isolated(dir.path()).args(["plan", "--request", name]));
    for name in ["c1-main", "c1", "c2", "n/p/c2"] {
        let ran = plan(name);
        let start = format!(
            "container {name}\nthe hook would fail: NVIDIA_DRIVER_CAPABILITIES: \"nonsense\""
        );
        assert!(ran.stdout.starts_with(&start), "{ran:?}");
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""), "{name}");
    }
    let stderr = plan("c").failed(1);
    assert!(stderr.contains("c1-main, c2 (ONH-053)\nhint: "), "{stderr}");
    let stderr = plan("n/p").failed(1);
    assert_says(
        &stderr,
        &["\"n/p\" has several containers (ONH-053)\nhint: give one of n/p/c"],
    );
    let stderr = plan("web").failed(1);
    assert_says(
        &stderr,
        &["unknown container or pod \"web\" (ONH-053)\nhint: "],
    );
    fs::remove_file(dir.path().join("c2/config.json")).unwrap();
    let stderr = plan("c2").failed(1);
    assert_says(
        &stderr,
        &[
            "config.json of container \"c2\" is missing: ",
            "hook why c2\"\n",
        ],
    );
}

/// Above the kernel's highest process id: the hook must never find a process to set up.
const NO_PROCESS: i32 = 999_999_999;

/// The container requests nothing from the hook, but has GPUs.
fn gpus_by_cdi() {
    let spec = json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}, "root": {"path": "/r"},
        "annotations": {"cdi.k8s.io/nvidia-device-plugin_x": "nvidia.com/gpu=0"},
        "linux": {"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]},
        "hooks": {"createContainer": [{"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "x"]}]},
    });
    let first = |spec: &serde_json::Value| {
        plan(&[], &spec.to_string())
            .ok()
            .lines()
            .next()
            .unwrap()
            .to_owned()
    };
    let nothing = "the hook would do nothing: NVIDIA_VISIBLE_DEVICES is \"void\"";
    assert_eq!(
        first(&spec),
        format!(
            "{nothing}, and the engine gave the container /dev/nvidia0 by CDI (nvidia.com/gpu=0)"
        )
    );
    let mut unnamed = spec.clone();
    unnamed["annotations"] = json!({});
    let by = "by CDI: config.json has the hook \"/usr/bin/nvidia-cdi-hook\"";
    assert_eq!(
        first(&unnamed),
        format!("{nothing}, and the engine gave the container /dev/nvidia0 {by}")
    );
    let mut none = unnamed;
    none["linux"] = json!({});
    assert_eq!(first(&none), nothing);
}

/// On a host whose driver and image have fixed paths.
fn what_a_person_reads() {
    let (_dir, image) = Image::debian();
    let script = "mount -t tmpfs host /mnt\n\
                  mkdir /mnt/driver /mnt/rootfs\n\
                  mount --bind \"$2\" /mnt/driver\n\
                  mount --bind \"$3\" /mnt/rootfs\n\
                  printf '[nvidia-container-cli]\\nroot = \"/mnt/driver\"\\n' >/mnt/config.toml\n\
                  printf '{\"root\":{\"path\":\"/mnt/rootfs\"},\"process\":{\"env\":[\"NVIDIA_VISIBLE_DEVICES=%s\"]}}' \"$4\" >/mnt/config.json\n\
                  exec \"$1\" --config /mnt/config.toml plan - </mnt/config.json";
    for (name, devices) in [("plan", "0"), ("plan-gpu-9", "9")] {
        let mut command = unshare(script);
        command
            .arg(HOOK)
            .args([&FakeDriver::shared().root, &image.rootfs])
            .arg(devices);
        golden::check(name, "oci-nvidia-hook plan - < config.json", &command);
    }
}

/// Writes a hook file that passes `--config FILE`, a record of the container `web1`, and a container `swarm` without a record. Settings of
/// that file decide what "why" and "status" answer.
fn with_a_hook_file(dir: &Path, fake: &FakeDriver) {
    let node = fake.root.join("dev/gdrdrv");
    shell!("mknod '{}' c 506 0", node.display());
    fake.configure("[devices]\ndeny = [\"gdrcopy\"]");
    let text = read(&fake.config);
    let text = format!("swarm-resource = \"DOCKER_RESOURCE_GPU\"\n{text}");
    write_file(&fake.config, text);
    let spec = |env: &str| json!({"process": {"env": [env]}, "root": {"path": "rootfs"}});
    fs::create_dir(dir.join("rootfs")).unwrap();
    let web = spec("NVIDIA_VISIBLE_DEVICES=1").to_string();
    write_file(dir.join("config.json"), web);
    let config = fake.config.to_str().unwrap();
    let state = json!({"id": "web1", "pid": NO_PROCESS, "bundle": dir}).to_string();
    run_with(
        isolated(dir).args(["--config", config, "prestart"]),
        state.as_bytes(),
    )
    .failed(1);
    let file = json!({
        "version": "1.0.0", "hook": {"path": HOOK, "args": ["oci-nvidia-hook", "--config", config, "prestart"]},
        "when": {"always": true}, "stages": ["prestart"],
    });
    write_file(dir.join("oci-nvidia-hook.json"), file.to_string());
    let containers = dir.join("storage/vfs-containers");
    fs::create_dir_all(containers.join("other/userdata")).unwrap();
    let swarm = spec("DOCKER_RESOURCE_GPU=0").to_string();
    write_file(containers.join("other/userdata/config.json"), swarm);
    let listed = json!([{"id": "other", "names": ["swarm"]}]).to_string();
    write_file(containers.join("containers.json"), listed);
}

/// Commands about containers of an engine read the configuration file that its hook file passes.
fn the_configuration_of_hook_files() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    with_a_hook_file(dir.path(), &fake);
    let run_in = |has_file: bool, command: &str| {
        let script = format!(
            "mount -t tmpfs share /usr/share/containers; mkdir -p /usr/share/containers/oci/hooks.d; \
             if {has_file}; then cp '{0}/oci-nvidia-hook.json' /usr/share/containers/oci/hooks.d; fi; \
             mkdir -p /var/lib/containers; mount --bind '{0}' /var/lib/containers; \
             mount -t tmpfs run /run; mkdir -p /run/oci-nvidia-hook; mount --bind '{0}/run' /run/oci-nvidia-hook; \
             exec {HOOK} {command}",
            dir.path().display()
        );
        let ran = sh_unshared(&script);
        ran.stdout + &ran.stderr
    };
    for (command, says) in [
        ("plan web1", "\ndevice: GPU 1: NVIDIA H100"),
        ("info", "NVIDIA H100"),
        ("files", "/libcuda.so.535.183.01\n"),
        ("why swarm", "DOCKER_RESOURCE_GPU requests GPU 0"),
        ("status", "[devices] in config.toml denies them"),
        (
            "doctor --all hook",
            "oci-nvidia-hook.json passes to the hook",
        ),
    ] {
        let (with, without) = (run_in(true, command), run_in(false, command));
        assert!(with.contains(says), "{command}: {with}");
        assert!(!without.contains(says), "{command}: {without}");
        let named = run_in(true, &format!("--config /nonexistent {command}"));
        assert!(!named.contains(says), "the command line decides: {named}");
    }
}
