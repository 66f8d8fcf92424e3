//! `explain` with config.json on stdin, and with the name of a container.

use std::fs;
use std::process::Command;

use serde_json::json;

use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::hostile::{NEEDS_FUSE, blocking};
use crate::support::{HOOK, Need, Ran, run, run_with, scratch};
use crate::why::isolated;

tests! {
    NEEDS => stdin_is_config_json_or_a_state, a_container_by_its_name_at_precreate;
    &[] => nothing_to_explain, gpus_by_cdi;
    &[Need::Root] => a_container_by_its_name;
    NEEDS_FUSE => a_file_system_that_does_not_answer;
}

fn explain(arguments: &[&str], stdin: &str) -> Ran {
    run_with(Command::new(HOOK).arg("explain").args(arguments).env_clear(), stdin.as_bytes())
}

fn stdin_is_config_json_or_a_state() {
    let (dir, fake) = (scratch(), FakeDriver::shared());
    let rootfs = dir.path().join("rootfs");
    fs::create_dir(&rootfs).unwrap();
    let spec = json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=1"]}, "root": {"path": rootfs}}).to_string();
    fs::write(dir.path().join("config.json"), &spec).unwrap();
    let state = json!({"ociVersion": "1.0.2", "id": "c", "status": "creating", "pid": 0, "bundle": dir.path()});
    let config = fake.config.to_str().unwrap();
    let ways = [
        explain(&["--config", config], &spec),
        explain(&["--config", config], &state.to_string()),
        explain(&["--config", config, "--stage", "prestart"], &state.to_string()),
    ];
    let texts = ways.map(Ran::ok);
    assert!(texts[0].starts_with("the hook sets up the container: NVIDIA_VISIBLE_DEVICES asks for 1\n"), "{texts:?}");
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:#?}");
    // At precreate, config.json is edited.
    let precreate = explain(&["--config", config, "--stage", "precreate"], &spec).ok();
    assert_eq!(precreate.lines().next(), texts[0].lines().next());
    assert!(precreate.contains("edit: add to mounts of config.json: "), "{precreate}");
    // With a stage, explain prints the hook's messages of that stage.
    let ran = explain(&["--config", config, "--stage", "prestart"], &spec);
    assert!(ran.stdout.contains("\"bundle\" (ONH-003)\n"), "{ran:?}");
}

/// The container mounts its own file system at /etc, whose server decides when a lookup ends.
fn a_file_system_that_does_not_answer() {
    let (dir, fake) = (scratch(), FakeDriver::shared());
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let mount = format!(
        "mkfifo '{0}/mounted'; '{1}' $rootfs/etc accept >'{0}/mounted' & read line <'{0}/mounted'",
        dir.path().display(),
        blocking::silent_fuse().display()
    );
    let container = Waiting::start(dir.path(), &image.rootfs, &["NVIDIA_VISIBLE_DEVICES=0"], &mount);
    let mut explain = Command::new("timeout");
    explain.args(["--signal=KILL", "60", HOOK, "explain", "--config"]).arg(&fake.config).env_clear();
    let ran = run_with(&mut explain, container.state().as_bytes());
    let says = "the hook fails: the container's files do not answer within 10 seconds (ONH-049)\n  hint: ";
    assert!(ran.code == Some(1) && ran.stdout.starts_with(says), "{ran:?}");
}

