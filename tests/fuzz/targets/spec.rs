//! config.json of a bundle, its request, and the resulting decision.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use cdi_spec::spec::{ContainerEdits, DeviceNode, Hook, Mount};
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::config::Config;
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::request::{nodes, select::decide};
use oci_nvidia_hook::testing::oci::SpecView;
use oci_nvidia_hook::testing::oci::device_rules::{DeviceRule, already_allowed};
use oci_nvidia_hook::testing::oci::gpu_nodes::characters;
use oci_nvidia_hook::testing::oci::spec_view::parse;
use oci_nvidia_hook::testing::plan::additions::{Additions, OciFacts};
use oci_nvidia_hook::testing::plan::request::{Decision, GpuRequest, Hint, from_spec, hint};

use super::{check_error, check_findings, sample_inventory};

/// Uses the defaults, and a configuration that accepts all kinds of requests.
pub fn run(data: &[u8]) {
    let spec = match parse(data, Path::new("/bundle")) {
        Ok(spec) => spec,
        Err(error) => return check_error(&error),
    };
    if let Ok(text) = std::str::from_utf8(data) {
        check_additions(text, &spec);
    }
    assert!(
        spec.rootfs.is_absolute() && spec.env.keys().all(|name| !name.contains('=')),
        "{spec:?}"
    );
    let open = Config {
        accept_volume_mounts: true,
        swarm_resource: vec![
            "DOCKER_RESOURCE_GPU".to_owned(),
            "DOCKER_RESOURCE_MIG".to_owned(),
        ],
        ..Config::default()
    };
    let closed = Config {
        accept_envvar_when_unprivileged: false,
        ..Config::default()
    };
    for config in [Config::default(), open, closed] {
        let decision = match from_spec(&spec, &config) {
            Ok(decision) => decision,
            Err(error) => {
                assert_ne!(
                    hint(&spec),
                    Hint::No,
                    "a container that asks for nothing is not stopped: {error:?}"
                );
                check_error(&error);
                continue;
            }
        };
        match (hint(&spec), &decision) {
            (Hint::No, decision) => assert!(
                matches!(decision, Decision::Nothing(_)),
                "no hint, and {decision:?}"
            ),
            (Hint::Perhaps, decision)
                if config.swarm_resource.is_empty()
                    && nodes::granted(&characters(&spec.devices)).is_none() =>
            {
                assert!(
                    matches!(decision, Decision::Nothing(_)),
                    "no swarm variable counts, and {decision:?}"
                );
            }
            _ => {}
        }
        if let Decision::Gpus(request) = decision {
            check_request(&spec, &config, &request);
        }
    }
}

/// With the additions, the result is still a config.json and contains each addition once, whatever the input.
fn check_additions(text: &str, spec: &SpecView) {
    let node = DeviceNode {
        path: "/dev/nvidia0".to_owned(),
        major: Some(195),
        minor: Some(0),
        file_mode: Some(0o660),
        ..DeviceNode::default()
    };
    let rest = RootfsEdits {
        egl_devices: 1,
        ..RootfsEdits::default()
    };
    let edits = ContainerEdits {
        device_nodes: vec![node],
        mounts: vec![Mount {
            host_path: "/lib/a".into(),
            container_path: "/lib/a".into(),
            ..Mount::default()
        }],
        hooks: vec![Hook {
            path: "/h".into(),
            args: rest.to_args().unwrap_or_default(),
            ..Hook::default()
        }],
        additional_gids: vec![44],
        ..ContainerEdits::default()
    };
    for in_user_namespace in [false, true] {
        let facts = OciFacts { in_user_namespace };
        let edited = Additions::new(&edits, spec, facts).apply(text.to_owned());
        let edited = match edited {
            Ok(edited) => edited,
            Err(error) => {
                check_error(&error);
                continue;
            }
        };
        let after = parse(edited.as_bytes(), Path::new("/bundle"))
            .unwrap_or_else(|error| panic!("{error:?}: {edited}"));
        let rule = DeviceRule {
            major: 195,
            minor: 0,
        };
        assert!(
            in_user_namespace || already_allowed(&after.device_rules, rule),
            "{edited}"
        );
        let node = after
            .devices
            .iter()
            .any(|device| device.path == Path::new("/dev/nvidia0"))
            || after
                .mounts
                .iter()
                .any(|mount| mount.destination == Path::new("/dev/nvidia0"));
        assert!(
            node && after.env == spec.env && after.rootfs == spec.rootfs,
            "{edited}"
        );
        let again = Additions::new(&edits, &after, facts).apply(edited.clone());
        assert_eq!(again.ok().as_ref(), Some(&edited), "twice is once");
    }
}

fn check_request(spec: &SpecView, config: &Config, request: &GpuRequest) {
    let by_mounts = request.asked_by.starts_with("a mount below ");
    let by_env = !by_mounts && !matches!(request.devices, VisibleDevices::Nodes(_));
    assert!(
        !by_env || spec.privileged || config.accept_envvar_when_unprivileged,
        "it may not ask: {request:?}"
    );
    if let VisibleDevices::Nodes(given) = &request.devices {
        assert!(
            !spec.privileged && nodes::granted(&characters(&spec.devices)).as_ref() == Some(given),
            "{request:?}"
        );
    }
    if let VisibleDevices::List(names) = &request.devices {
        check_names(names);
        assert!(!names.is_empty(), "a list of nothing");
    }
    check_names(&request.imex_channels);
    for name in request.imex_channels.iter().filter(|_| by_mounts) {
        assert!(
            Path::new(name)
                .components()
                .all(|part| matches!(part, Component::Normal(_))),
            "{name:?} climbs"
        );
    }
    assert!(request.requirements.len() <= 32);
    assert!(
        spec.privileged || request.mig_config.is_none() && request.mig_monitor.is_none(),
        "{request:?}"
    );
    let supported = config.supported_driver_capabilities;
    assert!(
        request
            .capabilities
            .iter()
            .all(|capability| supported.has(capability)),
        "{request:?}"
    );

    let inventory = sample_inventory();
    match decide(request, &inventory, config) {
        Ok((devices, findings)) => {
            let uuids: BTreeSet<_> = devices.iter().map(|device| device.uuid()).collect();
            assert_eq!(uuids.len(), devices.len(), "each device once");
            assert!(
                request.devices != VisibleDevices::None || devices.is_empty(),
                "none is none"
            );
            check_findings(&findings);
        }
        Err(error) => check_error(&error),
    }
}

fn check_names(names: &[String]) {
    let unique: BTreeSet<_> = names.iter().collect();
    assert_eq!(unique.len(), names.len(), "each name once: {names:?}");
    assert!(names.iter().all(|name| !name.is_empty()), "{names:?}");
}
