//! Runs `explain` on the input that real engines passed to hooks (`tests/fixtures/captures`).

use std::process::Command;

use serde_json::{Value, json};

use crate::Test;
use crate::support::{HOOK, run_with, scratch, source};

pub const TESTS: &[Test] = &[("captures::are_explained", &[], are_explained)];

fn are_explained() {
    let gpu = "GPU-00000000-1111-2222-3333-444444444444";
    let dir = scratch();
    let inventory = dir.path().join("inventory.json");
    let gpus = json!([{"uuid": gpu}, {"uuid": "GPU-other"}]);
    std::fs::write(&inventory, json!({"driver_version": "535.183.01", "gpus": gpus}).to_string()).unwrap();
    let config = dir.path().join("config.toml");
    std::fs::write(&config, "").unwrap();
    let mut seen = 0;
    for capture in std::fs::read_dir(source("tests/fixtures/captures")).unwrap().flatten() {
        let Ok(state) = std::fs::read_to_string(capture.path().join("state.json")) else { continue };
        let mut state: Value = serde_json::from_str(&state).unwrap();
        state["bundle"] = json!(capture.path());
        let mut hook = Command::new(HOOK);
        hook.arg("--config").arg(&config).args(["explain", "--json", "--inventory"]).arg(&inventory).env_clear();
        let said: Value = serde_json::from_str(&run_with(&mut hook, state.to_string().as_bytes()).ok()).unwrap();
        assert_eq!(said["outcome"], "inject", "{said}");
        let name = capture.file_name();
        let expected = if name == "kubelet-prestart" { json!([gpu]) } else { json!([gpu, "GPU-other"]) };
        assert_eq!(said["devices"], expected, "{name:?}");
        assert_eq!(said["request"]["driver_capabilities"], json!(["compute", "utility"]), "{name:?}");
        assert_eq!(said["container"]["pid"], state["pid"], "{name:?}");
        assert!(said["container"]["rootfs"].as_str().unwrap().ends_with("/merged"), "{name:?}");
        seen += 1;
    }
    assert_eq!(seen, 5);
}
