//! Records of calls: limited in size whatever containers request, owned by root whatever namespaces the containers have, and
//! found by the names that people use for containers.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::cdi::cdi;
use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::json_schema;
use crate::json_schema::fields;
use crate::support::{
    HOOK, Need, Ran, assert_lacks, assert_says, chmod, copy_nvml_program, read, run, run_with,
    scratch, write_file,
};
use crate::why::{isolated, why};

/// A script that makes the hook believe that it has removed three records of running containers.
pub const REMOVED_RECORDS: &str = "install -d -m 700 /run/oci-nvidia-hook /run/oci-nvidia-hook/containers; umask 077; \
     printf 3 >/run/oci-nvidia-hook/containers/.removed";

tests! {
    NEEDS => a_request_of_megabytes, each_start_has_its_record, a_start_without_its_request, an_error_precedes_the_warnings,
        an_edited_config_and_its_hook_entry;
    &[Need::Root, Need::Program("cc")] => a_pod_that_is_tried_again_and_again, a_pod_is_sent_to_the_scheduler, json_has_no_control_characters;
    engine::NEEDS => a_container_with_a_user_namespace = with_a_user_namespace(Cgroup::AsMounted), a_container_of_cdi;
    engine::NEEDS_CRUN => a_container_with_a_user_namespace_and_crun = with_a_user_namespace(Cgroup::WithCrun);
    &[Need::Root] => a_spec_that_cannot_be_read, a_file_that_is_not_a_record;
    &[Need::Root, Need::Program("setpriv")] => a_user_is_sent_to_root;
}

/// The maximum size of a record.
const MOST: u64 = 64 << 10;

/// Calls the hook for a container with this id in this pod that requests these devices.
fn call(dir: &Path, fake: &FakeDriver, id: &str, pod: [&str; 2], devices: &str) -> Ran {
    let bundle = dir.join("bundle");
    fs::create_dir_all(&bundle).unwrap();
    let [namespace, name] = pod;
    let spec = json!({
        "process": {"env": [format!("NVIDIA_VISIBLE_DEVICES={devices}")]}, "root": {"path": "/nowhere"},
        "annotations": {
            "io.kubernetes.pod.name": name, "io.kubernetes.pod.namespace": namespace,
            "io.kubernetes.container.name": "main",
        },
    });
    write_file(bundle.join("config.json"), spec.to_string());
    let state = json!({"id": id, "pid": std::process::id(), "bundle": bundle}).to_string();
    run_with(
        isolated(dir)
            .arg("--config")
            .arg(&fake.config)
            .arg("prestart")
            .env_clear(),
        state.as_bytes(),
    )
}

fn sizes(dir: &Path) -> Vec<u64> {
    let files = fs::read_dir(dir.join("run/containers")).unwrap().flatten();
    files.map(|file| file.metadata().unwrap().len()).collect()
}

/// Each list of a request can be as long as config.json. Without the limit, the record contained it in full, four times as long.
fn a_request_of_megabytes() {
    let names = |prefix: &str| {
        (0..400_000)
            .map(|n| format!("{prefix}{n:05}"))
            .collect::<Vec<_>>()
            .join(",")
    };
    let waiting = Waiting::debian(&[], "");
    let mut many = vec![format!("NVIDIA_VISIBLE_DEVICES=0{}", ",0".repeat(500_000))];
    many.extend(
        (0..30).map(|number| format!("NVIDIA_REQUIRE_N{number}={}", "cuda>=1.0 ".repeat(90))),
    );
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    for (env, outcome) in rows! {
        &[&*format!("NVIDIA_VISIBLE_DEVICES={}", names("x"))][..], "failed";
        &["NVIDIA_VISIBLE_DEVICES=all", &format!("NVIDIA_IMEX_CHANNELS={}", names("9"))], "failed";
        &["NVIDIA_VISIBLE_DEVICES=all", &format!("NVIDIA_DRIVER_CAPABILITIES={}", names("\u{202e}"))], "failed";
        &many, "ok";
    } {
        waiting.set_env(env);
        waiting.call(&mut isolated(waiting.dir()), &FakeDriver::shared().config);
        let sizes = sizes(waiting.dir());
        assert!(sizes.len() == 1 && sizes[0] <= MOST, "{outcome}: {sizes:?}");
        let record = json_schema::part(
            "why",
            &why(waiting.dir(), &["--json", "waiting"]).ok(),
            "records",
        )
        .remove(0);
        assert_eq!(record["outcome"], outcome, "{}", record["reason"]);
    }
}

