//! Decides which devices and device nodes a container gets from Allocate. Pure.
//!
//! The kubelet passes the nodes to the engine, which lists them in config.json: they survive `systemctl daemon-reload`, which applies the
//! rules of config.json again. The hook adds the driver's files. Which nodes a device has is decided by the same function as for the hook.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use findings::catalog;
use nvidia_host::capability::{Capabilities, Capability};
use nvidia_host::driver::nodes::DeviceNode;
use nvidia_host::edits::facts::DeviceFacts;
use nvidia_host::edits::{Wanted, decide};
use nvidia_host::feature::Features;
use nvidia_host::inventory::select::{Device as HostDevice, devices_of};

use super::layout::{self, Layout};
use crate::model::{Refusal, Resource, ResourceDevice};
use crate::node::gpus::NodeGpu;
use crate::proto::ContainerAllocateResponse;

/// The most ids that a message names.
const MAX_NAMED: usize = 3;

/// Returns the devices of a container, in the order of the node.
///
/// # Errors
/// If one of them does not exist, does not work, or may not be given together with the others.
pub fn permitted<'a>(
    resource: &'a Resource,
    ids: &[String],
    several_replicas: bool,
) -> Result<Vec<&'a ResourceDevice>, Refusal> {
    let wanted: BTreeSet<&str> = ids.iter().map(String::as_str).collect();
    let mut unknown = wanted.clone();
    let mut devices = Vec::new();
    for device in &resource.devices {
        if wanted.contains(device.id.as_str()) {
            unknown.remove(device.id.as_str());
            devices.push(device);
        }
    }
    if ids.is_empty() || !unknown.is_empty() {
        let names = named(&unknown);
        let what = match unknown.len() {
            0 => "the kubelet requests no device".to_owned(),
            1 => format!("{names} does not exist"),
            _ => format!("{names} do not exist"),
        };
        let fix = "delete the pod; the kubelet chooses another device for the next one";
        return Err(Refusal::of(&catalog::PLUGIN_UNKNOWN_DEVICE, &what, fix));
    }
    for device in &devices {
        if let Some(why) = &device.unhealthy {
            let what = format!("{} does not work: {why}", device.id);
            let fix = "delete the pod, and run \"oci-nvidia-kubelet-plugin check\" on the node";
            return Err(Refusal::of(&catalog::PLUGIN_UNHEALTHY_DEVICE, &what, fix));
        }
    }
    // A second client of the same daemon gives the container nothing.
    let is_mps = devices.iter().any(|device| device.mps_replicas.is_some());
    let is_shared = devices.iter().any(|device| device.is_shared);
    if devices.len() > 1 && is_shared && (is_mps || !several_replicas) {
        let what = format!(
            "{} devices of {} are requested, but its GPUs are shared",
            devices.len(),
            resource.name
        );
        return Err(Refusal::of(
            &catalog::PLUGIN_SHARED_DEVICE,
            &what,
            &format!("request {}: 1", resource.name),
        ));
    }
    Ok(devices)
}

/// Returns the device of the host for each device of a container, without duplicates.
///
/// # Errors
/// If its GPU or MIG device no longer exists.
pub fn of_host<'a>(
    gpus: &'a [NodeGpu],
    devices: &[&ResourceDevice],
) -> Result<Vec<HostDevice<'a>>, Refusal> {
    let uuids: Vec<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
    by_uuid(gpus, &uuids)
}

/// Returns the device of the host with each UUID, without duplicates.
///
/// # Errors
/// If a GPU or MIG device no longer exists.
pub(super) fn by_uuid<'a>(
    gpus: &'a [NodeGpu],
    uuids: &[&str],
) -> Result<Vec<HostDevice<'a>>, Refusal> {
    let mut found: Vec<HostDevice<'a>> = Vec::new();
    for uuid in uuids {
        let mut known = gpus.iter().flat_map(|known| devices_of(&known.gpu));
        let Some(host_device) = known.find(|known| known.uuid() == *uuid) else {
            let what = format!("{uuid} does not exist");
            let fix = "delete the pod; the kubelet chooses another device for the next one";
            return Err(Refusal::of(&catalog::PLUGIN_UNKNOWN_DEVICE, &what, fix));
        };
        if !found.contains(&host_device) {
            found.push(host_device);
        }
    }
    Ok(found)
}

