//! Describes devices as the specifications of ResourceSlices. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, Device as ApiDevice, DeviceAttribute, DeviceCapacity, DeviceTaint,
    ResourcePool, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::devices::{CLIENTS, ClaimDevice, MEMORY, Value};
use crate::settings::values::TaintEffect;

/// The most devices in a slice. Slices without taints may have 128, but then the first taint would move devices to another slice.
const MAX_DEVICES: usize = 64;

/// The key of the taint of a device that does not work, without the domain, which is the name of the driver.
const UNHEALTHY: &str = "unhealthy";

/// What the slices of a node have in common.
#[derive(Clone, Debug)]
pub struct Owner<'a> {
    /// The name of the driver
    pub driver: &'a str,
    /// The name of the node, and of its pool of devices
    pub node: &'a str,
    /// What the taint of a device does that does not work
    pub effect: TaintEffect,
    /// Whether the API server stores taints. Without them, a device that does not work is not listed.
    pub has_taints: bool,
    /// Whether the API server stores that several claims can have a device. Without that, one claim has it.
    pub has_shares: bool,
}

/// Returns the key of the taint of devices that do not work.
#[must_use]
pub fn taint_key(driver: &str) -> String {
    format!("{driver}/{UNHEALTHY}")
}

/// Returns the specifications of the slices, with the generation 0.
#[must_use]
pub fn specs(devices: &[ClaimDevice], owner: &Owner<'_>) -> Vec<ResourceSliceSpec> {
    let is_listed = |device: &&ClaimDevice| {
        device.unhealthy.is_none() || owner.has_taints || owner.effect == TaintEffect::None
    };
    let listed: Vec<ApiDevice> = devices
        .iter()
        .filter(is_listed)
        .map(|device| api_device(device, owner))
        .collect();
    let parts: Vec<&[ApiDevice]> = listed.chunks(MAX_DEVICES).collect();
    let resource_slice_count = i64::try_from(parts.len()).unwrap_or(i64::MAX);
    let pool = ResourcePool {
        name: owner.node.to_owned(),
        generation: 0,
        resource_slice_count,
    };
    let spec = |part: &[ApiDevice]| ResourceSliceSpec {
        driver: owner.driver.to_owned(),
        node_name: Some(owner.node.to_owned()),
        pool: pool.clone(),
        devices: Some(part.to_vec()),
        ..ResourceSliceSpec::default()
    };
    parts.into_iter().map(spec).collect()
}

fn api_device(device: &ClaimDevice, owner: &Owner<'_>) -> ApiDevice {
    let attributes = device
        .attributes
        .iter()
        .map(|(name, value)| ((*name).to_owned(), attribute(value)));
    let share = if owner.has_shares {
        device.share()
    } else {
        None
    };
    let mut capacities = BTreeMap::new();
    for (name, value) in &device.capacity {
        let share = share.and_then(|memory| match *name {
            MEMORY => Some(memory),
            CLIENTS => Some(1),
            _ => None,
        });
        capacities.insert((*name).to_owned(), capacity(*value, share));
    }
    let taints = device
        .unhealthy
        .as_ref()
        .filter(|_| owner.has_taints)
        .map(|_| vec![taint(owner)]);
    ApiDevice {
        name: device.name.clone(),
        attributes: Some(attributes.collect()),
        allow_multiple_allocations: share.map(|_| true),
        capacity: Some(capacities).filter(|capacities| !capacities.is_empty()),
        taints,
        ..ApiDevice::default()
    }
}

/// The reason is not in the taint: it changes more often than the health, and its value is restricted to letters and digits. The health
/// service has it.
fn taint(owner: &Owner<'_>) -> DeviceTaint {
    let effect = owner.effect.name();
    DeviceTaint {
        key: taint_key(owner.driver),
        effect,
        time_added: None,
        value: None,
    }
}

fn attribute(value: &Value) -> DeviceAttribute {
    match value {
        Value::Text(text) => DeviceAttribute {
            string: Some(text.clone()),
            ..DeviceAttribute::default()
        },
        Value::Number(number) => DeviceAttribute {
            int: Some(*number),
            ..DeviceAttribute::default()
        },
        Value::Version(version) => DeviceAttribute {
            version: Some(version.clone()),
            ..DeviceAttribute::default()
        },
    }
}

/// Makes each claim of the device take its whole capacity. A device without one stays as it is: nothing could be counted.
pub(super) fn give_whole(device: &mut ApiDevice) {
    let Some(capacities) = &mut device.capacity else {
        return;
    };
    device.allow_multiple_allocations = Some(true);
    for capacity in capacities.values_mut() {
        capacity.request_policy = Some(policy(capacity.value.clone()));
    }
}

/// Returns a capacity of which each claim gets `share`. A claim that requests more than a client can allocate gets another device.
fn capacity(value: u64, share: Option<u64>) -> DeviceCapacity {
    DeviceCapacity {
        value: Quantity(quantity(value)),
        request_policy: share.map(|share| policy(Quantity(quantity(share)))),
    }
}

/// Returns the policy of a capacity of which each claim gets `share`.
fn policy(share: Quantity) -> CapacityRequestPolicy {
    CapacityRequestPolicy {
        default: Some(share.clone()),
        valid_values: Some(vec![share]),
        ..CapacityRequestPolicy::default()
    }
}