/// A container that is started again has another process. What an earlier stage of the same start did is in the same record.
fn each_start_has_its_record() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let (dir, image) = Image::debian();
    let env = ["NVIDIA_VISIBLE_DEVICES=1"];
    let start = || Waiting::start(dir.path(), &image.rootfs, &env, "");
    let call = |container: &Waiting| container.call(&mut isolated(dir.path()), &fake.config);
    let drop_ins = fake.config.with_file_name("config.toml.d");
    fs::create_dir_all(&drop_ins).unwrap();
    let configure = |line: &str| write_file(drop_ins.join("10.toml"), line);
    let first = start();
    call(&first).ok();
    let text = why(dir.path(), &["waiting"]).ok();
    assert_says(
        &text,
        &["\nthe container got what it requested: ", "\n  GPU 1: "],
    );
    configure("accept-nvidia-visible-devices-envvar-when-unprivileged = false");
    // Another hook of the same start, which may do nothing.
    call(&first).ok();
    assert_eq!(why(dir.path(), &["waiting"]).ok(), text);
    let second = start();
    call(&second).ok();
    let text = why(dir.path(), &["waiting"]).ok();
    assert_says(&text, &["\nthe hook did nothing: ", "ONH-103"]);
    assert_lacks(&text, &["GPU 1"]);
    configure("disable-require = nonsense");
    let third = start();
    call(&third).failed(1);
    assert!(
        why(dir.path(), &["waiting"])
            .ok()
            .contains("\nthe hook failed: ")
    );
    configure("accept-nvidia-visible-devices-envvar-when-unprivileged = false");
    let fourth = start();
    call(&fourth).ok();
    assert!(
        why(dir.path(), &["waiting"])
            .ok()
            .contains("\nthe hook did nothing: ")
    );
}

/// NVML is asked before it is clear that the container starts without what it requested.
fn a_start_without_its_request() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "0", "--no-dev"]));
    fs::remove_dir_all(fake.root.join("proc")).unwrap();
    fs::create_dir_all(fake.root.join("sys/bus/pci/devices")).unwrap();
    fs::create_dir_all(fake.root.join("proc/driver/nvidia")).unwrap();
    fake.configure("[oci-nvidia-hook]\nno-gpu = \"start\"");
    call(dir.path(), &fake, "c1", ["lab", "fine"], "all").ok();
    let text = why(dir.path(), &["c1"]).ok();
    assert_says(&text, &["\nthe hook did nothing: ", "ONH-112"]);
    let list = why(dir.path(), &[]).ok();
    assert_says(&list, &["left alone  ONH-112", "lab/fine"]);
}

/// The error is the most important line.
fn an_error_precedes_the_warnings() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    fake.configure("nonsense = true");
    let stderr = call(dir.path(), &fake, "c1", ["lab", "fine"], "9").failed(1);
    let (error, warning) = (stderr.find("(ONH-030)"), stderr.find("warning: "));
    assert!(
        error.is_some() && warning.is_some() && error < warning,
        "{stderr}"
    );
}

/// The hook edits config.json for nvidia-container-runtime, and its hook entry in config.json does the rest: both have one record.
fn an_edited_config_and_its_hook_entry() {
    let fake = FakeDriver::shared();
    let container = Waiting::debian(&[], "");
    // The id is that of Podman's own mounts.
    let id = "5c".repeat(32);
    let bundle = container
        .dir()
        .join(format!("vfs-containers/{id}/userdata"));
    fs::create_dir_all(&bundle).unwrap();
    let spec = json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=1"]}, "root": {"path": container.rootfs},
        "mounts": [{"destination": "/dev/shm", "type": "bind", "source": bundle.join("shm")}],
    });
    let edited = fake.edit_config(&spec.to_string()).ok();
    let edited: Value = serde_json::from_str(&edited).unwrap();
    let entry = &edited["hooks"]["createRuntime"];
    container.set_hooks("createRuntime", entry);
    let args: Vec<String> = serde_json::from_value(entry[0]["args"].clone()).unwrap();
    let state = container.state().replace("\"waiting\"", &format!("{id:?}"));
    let mut hook = crate::kernels::hook_command();
    run_with(hook.args(&args[1..]).env_clear(), state.as_bytes()).ok();
    let text = run(std::process::Command::new(HOOK).args(["why", "--json", &id])).ok();
    let record = json_schema::part("why", &text, "records").remove(0);
    assert_eq!(
        (&record["stage"], &record["outcome"]),
        (&json!("nvidia-container-runtime"), &json!("ok")),
        "{record}"
    );
    let steps = fields(&record["steps"], "name");
    assert!(
        steps.contains(&"config.json") && steps.ends_with(&["rootfs"]),
        "{steps:?}"
    );
    assert_eq!(record["asked"]["visible_devices"], json!(["1"]));
    let reason = record["reason"].as_str().unwrap();
    assert!(reason.starts_with("added to config.json: "), "{record}");
}

