//! Decides which resources the node offers, from its GPUs and the settings. Pure.

use std::collections::{BTreeMap, BTreeSet};

use base::report::Finding;
use findings::catalog;
use nvidia_host::config::Limits;
use nvidia_host::driver::node_name::NodeName;
use nvidia_host::inventory::limits::{is_like, permit};
use nvidia_host::inventory::{Gpu, MigDevice};

use super::gpus::{NodeGpu, NumaNodes};
use crate::model::{Resource, ResourceDevice};
use crate::settings::Plugin;
use crate::settings::values::{
    DeviceIdStrategy, DeviceListStrategy, Interface, MigStrategy, SharingStrategy,
};

/// The resource of whole GPUs.
const GPU: &str = "gpu";
/// Separates the UUID of a device from the number of a replica.
pub const REPLICA: &str = "::";
/// The same in the ids of GKE's plugin.
const GKE_REPLICA: &str = "/vgpu";

/// What the node offers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// The resources in the order of their names
    pub offered: Vec<Resource>,
    /// The ids of the devices that the limits deny
    pub denied: BTreeSet<String>,
    /// What is wrong with the settings on this node
    pub findings: Vec<Finding>,
}

/// Decides which resources the node offers. `unhealthy` returns why a part of a GPU cannot be used.
#[must_use]
pub fn resources(
    gpus: &[NodeGpu],
    numa_nodes: &NumaNodes,
    settings: &Plugin,
    limits: &Limits,
    unhealthy: impl Fn(&NodeGpu, &OfferedPart<'_>) -> Option<String>,
) -> Resources {
    let (single, findings) = single_profile(gpus, settings);
    let separator = if has_gke_ids(settings) {
        GKE_REPLICA
    } else {
        REPLICA
    };
    let mut offered: BTreeMap<String, Vec<ResourceDevice>> = BTreeMap::new();
    let mut denied = BTreeSet::new();
    for node_gpu in gpus {
        let gpu = &node_gpu.gpu;
        let numa_node = numa_nodes.get(&gpu.bus_id).copied();
        for part in offered_parts(node_gpu, settings, single) {
            let device = ResourceDevice {
                id: if has_gke_ids(settings) {
                    gke_id(gpu, part.mig)
                } else {
                    part.uuid.to_owned()
                },
                uuid: part.uuid.to_owned(),
                is_shared: false,
                mps_replicas: part.mps_replicas,
                gpu: gpu.uuid.clone(),
                numa_node,
                unhealthy: unhealthy(node_gpu, &part),
            };
            let devices = replicas(&device, part.sharing.replicas, separator);
            if permit(limits, gpu, part.mig) {
                let devices_of_name = offered.entry(part.sharing.name).or_default();
                devices_of_name.extend(devices);
            } else {
                denied.extend(devices.into_iter().map(|device| device.id));
            }
        }
    }
    let mut resources = Vec::new();
    for (name, devices) in offered {
        resources.push(Resource { name, devices });
    }
    Resources {
        offered: resources,
        denied,
        findings,
    }
}

/// Whether the ids are the same as in GKE's plugin.
fn has_gke_ids(settings: &Plugin) -> bool {
    settings
        .device_list_strategy
        .contains(&DeviceListStrategy::HostPath)
        && settings.device_id_strategy == DeviceIdStrategy::Index
}

/// Returns the id of GKE's plugin, which is made from the name of the device node and the GPU instance: `nvidia0/gi1`. Several compute
/// instances of one GPU instance, which GKE does not create, have their numbers too.
fn gke_id(gpu: &Gpu, part: Option<&MigDevice>) -> String {
    let node = NodeName::Gpu(gpu.minor);
    let Some(mig) = part else {
        return node.to_string();
    };
    let instance = format!("{node}/gi{}", mig.gpu_instance);
    let is_same = |other: &&MigDevice| other.gpu_instance == mig.gpu_instance;
    if gpu.mig_devices.iter().filter(is_same).count() <= 1 {
        return instance;
    }
    format!("{instance}/ci{}", mig.compute_instance)
}

/// Returns the parts of a GPU that containers can get: its MIG devices, or the whole GPU as `None`;
/// nothing of a GPU that only drives a display.
#[must_use]
pub fn parts<'a>(gpu: &'a NodeGpu, settings: &Plugin) -> Vec<Option<&'a MigDevice>> {
    if gpu.gpu.is_display_only() {
        return Vec::new();
    }
    // NVML can list MIG devices of a GPU only while MIG is enabled, and programs can then use nothing else of the GPU.
    if settings.mig_strategy == MigStrategy::None || !gpu.gpu.mig_enabled {
        return vec![None];
    }
    gpu.gpu.mig_devices.iter().map(Some).collect()
}

