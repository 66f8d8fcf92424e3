//! Describes what the plugin offers to the kubelet, for `check` and for the hook's `doctor`. Pure.

use std::time::{Instant, SystemTime};

use plugin_api::control::{Offered, OfferedDevice, OfferedResource, Unhealthy};

use crate::model::{Resource, ResourceDevice};
use crate::node::Node;

/// Describes the devices in the list of the kubelet. `is_live` reports whether the kubelet has a resource, by name, and `now` is one moment of
/// two clocks.
#[must_use]
pub fn offered(
    list: &[Resource],
    is_live: impl Fn(&str) -> bool,
    node: &Node,
    now: (Instant, SystemTime),
) -> Offered {
    let resource = |resource: &Resource| OfferedResource {
        name: resource.name.clone(),
        is_live: is_live(&resource.name),
        devices: resource
            .devices
            .iter()
            .map(|device| offered_device(device, node, now))
            .collect(),
    };
    Offered {
        resources: list.iter().map(resource).collect(),
        driver: None,
        spec: None,
    }
}

fn offered_device(
    device: &ResourceDevice,
    node: &Node,
    (now, time): (Instant, SystemTime),
) -> OfferedDevice {
    let since = node
        .unhealthy_since(&device.gpu)
        .and_then(|since| time.checked_sub(now.saturating_duration_since(since)));
    let since = since.map(|since| humantime::format_rfc3339_seconds(since).to_string());
    let unhealthy = device.unhealthy.clone().map(|why| Unhealthy { why, since });
    OfferedDevice {
        id: device.id.clone(),
        gpu: device.gpu.clone(),
        unhealthy,
    }
}
