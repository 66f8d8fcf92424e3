//! A container that an engine creates, with the variables and mounts of its image.

use std::sync::Arc;

use kubelet_plugin::cdi_specs::DEVICE_PLUGIN;
use kubelet_plugin::model::InSpecs;
use kubelet_plugin::nri::grant::{Grant, Known, grant, may_ask};
use kubelet_plugin::proto::nri::CreateContainerRequest;
use nvidia_host::config::{Config, Limits};
use prost::Message;

use super::shared::{check_error, check_findings, sample_inventory};

/// Decides what the container gets, with and without a driver. It only gets devices of the specs.
pub fn run(data: &[u8]) {
    let Ok(CreateContainerRequest {
        container: Some(container),
        ..
    }) = CreateContainerRequest::decode(data)
    else {
        return;
    };
    let inventory = sample_inventory();
    let gpus = inventory.gpus.iter().map(|gpu| gpu.uuid.clone());
    let migs = inventory.gpus.iter().flat_map(|gpu| &gpu.mig_devices);
    let devices = gpus.chain(migs.map(|mig| mig.uuid.clone())).collect();
    let in_specs = InSpecs {
        devices: Arc::new(devices),
        imex_channels: vec![0, 7],
        ..InSpecs::default()
    };
    for inventory in [Some(&inventory), None] {
        let known = Known {
            inventory,
            limits: &Limits::default(),
            in_specs: &in_specs,
            mps: &[],
        };
        let granted = grant(&container, &Config::default(), known);
        if !may_ask(&container) {
            assert!(matches!(granted, Ok(Grant::Nothing)), "{granted:?}");
        }
        match granted {
            Ok(Grant::Nothing) => {}
            Ok(Grant::Unchanged(finding)) => check_findings(&[finding]),
            Ok(Grant::Devices(names, findings)) => {
                check_findings(&findings);
                for name in names {
                    let is_gpu = DEVICE_PLUGIN
                        .uuid(&name)
                        .is_some_and(|uuid| in_specs.devices.contains(uuid));
                    let is_channel = in_specs
                        .imex_channels
                        .iter()
                        .any(|channel| DEVICE_PLUGIN.imex_name(*channel) == name);
                    assert!(is_gpu || is_channel, "{name:?}");
                }
            }
            Err(error) => check_error(&error),
        }
    }
}
