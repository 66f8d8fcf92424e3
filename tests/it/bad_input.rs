//! Invalid input: the hook prints one line and a hint, exits with 1, and changes nothing.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use crate::driver::FakeDriver;
use crate::support::{HOOK, Need, Ran, assert_says, read, run_with, scratch, write_file};

tests! {
    &[] => stdin_that_is_not_a_state, fifty_megabytes_of_stdin, broken_spec, crun_reports_its_working_directory,
        no_request_no_config, bad_config, no_driver, wrong_command_line, a_name_that_is_not_utf_8;
    &[Need::Root, Need::Program("cc")] => no_process, unknown_user, module_and_libraries_differ, nvml_hangs,
        nvml_reports_an_error, unknown_gpu, missing_node;
}

fn hook(args: &[&str], stdin: &[u8]) -> Ran {
    run_with(Command::new(HOOK).args(args).env_clear(), stdin)
}

/// A state whose spec requests `devices`, with a rootfs that must stay empty.
fn state(dir: &Path, devices: &str) -> Vec<u8> {
    std::fs::create_dir_all(dir.join("rootfs")).unwrap();
    let spec = serde_json::json!({
        "process": {"env": [format!("NVIDIA_VISIBLE_DEVICES={devices}")]}, "root": {"path": "rootfs"},
    });
    write_file(dir.join("config.json"), spec.to_string());
    serde_json::json!({"id": "c", "pid": std::process::id(), "bundle": dir})
        .to_string()
        .into_bytes()
}

/// Checks that stderr is one error line with all of `says`, then one hint, and nothing else.
#[track_caller]
fn one_error(ran: Ran, says: &[&str]) {
    let stderr = ran.failed(1);
    let lines: Vec<_> = stderr.lines().collect();
    assert!(
        lines
            .first()
            .is_some_and(|line| line.starts_with("oci-nvidia-hook: ")),
        "{stderr}"
    );
    for text in says {
        assert!(lines[0].contains(text), "{text:?} is not in\n{stderr}");
    }
    // Podman takes these words for its own errors.
    assert!(!stderr.to_lowercase().contains("not found"), "{stderr}");
    assert!(
        lines.len() <= 2 && lines.get(1).is_none_or(|line| line.starts_with("hint: ")),
        "{stderr}"
    );
}

fn stdin_that_is_not_a_state() {
    for (stdin, says) in [
        (&b""[..], "the container state on stdin: it is empty"),
        (b"\xff\xfe", "the container state on stdin"),
        (b"hello", "expected value"),
        (b"{\"id\":\"c\",\"pid\":1,\"bundle\":\"/x\"", "EOF"),
        (b"{\"id\":\"c\",\"pid\":1}", "no \"bundle\" (ONH-003)"),
    ] {
        one_error(hook(&["prestart"], stdin), &[says]);
    }
}

fn no_process() {
    let fake = FakeDriver::shared();
    let dir = scratch();
    state(dir.path(), "all");
    let state = serde_json::json!({"id": "c", "bundle": dir.path()}).to_string();
    one_error(
        hook(
            &["--config", fake.config.to_str().unwrap(), "prestart"],
            state.as_bytes(),
        ),
        &["no \"pid\""],
    );
}

fn fifty_megabytes_of_stdin() {
    one_error(
        hook(&["prestart"], &vec![b' '; 50 << 20]),
        &["stdin", "larger than 16 MiB"],
    );
}

fn broken_spec() {
    let dir = scratch();
    let state = state(dir.path(), "all");
    let config = dir.path().join("config.json");
    for (text, says) in [
        ("", "it is empty"),
        ("{\"root\":", "EOF"),
        ("{\"process\":{}}", "no \"root.path\""),
        (
            "{\"process\":{\"env\":[\"FOO\"]},\"root\":{\"path\":\"r\"}}",
            "\"FOO\", which is not NAME=VALUE",
        ),
    ] {
        write_file(&config, text);
        one_error(hook(&["prestart"], &state), &["config.json", says]);
    }
    std::fs::remove_file(&config).unwrap();
    one_error(
        hook(&["prestart"], &state),
        &["config.json", "it does not exist"],
    );
    std::fs::create_dir(&config).unwrap();
    one_error(
        hook(&["prestart"], &state),
        &["config.json", "not a regular file"],
    );
}

