use super::*;
use crate::capability::{Capabilities, Capability};
use crate::config::Limits;
use crate::device_id;
use crate::feature::{Feature, Features};
use crate::inventory::select::tests::inventory as sample;
use crate::inventory::{ExcludedGpu, UnlistedMig};
use crate::require::Requirement;
use base::report::{ErrorReport, render};

/// Two GPUs, and a third in MIG mode with two MIG devices.
fn inventory() -> Inventory {
    let mut inventory = Inventory {
        driver_version: "535.183.01".into(),
        cuda_version: "12.2".into(),
        ..sample()
    };
    for gpu in &mut inventory.gpus {
        (gpu.compute_capability, gpu.brand) = (format!("{}.0", 7 + gpu.index), "Tesla".into());
    }
    inventory
}

fn request(devices: &str) -> GpuRequest {
    GpuRequest {
        devices: device_id::parse(devices).unwrap(),
        asked_by: "NVIDIA_VISIBLE_DEVICES".into(),
        capabilities: Capabilities::new(&[Capability::Compute, Capability::Utility]),
        requirements: Vec::new(),
        mig_config: None,
        mig_monitor: None,
        imex_channels: Vec::new(),
        features: Features::default(),
        remarks: Vec::new(),
        omit: crate::capability::Omit::default(),
    }
}

fn requiring(devices: &str, text: &str) -> GpuRequest {
    let requirement = Requirement {
        variable: "NVIDIA_REQUIRE_CUDA".into(),
        text: text.into(),
    };
    GpuRequest {
        requirements: vec![requirement],
        ..request(devices)
    }
}

/// Returns the UUIDs and the numbers of the findings, or the number of the error.
fn outcome(
    request: &GpuRequest,
    inventory: &Inventory,
    config: &Config,
) -> Result<(Vec<String>, Vec<String>), String> {
    match decide(request, inventory, config) {
        Ok((devices, findings)) => Ok((
            devices
                .iter()
                .map(|device| device.uuid().to_owned())
                .collect(),
            findings
                .iter()
                .map(|finding| finding.kind.id().to_owned())
                .collect(),
        )),
        Err(error) => Err(ErrorReport::new(&error).kind.id().to_owned()),
    }
}

#[track_caller]
fn findings(request: &GpuRequest, inventory: &Inventory) -> Vec<String> {
    outcome(request, inventory, &Config::default()).unwrap().1
}

#[test]
fn a_denied_feature_is_refused() {
    let request = GpuRequest {
        features: [Feature::Gds, Feature::Mofed].into_iter().collect(),
        ..request("0")
    };
    for (denied, refused) in [(Feature::Mofed, true), (Feature::Nvswitch, false)] {
        let devices = Limits {
            denied_features: [denied].into_iter().collect(),
            ..Limits::default()
        };
        let config = Config {
            devices,
            ..Config::default()
        };
        let outcome = outcome(&request, &inventory(), &config);
        assert_eq!(
            outcome.is_err_and(|id| id == "ONH-032"),
            refused,
            "{denied:?}"
        );
    }
}

#[test]
fn the_selection_and_the_limits_are_asked() {
    let config = Config {
        devices: Limits {
            deny: vec!["1".into()],
            ..Limits::default()
        },
        ..Config::default()
    };
    let all = [
        "GPU-00000000",
        "GPU-00000001",
        "GPU-00000002",
        "MIG-20",
        "MIG-21",
    ]
    .map(str::to_owned);
    assert_eq!(
        outcome(&request("0"), &inventory(), &config),
        Ok((all[..1].to_vec(), vec![]))
    );
    assert_eq!(
        outcome(&request("1"), &inventory(), &config),
        Err("ONH-032".into())
    );
    assert_eq!(
        outcome(&request("7"), &inventory(), &config),
        Err("ONH-030".into())
    );
    assert_eq!(
        outcome(&request("all"), &inventory(), &Config::default()),
        Ok((all.to_vec(), vec![]))
    );
    let nowhere = Config {
        devices: Limits {
            deny: vec!["7".into()],
            ..Limits::default()
        },
        ..Config::default()
    };
    assert_eq!(
        outcome(&request("0"), &inventory(), &nowhere).unwrap().1,
        ["ONH-107"],
        "an entry without a GPU"
    );
}

#[test]
fn a_requirement_is_checked_for_each_gpu() {
    let warning = Config {
        require: Require::Warn,
        ..Config::default()
    };
    for (devices, text, holds) in [
        ("0", "cuda>=12.2", true),
        ("0", "cuda>=12.3", false),
        ("0", "driver>=535", true),
        ("0", "driver>=536", false),
        ("0", "brand=tesla", true),
        ("0", "brand=geforce", false),
        ("1", "arch>=8", true),
        ("0", "arch>=8", false),
        ("0,1", "arch>=8", false),
        ("1,2", "arch>=8", true),
        ("2:0,2:1", "arch>=9", true),
        // Without a GPU, the driver is compared, and unknown properties of GPUs are not.
        ("none", "cuda>=12.2", true),
        ("none", "cuda>=12.3", false),
        ("none", "arch>=99", true),
    ] {
        let request = requiring(devices, text);
        let found = outcome(&request, &inventory(), &Config::default());
        assert_eq!(
            found.clone().err(),
            (!holds).then(|| "ONH-034".to_owned()),
            "{devices} {text}"
        );
        let (given, findings) = outcome(&request, &inventory(), &warning).unwrap();
        let is_warned = findings.contains(&"ONH-204".to_owned());
        assert!(
            is_warned != holds && given.is_empty() == (devices == "none"),
            "{devices} {text}: {findings:?}"
        );
    }
    let unknown = Inventory {
        cuda_version: String::new(),
        ..inventory()
    };
    assert!(
        outcome(&requiring("0", "cuda>=99"), &unknown, &Config::default()).is_ok(),
        "an unknown property"
    );
    let error = decide(
        &requiring("0,1", "arch>=8"),
        &inventory(),
        &Config::default(),
    )
    .unwrap_err();
    assert!(
        render(&error).contains("GPU 0") && !render(&error).contains("GPU 1"),
        "{}",
        render(&error)
    );
    let error = decide(
        &requiring("none", "cuda>=99"),
        &inventory(),
        &Config::default(),
    )
    .unwrap_err();
    assert!(render(&error).contains("the host"), "{}", render(&error));
}