/// Returns the canonical form of a quantity with binary units, in which the API server returns it.
fn quantity(mut value: u64) -> String {
    let mut unit = "";
    for next in ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"] {
        if value == 0 || !value.is_multiple_of(1024) {
            break;
        }
        value /= 1024;
        unit = next;
    }
    format!("{value}{unit}")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::dra::devices::MpsLimits;

    pub(crate) const OWNER: Owner<'_> = Owner {
        driver: "gpu.nvidia.com",
        node: "node-1",
        effect: TaintEffect::NoSchedule,
        has_taints: true,
        has_shares: true,
    };

    pub(crate) fn device(name: &str, unhealthy: Option<&str>) -> ClaimDevice {
        ClaimDevice {
            name: name.into(),
            uuid: format!("GPU-{name}"),
            gpu: format!("GPU-{name}"),
            attributes: [
                ("uuid", Value::Text(format!("GPU-{name}"))),
                ("driverVersion", Value::Version("1.2.3".into())),
            ]
            .into(),
            capacity: [("memory", 81559 * 1024 * 1024)].into(),
            mps: None,
            unhealthy: unhealthy.map(str::to_owned),
            driver_silent: false,
        }
    }

    #[test]
    fn the_document() {
        let found = specs(
            &[device("gpu-0", None), device("gpu-1", Some("XID 79"))],
            &OWNER,
        );
        let expected = serde_json::json!([{
            "driver": "gpu.nvidia.com",
            "nodeName": "node-1",
            "pool": {"name": "node-1", "generation": 0, "resourceSliceCount": 1},
            "devices": [
                {"name": "gpu-0", "attributes": {"driverVersion": {"version": "1.2.3"}, "uuid": {"string": "GPU-gpu-0"}},
                 "capacity": {"memory": {"value": "81559Mi"}}},
                {"name": "gpu-1", "attributes": {"driverVersion": {"version": "1.2.3"}, "uuid": {"string": "GPU-gpu-1"}},
                 "capacity": {"memory": {"value": "81559Mi"}},
                 "taints": [{"key": "gpu.nvidia.com/unhealthy", "effect": "NoSchedule"}]},
            ],
        }]);
        assert_eq!(serde_json::to_value(found).unwrap(), expected);
    }

    #[test]
    fn many_devices_need_several_slices() {
        for (count, expected) in [
            (0, vec![]),
            (1, vec![1]),
            (64, vec![64]),
            (65, vec![64, 1]),
            (129, vec![64, 64, 1]),
        ] {
            let devices: Vec<_> = (0..count)
                .map(|at| device(&format!("gpu-{at}"), None))
                .collect();
            let found = specs(&devices, &OWNER);
            let sizes: Vec<_> = found
                .iter()
                .map(|spec| spec.devices.as_ref().unwrap().len())
                .collect();
            assert_eq!(sizes, expected);
            let slices = i64::try_from(expected.len()).unwrap();
            assert!(
                found
                    .iter()
                    .all(|spec| spec.pool.resource_slice_count == slices)
            );
        }
    }

    #[test]
    fn without_taints_the_device_is_withdrawn() {
        let devices = [device("gpu-0", None), device("gpu-1", Some("XID 79"))];
        let listed = |owner: &Owner<'_>| specs(&devices, owner)[0].devices.as_ref().unwrap().len();
        assert_eq!(
            listed(&Owner {
                has_taints: false,
                ..OWNER
            }),
            1
        );
        assert_eq!(
            listed(&Owner {
                has_taints: false,
                effect: TaintEffect::None,
                ..OWNER
            }),
            2
        );
    }

    #[test]
    fn a_gpu_that_several_claims_can_have() {
        let gib = 1024 * 1024 * 1024;
        let with = |memory| ClaimDevice {
            mps: Some(MpsLimits {
                memory,
                thread_percentage: 25,
            }),
            ..device("gpu-0", None)
        };
        let published = |device: ClaimDevice, owner: &Owner<'_>| {
            let found = specs(&[device], owner);
            serde_json::to_value(&found[0].devices.as_ref().unwrap()[0]).unwrap()
        };
        let shared = published(with(Some(16 * gib)), &OWNER);
        assert_eq!(shared["allowMultipleAllocations"], true);
        let policy = serde_json::json!({"default": "16Gi", "validValues": ["16Gi"]});
        let expected = serde_json::json!({"memory": {"value": "81559Mi", "requestPolicy": policy}});
        assert_eq!(shared["capacity"], expected);
        let old = Owner {
            has_shares: false,
            ..OWNER
        };
        for (device, owner) in [
            (with(None), &OWNER),
            (with(Some(0)), &OWNER),
            (with(Some(80 * gib)), &OWNER),
            (with(Some(16 * gib)), &old),
            (device("gpu-0", None), &OWNER),
        ] {
            let found = published(device, owner);
            assert_eq!(found.get("allowMultipleAllocations"), None, "{found}");
            let expected = serde_json::json!({"memory": {"value": "81559Mi"}});
            assert_eq!(found["capacity"], expected);
        }
    }

    #[test]
    fn quantities() {
        for (value, expected) in [
            (0, "0"),
            (14, "14"),
            (1000, "1000"),
            (1024, "1Ki"),
            (85_520_809_984, "81559Mi"),
            (85_899_345_920, "80Gi"),
        ] {
            assert_eq!(quantity(value), expected);
        }
    }
}