/// crun reports the bundle "/" if the container has a user namespace and device nodes. Its arguments contain the bundle.
fn crun_reports_its_working_directory() {
    let dir = scratch();
    state(dir.path(), "void");
    let text = serde_json::json!({"id": "x", "pid": 1, "bundle": "/"}).to_string();
    let create = |bundle: &str| {
        let mut crun = Command::new("sh");
        crun.args([
            "-c",
            &format!("'{HOOK}' prestart; exit $?"),
            "crun",
            "create",
        ])
        .args(bundle.split(' '))
        .arg("x");
        run_with(crun.env_clear(), text.as_bytes())
    };
    let bundle = dir.path().to_str().unwrap();
    for option in [
        format!("--bundle {bundle}"),
        format!("--bundle={bundle}"),
        format!("-b {bundle}"),
    ] {
        assert_eq!(create(&option).ok(), "", "{option}");
    }
    for option in ["--bundle .", "--no-pivot", "--bundle /nowhere"] {
        one_error(create(option), &["config.json", "it does not exist"]);
    }
}

/// An error in config.toml stops containers that request GPUs, and no others.
fn no_request_no_config() {
    let dir = scratch();
    let config = dir.path().join("config.toml");
    write_file(&config, "this is no toml");
    let config = config.to_str().unwrap();
    let ran = hook(
        &["--config", config, "prestart"],
        &state(dir.path(), "void"),
    );
    assert_eq!((ran.stderr.as_str(), ran.code), ("", Some(0)));
    one_error(
        hook(&["--config", config, "prestart"], &state(dir.path(), "all")),
        &["config.toml"],
    );
}

fn bad_config() {
    let dir = scratch();
    let state = state(dir.path(), "all");
    let path = dir.path().join("config.toml");
    for (text, says) in rows! {
        "a = ", &["config.toml"][..];
        "[nvidia-container-cli]\nno-cgroups = \"yes\"\n", &["config.toml", "2", "no-cgroups", "true or false"];
        "\n\naccept-nvidia-visible-devices-envvar-when-unprivileged = 1\n", &["3", "unprivileged", "true or false"];
        "[oci-nvidia-hook]\nnvml-timeout = -3\n", &["2", "nvml-timeout"];
        "supported-driver-capabilities = \"compute,typo\"\n", &["supported-driver-capabilities", "\"typo\""];
    } {
        write_file(&path, text);
        one_error(
            hook(&["--config", path.to_str().unwrap(), "prestart"], &state),
            says,
        );
    }
    std::fs::remove_file(&path).unwrap();
    one_error(
        hook(&["--config", path.to_str().unwrap(), "prestart"], &state),
        &["config.toml", "it does not exist"],
    );
}

/// Three different causes that all look like a missing library.
fn no_driver() {
    let dir = scratch();
    let state = state(dir.path(), "all");
    let root = dir.path().join("host");
    let device = root.join("sys/bus/pci/devices/0000:01:00.0");
    std::fs::create_dir_all(root.join("sys/bus/pci/devices")).unwrap();
    let config = dir.path().join("config.toml");
    write_file(
        &config,
        format!("[nvidia-container-cli]\nroot = \"{}\"\n", root.display()),
    );
    let args = ["--config", config.to_str().unwrap(), "prestart"];
    one_error(hook(&args, &state), &["(ONH-010)"]);
    std::fs::create_dir_all(&device).unwrap();
    write_file(device.join("vendor"), "0x10de\n");
    write_file(device.join("class"), "0x030200\n");
    one_error(hook(&args, &state), &["(ONH-011)"]);
    let proc = root.join("proc/driver/nvidia");
    std::fs::create_dir_all(&proc).unwrap();
    write_file(
        proc.join("version"),
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.1  x\n",
    );
    one_error(
        hook(&args, &state),
        &["the kernel module of driver 550.1 is loaded, but libnvidia-ml is missing below"],
    );
    write_file(&config, "[nvidia-container-cli]\nroot = \"/nowhere\"\n");
    one_error(hook(&args, &state), &["\"/nowhere\"", "(ONH-014)"]);
    assert_eq!(
        std::fs::read_dir(dir.path().join("rootfs"))
            .unwrap()
            .count(),
        0
    );
}

/// Covers an update without a reboot, and a module that was never loaded.
fn module_and_libraries_differ() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let version = fake.root.join("proc/driver/nvidia/version");
    let text = read(&version);
    write_file(&version, text.replace("535.183.01", "550.54.14"));
    one_error(
        with_fake(&fake, "all"),
        &[
            "the loaded kernel module has version 550.54.14, and the libraries",
            "have version 535.183.01",
        ],
    );

    std::fs::remove_dir_all(fake.root.join("proc")).unwrap();
    std::fs::remove_file(fake.root.join("dev/nvidiactl")).unwrap();
    let device = fake.root.join("sys/bus/pci/devices/0000:01:00.0");
    std::fs::create_dir_all(&device).unwrap();
    write_file(device.join("vendor"), "0x10de\n");
    write_file(device.join("class"), "0x030200\n");
    let ran = with_fake(&fake, "all");
    assert_says(&ran.stderr, &["hint: load it with \"modprobe nvidia\""]);
    one_error(ran, &["(ONH-011)"]);
}