#[test]
fn a_whole_gpu_in_mig_mode_is_reported() {
    let compute = request("2");
    assert_eq!(findings(&compute, &inventory()), ["ONH-230"]);
    assert_eq!(findings(&request("0"), &inventory()), Vec::<String>::new());
    assert_eq!(
        findings(&request("2,2:0"), &inventory()),
        Vec::<String>::new(),
        "it gets one of them"
    );
    assert_eq!(findings(&request("2,0"), &inventory()), ["ONH-230"]);
    let utility = GpuRequest {
        capabilities: Capabilities::new(&[Capability::Utility]),
        ..compute.clone()
    };
    assert_eq!(
        findings(&utility, &inventory()),
        Vec::<String>::new(),
        "no program computes"
    );
    for managing in [
        GpuRequest {
            mig_config: Some("all".into()),
            ..compute.clone()
        },
        GpuRequest {
            mig_monitor: Some("all".into()),
            ..compute.clone()
        },
    ] {
        assert_eq!(findings(&managing, &inventory()), Vec::<String>::new());
    }
    let what = |inventory: &Inventory, devices: &str| {
        let (_, findings) = decide(&request(devices), inventory, &Config::default()).unwrap();
        findings
            .into_iter()
            .map(|finding| format!("{}; {}", finding.what, finding.fix))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        what(&inventory(), "2"),
        [
            "GPU 2 is in MIG mode and is given without its MIG devices; request its MIG devices, for example 2:0 or MIG-20"
        ]
    );
    let mut empty = inventory();
    empty.gpus[2].mig_devices.clear();
    let says = "GPU 2 is in MIG mode and has no MIG device; run \"nvidia-smi mig -i 2 -cgi 0 -C\", or leave MIG mode \
                with \"nvidia-smi -i 2 -mig 0\"";
    assert_eq!(what(&empty, "2"), [says]);
    assert_eq!(what(&empty, "all"), [says]);
    // NVML lists none of its MIG devices, because they have no nodes. The selection reports that for "all".
    let nodes = vec!["nvidia-caps/nvidia-cap21".to_owned()];
    empty.gpus[2].unlisted_mig = vec![UnlistedMig {
        gpu_instance: 2,
        compute_instance: 0,
        nodes,
    }];
    let text = what(&empty, "2");
    assert!(
        matches!(&*text, [one] if one.starts_with("GPU 2 is given without its MIG devices, because ")),
        "{text:?}"
    );
    let ids = findings(&request("all"), &empty);
    assert!(
        ids.len() == 1 && !ids.contains(&"ONH-230".to_owned()),
        "{ids:?}"
    );
}

#[test]
fn mig_management_needs_whole_gpus() {
    for (devices, is_refused) in [
        ("2:0", true),
        ("0,2:0", true),
        ("all", false),
        ("2", false),
        ("0", false),
        ("none", false),
    ] {
        for (config, monitor) in [
            (Some("all"), None),
            (None, Some("all")),
            (Some("all"), Some("all")),
        ] {
            let (mig_config, mig_monitor) = (config.map(str::to_owned), monitor.map(str::to_owned));
            let request = GpuRequest {
                mig_config,
                mig_monitor,
                ..request(devices)
            };
            let found = outcome(&request, &inventory(), &Config::default()).err();
            assert_eq!(found, is_refused.then(|| "ONH-038".to_owned()), "{devices}");
        }
        assert!(
            outcome(&request(devices), &inventory(), &Config::default()).is_ok(),
            "{devices}"
        );
    }
    let request = GpuRequest {
        mig_monitor: Some("all".into()),
        ..request("2:0")
    };
    let text = render(&decide(&request, &inventory(), &Config::default()).unwrap_err());
    assert!(
        text.starts_with(
            "NVIDIA_MIG_MONITOR_DEVICES=all cannot be combined with selected MIG devices"
        ),
        "{text}"
    );
}

#[test]
fn an_excluded_gpu_is_not_given() {
    let uuid = Some("GPU-00000009".to_owned());
    let excluded = vec![ExcludedGpu {
        uuid,
        ..ExcludedGpu::default()
    }];
    let inventory = Inventory {
        excluded,
        ..inventory()
    };
    assert_eq!(
        outcome(&request("GPU-00000009"), &inventory, &Config::default()),
        Err("ONH-033".into())
    );
    assert_eq!(findings(&request("all"), &inventory), Vec::<String>::new());
}
