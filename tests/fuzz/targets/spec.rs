//! config.json of a bundle, what it asks for, and what it would get.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use oci_nvidia_hook::config::Config;
use oci_nvidia_hook::host::decide;
use oci_nvidia_hook::oci::SpecView;
use oci_nvidia_hook::oci::spec_view::parse;
use oci_nvidia_hook::request::{Decision, GpuRequest, Hint, VisibleDevices, from_spec, hint, mounts};

use super::{check_error, check_findings, sample_inventory};

/// Under the defaults, and under a configuration that listens to everything.
pub fn run(data: &[u8]) {
    let spec = match parse(data, Path::new("/bundle")) {
        Ok(spec) => spec,
        Err(error) => return check_error(&error),
    };
    assert!(spec.rootfs.is_absolute() && spec.env.keys().all(|name| !name.contains('=')), "{spec:?}");
    let open = Config {
        accept_volume_mounts: true,
        swarm_resource: vec!["DOCKER_RESOURCE_GPU".to_owned(), "DOCKER_RESOURCE_MIG".to_owned()],
        ..Config::default()
    };
    let closed = Config { accept_envvar_when_unprivileged: false, ..Config::default() };
    for config in [Config::default(), open, closed] {
        let decision = match from_spec(&spec, &config) {
            Ok(decision) => decision,
            Err(error) => {
                assert_ne!(hint(&spec), Hint::No, "a container that asks for nothing is not stopped: {error:?}");
                check_error(&error);
                continue;
            }
        };
        match (hint(&spec), &decision) {
            (Hint::No, decision) => assert!(matches!(decision, Decision::Nothing(_)), "no hint, and {decision:?}"),
            (Hint::Perhaps, decision) if config.swarm_resource.is_empty() => {
                assert!(matches!(decision, Decision::Nothing(_)), "no swarm variable counts, and {decision:?}");
            }
            _ => {}
        }
        if let Decision::Gpus(request) = decision {
            check_request(&spec, &config, &request);
        }
    }
}

fn check_request(spec: &SpecView, config: &Config, request: &GpuRequest) {
    let by_env = request.asked_by != mounts::ORIGIN;
    assert!(!by_env || spec.privileged || config.accept_envvar_when_unprivileged, "it may not ask: {request:?}");
    if let VisibleDevices::List(names) = &request.devices {
        check_names(names);
        assert!(!names.is_empty(), "a list of nothing");
    }
    check_names(&request.imex_channels);
    for name in request.imex_channels.iter().filter(|_| !by_env) {
        assert!(Path::new(name).components().all(|part| matches!(part, Component::Normal(_))), "{name:?} climbs");
    }
    assert!(request.requirements.len() <= 32);
    assert!(spec.privileged || request.mig_config.is_none() && request.mig_monitor.is_none(), "{request:?}");
    let supported = config.supported_driver_capabilities;
    assert!(request.capabilities.iter().all(|capability| supported.has(capability)), "{request:?}");

    let inventory = sample_inventory();
    match decide(request, &inventory, config) {
        Ok((devices, findings)) => {
            let uuids: BTreeSet<_> = devices.iter().map(|device| device.uuid()).collect();
            assert_eq!(uuids.len(), devices.len(), "each device once");
            assert!(request.devices != VisibleDevices::None || devices.is_empty(), "none is none");
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