fn with_fake(fake: &FakeDriver, devices: &str) -> Ran {
    let dir = scratch();
    let ran = hook(
        &["--config", fake.config.to_str().unwrap(), "prestart"],
        &state(dir.path(), devices),
    );
    assert_eq!(
        std::fs::read_dir(dir.path().join("rootfs"))
            .unwrap()
            .count(),
        0,
        "the container is untouched"
    );
    ran
}

fn unknown_user() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    fake.configure("user = \"root:vidoe\"");
    one_error(
        with_fake(&fake, "all"),
        &["root:vidoe", "unknown group \"vidoe\""],
    );
    fake.configure("user = \"nobody-here\"");
    one_error(with_fake(&fake, "all"), &["unknown user \"nobody-here\""]);
}

fn nvml_hangs() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    fake.configure("[oci-nvidia-hook]\nnvml-timeout = 1");
    fake.set_nvml(|old| old + "\ninit-hang\n");
    let start = std::time::Instant::now();
    one_error(with_fake(&fake, "all"), &["1 s (ONH-016)"]);
    assert!(start.elapsed().as_secs() < 10);
}

fn nvml_reports_an_error() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    for (code, id) in [
        ("9", "(ONH-011)"),
        ("18", "(ONH-013)"),
        ("4", "(ONH-019)"),
        ("999", "(ONH-018)"),
    ] {
        fake.remove_from_nvml("init-error");
        fake.set_nvml(|old| {
            format!(
                "{old}
init-error {code}
"
            )
        });
        one_error(with_fake(&fake, "all"), &[id, "nvmlInit_v2"]);
    }
    // A user who has no permission to open the nodes: the process really runs as that user.
    let fake = FakeDriver::new(&["--gpus", "1", "--dev-mode", "0660", "--dev-group", "video"]);
    fake.configure("user = \"nobody\"");
    one_error(with_fake(&fake, "all"), &["(ONH-019)"]);
}

fn unknown_gpu() {
    let fake = FakeDriver::shared();
    for devices in ["9", "GPU-deadbeef", "bogus", "0,7"] {
        let ran = with_fake(fake, devices);
        assert!(ran.stderr.contains(" 0, "), "{}", ran.stderr);
        one_error(ran, &["NVIDIA_VISIBLE_DEVICES", "(ONH-030)"]);
    }
}

/// NVIDIA's stack starts the container with one GPU less and prints nothing.
fn missing_node() {
    let fake = FakeDriver::new(&["--gpus", "3"]);
    std::fs::remove_file(fake.root.join("dev/nvidia1")).unwrap();
    one_error(
        with_fake(&fake, "all"),
        &[
            "requests all GPUs",
            "\"/dev/nvidia1\"",
            "is missing",
            "(ONH-021)",
        ],
    );
    // The same if NVML counts the GPU nevertheless.
    fake.set_nvml(|old| old + "\ncount-all\n");
    one_error(
        with_fake(&fake, "all"),
        &["\"/dev/nvidia1\"", "is missing", "(ONH-021)"],
    );
    one_error(
        with_fake(&fake, "1"),
        &["\"/dev/nvidia1\"", "is missing", "(ONH-021)"],
    );
}

fn wrong_command_line() {
    let bare = hook(&[], b"").failed(2);
    assert_says(
        &bare,
        &["\nCommands:\n  ps ", "\nCalled by engines:\n  prestart, "],
    );
    assert!(
        bare.ends_with("\noci-nvidia-hook: a command is missing (ONH-002)\nhint: run \"oci-nvidia-hook help\"\n"),
        "{bare}"
    );
    assert_eq!(hook(&["poststop"], b"not even json").ok(), "");
}

fn a_name_that_is_not_utf_8() {
    let mut check = Command::new(HOOK);
    check
        .args(["cdi", "check", "--json", "--spec-dir"])
        .arg(OsStr::from_bytes(b"/\xff"))
        .env_clear();
    let ran = run_with(&mut check, b"");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let document: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        document["groups"][0]["spec_dirs"][0], "/\u{fffd}",
        "{ran:?}"
    );
}
