//! The record of a call, which `why` reads, and the journal.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use engines::Version;
use serde_json::Value;

use crate::driver::{ALL_GPUS, FakeDriver, Image, NEEDS, Waiting};
use crate::engine::{self, Cgroup, IMAGE, Podman};
use crate::json_schema;
use crate::json_schema::fields;
use crate::support::{
    HOOK, Need, Ran, assert_lacks, assert_says, chmod, copy_nvml_program, run, run_with, scratch,
    unshare, write_file,
};
use crate::{golden, ps, status};

const STRACE: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "strace", "mount"]),
];

tests! {
    NEEDS => a_container_that_got_its_gpus, fewer_gpus_than_all, a_failure_is_kept,
        the_journal_has_it, a_run_directory_of_another_user;
    STRACE => a_start_that_the_deadline_ends;
    ps::GOLDEN => what_a_person_reads;
    &[Need::Root, Need::Program("setpriv")] => a_user_has_records_of_his_own;
    engine::NEEDS => containers_of_podman_with_runc = containers_of_podman(Cgroup::AsMounted), requests_that_podman_ignores;
    engine::NEEDS_CRUN => what_crun_does_not_show = containers_of_podman(Cgroup::WithCrun);
    &[Need::Root] => no_records;
}

/// Runs `$HOOK` with a separate `/run`: its run directory is `dir/run`, and the journal's socket is in `dir/journal`.
pub fn isolated(dir: &Path) -> Command {
    isolated_program(dir, Path::new(HOOK))
}

/// Runs another program like [`isolated`].
pub fn isolated_program(dir: &Path, program: &Path) -> Command {
    let mut command = isolated_shell(dir);
    command.arg(program);
    command
}

/// Runs the program in the first argument like [`isolated`].
fn isolated_shell(dir: &Path) -> Command {
    for name in ["run", "journal"] {
        fs::create_dir_all(dir.join(name)).unwrap();
    }
    let script = format!(
        "mount -t tmpfs run /run; mkdir -p /run/oci-nvidia-hook /run/systemd/journal; \
         mount --bind '{dir}/run' /run/oci-nvidia-hook; mount --bind '{dir}/journal' /run/systemd/journal; exec \"$@\"",
        dir = dir.display()
    );
    unshare(&script)
}

pub fn why(dir: &Path, args: &[&str]) -> Ran {
    run(isolated(dir).arg("why").args(args))
}

fn json(dir: &Path, name: &str) -> Value {
    json_schema::part("why", &why(dir, &["--json", name]).ok(), "records").remove(0)
}

struct Container {
    dir: tempfile::TempDir,
    waiting: Waiting,
}

impl Container {
    fn new(env: &[&str]) -> Self {
        let (dir, image) = Image::debian();
        let waiting = Waiting::start(dir.path(), &image.rootfs, env, "");
        Self { dir, waiting }
    }

    fn hook(&self, fake: &FakeDriver) -> Ran {
        self.waiting
            .call(&mut isolated(self.dir.path()), &fake.config)
    }

    fn poststop(&self) {
        run_with(
            isolated(self.dir.path()).arg("poststop"),
            self.waiting.state().as_bytes(),
        )
        .ok();
    }
}

