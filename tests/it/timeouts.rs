//! Timeouts: an engine kills a slow hook; before that, the hook reports what it waits for.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cache;
use crate::cdi::write_spec;
use crate::driver::{ALL_GPUS, FakeDriver, Image, NEEDS, Waiting};
use crate::golden::{SCRIPT, View};
use crate::support::{HOOK, Need, Ran, read, scratch, shell, source, write_file};

tests! {
    &[Need::Root, Need::Program("cc")] => every_hook_entry_has_one;
    NEEDS => a_call_that_waits_for_another;
    &[Need::Root, Need::Program("cc"), SCRIPT, Need::Programs(&["flock", "unshare"])] =>
        a_person_who_waits_sees_a_line;
}

/// kubelet gives a container 120 seconds to start.
const MOST: u64 = 60;

/// The timeouts of all hook entries in a JSON document: objects with a path and an environment.
fn entries(value: &Value) -> Vec<Option<u64>> {
    match value {
        Value::Object(fields) if fields.contains_key("path") && fields.contains_key("env") => {
            vec![fields.get("timeout").and_then(Value::as_u64)]
        }
        Value::Object(fields) => fields.values().flat_map(entries).collect(),
        Value::Array(items) => items.iter().flat_map(entries).collect(),
        _ => Vec::new(),
    }
}

fn every_hook_entry_has_one() {
    let fake = FakeDriver::shared();
    let dir = scratch();
    let spec_file = dir.path().join("nvidia.json");
    write_spec(fake, &spec_file);
    let config = json!({
        "ociVersion": "1.0.2", "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, "root": {"path": dir.path()},
    });
    let edited = fake.edit_config(&config.to_string()).ok();
    let spec = read(&spec_file);
    for (name, text) in [
        ("hooks.d", read(source("hooks.d/oci-nvidia-hook.json"))),
        ("cdi generate", spec.clone()),
        ("edit-config", edited),
    ] {
        let found = entries(&serde_json::from_str(&text).unwrap());
        assert!(!found.is_empty(), "{name} has no hook entry");
        for timeout in found {
            assert!(
                timeout.is_some_and(|seconds| (1..=MOST).contains(&seconds)),
                "{name}: {timeout:?}"
            );
        }
    }
    // Hook.timeout is as old as hooks in CDI, so every engine with CDI supports it.
    let spec: Value = serde_json::from_str(&spec).unwrap();
    assert_eq!(
        spec["cdiVersion"], "0.5.0",
        "hostPath of the fake driver's nodes takes this version"
    );
}

/// NVML hangs, and a first call holds the lock while it asks. A second call waits for the lock and gets the same error; it takes
/// no longer than the first one.
fn a_call_that_waits_for_another() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    fake.set_nvml(|text| format!("init-delay-ms 60000\n{text}"));
    fake.configure("[oci-nvidia-hook]\nnvml-timeout = 4");
    let (first, second) = (scratch(), scratch());
    let image = Image::new(first.path(), &["--layout", "debian"]);
    let env = ["NVIDIA_VISIBLE_DEVICES=all"];
    let waiting = [&first, &second].map(|dir| Waiting::start(dir.path(), &image.rootfs, &env, ""));
    let started = Instant::now();
    let hooks = waiting.each_ref().map(|container| {
        let mut hook = fake.command();
        let hook = hook.arg("prestart").env_clear();
        let mut hook = hook
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(
            &mut hook.stdin.take().unwrap(),
            container.state().as_bytes(),
        )
        .unwrap();
        hook
    });
    for hook in hooks {
        let output = hook.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("4 s (ONH-016)"), "{stderr}");
    }
    // It took 8 s when the time for the lock did not count.
    let took = started.elapsed();
    assert!(took < Duration::from_millis(7500), "{took:?}");
}

/// Runs a script on a terminal. `$0` is the hook, and `$1` its configuration.
fn on_terminal(fake: &FakeDriver, script: &str) -> Ran {
    let mut shell = Command::new("sh");
    View::Terminal { color: false }.run(shell.args(["-c", script, HOOK]).arg(&fake.config))
}

/// Returns the lines about a wait in the output of a terminal, which also has stderr.
fn waits(ran: &Ran) -> Vec<&str> {
    ran.stdout
        .lines()
        .filter(|line| line.contains("waiting for NVML"))
        .collect()
}

fn is_the_line(line: &str, limit: u32) -> bool {
    line == format!("waiting for NVML, at most {limit} s; press Ctrl-C to stop")
}

/// A person sees that a command is alive. Engines and scripts do not get the line: an engine can show it as an error of the container.
fn a_person_who_waits_sees_a_line() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    fake.configure("[oci-nvidia-hook]\nnvml-timeout = 20");
    fake.set_nvml(|text| format!("init-delay-ms 2000\n{text}"));

    let container = Waiting::debian(ALL_GPUS, "");
    let state = container.dir().join("state.json");
    write_file(&state, container.state());
    let started = Instant::now();
    let stage = on_terminal(
        &fake,
        &format!(
            "exec \"$0\" prestart --config \"$1\" <'{}'",
            state.display()
        ),
    );
    assert!(
        started.elapsed() >= Duration::from_secs(2),
        "the stage asks NVML"
    );
    assert_eq!(stage.ok(), "");

    // The other commands set the same notice.
    for (command, asks_nvml) in [
        ("info", true),
        ("prepare", true),
        ("files --libraries", false),
    ] {
        // Commands that may use the cached inventory.
        shell!(
            "rm -f $(grep -l '{}' /run/oci-nvidia-hook/inventory-*)",
            fake.root.display()
        );
        let ran = on_terminal(&fake, &format!("exec \"$0\" --config \"$1\" {command}"));
        match asks_nvml {
            true => assert!(
                matches!(waits(&ran)[..], [line] if is_the_line(line, 20)),
                "{command}: {ran:?}"
            ),
            false => assert!(waits(&ran).is_empty(), "{command}: {ran:?}"),
        }
    }
    let piped = fake.run(&["info"]);
    assert!(!piped.stderr.contains("waiting for NVML"), "{piped:?}");
    piped.ok();

    fake.set_nvml(|text| text.replace("init-delay-ms 2000", ""));
    let info = "\"$0\" --config \"$1\" info";
    assert!(waits(&on_terminal(&fake, info)).is_empty());
    // Another process asks NVML.
    let lock = format!("{}.lock", cache::kept(&fake).display());
    let ran = on_terminal(
        &fake,
        &format!("flock '{lock}' sleep 2 & sleep 0.5; {info}; wait"),
    );
    assert!(
        matches!(waits(&ran)[..], [line] if is_the_line(line, 20)),
        "{ran:?}"
    );
}
