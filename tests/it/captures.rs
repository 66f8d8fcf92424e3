//! Runs `plan` on the input that real engines passed to hooks (`tests/fixtures/captures`).

use std::process::Command;

use nvidia_host::inventory::report::Report;
use nvidia_host::inventory::{BusId, Gpu, Inventory};
use serde_json::{Value, json};

use crate::support::{HOOK, run_with, scratch, source, write_file};

tests! {
    &[] => are_explained;
}

fn are_explained() {
    let gpu = "GPU-00000000-1111-2222-3333-444444444444";
    let dir = scratch();
    let inventory = dir.path().join("inventory.json");
    let described = |index: u32, uuid: &str| Gpu {
        index,
        minor: index,
        uuid: uuid.to_owned(),
        bus_id: BusId {
            bus: index + 1,
            ..BusId::default()
        },
        model: String::new(),
        compute_capability: String::new(),
        brand: String::new(),
        mig_enabled: false,
        mig_devices: Vec::new(),
        unlisted_mig: Vec::new(),
    };
    let gpus = vec![described(0, gpu), described(1, "GPU-other")];
    let report = Report::from(&Inventory {
        driver_version: "535.183.01".into(),
        gpus,
        ..Inventory::default()
    });
    write_file(&inventory, serde_json::to_vec(&report).unwrap());
    let config = dir.path().join("config.toml");
    write_file(&config, "");
    let mut seen = 0;
    for capture in std::fs::read_dir(source("tests/fixtures/captures"))
        .unwrap()
        .flatten()
    {
        let Ok(state) = std::fs::read_to_string(capture.path().join("state.json")) else {
            continue;
        };
        let mut state: Value = serde_json::from_str(&state).unwrap();
        state["bundle"] = json!(capture.path());
        let mut hook = Command::new(HOOK);
        hook.arg("--config")
            .arg(&config)
            .args(["plan", "-", "--json", "--inventory"])
            .arg(&inventory)
            .env_clear();
        let said: Value =
            serde_json::from_str(&run_with(&mut hook, state.to_string().as_bytes()).ok()).unwrap();
        assert_eq!(said["outcome"], "inject", "{said}");
        let name = capture.file_name();
        let expected = if name == "kubelet-prestart" {
            json!([gpu])
        } else {
            json!([gpu, "GPU-other"])
        };
        assert_eq!(said["devices"], expected, "{name:?}");
        assert_eq!(
            said["request"]["driver_capabilities"],
            json!(["compute", "utility"]),
            "{name:?}"
        );
        assert_eq!(said["container"]["pid"], state["pid"], "{name:?}");
        assert!(
            said["container"]["rootfs"]
                .as_str()
                .unwrap()
                .ends_with("/merged"),
            "{name:?}"
        );
        seen += 1;
    }
    assert_eq!(seen, 5);
}