fn a_container_that_got_its_gpus() {
    let container = Container::new(&[
        "NVIDIA_VISIBLE_DEVICES=1",
        "NVIDIA_DRIVER_CAPABILITIES=utility",
    ]);
    let dir = container.dir.path();
    container.hook(FakeDriver::shared()).ok();
    let text = why(dir, &["waiting"]).ok();
    for says in [
        "container waiting\nat prestart, 20",
        "\nrequested: GPU 1; capabilities utility (NVIDIA_VISIBLE_DEVICES)\nthe container got what it requested: injected ",
        "\n  GPU 1: NVIDIA ",
        "\ntook: request ",
    ] {
        assert!(text.contains(says), "{says:?} is not in\n{text}");
    }
    assert!(!text.contains("GPU 0"), "{text}");
    let record = json(dir, "wait");
    assert_eq!(
        (&record["outcome"], &record["asked"]["visible_devices"][0]),
        (&"ok".into(), &"1".into())
    );
    let steps = fields(&record["steps"], "name");
    assert!(
        steps.starts_with(&["request", "driver", "files", "container"])
            && steps.ends_with(&["mounts"]),
        "{steps:?}"
    );
    let milliseconds = record["steps"][1]["milliseconds"].as_f64().unwrap();
    assert!(
        milliseconds > 0.0 && record["steps"][1]["milliseconds"].to_string().len() < 10,
        "{milliseconds}"
    );
    let gpu = &record["devices"][0];
    assert_eq!(
        (gpu["index"].as_u64(), gpu.get("mig_index")),
        (Some(1), None),
        "{gpu}"
    );
    assert!(
        gpu["uuid"].as_str().unwrap().starts_with("GPU-") && gpu["name"] == "NVIDIA H100 80GB HBM3",
        "{gpu}"
    );
    assert_eq!(
        (
            record["container"].get("pod"),
            record["container"].get("name")
        ),
        (None, None),
        "{record}"
    );
    let list = why(dir, &[]).ok();
    assert_eq!(
        list,
        "no container failed in the last hour; \"oci-nvidia-hook ps --all\" lists all\n"
    );
    for line in [
        &["why", "wai"][..],
        &["plan", "wai"],
        &["doctor", "--container", "wai"],
    ] {
        assert_eq!(
            run(isolated(dir).arg("__complete").args(line)).ok(),
            "waiting\n",
            "{line:?}"
        );
    }
    let file = dir.join("run/containers/waiting.json");
    assert_eq!(
        file.metadata().unwrap().permissions().mode() & 0o7777,
        0o600
    );

    // A stage that finds everything done records less than the one that did it.
    let done = serde_json::json!([{"path": HOOK, "args": ["oci-nvidia-hook", "rootfs"]}]);
    container.waiting.set_hooks("createRuntime", &done);
    container.hook(FakeDriver::shared()).ok();
    assert_eq!(json(dir, "waiting")["outcome"], "ok");
    container.poststop();
    let text = why(dir, &["waiting"]).ok();
    assert_says(
        &text,
        &["\nended 20", "\nthe container got what it requested: "],
    );
}

fn fewer_gpus_than_all() {
    let fake = FakeDriver::new(&["--gpus", "3"]);
    fake.set_nvml(|old| old.replace("gpu minor=1 ", "gpu minor=1 fail=15 "));
    let container = Container::new(ALL_GPUS);
    let dir = container.dir.path();
    container.hook(&fake).ok();
    let text = why(dir, &["waiting"]).ok();
    assert_says(
        &text,
        &[
            "\nthe container got fewer GPUs than it requested: injected ",
            "ONH-201",
        ],
    );
    assert_eq!(json(dir, "waiting")["outcome"], "incomplete");
    let list = why(dir, &[]).ok();
    let row = "  incomplete  ONH-201  waiting  -\n";
    assert_says(
        &list,
        &[
            row,
            "\n    the container got fewer GPUs than it requested\n",
        ],
    );
    container.waiting.set_env(&["NVIDIA_VISIBLE_DEVICES=0,2"]);
    container.hook(&fake).ok();
    assert_eq!(json(dir, "waiting")["outcome"], "ok");
    // The fake driver has no libraries for graphics.
    container.waiting.set_env(&[
        "NVIDIA_VISIBLE_DEVICES=0",
        "NVIDIA_DRIVER_CAPABILITIES=graphics",
    ]);
    container.hook(&fake).ok();
    let text = why(dir, &["waiting"]).ok();
    let says =
        "\nthe container got its GPUs, but not all driver libraries that it requested: injected ";
    assert!(text.contains(says) && text.contains("ONH-210"), "{text}");
}

fn a_failure_is_kept() {
    let container = Container::new(&["NVIDIA_VISIBLE_DEVICES=9"]);
    let dir = container.dir.path();
    let stderr = container.hook(FakeDriver::shared()).failed(1);
    assert!(stderr.contains(" (ONH-030)\nhint: "), "{stderr}");
    container.poststop();
    let text = why(dir, &["waiting"]).ok();
    assert_says(
        &text,
        &["\nthe hook failed: NVIDIA_VISIBLE_DEVICES requests \"9\""],
    );
    assert_says(&text, &["\nnumber: ONH-030; ", "\n  hint: "]);
    assert_eq!(json(dir, "waiting")["findings"][0]["id"], "ONH-030");
}