/// A part of a GPU that is offered.
#[derive(Clone, Debug)]
pub struct OfferedPart<'a> {
    /// `None` for the whole GPU
    pub mig: Option<&'a MigDevice>,
    /// The UUID of the MIG device or the GPU
    pub uuid: &'a str,
    /// How it is offered
    pub sharing: Sharing,
    /// How many containers share it as clients of its MPS daemon; `None` if it is not shared in this way
    pub mps_replicas: Option<u32>,
}

/// Returns the parts of a GPU that are offered. `single` reports whether the MIG devices are offered as GPUs.
pub(super) fn offered_parts<'a>(
    node_gpu: &'a NodeGpu,
    settings: &Plugin,
    single: bool,
) -> Vec<OfferedPart<'a>> {
    let mut offered = Vec::new();
    for mig in parts(node_gpu, settings) {
        let profile = match mig {
            None => None,
            Some(_) if settings.mig_strategy == MigStrategy::Single && !single => continue,
            Some(_) if single => None,
            Some(mig) => match node_gpu.profiles.get(&mig.uuid) {
                Some(profile) => Some(profile.as_str()),
                None => continue,
            },
        };
        let sharing = sharing(&node_gpu.gpu.model, profile, settings);
        offered.push(OfferedPart {
            mig,
            uuid: mig.map_or(&node_gpu.gpu.uuid, |mig| &mig.uuid),
            mps_replicas: sharing.mps_replicas(settings),
            sharing,
        });
    }
    offered
}

/// Whether the MIG devices are offered as GPUs.
#[must_use]
pub fn is_single(gpus: &[NodeGpu], settings: &Plugin) -> bool {
    single_profile(gpus, settings).0
}

/// Whether the MIG devices are offered as GPUs, and a finding if the strategy `single` does not permit that.
fn single_profile(gpus: &[NodeGpu], settings: &Plugin) -> (bool, Vec<Finding>) {
    let is_offered = |gpu: &&NodeGpu| !gpu.gpu.is_display_only();
    let gpus: Vec<&NodeGpu> = gpus.iter().filter(is_offered).collect();
    let in_mig_mode = gpus.iter().filter(|gpu| gpu.gpu.mig_enabled).count();
    if settings.mig_strategy != MigStrategy::Single || in_mig_mode == 0 {
        return (false, Vec::new());
    }
    let profiles: BTreeSet<&String> = gpus.iter().flat_map(|gpu| gpu.profiles.values()).collect();
    let what = match (in_mig_mode == gpus.len(), profiles.len()) {
        (true, 0 | 1) => return (true, Vec::new()),
        (false, _) => "some GPUs are in MIG mode and others are not".to_owned(),
        (true, _) => {
            let names: Vec<_> = profiles.into_iter().map(String::as_str).collect();
            format!(
                "the MIG devices have several profiles: {}",
                names.join(", ")
            )
        }
    };
    let finding = Finding::new(
        &catalog::PLUGIN_MIG_STRATEGY,
        format!("mig-strategy is \"single\", but {what}"),
        "create MIG devices of one profile on all GPUs, or set mig-strategy = \"mixed\"",
    );
    (false, vec![finding])
}

/// How devices of one kind are offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// The name of the resource
    pub name: String,
    /// 1 if the devices are not shared
    pub replicas: u32,
    /// Whether shared devices have a name of their own
    pub is_renamed: bool,
    /// How containers share a device
    pub strategy: SharingStrategy,
}

impl Sharing {
    /// Returns how many containers share a device as clients of its MPS daemon; `None` if it is not shared in this way, or for claims.
    fn mps_replicas(&self, settings: &Plugin) -> Option<u32> {
        if self.strategy == SharingStrategy::Mps && settings.interface == Interface::DevicePlugin {
            return Some(self.replicas);
        }
        None
    }
}

