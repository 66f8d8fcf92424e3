//! Arranges an answer in the way that the settings select: which of variable, mounts, CDI names and device nodes it contains. Pure.

use std::path::Path;

use clap::ValueEnum;
use nvidia_host::driver::nodes::DeviceNode;
use nvidia_host::feature::{self, Features};
use nvidia_host::inventory::select::Device;
use nvidia_host::mps::CONTAINER_DIRECTORY;
use nvidia_host::request::mounts;

use crate::cdi_specs::DEVICE_PLUGIN;
use crate::proto::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};
use crate::settings::Plugin;
use crate::settings::values::{DeviceIdStrategy, DeviceListStrategy};

/// The variable that requests GPUs from the hook.
pub(crate) const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// The access of containers to device nodes: creating nodes is not needed.
const ACCESS: &str = "rw";
/// The directory in the container whose mounts request GPUs from the hook. The variable then has this value, as with NVIDIA's plugin.
const DEVICE_MOUNTS: &str = "/var/run/nvidia-container-devices";
/// What is mounted there.
const NULL: &str = "/dev/null";
/// The prefix of the annotations that request CDI devices, and the name of the plugin in them.
const ANNOTATION: &str = "cdi.k8s.io/nvidia-device-plugin_";
/// The longest part of an annotation's key after the name of the plugin: names have at most 63 characters.
const MAX_SUFFIX: usize = 42;
/// Where containers of GKE find the driver's files.
const GKE_FILES: &str = "/usr/local/nvidia";
/// Where the Vulkan loader searches for drivers.
const GKE_ICDS: &str = "/etc/vulkan/icd.d";
/// The directory with Vulkan's files, below the directory with the driver's files.
pub const ICDS: &str = "vulkan/icd.d";

/// The variable that names the directory of an MPS daemon for CUDA.
const MPS_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// How a container gets its devices.
#[derive(Clone, Copy, Debug)]
pub struct Layout<'a> {
    /// The strategies, at least one
    pub strategies: &'a [DeviceListStrategy],
    /// The other settings
    pub settings: &'a Plugin,
    /// Whether the directory [`ICDS`] exists
    pub has_icds: bool,
    /// The features that the container gets with its GPUs
    pub features: Features,
    /// The directory with the sockets of the GPU's MPS daemon; `None` without a daemon
    pub mps_pipe: Option<&'a Path>,
}

impl Layout<'_> {
    fn has(&self, strategy: DeviceListStrategy) -> bool {
        self.strategies.contains(&strategy)
    }

    /// Whether the answer contains device nodes. With CDI, they are in the spec.
    fn passes_nodes(&self) -> bool {
        use DeviceListStrategy::{Envvar, HostPath, VolumeMounts};
        self.has(HostPath)
            || self.settings.pass_device_specs && (self.has(Envvar) || self.has(VolumeMounts))
    }
}

/// Returns the answer for these devices, with these nodes.
pub(crate) fn arrange(
    layout: &Layout<'_>,
    devices: &[Device<'_>],
    nodes: &[DeviceNode],
) -> ContainerAllocateResponse {
    let mut answer = ContainerAllocateResponse::default();
    // In this order: if the variable does not name the devices, it names the directory of the mounts.
    for strategy in DeviceListStrategy::value_variants()
        .iter()
        .filter(|strategy| layout.has(**strategy))
    {
        add(&mut answer, *strategy, layout, devices);
    }
    if let Some(pipe) = layout.mps_pipe {
        add_mps(&mut answer, pipe);
    }
    if layout.passes_nodes() {
        answer.devices = nodes.iter().map(spec_of).collect();
    }
    answer
}

/// Adds the directory of an MPS daemon. The hook and our CDI specs add it too, at the same path, but with `host-path` there is neither.
fn add_mps(answer: &mut ContainerAllocateResponse, pipe: &Path) {
    answer.mounts.push(mount(pipe, CONTAINER_DIRECTORY, true));
    // A variable of the image could name another directory, and CUDA would run without the daemon and its limits.
    let variable = MPS_VARIABLE.to_owned();
    answer.envs.insert(variable, CONTAINER_DIRECTORY.to_owned());
}

/// Returns the CDI names of the devices and of the features.
fn cdi_names(layout: &Layout<'_>, devices: &[Device<'_>]) -> Vec<String> {
    let mut names = Vec::new();
    for device in devices {
        names.push(DEVICE_PLUGIN.device_name(device.uuid()));
    }
    for feature in layout.features.iter() {
        names.push(DEVICE_PLUGIN.feature_name(feature));
    }
    names
}