/// Returns the fields of an entry of the journal; none of ours contains a line feed.
fn entry(journal: &UnixDatagram) -> Vec<(String, String)> {
    let mut bytes = [0; 65536];
    let length = journal.recv(&mut bytes).unwrap();
    let text = String::from_utf8(bytes[..length].to_vec()).unwrap();
    text.lines()
        .map(|line| line.split_once('=').unwrap())
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

fn the_journal_has_it() {
    let container = Container::new(&[]);
    let dir = container.dir.path();
    fs::create_dir(dir.join("journal")).unwrap();
    // The path of a socket has at most 107 bytes.
    let short = tempfile::tempdir().unwrap();
    symlink(dir.join("journal"), short.path().join("j")).unwrap();
    let journal = UnixDatagram::bind(short.path().join("j/socket")).unwrap();
    journal
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let annotations = serde_json::json!({"annotations": {
        "io.kubernetes.pod.name": "cuda-0\nPRIORITY=0", "io.kubernetes.pod.namespace": "lab",
        "io.kubernetes.container.name": "main", "other": 3,
    }});
    container
        .waiting
        .set_spec(&["NVIDIA_VISIBLE_DEVICES=9"], &annotations);
    container.hook(FakeDriver::shared()).failed(1);
    let fields = entry(&journal);
    let field = |name: &str| {
        let values: Vec<_> = fields
            .iter()
            .filter(|(other, _)| other == name)
            .map(|(_, value)| value.as_str())
            .collect();
        assert_eq!(values.len(), 1, "{name} in {fields:?}");
        values[0]
    };
    for (name, value) in [
        ("PRIORITY", "3"),
        ("SYSLOG_IDENTIFIER", "oci-nvidia-hook"),
        ("CONTAINER_ID_FULL", "waiting"),
        ("CONTAINER_NAME", "main"),
        ("ONH_POD", "cuda-0\\nPRIORITY=0"),
        ("ONH_NAMESPACE", "lab"),
        ("ONH_STAGE", "prestart"),
        ("ONH_FINDING", "ONH-030"),
    ] {
        assert_eq!(field(name), value);
    }
    assert!(
        field("MESSAGE").starts_with("waiting: NVIDIA_VISIBLE_DEVICES requests \"9\""),
        "{fields:?}"
    );
    assert!(field("ONH_HINT").contains(" 0, 1"), "{fields:?}");

    container.waiting.set_env(ALL_GPUS);
    container.hook(FakeDriver::shared()).ok();
    let done = entry(&journal);
    assert!(
        done.contains(&("PRIORITY".into(), "6".into()))
            && done[0].1.starts_with("waiting: injected "),
        "{done:?}"
    );
    // journalctl finds the entry with the UUID of each GPU.
    let gpus = done.iter().filter(|(name, _)| name == "ONH_GPU");
    let uuids: Vec<_> = gpus.map(|(_, uuid)| uuid.as_str()).collect();
    assert!(
        uuids.len() == 2 && uuids.iter().all(|uuid| done[0].1.contains(uuid)),
        "{done:?}"
    );
    assert!(
        uuids.iter().all(|uuid| uuid.starts_with("GPU-")),
        "{uuids:?}"
    );

    // The socket is not read, and its queue is full: the container does not wait for it.
    while journal_is_free(&short.path().join("j/socket")) {}
    let started = Instant::now();
    container.waiting.set_env(&["NVIDIA_VISIBLE_DEVICES=9"]);
    container.hook(FakeDriver::shared()).failed(1);
    assert!(started.elapsed() < Duration::from_secs(5));
}

fn journal_is_free(path: &Path) -> bool {
    let socket = UnixDatagram::unbound().unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.send_to(b"A=b\n", path).is_ok()
}

/// The deadline for the container's files ends the hook. A process that waits for a FUSE server handles no signal, so it is killed.
fn a_start_that_the_deadline_ends() {
    let container = Container::new(ALL_GPUS);
    let dir = container.dir.path();
    container.hook(FakeDriver::shared()).ok();
    let file = dir.join("run/containers/waiting.json");
    let stored = || serde_json::from_slice::<Value>(&fs::read(&file).unwrap()).unwrap();
    for (signal, outcome, says) in [
        (
            "SIGALRM",
            "failed",
            "the hook failed: the container was not set up within 20 seconds\n",
        ),
        (
            "SIGKILL",
            "unfinished",
            "the hook did not finish: it still runs, or it was stopped after a timeout: it opened the",
        ),
    ] {
        let again = Waiting::start(dir, &container.waiting.rootfs, ALL_GPUS, "");
        let mut hook = isolated_shell(dir);
        hook.args([
            "strace",
            "-f",
            "-o",
            "/dev/null",
            "-e",
            "trace=move_mount",
            "-e",
        ]);
        hook.arg(format!("inject=move_mount:signal={signal}:when=1"))
            .arg(HOOK);
        let ran = again.call(&mut hook, &FakeDriver::shared().config);
        assert_ne!(ran.code, Some(0), "{signal}: {ran:?}");
        assert_eq!(
            ran.stderr.contains("(ONH-049)\nhint: run \"findmnt\""),
            signal == "SIGALRM",
            "{ran:?}"
        );
        let text = why(dir, &["waiting"]).ok();
        assert_says(&text, &[says, "requested: all GPUs", "ONH-049"]);
        assert_eq!(stored()["outcome"], outcome, "{signal}");
    }
}

/// A container gets its GPUs whatever occupies the path of the record, and nothing is written there.
fn a_run_directory_of_another_user() {
    let container = Container::new(ALL_GPUS);
    let dir = container.dir.path();
    let target = scratch();
    fs::create_dir(dir.join("run")).unwrap();
    symlink(target.path(), dir.join("run/containers")).unwrap();
    container.hook(FakeDriver::shared()).ok();
    fs::remove_file(dir.join("run/containers")).unwrap();
    fs::create_dir(dir.join("run/containers")).unwrap();
    chmod(dir.join("run/containers"), 0o777);
    container.hook(FakeDriver::shared()).ok();
    assert_eq!(fs::read_dir(dir.join("run/containers")).unwrap().count(), 0);
    chmod(dir.join("run/containers"), 0o755);
    symlink(
        target.path().join("x"),
        dir.join("run/containers/waiting.json"),
    )
    .unwrap();
    container.hook(FakeDriver::shared()).ok();
    assert_eq!(fs::read_dir(target.path()).unwrap().count(), 0);
    assert!(
        dir.join("run/containers/waiting.json")
            .symlink_metadata()
            .unwrap()
            .is_file()
    );
    // Files of other users are not trusted either.
    chmod(dir.join("run/containers/waiting.json"), 0o666);
    assert!(
        why(dir, &["waiting"])
            .failed(1)
            .contains("unknown container or pod \"waiting\" (ONH-053)")
    );
}

/// In a user namespace, root is an unprivileged user of the host: its directory is used, and nothing of root's.
fn a_user_has_records_of_his_own() {
    let dir = scratch();
    chmod(dir.path(), 0o755);
    let spec = serde_json::json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=nonsense"]}, "root": {"path": "r"},
    });
    write_file(dir.path().join("config.json"), spec.to_string());
    let state = serde_json::json!({"id": "c1", "pid": 1, "bundle": dir.path()}).to_string();
    // The user cannot enter the directory in which the tests are built.
    let hook = dir.path().join("oci-nvidia-hook");
    fs::copy(HOOK, &hook).unwrap();
    copy_nvml_program(dir.path());
    let script = format!(
        "mount -t tmpfs run /run; mkdir -p -m 755 /run/user; mkdir -m 700 /run/user/7777; chown 7777 /run/user/7777; \
         mount --bind '{}' /mnt; \
         as() {{ setpriv --reuid 7777 --regid 7777 --clear-groups \"$@\"; }}; \
         printf '%s' '{}' | sed 's,{0},/mnt,' | as unshare -Ur /mnt/oci-nvidia-hook prestart || echo failed; \
         as /mnt/oci-nvidia-hook why c1; ls -A /run; find /run/user/7777 -name '*.json' -user 7777",
        dir.path().display(),
        state
    );
    let text = run(Command::new("unshare").args(["-m", "sh", "-uc", &script])).ok();
    assert!(text.starts_with("failed\ncontainer c1\n"), "{text}");
    assert_says(
        &text,
        &["the hook failed: NVIDIA_DRIVER_CAPABILITIES: \"nonsense\""],
    );
    assert!(
        text.ends_with("\nuser\n/run/user/7777/oci-nvidia-hook/containers/c1.json\n"),
        "{text}"
    );
}