/// Decides how the GPUs of this model are offered, or their MIG devices with this profile.
#[must_use]
pub fn sharing(model: &str, profile: Option<&str>, settings: &Plugin) -> Sharing {
    let row = settings
        .resources
        .iter()
        .find(|row| is_like(&row.model, model));
    let name = match (profile, row) {
        (Some(profile), _) => format!(
            "{}/mig-{}",
            settings.resource_prefix,
            profile.replace('+', ".")
        ),
        (None, Some(row)) => row.name.clone(),
        (None, None) => format!("{}/{GPU}", settings.resource_prefix),
    };
    match settings
        .shared_resources
        .iter()
        .find(|row| row.name == name)
    {
        Some(shared) => Sharing {
            replicas: shared.replicas,
            is_renamed: shared.rename.is_some(),
            strategy: shared.strategy,
            name: shared.rename.clone().unwrap_or(name),
        },
        None => {
            let replicas = row
                .and_then(|row| row.replicas)
                .unwrap_or(settings.replicas);
            Sharing {
                name,
                replicas,
                is_renamed: false,
                strategy: settings.sharing,
            }
        }
    }
}

fn replicas(device: &ResourceDevice, count: u32, separator: &str) -> Vec<ResourceDevice> {
    if count == 1 {
        return vec![device.clone()];
    }
    let mut devices = Vec::new();
    for number in 0..count {
        devices.push(ResourceDevice {
            id: format!("{}{separator}{number}", device.id),
            is_shared: true,
            ..device.clone()
        });
    }
    devices
}