/// kubelet starts a container that fails again every few seconds, each time with another id.
fn a_pod_that_is_tried_again_and_again() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    call(dir.path(), &fake, "other", ["lab", "fine"], "8").failed(1);
    for attempt in 0..5 {
        call(
            dir.path(),
            &fake,
            &format!("attempt{attempt}"),
            ["lab", "cuda-0"],
            "9",
        )
        .failed(1);
    }
    assert_eq!(sizes(dir.path()).len(), 2);
    let list = why(dir.path(), &[]).ok();
    let lines: Vec<_> = list.lines().collect();
    for (place, row, device) in [(1, "  lab/cuda-0/main", 9), (3, "  lab/fine/main", 8)] {
        assert!(lines[place].contains("  failed  ONH-030  "), "{list}");
        assert!(lines[place].ends_with(row), "{list}");
        assert!(
            lines[place + 1]
                .starts_with(&format!("    NVIDIA_VISIBLE_DEVICES requests \"{device}\"")),
            "{list}"
        );
    }
    // The names that the event of the pod contains; its container is gone, and no command of the engine lists it.
    for name in ["cuda-0", "lab/cuda-0", "lab/cuda-0/main"] {
        let text = why(dir.path(), &[name]).ok();
        assert!(
            text.starts_with("container attempt4\npod lab/cuda-0, container main\n"),
            "{text}"
        );
        assert!(text.contains("ONH-030"), "{text}");
    }
    why(dir.path(), &["lab"]).failed(1);
}

/// A file that the container's root user owns is not trusted: the old code wrote records as that user.
fn with_a_user_namespace(cgroup: Cgroup) {
    // Each container has its own storage: while Podman cleans up after one in the background, a runtime sometimes cannot search it.
    let (first, second) = (Podman::with_image(), Podman::with_image());
    let start = "\"$@\" run --network=none --log-driver=none --uidmap 0:100000:65536 --gidmap 0:100000:65536 \
                 -e NVIDIA_VISIBLE_DEVICES=1";
    let fails = format!(
        "{start} --rm --name u2 -v '{}':/usr/lib/x86_64-linux-gnu/libcuda.so {IMAGE} true 2>/run/u2 && exit 1; \
         {HOOK} why u2 || {{ cat /run/u2; exit 1; }}; rm /run/oci-nvidia-hook/containers/*.json",
        first.dir.path().join("old").display()
    );
    let failed = first.shell(cgroup, &fails).ok();
    let runs = format!(
        "{start} -d --name u1 {IMAGE} sleep 600 >/dev/null; {HOOK} why u1; \
         stat -c '%u:%g %a' /run/oci-nvidia-hook/containers/*.json; \"$@\" rm -f -t 0 u1 >/dev/null 2>&1 || true"
    );
    let given = second.shell(cgroup, &runs).ok();
    let got = "\nthe container got what it requested: injected ";
    assert_says(&given, &[" (u1)\nat prestart, ", got]);
    assert!(given.ends_with("\n0:0 600\n"), "{given}");
    assert_says(&failed, &[" (u2)\nat prestart, ", "the hook failed: "]);
}