/// crun reports that a hook failed, but not why; `why` does, also after Podman has removed the container.
fn containers_of_podman(cgroup: Cgroup) {
    let podman = Podman::with_image();
    let script = format!(
        "start='run --network=none --log-driver=none'; \
         \"$@\" $start --rm --name broken -e NVIDIA_VISIBLE_DEVICES=9 {IMAGE} true 2>&1 || echo \"failed: $?\"; \
         echo ---; {HOOK} why broken; echo ---; \
         \"$@\" $start -d --name web -e NVIDIA_VISIBLE_DEVICES=1 {IMAGE} sleep 600 >/dev/null; {HOOK} why web; echo ---; \
         \"$@\" $start --name plain {IMAGE} true; {HOOK} why plain; echo ---; {HOOK} why; \
         \"$@\" rm -f -t 0 web plain >/dev/null"
    );
    let text = podman.shell(cgroup, &script).ok();
    let parts: Vec<_> = text.split("---\n").collect();
    let [podmans, broken, web, plain, list] = parts[..] else {
        panic!("{text}")
    };
    assert_says(podmans, &["failed: 12"]);
    if matches!(cgroup, Cgroup::WithCrun) {
        assert_says(podmans, &["crun: error executing hook"]);
        assert_lacks(podmans, &["ONH-030", "requests"]);
    }
    assert_says(broken, &[" (broken)\nat prestart, ", "\nnumber: ONH-030; "]);
    let reason = "\nthe hook failed: NVIDIA_VISIBLE_DEVICES requests \"9\"";
    assert_says(broken, &[reason, "\n  hint: "]);
    assert_says(web, &[" (web)\nat prestart, ", "\n  GPU 1: "]);
    assert_says(web, &["\nthe container got what it requested: injected "]);
    assert_lacks(web, &["GPU 0: "]);
    let nothing = "\nthe container requests no GPU: NVIDIA_VISIBLE_DEVICES is not set\n";
    assert_says(plain, &[" (plain)", nothing]);
    let lines: Vec<_> = list.lines().collect();
    assert_eq!(lines.len(), 4, "{list}");
    assert_says(lines[1], &["  failed  ONH-030  ", "  broken"]);
    assert!(lines[3].ends_with("oci-nvidia-hook ps --all\""), "{list}");
}