/// Returns the UUID in an id.
#[must_use]
pub fn uuid_of(id: &str) -> &str {
    id.split_once(REPLICA).map_or(id, |(uuid, _)| uuid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::gpus::tests::gpu;
    use crate::settings::resources::{ResourceRow, SharedResource};

    fn offered(gpus: &[NodeGpu], settings: &Plugin, limits: &Limits) -> Vec<(String, Vec<String>)> {
        let resources = resources(gpus, &NumaNodes::new(), settings, limits, |_, _| None).offered;
        let ids = |resource: Resource| {
            resource
                .devices
                .into_iter()
                .map(|device| device.id)
                .collect()
        };
        resources
            .into_iter()
            .map(|resource| (resource.name.clone(), ids(resource)))
            .collect()
    }

    fn expect(found: &[(String, Vec<String>)], expected: &[(&str, &[&str])]) {
        let found: Vec<_> = found
            .iter()
            .map(|(name, ids)| {
                (
                    name.as_str(),
                    ids.iter().map(String::as_str).collect::<Vec<_>>(),
                )
            })
            .collect();
        let expected: Vec<_> = expected
            .iter()
            .map(|(name, ids)| (*name, ids.to_vec()))
            .collect();
        assert_eq!(found, expected);
    }

    fn row(name: &str, model: &str, replicas: Option<u32>) -> ResourceRow {
        ResourceRow {
            name: name.into(),
            model: model.into(),
            replicas,
        }
    }

    #[test]
    fn whole_gpus_by_model_and_within_the_limits() {
        let gpus = [
            gpu(0, "NVIDIA H100 80GB", &[]),
            gpu(1, "NVIDIA T4", &[]),
            gpu(2, "Quadro K2000", &[]),
        ];
        let mut settings = Plugin::default();
        let none = Limits::default();
        expect(
            &offered(&gpus, &settings, &none),
            &[("nvidia.com/gpu", &["GPU-0", "GPU-1", "GPU-2"])],
        );
        settings.resources = vec![
            row("nvidia.com/h100", "*h100*", Some(2)),
            row("a.b/x", "*", None),
        ];
        settings.replicas = 3;
        expect(
            &offered(&gpus[..2], &settings, &none),
            &[
                ("a.b/x", &["GPU-1::0", "GPU-1::1", "GPU-1::2"]),
                ("nvidia.com/h100", &["GPU-0::0", "GPU-0::1"]),
            ],
        );
        let deny = Limits {
            deny: vec!["*K2000*".into(), "0".into()],
            ..Limits::default()
        };
        expect(
            &offered(&gpus, &Plugin::default(), &deny),
            &[("nvidia.com/gpu", &["GPU-1"])],
        );
    }

    #[test]
    fn ids_of_gke() {
        let mut gpus = [
            gpu(0, "A100", &["1g.5gb", "1g.5gb"]),
            gpu(1, "A100", &["1g.5gb", "1g.5gb"]),
            gpu(2, "A100", &[]),
        ];
        gpus[1].gpu.mig_devices[1].gpu_instance = 7;
        gpus[1].gpu.mig_devices[1].compute_instance = 1;
        let mut settings = Plugin {
            device_list_strategy: vec![DeviceListStrategy::HostPath],
            device_id_strategy: DeviceIdStrategy::Index,
            ..Plugin::default()
        };
        let migs = [
            "nvidia0/gi7",
            "nvidia0/gi8",
            "nvidia1/gi7/ci0",
            "nvidia1/gi7/ci1",
        ];
        let limits = Limits::default();
        expect(
            &offered(&gpus, &settings, &limits),
            &[
                ("nvidia.com/gpu", &["nvidia2"]),
                ("nvidia.com/mig-1g.5gb", &migs),
            ],
        );
        settings.replicas = 2;
        let resources =
            resources(&gpus, &NumaNodes::new(), &settings, &limits, |_, _| None).offered;
        let devices = resources.iter().flat_map(|resource| &resource.devices);
        let found: Vec<_> = devices
            .map(|device| (device.id.as_str(), device.uuid.as_str()))
            .collect();
        assert_eq!(
            found[..3],
            [
                ("nvidia2/vgpu0", "GPU-2"),
                ("nvidia2/vgpu1", "GPU-2"),
                ("nvidia0/gi7/vgpu0", "MIG-0-0")
            ]
        );
    }

    #[test]
    fn time_slicing_by_resource() {
        let gpus = [gpu(0, "A100", &["1g.5gb"]), gpu(1, "A100", &[])];
        let slice = |name: &str, rename: Option<&str>, replicas| SharedResource {
            name: name.into(),
            rename: rename.map(str::to_owned),
            replicas,
            ..SharedResource::default()
        };
        let settings = Plugin {
            replicas: 3,
            shared_resources: vec![
                slice("nvidia.com/gpu", Some("nvidia.com/gpu.shared"), 2),
                slice("nvidia.com/x", None, 4),
            ],
            ..Plugin::default()
        };
        expect(
            &offered(&gpus, &settings, &Limits::default()),
            &[
                ("nvidia.com/gpu.shared", &["GPU-1::0", "GPU-1::1"]),
                (
                    "nvidia.com/mig-1g.5gb",
                    &["MIG-0-0::0", "MIG-0-0::1", "MIG-0-0::2"],
                ),
            ],
        );
    }

    #[test]
    fn devices_that_mps_shares() {
        let gpus = [gpu(0, "A100", &["1g.5gb"]), gpu(1, "A100", &[])];
        let row = SharedResource {
            name: "nvidia.com/gpu".into(),
            rename: None,
            replicas: 4,
            strategy: SharingStrategy::Mps,
        };
        let of_file = Plugin {
            replicas: 2,
            shared_resources: vec![row],
            ..Plugin::default()
        };
        let ours = |interface| Plugin {
            replicas: 2,
            sharing: SharingStrategy::Mps,
            interface,
            ..Plugin::default()
        };
        for (settings, of_gpu, of_mig) in [
            (of_file, Some(4), None),
            (ours(Interface::DevicePlugin), Some(2), Some(2)),
            (ours(Interface::Dra), None, None),
        ] {
            let limits = Limits::default();
            let found =
                resources(&gpus, &NumaNodes::new(), &settings, &limits, |_, _| None).offered;
            for device in found.iter().flat_map(|resource| &resource.devices) {
                let is_gpu = device.uuid == device.gpu;
                let expected = if is_gpu { of_gpu } else { of_mig };
                assert_eq!(device.mps_replicas, expected, "{device:?}");
            }
        }
    }

    #[test]
    fn mig_strategies() {
        let mixed = [
            gpu(0, "A100", &["1g.5gb", "1g.10gb+me"]),
            gpu(1, "A100", &[]),
        ];
        let uniform = [
            gpu(0, "A100", &["1g.5gb", "1g.5gb"]),
            gpu(1, "A100", &["1g.5gb"]),
        ];
        let with = |mig_strategy| Plugin {
            mig_strategy,
            ..Plugin::default()
        };
        let none = Limits::default();
        let gpu_name = "nvidia.com/gpu";
        for (gpus, strategy, expected, finds) in [
            (
                &mixed,
                MigStrategy::Mixed,
                &[
                    (gpu_name, &["GPU-1"][..]),
                    ("nvidia.com/mig-1g.10gb.me", &["MIG-0-1"]),
                    ("nvidia.com/mig-1g.5gb", &["MIG-0-0"]),
                ][..],
                false,
            ),
            (
                &mixed,
                MigStrategy::None,
                &[(gpu_name, &["GPU-0", "GPU-1"])],
                false,
            ),
            (&mixed, MigStrategy::Single, &[(gpu_name, &["GPU-1"])], true),
            (
                &uniform,
                MigStrategy::Single,
                &[(gpu_name, &["MIG-0-0", "MIG-0-1", "MIG-1-0"])],
                false,
            ),
            (
                &uniform,
                MigStrategy::Mixed,
                &[("nvidia.com/mig-1g.5gb", &["MIG-0-0", "MIG-0-1", "MIG-1-0"])],
                false,
            ),
        ] {
            expect(&offered(gpus, &with(strategy), &none), expected);
            let found = resources(gpus, &NumaNodes::new(), &with(strategy), &none, |_, _| None);
            assert_eq!(!found.findings.is_empty(), finds, "{strategy:?}");
        }
    }

    #[test]
    fn a_card_for_a_display_is_not_offered() {
        let mut settings = Plugin::default();
        for (name, is_offered) in [
            ("NVIDIA DGX Display", false),
            ("DGX Display", false),
            ("NVIDIA DGX Display 2", true),
            ("NVIDIA A100-SXM4-80GB", true),
        ] {
            let gpus = [gpu(0, "NVIDIA A100-SXM4-80GB", &[]), gpu(1, name, &[])];
            let ids: &[&str] = if is_offered {
                &["GPU-0", "GPU-1"]
            } else {
                &["GPU-0"]
            };
            let found = offered(&gpus, &settings, &Limits::default());
            expect(&found, &[("nvidia.com/gpu", ids)]);
        }
        // The card has no MIG mode, which does not make the node one with GPUs in different modes.
        settings.mig_strategy = MigStrategy::Single;
        let gpus = [gpu(0, "A100", &["1g.5gb"]), gpu(1, "DGX Display", &[])];
        let found = offered(&gpus, &settings, &Limits::default());
        expect(&found, &[("nvidia.com/gpu", &["MIG-0-0"])]);
    }

    #[test]
    fn every_id_of_a_failed_gpu_is_unhealthy() {
        let gpus = [
            gpu(0, "A", &["1g.5gb", "1g.5gb"]),
            gpu(1, "A", &["1g.5gb"]),
            gpu(2, "A", &[]),
        ];
        let settings = Plugin {
            replicas: 2,
            ..Plugin::default()
        };
        let unhealthy = |gpu: &NodeGpu, part: &OfferedPart<'_>| {
            let why = match part.uuid {
                "GPU-2" => "lost",
                _ if gpu.gpu.uuid == "GPU-0" => "XID 79",
                _ => return None,
            };
            Some(why.to_owned())
        };
        let numa_nodes = [(gpus[1].gpu.bus_id, 1)].into();
        let resources =
            resources(&gpus, &numa_nodes, &settings, &Limits::default(), unhealthy).offered;
        for device in resources.iter().flat_map(|resource| &resource.devices) {
            let expected = match device.gpu.as_str() {
                "GPU-0" => Some("XID 79"),
                "GPU-2" => Some("lost"),
                _ => None,
            };
            assert_eq!(device.unhealthy.as_deref(), expected, "{device:?}");
            assert_eq!(device.numa_node, (device.gpu == "GPU-1").then_some(1));
            assert!(device.id.len() <= 63 && uuid_of(&device.id).len() + 3 == device.id.len());
        }
        assert_eq!(
            resources
                .iter()
                .map(|resource| resource.devices.len())
                .sum::<usize>(),
            8
        );
    }
}