/// The engine calls the hook for the rest, so `why` knows the container.
fn a_container_of_cdi() {
    let podman = Podman::with_image();
    podman.remove_hook();
    let dir = podman.dir.path();
    let spec = dir.join("cdi/nvidia.json");
    fs::create_dir(dir.join("cdi")).unwrap();
    let arguments = [
        "generate",
        "--hook-path",
        HOOK,
        "--output",
        spec.to_str().unwrap(),
    ];
    cdi(FakeDriver::shared(), &arguments).ok();
    let script = format!(
        "rm -rf /run/test-cdi; mkdir -p /var/run/cdi /etc/cdi; mount -t tmpfs cdi /etc/cdi; mount --bind '{0}/cdi' /var/run/cdi; \
         start=\"$* run --network=none --log-driver=none -d --name\"; \
         $start web --device nvidia.com/gpu=1 {IMAGE} sleep 600 >/dev/null; \
         {HOOK} why web; echo ---; {HOOK} ps --all --gpu 1; echo ---; \
         rm /run/oci-nvidia-hook/containers/*; $start other --device nvidia.com/gpu=0 {IMAGE} true >/dev/null; \
         {HOOK} why web; {HOOK} plan web; \"$@\" rm -f -t 0 web other >/dev/null 2>&1 || true",
        dir.display()
    );
    let text = podman.shell(Cgroup::AsMounted, &script).ok();
    let parts: Vec<_> = text.split("---\n").collect();
    let [web, list, without_record] = parts[..] else {
        panic!("{text}")
    };
    assert!(
        web.contains(" (web)\nat rootfs, ")
            && web.contains("\nthe engine set it up from a CDI spec\n"),
        "{text}"
    );
    assert!(
        web.contains("\n  /dev/nvidia1\n") && !web.contains("/dev/nvidiactl"),
        "{text}"
    );
    // Without NVML, because the host of this test has no driver.
    assert!(
        list.starts_with("no container with GPU 1 is known\n"),
        "{list}"
    );
    let by_cdi = format!(
        "the engine gave the container /dev/nvidia1 by CDI: config.json has the hook \"{HOOK}\"\n"
    );
    assert_eq!(
        without_record.matches(&by_cdi).count(),
        2,
        "{without_record}"
    );
    assert_lacks(without_record, &["requests no GPU\n"]);
}

/// crun 1.28 names "/" as the bundle of a container with a user namespace and devices. The state contains the rest.
fn a_spec_that_cannot_be_read() {
    let dir = scratch();
    let state = json!({"id": "c1", "pid": 1, "bundle": dir.path(), "annotations": {
        "io.kubernetes.pod.name": "cuda-0", "io.kubernetes.pod.namespace": "lab", "io.kubernetes.container.name": "main",
    }});
    for stage in ["prestart", "rootfs"] {
        run_with(
            isolated(dir.path()).arg(stage),
            state.to_string().as_bytes(),
        )
        .failed(1);
        let text = why(dir.path(), &["lab/cuda-0"]).ok();
        assert!(
            text.starts_with(&format!(
                "container c1\npod lab/cuda-0, container main\nat {stage}, "
            )),
            "{text}"
        );
        assert_says(
            &text,
            &["the hook failed: cannot read the container's spec"],
        );
    }
}

fn a_file_that_is_not_a_record() {
    let dir = scratch();
    let records = dir.path().join("run/containers");
    fs::create_dir_all(&records).unwrap();
    chmod(&records, 0o700);
    chmod(dir.path().join("run"), 0o700);
    // The format that the program once wrote.
    write_file(records.join("large.json"), vec![b' '; 13 << 20]);
    let ran = why(dir.path(), &[]);
    let says = "warning: cannot read the record \"/run/oci-nvidia-hook/containers/large.json\": ";
    assert_says(
        &ran.stderr,
        &[says, "(ONH-109)\nhint: rm /run/oci-nvidia-hook/"],
    );
    ran.ok();
    let state = json!({"id": "large", "pid": 1, "bundle": "/"}).to_string();
    run_with(isolated(dir.path()).arg("poststop"), state.as_bytes()).ok();
    assert!(!records.join("large.json").exists(), "of no use");
}