/// What the facts for [`response`] must cover. The plugin does not know which capabilities the image requests, so it includes the nodes
/// that every CUDA program may open, and the node of nvidia-modeset, as NVIDIA's plugin does.
#[must_use]
pub fn wanted(features: Features) -> Wanted {
    let capabilities = Capabilities::new(&[
        Capability::Compute,
        Capability::Utility,
        Capability::Graphics,
    ]);
    Wanted {
        capabilities,
        gpus: true,
        features,
        ..Wanted::default()
    }
}

/// Returns the answer to the kubelet.
///
/// # Errors
/// If a device node is missing or wrong.
pub fn response(
    facts: &DeviceFacts,
    devices: &[HostDevice<'_>],
    layout: &Layout<'_>,
) -> Result<ContainerAllocateResponse, Refusal> {
    let nodes = nodes(facts, devices, layout.features).map_err(|error| Refusal::from(&error))?;
    Ok(layout::arrange(layout, devices, &nodes))
}

/// Returns the nodes of these devices, and those that every CUDA program opens.
///
/// # Errors
/// If a device node is missing or wrong.
pub(super) fn nodes(
    facts: &DeviceFacts,
    devices: &[HostDevice<'_>],
    features: Features,
) -> Result<Vec<DeviceNode>> {
    let wanted = wanted(features);
    // The nodes in /dev/dri are left to the hook: only few images need them, and only they request the capability.
    let without_drm = Wanted {
        capabilities: Capabilities::new(&[Capability::Compute, Capability::Utility]),
        ..wanted.clone()
    };
    let mut found = Vec::new();
    for device in devices {
        found.extend(decide::of_device(facts, &without_drm, *device)?.nodes);
    }
    found.extend(decide::common_nodes(facts, &wanted, &mut Vec::new())?);
    for feature in features.iter() {
        found.extend(facts.of_feature(feature)?);
    }
    // Several MIG devices of one GPU have nodes in common.
    let mut by_path = BTreeMap::new();
    for node in found {
        by_path.insert(node.path.absolute(), node);
    }
    Ok(by_path.into_values().collect())
}

fn named(ids: &BTreeSet<&str>) -> String {
    let first: Vec<&str> = ids.iter().take(MAX_NAMED).copied().collect();
    let first = first.join(", ");
    match ids.len().saturating_sub(MAX_NAMED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::layout::VISIBLE_DEVICES;
    use crate::node::devices::uuid_of;
    use crate::node::gpus::tests::gpu;
    use crate::settings::Plugin;
    use crate::settings::values::DeviceListStrategy;
    use DeviceListStrategy::{CdiCri, Envvar, HostPath as HostDir, VolumeMounts};
    use base::paths::HostPath;
    use nvidia_host::driver::access::Permissions;
    use nvidia_host::driver::files::DriverFiles;
    use nvidia_host::driver::nodes::NodeState;
    use nvidia_host::edits::facts::HostFacts;
    use nvidia_host::inventory::caps::MigCap;
    use proptest::prelude::*;

    fn resource(ids: &[&str]) -> Resource {
        let device = |id: &&str| {
            let uuid = uuid_of(id).to_owned();
            ResourceDevice {
                id: (*id).to_owned(),
                is_shared: *id != uuid,
                gpu: uuid.clone(),
                uuid,
                ..ResourceDevice::default()
            }
        };
        Resource {
            name: "nvidia.com/gpu".to_owned(),
            devices: ids.iter().map(device).collect(),
        }
    }

    fn ids(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn refusals_are_one_line_with_a_number_and_a_hint() {
        let whole = resource(&["GPU-0", "GPU-1"]);
        let shared = resource(&["GPU-0::0", "GPU-0::1", "GPU-1::0"]);
        let mut unhealthy = resource(&["GPU-0", "GPU-1"]);
        unhealthy.devices[1].unhealthy = Some("XID 79\nand a second line é".to_owned());
        let many: Vec<String> = (0..10_000).map(|number| format!("GPU-x{number}")).collect();
        for (resource, ids, expected) in [
            (
                &whole,
                ids(&["GPU-7"]),
                "GPU-7 does not exist (ONH-071); hint: ",
            ),
            (
                &whole,
                ids(&["GPU-0", "GPU-8", "GPU-9"]),
                "GPU-8, GPU-9 do not exist (ONH-071); hint: ",
            ),
            (
                &whole,
                ids(&[]),
                "the kubelet requests no device (ONH-071); hint: ",
            ),
            (
                &whole,
                many,
                "GPU-x0, GPU-x1, GPU-x10 and 9997 more do not exist (ONH-071); hint: ",
            ),
            (
                &unhealthy,
                ids(&["GPU-1"]),
                "GPU-1 does not work: XID 79?and a second line ? (ONH-072); hint: ",
            ),
            (
                &shared,
                ids(&["GPU-0::0", "GPU-1::0"]),
                "2 devices of nvidia.com/gpu are requested, but its GPUs are shared",
            ),
            (&shared, ids(&["GPU-0"]), "GPU-0 does not exist (ONH-071)"),
        ] {
            let refusal = permitted(resource, &ids, false).unwrap_err().to_string();
            assert!(refusal.starts_with(expected), "{refusal}");
            assert!(
                refusal.len() <= 1024 && refusal.bytes().all(|byte| (b' '..=b'~').contains(&byte)),
                "{refusal}"
            );
        }
        assert_eq!(
            permitted(&unhealthy, &ids(&["GPU-0"]), false)
                .unwrap()
                .len(),
            1
        );
        assert_eq!(
            permitted(&shared, &ids(&["GPU-1::0"]), false)
                .unwrap()
                .len(),
            1
        );
        let both = permitted(&shared, &ids(&["GPU-0::0", "GPU-0::1"]), true).unwrap();
        assert_eq!(
            of_host(&[gpu(0, "A", &[])], &both).unwrap().len(),
            1,
            "two replicas are one GPU"
        );
    }

    #[test]
    fn a_container_has_one_mps_daemon() {
        for replicas in [["GPU-0::0", "GPU-0::1"], ["GPU-0::0", "GPU-1::0"]] {
            let mut resource = resource(&replicas);
            for device in &mut resource.devices {
                device.mps_replicas = Some(2);
            }
            // Also if the settings permit several replicas of other resources.
            let refusal = permitted(&resource, &ids(&replicas), true).unwrap_err();
            let expected = "2 devices of nvidia.com/gpu are requested, but its GPUs are shared (ONH-073); hint: request nvidia.com/gpu: 1";
            assert_eq!(refusal.to_string(), expected);
            assert!(permitted(&resource, &ids(&replicas[..1]), false).is_ok());
        }
    }

    #[test]
    fn nodes_and_the_variable() {
        let gpus = [gpu(0, "A", &[]), gpu(1, "B", &[])];
        let nodes = [
            node("nvidia0", 0),
            node("nvidiactl", 255),
            node("nvidia-modeset", 254),
        ]
        .into();
        let facts = DeviceFacts {
            nodes,
            ..DeviceFacts::default()
        };
        let whole = resource(&["GPU-0", "GPU-1"]);
        let settings = Plugin::default();
        let answer = |ids: &[&str]| {
            let devices = permitted(&whole, &self::ids(ids), false).unwrap();
            response(
                &facts,
                &of_host(&gpus, &devices).unwrap(),
                &layout(&[Envvar], &settings),
            )
        };
        let found = answer(&["GPU-0"]).unwrap();
        assert_eq!(
            found.envs,
            [(VISIBLE_DEVICES.to_owned(), "GPU-0".to_owned())].into()
        );
        let paths: Vec<&str> = found
            .devices
            .iter()
            .map(|spec| spec.container_path.as_str())
            .collect();
        assert_eq!(
            paths,
            ["/dev/nvidia-modeset", "/dev/nvidia0", "/dev/nvidiactl"]
        );
        assert!(
            found
                .devices
                .iter()
                .all(|spec| spec.permissions == "rw" && spec.host_path == spec.container_path)
        );
        let refusal = answer(&["GPU-1"]).unwrap_err().to_string();
        assert!(
            refusal.contains("/dev/nvidia1")
                && refusal.contains("(ONH-021); hint: run \"oci-nvidia-hook prepare\""),
            "{refusal}"
        );
    }

    fn layout<'a>(strategies: &'a [DeviceListStrategy], settings: &'a Plugin) -> Layout<'a> {
        Layout {
            strategies,
            settings,
            has_icds: false,
            features: Features::EMPTY,
            mps_pipe: None,
        }
    }

    fn node(name: &str, minor: u32) -> (String, NodeState) {
        let path = format!("/dev/{name}");
        let (source, path) = (
            HostPath::new(&path),
            base::paths::ContainerPath::new(&path).unwrap(),
        );
        (
            name.to_owned(),
            NodeState::Device(DeviceNode {
                source,
                path,
                major: 195,
                minor,
                permissions: Permissions::default(),
            }),
        )
    }

    /// The nodes of three GPUs, of which the first has two MIG devices.
    fn all_nodes() -> Vec<(String, NodeState)> {
        let common = [
            ("nvidiactl", 255),
            ("nvidia-uvm", 0),
            ("nvidia-uvm-tools", 1),
            ("nvidia-modeset", 254),
        ];
        let gpus = [("nvidia0", 0), ("nvidia1", 1), ("nvidia2", 2)];
        let caps =
            [70, 71, 80, 81].map(|minor| node(&format!("nvidia-caps/nvidia-cap{minor}"), minor));
        common
            .into_iter()
            .chain(gpus)
            .map(|(name, minor)| node(name, minor))
            .chain(caps)
            .collect()
    }

    proptest! {
        /// For every host and every choice of devices, the plugin gives the nodes that the hook gives, or both refuse. With CDI it
        /// refuses the same devices, and gives no nodes.
        #[test]
        fn the_nodes_are_those_of_the_hook(
            missing in any::<[bool; 11]>(),
            chosen in any::<[bool; 4]>(),
            strategy in prop::sample::select(vec![Envvar, VolumeMounts, HostDir, CdiCri]),
        ) {
            let gpus = [gpu(0, "A", &["1g.5gb", "1g.5gb"]), gpu(1, "B", &[]), gpu(2, "C", &[])];
            let nodes = all_nodes().into_iter().zip(missing).filter(|(_, missing)| !missing);
            let cap = |gi, ci: Option<u32>| ci.map_or(MigCap::GpuInstance(0, gi), |ci| MigCap::ComputeInstance(0, gi, ci));
            let minors = [(cap(7, None), 70), (cap(7, Some(0)), 71), (cap(8, None), 80), (cap(8, Some(0)), 81)];
            let facts = DeviceFacts {
                nodes: nodes.map(|(node, _)| node).collect(),
                mig_minors: Some(minors.into()),
                ..DeviceFacts::default()
            };
            let [mig_a, mig_b] = [0, 1].map(|at| HostDevice::Mig(&gpus[0].gpu, &gpus[0].gpu.mig_devices[at]));
            let devices = [mig_a, mig_b, HostDevice::Gpu(&gpus[1].gpu), HostDevice::Gpu(&gpus[2].gpu)];
            let devices: Vec<_> =
                devices.into_iter().zip(chosen).filter_map(|(device, chosen)| chosen.then_some(device)).collect();

            let files = DriverFiles::default();
            let host = HostFacts {
                files, ipc: Vec::new(), proc_files: None, devices: facts.clone(), findings: Vec::new(),
            };
            let hook = decide::edits(&host, &wanted(Features::EMPTY), &devices);
            let plugin = response(&facts, &devices, &layout(&[strategy], &Plugin::default()));
            prop_assert_eq!(hook.is_ok(), plugin.is_ok());
            if let (Ok((edits, _)), Ok(answer)) = (hook, plugin) {
                let hook: BTreeSet<_> = edits.nodes.iter().map(|node| node.path.absolute().display().to_string()).collect();
                let plugin: BTreeSet<_> = answer.devices.into_iter().map(|spec| spec.container_path).collect();
                prop_assert_eq!(if strategy == CdiCri { BTreeSet::new() } else { hook }, plugin);
            }
        }
    }
}
