//! The commands of the program, and what a person reads on a terminal.

use std::process::Command;

use super::fake_host::{Fake, uuid};
use super::harness::Need;
use super::{AT_ONCE, GPU, Node, PROGRAM, ROOT, SOON, check, views};

tests! {
    ROOT => check_prints_what_run_offers, check_shows_the_health_that_the_kubelet_has, command_lines, bad_settings;
    &[Need::Root, Need::Program("script")] => what_a_person_reads, a_person_who_waits_sees_a_line;
}

fn check_prints_what_run_offers() {
    let fake = Fake::new(&["--gpus", "2", "--mig"]);
    let (code, text, errors) = check(&fake, &[]);
    assert_eq!((code, errors.as_str()), (Some(1), ""), "{text}");
    assert!(
        text.contains(&format!(
            "nvidia.com/gpu: 1 of 1 devices can be allocated\n  {} healthy",
            uuid(1)
        )),
        "{text}"
    );
    assert!(text.contains("nvidia.com/mig-1g.10gb: 1 of 1"), "{text}");
    let (_, json, _) = check(&fake, &["--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["resources"][0]["devices"][0]["id"], uuid(1));
    assert_eq!(json["resources"][0]["devices"][0]["health"], "Healthy");
    assert!(
        json["strategy"]["names"][0].is_string() && json["strategy"]["why"].is_string(),
        "{json}"
    );
    // The monitor runs in another directory.
    let mut command = Command::new(PROGRAM);
    command
        .args(["check", "--config", "config.toml"])
        .current_dir(fake.dir.path());
    assert_eq!(command.output().unwrap().status.code(), Some(1));
    fake.add(1, "fail=15");
    let (code, text, _) = check(&fake, &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("nvidia.com/gpu: 0 of 1 devices can be allocated"),
        "{text}"
    );
    std::fs::remove_file(fake.root.join("dev/nvidiactl")).unwrap();
    let (code, text, _) = check(&fake, &[]);
    assert_eq!(code, Some(3), "{text}");
    assert!(
        text.contains("ONH-074 error: ") && text.contains("  hint: "),
        "{text}"
    );
    // No pod would start, as the last line states.
    let (code, text, _) = check(&Fake::new(&["--gpus", "0"]), &[]);
    assert_eq!(
        (code, text.as_str()),
        (
            Some(1),
            "this node has no GPU to offer\na pod that requests a GPU would not start: the node has no GPU\n"
        )
    );
}

/// The plugin's messages about its command line have the form of the hook's, and its common options stand anywhere.
fn command_lines() {
    let fake = Fake::new(&["--gpus", "1"]);
    let run = |arguments: &[&str]| {
        let output = Command::new(PROGRAM).args(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    let dir = fake.dir.path().display().to_string();
    let document = fake.dir.path().join("bad.yaml").display().to_string();
    std::fs::write(&document, "version: v1\nsharing: [\n").unwrap();
    let missing = format!("{dir}/missing.yaml");
    for (arguments, code, message, hint) in rows! {
        &["chek"][..], 2, "invalid command line: unrecognized subcommand \"chek\" (ONH-002)",
            "a similar subcommand exists: \"check\"; see \"oci-nvidia-kubelet-plugin --help\"";
        &["check", "--replicas", "x"], 2, "invalid command line: --replicas has an invalid value; it must be ",
            "run \"oci-nvidia-kubelet-plugin run --help\"";
        &["check", "--config-file", &document], 1, "(ONH-075)", "";
        &["check", "--config-file", &missing], 1, "no such file or directory (ENOENT) (ONH-0", "";
        &["clear", "GPU-0", "--run-dir", &dir], 1,
            "cannot clear \"GPU-0\" in the running plugin: the kubelet plugin does not run on this host (ONH-001)", "start the plugin with";
    } {
        let (found, stdout, stderr) = run(arguments);
        let is_code = (found, stdout.as_str()) == (Some(code), "");
        assert!(is_code, "{arguments:?}: {stderr}");
        let (first, second) = stderr.split_once('\n').unwrap();
        assert!(first.starts_with("oci-nvidia-kubelet-plugin: "), "{stderr}");
        assert!(first.contains(message), "{arguments:?}: {stderr}");
        let is_hint = hint.is_empty() || second.starts_with(&format!("hint: {hint}"));
        assert!(is_hint && second.lines().count() <= 1, "{stderr}");
        assert!(!stderr.contains("os error"), "{stderr}");
    }
    // Without a command: help and an error.
    let (code, stdout, stderr) = run(&[]);
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    assert!(
        stderr.contains("\nUsage: ")
            && stderr.contains(": invalid command line: a command is missing (ONH-002)\n"),
        "{stderr}"
    );
    let config = fake.config.to_str().unwrap();
    for arguments in [
        &["--config", config, "--color", "always", "--debug", "check"][..],
        &["check", "--config", config, "--color", "always", "--debug"],
    ] {
        let (code, stdout, log) = run(arguments);
        assert!(
            code == Some(1) && stdout.contains(" \u{1b}[32mhealthy\u{1b}[0m"),
            "{stdout}"
        );
        for text in [
            format!(": read \"{config}\""),
            format!(": driver root {:?}", fake.root),
        ] {
            assert!(log.contains(&text), "{text}: {log}");
        }
        assert!(log.contains(": the driver was asked for "), "{log}");
    }
    let help = run(&["--help"]).1;
    assert!(
        help.contains("Exit status:") && help.lines().all(|line| line.len() <= 80),
        "{help}"
    );
    assert_eq!(
        run(&["--version"]).1,
        concat!(
            "oci-nvidia-kubelet-plugin ",
            env!("CARGO_PKG_VERSION"),
            "\n"
        )
    );
}

/// The driver reports nothing wrong about a GPU that had an XID, and only the running plugin remembers it.
fn check_shows_the_health_that_the_kubelet_has() {
    let mut node = Node::start(&["--gpus", "2"], &["--replicas", "2"]);
    let run = node.fake.dir.path().join("run").display().to_string();
    node.wait("the list", SOON, GPU, 4, 4);
    let checked = |node: &Node, options: &[&str]| {
        let (code, text, _) = check(&node.fake, &[&["--run-dir", &run], options].concat());
        (code, text)
    };
    let (code, text) = checked(&node, &["--replicas", "2"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("\nthe running plugin reports this health to the kubelet\n"),
        "{text}"
    );
    assert!(
        text.contains("\na pod that requests a GPU may or may not start: whether the engine reads CDI specs is not known: "),
        "this machine has no engine: {text}"
    );
    node.fake.event("xid 1 79");
    node.wait("the unhealthy GPU", AT_ONCE, GPU, 2, 4);
    let (code, text) = checked(&node, &["--replicas", "2"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("nvidia.com/gpu: 2 of 4 devices can be allocated\n"),
        "{text}"
    );
    assert!(
        text.contains(&format!(
            "  {}::0 and 1 more unhealthy: XID 79 (since 20",
            uuid(1)
        )),
        "{text}"
    );
    // With other settings, the health also comes from the running plugin, and a note names the difference.
    let (code, json) = checked(&node, &["--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (code, &json["running"]["active"]),
        (Some(1), &true.into()),
        "{json}"
    );
    assert!(json["verdict"]["starts"].is_null(), "{json}");
    let resource = &json["resources"][0];
    assert_eq!(resource["registered"], true, "{json}");
    assert_eq!(
        (
            &resource["devices"][0]["why"],
            &resource["devices"][0]["since"]
        ),
        (&().into(), &().into()),
        "{json}"
    );
    assert_eq!(
        (
            &resource["devices"][1]["health"],
            &resource["devices"][1]["why"]
        ),
        (&"Unhealthy".into(), &"XID 79".into())
    );
    assert!(
        resource["devices"][1]["since"]
            .as_str()
            .unwrap()
            .ends_with('Z'),
        "{json}"
    );
    assert_eq!(
        (&json["findings"][0]["id"], &json["findings"][0]["severity"]),
        (&"ONH-605".into(), &"note".into())
    );
    // A plugin that is killed leaves its socket.
    node.plugin.kill().unwrap();
    node.plugin.wait().unwrap();
    let (code, text) = checked(&node, &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains(
            "\nthe kubelet plugin does not run on this host: this is what it would offer\n"
        ),
        "{text}"
    );
}

/// The strategy is configured, because the default depends on the engine of the node.
fn what_a_person_reads() {
    let of = |fake: &Fake| {
        let mut command = Command::new(PROGRAM);
        command
            .args([
                "check",
                "--device-list-strategy=envvar",
                "--run-dir=/nowhere",
                "--config",
            ])
            .arg(&fake.config);
        command
    };
    let fake = Fake::new(&["--gpus", "2"]);
    views::check("check", "oci-nvidia-kubelet-plugin check", &of(&fake));
    fake.add(1, "fail=15");
    views::check(
        "check-unhealthy",
        "oci-nvidia-kubelet-plugin check",
        &of(&fake),
    );
    views::check(
        "check-no-gpu",
        "oci-nvidia-kubelet-plugin check",
        &of(&Fake::new(&["--gpus", "0"])),
    );
}

fn a_person_who_waits_sees_a_line() {
    let fake = Fake::new(&["--gpus", "1"]);
    let mut check = Command::new(PROGRAM);
    check
        .args(["check", "--run-dir=/nowhere", "--config"])
        .arg(&fake.config);
    let terminal = views::View::Terminal { color: false };
    let quick = views::text(&terminal.output(&check).stdout);
    assert!(!quick.contains("waiting for NVML"), "{quick}");
    let conf = fake.file("nvml.conf");
    std::fs::write(
        &conf,
        format!(
            "init-delay-ms 2000\n{}",
            std::fs::read_to_string(&conf).unwrap()
        ),
    )
    .unwrap();
    let slow = views::text(&terminal.output(&check).stdout);
    assert!(
        slow.starts_with("waiting for NVML, at most 15 s; press Ctrl-C to stop\n"),
        "{slow}"
    );
    assert_eq!(slow.matches("waiting for NVML").count(), 1, "{slow}");
    let piped = views::View::Pipe.output(&check);
    assert_eq!(views::text(&piped.stderr), "");
}

fn bad_settings() {
    let fake = Fake::new(&["--gpus", "1"]);
    for (option, value, says) in rows! {
        "--replicas", "0", "--replicas has an invalid value; it must be a number from 1 to 100 (ONH-002)";
        "--mig-strategy", "both", "it must be \"none\", \"single\" or \"mixed\" (ONH-002)";
        "--device-list-strategy", "cdi", "it must be a list of \"envvar\", ";
        "--device-list-strategy", "host-path,envvar", "and \"host-path\" alone (ONH-002)";
        "--nvidia-driver-root", "x", "--nvidia-driver-root has an invalid value; it must be an absolute path (ONH-002)";
        "--resources", "name=a.b/c", "\"a.b/c\" has no model";
        "--quiet-period", "0", "it must be a number of seconds from 1 to 600 (ONH-002)";
    } {
        let (code, text, errors) = check(&fake, &[option, value]);
        assert_eq!((code, text.as_str()), (Some(2), ""), "{errors}");
        assert!(errors.contains(says), "{errors}");
    }
    let config = std::fs::read_to_string(&fake.config).unwrap();
    std::fs::write(
        &fake.config,
        format!("{config}[kubelet-plugin]\nreplicas = \"2\"\n"),
    )
    .unwrap();
    let (code, _, errors) = check(&fake, &[]);
    assert_eq!(code, Some(1));
    assert!(
        errors.contains(
            "line 4: kubelet-plugin.replicas has an invalid value; it must be a number (ONH-005)"
        ),
        "{errors}"
    );
    let long = fake.dir.path().join("x".repeat(100));
    let ran = Command::new(PROGRAM)
        .args(["run", "--kubelet-dir"])
        .arg(long)
        .output()
        .unwrap();
    let errors = String::from_utf8(ran.stderr).unwrap();
    assert!(
        ran.status.code() == Some(1) && errors.contains("107"),
        "{errors}"
    );
}
