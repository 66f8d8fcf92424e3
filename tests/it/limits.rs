//! `[devices]` in config.toml. If a list were misread, a container could get a GPU, so an invalid entry is never ignored
//! silently.

use serde_json::Value;

use crate::driver::{ALL_GPUS, FakeDriver, MASKABLE_PROC, NEEDS, Waiting};
use crate::support::{assert_says, read};

tests! {
    NEEDS => an_entry_of_no_form_is_an_error, an_entry_that_matches_nothing,
        capabilities_of_a_denied_mig_device, hints_have_no_ids_of_other_gpus;
}

/// Returns the UUIDs of the devices that the container would get.
fn devices(explanation: &Value) -> Vec<&str> {
    explanation["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|uuid| uuid.as_str().unwrap())
        .collect()
}

/// Each of these entries once gave the container the GPU that it was meant to deny.
fn an_entry_of_no_form_is_an_error() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let container = Waiting::debian(ALL_GPUS, "");
    for entry in ["H100", "0-2"] {
        fake.configure(&format!("[devices]\ndeny = [{entry:?}]"));
        let stderr = container.hook(&fake.config).failed(1);
        let config = read(&fake.config);
        let line = config
            .lines()
            .position(|line| line.starts_with("deny"))
            .unwrap()
            + 1;
        assert!(
            stderr.contains(&format!(
                "{:?} line {line}: devices.deny has an invalid value",
                fake.config
            )) && stderr.contains(&format!("{entry:?} is not a valid entry"))
                && stderr.contains("(ONH-005)"),
            "{entry:?}: {stderr}"
        );
        assert_eq!(fake.plan(ALL_GPUS)["outcome"], "error", "{entry:?}");
        let found = fake.run(&["doctor", "--json"]);
        assert!(
            found.stdout.contains("devices.deny has an invalid value") && found.code == Some(3),
            "{entry:?}: {found:?}"
        );
        assert!(
            container
                .output("ls /dev")
                .split_whitespace()
                .all(|name| !name.starts_with("nvidia")),
            "{entry:?}"
        );
    }
}

fn an_entry_that_matches_nothing() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    fake.configure("[devices]\ndeny = [\"1\", \"7\"]");
    let container = Waiting::debian(ALL_GPUS, "");
    let ran = container.hook(&fake.config);
    let says = "deny in the [devices] table of config.toml contains \"7\", which matches no GPU of this host";
    assert_says(&ran.stderr, &[says, "(ONH-107)\nhint: "]);
    assert_eq!(ran.stderr.matches("ONH-107").count(), 1, "{}", ran.stderr);
    ran.ok();
    let explanation = fake.plan(ALL_GPUS);
    assert_eq!(
        (
            explanation["findings"][0]["id"].as_str(),
            devices(&explanation).len()
        ),
        (Some("ONH-107"), 1)
    );
    let check = |fake: &FakeDriver| {
        let outcomes =
            crate::json_schema::part("doctor", &fake.run(&["doctor", "--json"]).stdout, "checks");
        let limits = outcomes
            .iter()
            .find(|outcome| outcome["check"] == "limits")
            .unwrap()
            .clone();
        (
            limits["status"].as_str().unwrap().to_owned(),
            limits["what"].as_str().unwrap().to_owned(),
        )
    };
    assert_eq!(check(&fake), ("warning".to_owned(), says.to_owned()));
    fake.configure("[devices]\ndeny = [\"1\"]");
    let ok = "[devices] in config.toml denies these GPUs and MIG devices: 1";
    assert_eq!(check(&fake), ("ok".to_owned(), ok.to_owned()));
}

/// A privileged container that monitors MIG devices gets the capability nodes of its GPUs' instances, except nodes of denied
/// instances.
fn capabilities_of_a_denied_mig_device() {
    let fake = FakeDriver::new(&["--gpus", "2", "--mig"]);
    for (deny, nodes, files) in rows! {
        "", "nvidia-cap12 nvidia-cap13 nvidia-cap2 nvidia-cap21 nvidia-cap22", "gi1 gi2";
        "0:1", "nvidia-cap12 nvidia-cap13 nvidia-cap2", "gi1";
        "MIG-51eed000-0001*", "nvidia-cap2 nvidia-cap21 nvidia-cap22", "gi2";
    } {
        fake.configure(&format!(
            "[devices]\ndeny = [{}]",
            if deny.is_empty() {
                String::new()
            } else {
                format!("{deny:?}")
            }
        ));
        let env = ["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_MIG_MONITOR_DEVICES=all"];
        let container = Waiting::debian(&env, MASKABLE_PROC);
        container.set_privileged_env(&env);
        container.hook(&fake.config).ok();
        assert_eq!(
            container.output("cd /dev/nvidia-caps; echo *").trim(),
            nodes,
            "{deny}"
        );
        assert_eq!(
            container
                .output("cd /proc/driver/nvidia/capabilities/gpu0/mig; echo *")
                .trim(),
            files,
            "{deny}"
        );
        container.output("cat /proc/driver/nvidia/capabilities/mig/monitor");
    }
}

/// The messages appear in a pod's events, which the author of the pod can read.
fn hints_have_no_ids_of_other_gpus() {
    let fake = FakeDriver::new(&["--gpus", "3"]);
    fake.configure("[devices]\ndeny = [\"1\"]");
    for asked in ["9", "1"] {
        let explanation = fake.plan(&[&format!("NVIDIA_VISIBLE_DEVICES={asked}")]);
        let finding = &explanation["findings"][0];
        let hint = finding["fix"].as_str().unwrap();
        assert!(hint.contains(" 0, 2, all, none"), "{hint}");
        assert!(
            !finding.to_string().contains("GPU-") && !finding.to_string().contains("0000:"),
            "{finding}"
        );
    }
}