/// Podman 4 ignores `--gpus`, all versions ignore resources in pod files, and compose providers ignore keys. The containers start without a
/// GPU, and nothing in config.json shows the request. As on a usual host, the file storage.conf names the storage, and not an option.
fn requests_that_podman_ignores() {
    let podman = Podman::with_image();
    let script = format!(
        "cp -r /etc/containers '{dir}/etc'; mount --bind '{dir}/etc' /etc/containers; \
         printf '[storage]\ndriver = \"vfs\"\ngraphroot = \"%s\"\nrunroot = \"%s\"\n' \"$3\" \"$5\" >/etc/containers/storage.conf; \
         start='run --network=none --log-driver=none'; \
         \"$@\" $start -d --name recorded -e NVIDIA_VISIBLE_DEVICES=1 {IMAGE} true >/dev/null; \
         \"$@\" $start --name gpus --gpus all {IMAGE} true && {HOOK} why gpus; echo ---; \
         \"$@\" $start --name compose --label io.podman.compose.project=p {IMAGE} true; {HOOK} why compose; echo ---; \
         \"$@\" $start --name argument {IMAGE} echo --gpus 1 >/dev/null; {HOOK} why argument; \
         \"$@\" rm -f -t 0 recorded gpus compose argument >/dev/null",
        dir = podman.dir.path().display()
    );
    let text = podman.shell(Cgroup::AsMounted, &script).ok();
    let parts: Vec<_> = text.split("---\n").collect();
    let [gpus, compose, argument] = parts[..] else {
        panic!("{text}")
    };
    let plain = "the container requests no GPU: NVIDIA_VISIBLE_DEVICES is not set";
    let version = status::podman_version();
    if version < Version(5, 0, 0) {
        let ignored = format!("{plain}, and Podman {version} ignores the option --gpus\n");
        assert_says(
            gpus,
            &[&ignored, "hint: use \"-e NVIDIA_VISIBLE_DEVICES=all\""],
        );
    } else {
        // Without a CDI spec, the option is refused.
        assert_eq!(gpus, "");
    }
    assert_says(
        compose,
        &[
            &format!("{plain}, and the compose provider "),
            "hint: add \"environment: ",
        ],
    );
    assert!(argument.ends_with(&format!("{plain}\n")), "{argument}");
}

