//! The edit of config.json for nvidia-container-runtime: the hook reads it from stdin and prints it with additions.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::driver::{ALL_GPUS, FakeDriver};
use crate::json_schema::fields;
use crate::own_nodes::NODES_OF_THE_HOST;
use crate::support::{
    HOOK, Need, Ran, assert_says, private_dir, read, run_with, scratch, write_file,
};

const NEEDS_DRIVER: &[Need] = &[Need::Root, Need::Program("cc")];

tests! {
    &[] => no_request_is_the_same_bytes;
    NEEDS_DRIVER => nothing_is_printed_on_an_error, a_rootfs_that_is_not_there_yet, what_is_not_ours_stays;
}

pub fn edit_config(config: &Path, spec: &str) -> Ran {
    run_with(
        Command::new(HOOK)
            .arg("--config")
            .arg(config)
            .arg("edit-config")
            .env_clear(),
        spec.as_bytes(),
    )
}

/// A config.json in the format of an engine, with values that only other programs would write.
pub fn spec(rootfs: &Path, env: &[&str]) -> String {
    let (rootfs, env) = (rootfs.display(), json!(env));
    format!(
        "{{ \"zeta\" : 1e400,\n \"ociVersion\":\"1.0.2-dev\", \"root\":{{\"path\":\"{rootfs}\"}},\n\
         \"process\":{{\"env\":{env},\"new\":18446744073709551616,\"user\":{{\"uid\":1000,\"additionalGids\":[7]}}}},\n\
         \"mounts\":[{{\"destination\":\"/proc\",\"type\":\"proc\"}}],\n\
         \"hooks\":{{\"createRuntime\":null,\"later\":[0.10]}},\n\
         \"linux\":{{\"resources\":{{\"devices\":[{{\"allow\":false,\"access\":\"rwm\"}}],\"x\":-0.0}}}},\"alpha\":\"\\u00e9\"}}\n "
    )
}

fn no_request_is_the_same_bytes() {
    let dir = scratch();
    // An error in config.toml does not stop a container that requests nothing.
    let config = dir.path().join("config.toml");
    write_file(&config, "nonsense = ");
    for env in [
        &[][..],
        &["NVIDIA_VISIBLE_DEVICES=void"],
        &["NVIDIA_VISIBLE_DEVICES="],
    ] {
        let spec = spec(dir.path(), env);
        assert_eq!(edit_config(&config, &spec).ok(), spec);
    }
}

fn nothing_is_printed_on_an_error() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let private = private_dir();
    let log = private.path().join("log");
    fake.configure(&format!("debug = \"{}\"", log.display()));
    let gpu_9 = spec(dir.path(), &["NVIDIA_VISIBLE_DEVICES=9"]);
    let no_array = spec(dir.path(), &["NVIDIA_VISIBLE_DEVICES=0"])
        .replace("\"later\"", "\"createRuntime\":{},\"later\"");
    for (spec, says) in rows! {
        "", "cannot read the container's spec on stdin: it is empty";
        "{\"process\":", "cannot read the container's spec on stdin: EOF";
        "{}", "no \"root.path\"";
        &gpu_9, "requests \"9\"";
        &no_array, "cannot add to \"hooks.createRuntime\": it is not an array";
    } {
        let ran = edit_config(&fake.config, spec);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{ran:?}");
        assert!(ran.stderr.contains(says), "{ran:?}");
    }
    let log = read(log);
    assert_says(&log, &[": error: ", "requests \"9\"", "it is not an array"]);
    // If writing fails, nothing is printed, however short.
    let script = format!(
        "'{HOOK}' --config '{}' edit-config >/dev/full",
        fake.config.display()
    );
    for spec in [
        &spec(dir.path(), &["NVIDIA_VISIBLE_DEVICES=0"]),
        r#"{"root":{"path":"/r"},"process":{}}"#,
    ] {
        run_with(Command::new("sh").args(["-c", &script]), spec.as_bytes()).failed(1);
    }
}

/// Podman 5 names an empty directory for a container with a user namespace. The layout of the image is not known then, so files
/// are placed at the paths of the host, and the hook entry does the rest when the rootfs exists.
fn a_rootfs_that_is_not_there_yet() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let edited = edit_config(
        &fake.config,
        &spec(dir.path(), &["NVIDIA_VISIBLE_DEVICES=0"]),
    )
    .ok()
    .replace("1e400", "0");
    let edited: Value = serde_json::from_str(&edited).unwrap();
    let destinations = fields(&edited["mounts"], "destination");
    assert!(
        destinations.contains(&"/usr/lib/x86_64-linux-gnu/libcuda.so.535.183.01"),
        "{destinations:?}"
    );
    let args = &edited["hooks"]["createRuntime"][0]["args"];
    let has_library = |path: &str| {
        args.as_array()
            .unwrap()
            .windows(2)
            .any(|pair| pair[0] == "--library" && pair[1] == path)
    };
    assert!(
        has_library("/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
        "{args}"
    );
}

fn what_is_not_ours_stays() {
    let (dir, fake) = (
        scratch(),
        FakeDriver::new(&["--gpus", "1", "--dev-mode", "0660", "--dev-group", "video"]),
    );
    let before = spec(dir.path(), ALL_GPUS);
    let after = edit_config(&fake.config, &before).ok();
    assert_eq!(edit_config(&fake.config, &after).ok(), after, "idempotent");
    for (from, to) in [
        ("{ \"zeta\" : 1e400,\n ", "{ \"zeta\" : 1e400,\n "),
        (
            "\"new\":18446744073709551616,\"user\":{\"uid\":1000,\"additionalGids\":[7",
            "\"new\":18446744073709551616,\"user\":{\"uid\":1000,\"additionalGids\":[7,44]",
        ),
        ("\"later\":[0.10]", "\"later\":[0.10]"),
        ("\"x\":-0.0", "\"x\":-0.0"),
        ("\"alpha\":\"\\u00e9\"}\n ", "\"alpha\":\"\\u00e9\"}\n "),
    ] {
        let to = to.replace("44", &video().to_string());
        assert!(
            before.contains(from) && after.contains(&to),
            "{to} is not in\n{after}"
        );
    }
    let (old, new): (Value, Value) = (
        serde_json::from_str(&before.replace("1e400", "0")).unwrap(),
        serde_json::from_str(&after.replace("1e400", "0")).unwrap(),
    );
    for key in ["zeta", "ociVersion", "root", "alpha"] {
        assert_eq!(old[key], new[key]);
    }
    assert_eq!(old["process"]["env"], new["process"]["env"]);
    assert_eq!(old["mounts"][0], new["mounts"][0]);
    let node = &new["linux"]["devices"][0];
    assert_eq!(
        (&node["fileMode"], &node["uid"], &node["gid"]),
        (&json!(0o666), &json!(0), &json!(video())),
        "{node}"
    );
    fake.configure(NODES_OF_THE_HOST);
    let new: Value = serde_json::from_str(
        &edit_config(&fake.config, &before)
            .ok()
            .replace("1e400", "0"),
    )
    .unwrap();
    assert_eq!(new["linux"]["devices"][0]["fileMode"], 0o660, "{new}");
}

/// The number of the group that owns the nodes.
pub fn video() -> u32 {
    let group = crate::support::sh("getent group video | cut -d: -f3").ok();
    group.trim().parse().unwrap()
}