fn nothing_to_explain() {
    for stdin in ["", " \n"] {
        let stderr = explain(&[], stdin).failed(2);
        assert!(stderr.contains("no container is given, and stdin is empty (ONH-002)\n"), "{stderr}");
        assert!(stderr.contains("\nhint: oci-nvidia-hook explain CONTAINER, or "), "{stderr}");
    }
    for stdin in ["hello", "3", "{}", r#"{"id":"c"}"#, r#"{"process":"#] {
        let ran = explain(&[], stdin);
        let text = &ran.stdout;
        assert!(text.contains("stdin is neither config.json nor the state of a container: "), "{stdin}: {ran:?}");
        assert!(
            text.contains("(ONH-003)\n  hint: oci-nvidia-hook explain CONTAINER") && ran.code == Some(1),
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
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        let state = json!({"id": id, "pid": 1, "bundle": bundle}).to_string();
        run_with(isolated(dir.path()).arg("prestart"), state.as_bytes()).failed(1);
    }
    let explain = |name: &str| run(isolated(dir.path()).args(["explain", "--request", name]));
    for name in ["c1-main", "c1", "c2", "n/p/c2"] {
        let ran = explain(name);
        assert!(ran.stdout.starts_with("the hook fails: NVIDIA_DRIVER_CAPABILITIES: \"nonsense\""), "{ran:?}");
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""), "{name}");
    }
    let stderr = explain("c").failed(1);
    assert!(stderr.contains("c1-main, c2 (ONH-053)\nhint: "), "{stderr}");
    let stderr = explain("n/p").failed(1);
    assert!(stderr.contains("\"n/p\" has several containers (ONH-053)\nhint: give one of n/p/c"), "{stderr}");
    let stderr = explain("web").failed(1);
    assert!(stderr.contains("unknown container or pod \"web\" (ONH-053)\nhint: "), "{stderr}");
    fs::remove_file(dir.path().join("c2/config.json")).unwrap();
    let stderr = explain("c2").failed(1);
    assert!(
        stderr.contains("config.json of container \"c2\" is missing: ") && stderr.contains("hook why c2\"\n"),
        "{stderr}"
    );
}

/// Above the kernel's highest process id: the hook must never find a process to set up.
const NO_PROCESS: i32 = 999_999_999;

/// The same as with its config.json on stdin.
fn a_container_by_its_name_at_precreate() {
    let (dir, fake) = (scratch(), FakeDriver::shared());
    let spec = json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=1"]}, "root": {"path": "rootfs"}}).to_string();
    fs::create_dir(dir.path().join("rootfs")).unwrap();
    fs::write(dir.path().join("config.json"), &spec).unwrap();
    let config = fake.config.to_str().unwrap();
    let state = json!({"id": "web1", "pid": NO_PROCESS, "bundle": dir.path()}).to_string();
    // The hook does not set up the container, but the record contains the bundle.
    run_with(isolated(dir.path()).args(["--config", config, "prestart"]), state.as_bytes()).failed(1);
    let explain = |name: &[&str], stdin: &str| {
        let mut explain = isolated(dir.path());
        explain.args(["--config", config, "explain", "--stage", "precreate"]).args(name).current_dir(dir.path());
        run_with(&mut explain, stdin.as_bytes()).ok()
    };
    let text = explain(&["web1"], "");
    assert!(text.contains("edit: add to linux.resources.devices of config.json: allow c 195:1 rw\n"), "{text}");
    assert_eq!(text, explain(&[], &spec));
}

/// The container requests nothing from the hook, but has GPUs.
fn gpus_by_cdi() {
    let spec = json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}, "root": {"path": "/r"},
        "annotations": {"cdi.k8s.io/nvidia-device-plugin_x": "nvidia.com/gpu=0"},
        "linux": {"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]},
        "hooks": {"createContainer": [{"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "x"]}]},
    });
    let first = |spec: &serde_json::Value| explain(&[], &spec.to_string()).ok().lines().next().unwrap().to_owned();
    let nothing = "the hook does nothing: NVIDIA_VISIBLE_DEVICES is \"void\"";
    assert_eq!(
        first(&spec),
        format!("{nothing}, and the engine gave the container /dev/nvidia0 by CDI (nvidia.com/gpu=0)")
    );
    let mut unnamed = spec.clone();
    unnamed["annotations"] = json!({});
    let by = "by CDI: config.json has the hook \"/usr/bin/nvidia-cdi-hook\"";
    assert_eq!(first(&unnamed), format!("{nothing}, and the engine gave the container /dev/nvidia0 {by}"));
    let mut none = unnamed;
    none["linux"] = json!({});
    assert_eq!(first(&none), nothing);
}