fn a_user_is_sent_to_root() {
    let dir = scratch();
    chmod(dir.path(), 0o755);
    let hook = dir.path().join("oci-nvidia-hook");
    fs::copy(HOOK, &hook).unwrap();
    copy_nvml_program(dir.path());
    assert_eq!(hook.metadata().unwrap().uid(), 0);
    let script = format!(
        "mount -t tmpfs run /run; mkdir -m 700 /run/oci-nvidia-hook; mkdir -p -m 755 /run/user; \
         mkdir -m 700 /run/user/7777; chown 7777 /run/user/7777; mount --bind '{}' /mnt; \
         setpriv --reuid 7777 --regid 7777 --clear-groups sh -c '/mnt/oci-nvidia-hook why; /mnt/oci-nvidia-hook ps; /mnt/oci-nvidia-hook why web' 2>&1 || \
         echo failed",
        dir.path().display()
    );
    let text = run(std::process::Command::new("unshare").args(["-m", "sh", "-uc", &script])).ok();
    assert!(
        text.starts_with("no container of this user failed in the last hour; "),
        "{text}"
    );
    for command in ["why", "why web"] {
        let hint = format!("run \"sudo oci-nvidia-hook {command}\"\n");
        assert_eq!(text.matches(&hint).count(), 1, "{text}");
    }
    assert_eq!(
        text.matches("run \"sudo oci-nvidia-hook ps\"\n").count(),
        1,
        "{text}"
    );
    assert!(
        text.contains("(ONH-053)\nhint: only root can read the records of root's")
            && text.ends_with("failed\n"),
        "{text}"
    );
}

/// The author of a pod cannot make it privileged, and should not.
fn a_pod_is_sent_to_the_scheduler() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let text = read(&fake.config);
    let locked = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n";
    write_file(&fake.config, format!("{locked}{text}"));
    for (pod, says) in [
        (
            ["lab", "cuda-0"],
            "resources: {limits: {nvidia.com/gpu: 1}}",
        ),
        (
            ["", ""],
            "hint: request the GPUs by their CDI names, such as ",
        ),
    ] {
        let ran = call(dir.path(), &fake, "c", pod, "all");
        assert!(
            ran.stderr.contains("(ONH-103)\nhint: ") && ran.stderr.contains(says),
            "{pod:?}: {}",
            ran.stderr
        );
        assert_eq!(
            ran.stderr.contains("by their CDI names"),
            pod[0].is_empty(),
            "{}",
            ran.stderr
        );
    }
}

fn is_invisible(c: char) -> bool {
    let is_of_unicode =
        matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{2069}' | '\u{e0000}'..='\u{e0fff}');
    c != '\n' && c.is_control() || is_of_unicode
}

/// JSON itself escapes only C0. A terminal interprets U+009B like ESC [, U+202E reverses the text after it, and it shows nothing of
/// U+200B and U+E0041, so that the name looks like another.
fn json_has_no_control_characters() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let evil = "x\u{9b}2J\u{202e}\u{7f}\u{2066}\u{200b}\u{e0041}";
    let stderr = call(dir.path(), &fake, "c", ["lab", evil], &format!("{evil},0")).failed(1);
    for text in [
        stderr,
        why(dir.path(), &["c"]).ok(),
        why(dir.path(), &[]).ok(),
    ] {
        assert_says(&text, &["\\u{200b}\\u{e0041}"]);
        assert!(!text.contains(is_invisible), "{text:?}");
    }
    let record = why(dir.path(), &["--json", "c"]).ok();
    let spec = json!({"process": {"env": [format!("NVIDIA_VISIBLE_DEVICES={evil}")]}, "root": {"path": "/x"}});
    write_file(dir.path().join("config.json"), spec.to_string());
    let state = json!({"id": "c", "bundle": dir.path()}).to_string();
    let mut plan = std::process::Command::new(HOOK);
    let explained = run_with(
        plan.arg("--config")
            .arg(&fake.config)
            .args(["plan", "-", "--json"])
            .env_clear(),
        state.as_bytes(),
    );
    for text in [record, explained.stdout] {
        assert_says(
            &text,
            &["\\u009b2J\\u202e\\u007f\\u2066\\u200b\\udb40\\udc41"],
        );
        assert!(!text.contains(is_invisible), "{text:?}");
        let value: Value = serde_json::from_str(&text).unwrap();
        let asked = &value
            .pointer("/records/0/asked")
            .or_else(|| value.get("request"))
            .unwrap()["visible_devices"][0];
        assert_eq!(asked, evil, "it is read as it was");
    }
}