fn add(
    answer: &mut ContainerAllocateResponse,
    strategy: DeviceListStrategy,
    layout: &Layout<'_>,
    devices: &[Device<'_>],
) {
    let mut ids = Vec::new();
    for device in devices {
        ids.push(id_of(*device, layout.settings.device_id_strategy));
    }
    if !matches!(
        strategy,
        DeviceListStrategy::CdiCri | DeviceListStrategy::CdiAnnotations
    ) {
        for feature in layout.features.iter() {
            let variable = feature.row().variable.to_owned();
            answer.envs.insert(variable, feature::ENABLED.to_owned());
        }
    }
    match strategy {
        DeviceListStrategy::Envvar => {
            answer
                .envs
                .insert(VISIBLE_DEVICES.to_owned(), ids.join(","));
        }
        DeviceListStrategy::VolumeMounts => {
            answer
                .envs
                .insert(VISIBLE_DEVICES.to_owned(), DEVICE_MOUNTS.to_owned());
            // On a locked node, the variables of the features have no effect.
            ids.extend(layout.features.iter().map(mounts::name_of));
            for name in ids {
                let path = format!("{DEVICE_MOUNTS}/{name}");
                answer.mounts.push(mount(Path::new(NULL), &path, false));
            }
        }
        DeviceListStrategy::CdiCri => {
            for name in cdi_names(layout, devices) {
                answer.cdi_devices.push(CdiDevice { name });
            }
        }
        DeviceListStrategy::CdiAnnotations => {
            let key = devices
                .first()
                .map(|device| annotation(device.uuid()))
                .unwrap_or_default();
            let names = cdi_names(layout, devices).join(",");
            answer.annotations.insert(key, names);
        }
        DeviceListStrategy::HostPath => {
            // On a node with the hook, a variable of the image would otherwise request all GPUs.
            answer
                .envs
                .insert(VISIBLE_DEVICES.to_owned(), ids.join(","));
            let files = layout.settings.host_path.as_path();
            answer.mounts.push(mount(files, GKE_FILES, true));
            if layout.has_icds {
                answer.mounts.push(mount(&files.join(ICDS), GKE_ICDS, true));
            }
        }
    }
}

/// Returns the name of a device for the hook.
fn id_of(device: Device<'_>, strategy: DeviceIdStrategy) -> String {
    match (strategy, device) {
        (DeviceIdStrategy::Uuid, device) => device.uuid().to_owned(),
        (DeviceIdStrategy::Index, Device::Gpu(gpu)) => gpu.index.to_string(),
        (DeviceIdStrategy::Index, Device::Mig(gpu, mig)) => format!("{}:{}", gpu.index, mig.index),
    }
}

/// Returns the key of an annotation. A container can have devices of several resources, and each answer needs a separate key: a
/// device belongs to one resource only.
fn annotation(uuid: &str) -> String {
    let name = uuid.replace(
        |c: char| !c.is_ascii_alphanumeric() && !"-_.".contains(c),
        "_",
    );
    let start = name.len().saturating_sub(MAX_SUFFIX);
    format!("{ANNOTATION}{}", name.get(start..).unwrap_or_default())
}

fn mount(host_path: &Path, container_path: &str, read_only: bool) -> Mount {
    Mount {
        container_path: container_path.to_owned(),
        host_path: host_path.display().to_string(),
        read_only,
    }
}

fn spec_of(node: &DeviceNode) -> DeviceSpec {
    DeviceSpec {
        container_path: node.path.absolute().display().to_string(),
        host_path: node.source.as_path().display().to_string(),
        permissions: ACCESS.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::gpus::tests::gpu;
    use DeviceListStrategy::{CdiAnnotations, CdiCri, Envvar, HostPath, VolumeMounts};
    use base::paths::{ContainerPath, HostPath as Source};
    use nvidia_host::driver::access::Permissions;
    use nvidia_host::feature::Feature;
    use nvidia_host::inventory::Gpu;

    /// The answer for a GPU and a MIG device, one line for each entry.
    fn lines(strategies: &[DeviceListStrategy], settings: &Plugin, has_icds: bool) -> Vec<String> {
        lines_with(Features::EMPTY, strategies, settings, has_icds)
    }

    fn lines_with(
        features: Features,
        strategies: &[DeviceListStrategy],
        settings: &Plugin,
        has_icds: bool,
    ) -> Vec<String> {
        let gpus: [Gpu; 2] = [gpu(0, "A", &["1g.5gb", "1g.5gb"]).gpu, gpu(1, "B", &[]).gpu];
        let devices = [
            Device::Mig(&gpus[0], &gpus[0].mig_devices[1]),
            Device::Gpu(&gpus[1]),
        ];
        let path = ContainerPath::new("/dev/nvidia1").unwrap();
        let nodes = [DeviceNode {
            source: Source::new("/root/dev/nvidia1"),
            path,
            major: 195,
            minor: 1,
            permissions: Permissions::default(),
        }];
        let answer = arrange(
            &Layout {
                strategies,
                settings,
                has_icds,
                features,
                mps_pipe: None,
            },
            &devices,
            &nodes,
        );
        let mut lines: Vec<String> = answer
            .envs
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        lines.sort();
        let access = |mount: &Mount| if mount.read_only { "ro" } else { "rw" };
        lines.extend(answer.mounts.iter().map(|mount| {
            format!(
                "mount {} {} {}",
                mount.host_path,
                mount.container_path,
                access(mount)
            )
        }));
        lines.extend(
            answer
                .cdi_devices
                .iter()
                .map(|device| format!("cdi {}", device.name)),
        );
        lines.extend(
            answer
                .annotations
                .iter()
                .map(|(key, value)| format!("annotation {key} {value}")),
        );
        lines.extend(
            answer
                .devices
                .iter()
                .map(|spec| format!("node {} {}", spec.host_path, spec.container_path)),
        );
        lines
    }

    #[test]
    fn strategies() {
        let default = Plugin::default();
        let without = Plugin {
            pass_device_specs: false,
            ..Plugin::default()
        };
        let index = Plugin {
            device_id_strategy: DeviceIdStrategy::Index,
            ..without.clone()
        };
        let node = "node /root/dev/nvidia1 /dev/nvidia1";
        let null = |id: &str| format!("mount /dev/null /var/run/nvidia-container-devices/{id} rw");
        let kind = "k8s.device-plugin.nvidia.com/gpu";
        let cdi = [format!("cdi {kind}=MIG-0-1"), format!("cdi {kind}=GPU-1")];
        let annotation = format!(
            "annotation cdi.k8s.io/nvidia-device-plugin_MIG-0-1 {kind}=MIG-0-1,{kind}=GPU-1"
        );
        let directory = "NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices";
        let files = "mount /home/kubernetes/bin/nvidia /usr/local/nvidia ro";
        let icds = "mount /home/kubernetes/bin/nvidia/vulkan/icd.d /etc/vulkan/icd.d ro";
        for (strategies, settings, has_icds, expected) in [
            (
                &[Envvar][..],
                &default,
                true,
                vec!["NVIDIA_VISIBLE_DEVICES=MIG-0-1,GPU-1", node],
            ),
            (
                &[Envvar],
                &without,
                true,
                vec!["NVIDIA_VISIBLE_DEVICES=MIG-0-1,GPU-1"],
            ),
            (
                &[Envvar],
                &index,
                true,
                vec!["NVIDIA_VISIBLE_DEVICES=0:1,1"],
            ),
            (
                &[VolumeMounts],
                &default,
                true,
                vec![directory, &null("MIG-0-1"), &null("GPU-1"), node],
            ),
            (
                &[VolumeMounts],
                &index,
                true,
                vec![directory, &null("0:1"), &null("1")],
            ),
            (
                &[VolumeMounts, Envvar],
                &without,
                true,
                vec![directory, &null("MIG-0-1"), &null("GPU-1")],
            ),
            (&[CdiCri], &default, true, vec![&cdi[0], &cdi[1]]),
            (&[CdiCri], &index, true, vec![&cdi[0], &cdi[1]]),
            (&[CdiAnnotations], &default, true, vec![&annotation]),
            (
                &[Envvar, CdiCri],
                &default,
                true,
                vec![
                    "NVIDIA_VISIBLE_DEVICES=MIG-0-1,GPU-1",
                    &cdi[0],
                    &cdi[1],
                    node,
                ],
            ),
            (
                &[HostPath],
                &default,
                true,
                vec!["NVIDIA_VISIBLE_DEVICES=MIG-0-1,GPU-1", files, icds, node],
            ),
            (
                &[HostPath],
                &index,
                false,
                vec!["NVIDIA_VISIBLE_DEVICES=0:1,1", files, node],
            ),
        ] {
            assert_eq!(
                lines(strategies, settings, has_icds),
                expected,
                "{strategies:?}"
            );
        }
    }

    /// Each strategy gives the directory of the daemon, and a variable of the image cannot name another one.
    #[test]
    fn an_mps_daemon() {
        let settings = Plugin::default();
        let gpu = gpu(0, "A", &[]).gpu;
        for strategy in DeviceListStrategy::value_variants() {
            let layout = |mps_pipe| Layout {
                strategies: std::slice::from_ref(strategy),
                settings: &settings,
                has_icds: false,
                features: Features::EMPTY,
                mps_pipe,
            };
            let answer = arrange(&layout(None), &[Device::Gpu(&gpu)], &[]);
            assert!(!answer.envs.contains_key(MPS_VARIABLE), "{answer:?}");
            let pipe = Path::new("/run/oci-nvidia-mps/GPU-0/pipe");
            let answer = arrange(&layout(Some(pipe)), &[Device::Gpu(&gpu)], &[]);
            assert_eq!(answer.envs[MPS_VARIABLE], "/tmp/nvidia-mps");
            let expected = mount(pipe, "/tmp/nvidia-mps", true);
            assert!(answer.mounts.contains(&expected), "{answer:?}");
        }
    }

    /// As with NVIDIA's plugin: names of CDI devices for engines, and variables for the hook.
    #[test]
    fn features() {
        let settings = Plugin {
            pass_device_specs: false,
            ..Plugin::default()
        };
        let features = [Feature::Gds, Feature::Mofed].into_iter().collect();
        let kind = "k8s.device-plugin.nvidia.com";
        let gpus = format!("{kind}/gpu=MIG-0-1,{kind}/gpu=GPU-1");
        let variables = ["NVIDIA_GDS=enabled", "NVIDIA_MOFED=enabled"];
        let mounts = ["gds", "mofed"].map(|name| {
            format!(
                "mount /dev/null /var/run/nvidia-container-devices/cdi/nvidia.com/{name}=all rw"
            )
        });
        for (strategy, before, expected) in [
            (Envvar, 0, &variables.map(str::to_owned)[..]),
            (HostPath, 0, &variables.map(str::to_owned)),
            (VolumeMounts, 5, &mounts),
            (
                CdiCri,
                2,
                &[
                    format!("cdi {kind}/gds=all"),
                    format!("cdi {kind}/mofed=all"),
                ],
            ),
            (
                CdiAnnotations,
                0,
                &[format!(
                    "annotation cdi.k8s.io/nvidia-device-plugin_MIG-0-1 {gpus},{kind}/gds=all,{kind}/mofed=all"
                )],
            ),
        ] {
            let lines = lines_with(features, &[strategy], &settings, false);
            assert_eq!(
                lines.get(before..before + expected.len()),
                Some(expected),
                "{strategy:?}: {lines:?}"
            );
            let has_variables = variables
                .iter()
                .all(|variable| lines.iter().any(|line| line == variable));
            assert_eq!(
                has_variables,
                ![CdiCri, CdiAnnotations].contains(&strategy),
                "{lines:?}"
            );
        }
    }

    #[test]
    fn keys_of_annotations_are_valid_names() {
        for uuid in [
            "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c",
            "MIG-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c",
            "MIG-GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c/13/0",
        ] {
            let key = annotation(uuid);
            let (prefix, name) = key.split_once('/').unwrap();
            assert_eq!(prefix, "cdi.k8s.io");
            assert!(crate::settings::resources::is_qualified_name(name), "{key}");
        }
        assert_ne!(
            annotation("MIG-GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c/13/0"),
            { annotation("MIG-GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c/13/1") }
        );
    }
}