fn no_records() {
    let dir = scratch();
    assert_eq!(
        why(dir.path(), &[]).ok(),
        "no container failed in the last hour; \"oci-nvidia-hook ps --all\" lists all\n"
    );
    let stderr = why(dir.path(), &["x\ny"]).failed(1);
    assert_says(
        &stderr,
        &["unknown container or pod \"x\\ny\" (ONH-053)\nhint: "],
    );
}

/// The list, a failure, a container that got its GPUs and one that lacks a part, and no failure.
fn what_a_person_reads() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    let lacks = serde_json::json!({
        "id": "ONH-201", "severity": "warning", "what": "GPU 1: nvmlDeviceGetUUID reports \"gpu is lost\" (15)",
        "why": "the container has fewer GPUs than the host", "fix": "see \"journalctl -k\" on the host",
    });
    let pod = serde_json::json!({
        "container": {"id": "b".repeat(64), "bundle": "/nowhere", "pod": {
            "name": "trainer-7c6bd5b9d4-x2x9p", "namespace": "machine-learning", "container": "main",
        }},
        "devices": [ps::gpu(0)], "findings": [lacks], "reason": "injected 12 files and 4 device nodes of driver 535.183.01",
    });
    let failed = serde_json::json!({
        "started": "2026-01-02T03:04:05.678Z", "reason": ps::finding()["what"], "findings": [ps::finding()],
        "asked": {"visible_devices": ["9"], "driver_capabilities": ["compute", "utility"]},
    });
    let recent = serde_json::json!({"reason": ps::finding()["what"], "findings": [ps::finding()]});
    let good = serde_json::json!({
        "started": "2026-01-02T03:04:05.678Z", "ended": "2026-01-02T04:00:00.000Z", "devices": [ps::gpu(0), ps::gpu(1)],
        "reason": "injected 12 files and 4 device nodes of driver 535.183.01",
        "steps": [{"name": "request", "milliseconds": 0.304}, {"name": "driver", "milliseconds": 1.25}],
    });
    let all = [
        (2, ps::record(&"d".repeat(64), "bad", "failed", recent)),
        (12, ps::record(&"b".repeat(64), "", "incomplete", pod)),
        (0, ps::record(&"c".repeat(64), "old", "failed", failed)),
        (0, ps::record(&"a".repeat(64), "web", "ok", good)),
    ];
    let why = |records: &[(u32, Value)], args: &[&str]| {
        // Another directory for each set of records.
        let mut command = ps::isolated(&dir.path().join(args.join("-")), &fake, records);
        command.arg("why").args(args);
        command
    };
    golden::check("why", "oci-nvidia-hook why", &why(&all, &[]));
    golden::check(
        "why-failed",
        "oci-nvidia-hook why old",
        &why(&all, &["old"]),
    );
    golden::check("why-ok", "oci-nvidia-hook why web", &why(&all, &["web"]));
    golden::check(
        "why-unknown",
        "oci-nvidia-hook why wep",
        &why(&all, &["wep"]),
    );
    golden::check(
        "why-no-failure",
        "oci-nvidia-hook why",
        &why(&all[2..], &["--color", "auto"]),
    );
    ps::remove_cgroups(dir.path());
}
