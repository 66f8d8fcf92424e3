//! Decides which devices claims can have, with the names and attributes of NVIDIA's driver for DRA, because the selectors of users depend
//! on them. Pure.

use std::collections::{BTreeMap, BTreeSet};

use nvidia_host::config::Limits;
use nvidia_host::inventory::MigDevice;
use nvidia_host::inventory::limits::permit;
use nvidia_host::nvml::monitoring::AddressingMode;

use crate::node::devices::parts;
use crate::node::facts::{Facts, architecture};
use crate::node::gpus::{NodeGpu, NumaNodes, PcieRoots};
use crate::node::health::Failure;
use crate::settings::Plugin;

const MIB: u64 = 1024 * 1024;
/// The longest value of a text, in bytes.
const MAX_TEXT: usize = 64;
/// The longest name of a device, which is a label of DNS.
const MAX_NAME: usize = 63;

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A text of at most 64 bytes
    Text(String),
    /// A number
    Number(i64),
    /// A version of the form that semver.org describes
    Version(String),
}

/// A device that claims can have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// The name in the pool of the node
    pub name: String,
    /// The UUID of the GPU or MIG device
    pub uuid: String,
    /// The UUID of the GPU
    pub gpu: String,
    /// The attributes by name. Names without a domain belong to that of the driver.
    pub attributes: BTreeMap<&'static str, Value>,
    /// The capacities by name, in bytes or as numbers
    pub capacity: BTreeMap<&'static str, u64>,
    /// Why the device cannot be used; `None` if it can
    pub unhealthy: Option<String>,
    /// The driver as a whole does not answer. The device is tainted, but claims that have it still get it: no error of the GPU is known.
    pub is_of_driver: bool,
}

/// Where the GPUs are in the computer.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// The NUMA nodes
    pub numa_nodes: &'a NumaNodes,
    /// The roots of the PCI hierarchy, such as `pci0000:00`
    pub pcie_roots: &'a PcieRoots,
}

/// Returns the devices in the order of the PCI bus, in which the scheduler chooses them. `before` are those of the last call: a driver that
/// stops does not change what is known about the hardware. `failure` returns the error of a GPU.
#[must_use]
pub fn devices(
    gpus: &[NodeGpu],
    facts: &Facts,
    places: Places<'_>,
    (settings, limits): (&Plugin, &Limits),
    before: &[Device],
    failure: impl Fn(&NodeGpu) -> Option<Failure>,
) -> Vec<Device> {
    let (mut found, mut names) = (Vec::new(), BTreeSet::new());
    for gpu in gpus {
        let failure = failure(gpu);
        let is_of_driver = failure.as_ref().is_some_and(|failure| failure.is_of_driver);
        let why = failure.map(|failure| failure.why);
        for part in parts(gpu, settings) {
            // Two profiles can differ in a letter that names cannot have.
            if permit(limits, &gpu.gpu, part) && names.insert(name(gpu, part)) {
                found.push(Device {
                    unhealthy: why.clone(),
                    is_of_driver,
                    ..device(gpu, part, facts, places)
                });
            }
        }
    }
    if facts.driver_version.is_empty() {
        for device in &mut found {
            keep(device, before);
        }
    }
    found
}

/// Takes over what was known about the hardware of a device.
fn keep(device: &mut Device, before: &[Device]) {
    if let Some(known) = before
        .iter()
        .find(|known| known.uuid == device.uuid && known.name == device.name)
    {
        device.attributes.clone_from(&known.attributes);
        device.capacity.clone_from(&known.capacity);
    }
}

fn device(gpu: &NodeGpu, part: Option<&MigDevice>, facts: &Facts, places: Places<'_>) -> Device {
    let mut device = Device {
        name: name(gpu, part),
        uuid: part.map_or(&gpu.gpu.uuid, |mig| &mig.uuid).clone(),
        gpu: gpu.gpu.uuid.clone(),
        attributes: common_attributes(gpu, facts, places),
        ..Device::default()
    };
    device.text("uuid", &device.uuid.clone());
    match part {
        None => {
            device.text("type", "gpu");
            let memory = facts
                .properties
                .get(&gpu.gpu.uuid)
                .and_then(|properties| properties.memory_mib);
            device
                .capacity
                .extend(memory.map(|mib| ("memory", mib.saturating_mul(MIB))));
        }
        Some(mig) => {
            device.text("type", "mig");
            device.text("parentUUID", &gpu.gpu.uuid);
            device.text(
                "profile",
                gpu.profiles.get(&mig.uuid).map_or("", String::as_str),
            );
            device.capacity = mig_capacity(mig, facts);
        }
    }
    device
}

impl Device {
    fn text(&mut self, name: &'static str, value: &str) {
        self.attributes.extend(text(name, value));
    }
}

/// Returns an attribute with a text; `None` if the text is empty or too long for one.
fn text(name: &'static str, value: &str) -> Option<(&'static str, Value)> {
    (1..=MAX_TEXT)
        .contains(&value.len())
        .then(|| (name, Value::Text(value.to_owned())))
}

/// Returns the attributes that the MIG devices of a GPU have too.
fn common_attributes(
    gpu: &NodeGpu,
    facts: &Facts,
    places: Places<'_>,
) -> BTreeMap<&'static str, Value> {
    let info = &gpu.gpu;
    let version = |name, text| Some((name, Value::Version(semver(text)?)));
    let root = places.pcie_roots.get(&info.bus_id);
    let numa_node = places.numa_nodes.get(&info.bus_id);
    let mode = facts
        .properties
        .get(&info.uuid)
        .and_then(|properties| properties.addressing_mode);
    let found = [
        mode.and_then(|mode| text("addressingMode", addressing(mode))),
        text("productName", &info.model),
        text("brand", brand(&info.brand)),
        architecture(&info.compute_capability).and_then(|name| text("architecture", name)),
        version("cudaComputeCapability", &info.compute_capability),
        version("driverVersion", &facts.driver_version),
        version("cudaDriverVersion", &facts.cuda_version),
        text("resource.kubernetes.io/pciBusID", &info.bus_id.in_sysfs()),
        root.and_then(|root| text("resource.kubernetes.io/pcieRoot", root)),
        numa_node.map(|node| {
            (
                "resource.kubernetes.io/numaNode",
                Value::Number((*node).into()),
            )
        }),
    ];
    found.into_iter().flatten().collect()
}

/// The memory slices of a GPU. All GPUs with MIG have at most eight.
const MEMORY_SLICES: [&str; 8] = [
    "memorySlice0",
    "memorySlice1",
    "memorySlice2",
    "memorySlice3",
    "memorySlice4",
    "memorySlice5",
    "memorySlice6",
    "memorySlice7",
];

fn mig_capacity(mig: &MigDevice, facts: &Facts) -> BTreeMap<&'static str, u64> {
    let Some(parts) = facts.mig_attributes.get(&mig.uuid) else {
        return BTreeMap::new();
    };
    let slices = facts
        .memory_slices
        .get(&mig.uuid)
        .copied()
        .unwrap_or_default();
    let first = usize::try_from(slices.start).unwrap_or(usize::MAX);
    let size = usize::try_from(slices.size).unwrap_or_default();
    let slices = MEMORY_SLICES
        .iter()
        .skip(first)
        .take(size)
        .map(|name| (*name, 1));
    let mut capacity = BTreeMap::from([
        ("memory", parts.memory_mib.saturating_mul(MIB)),
        ("multiprocessors", parts.multiprocessors.into()),
        ("copyEngines", parts.engines.copy.into()),
        ("decoders", parts.engines.decoder.into()),
        ("encoders", parts.engines.encoder.into()),
        ("jpegEngines", parts.engines.jpeg.into()),
        ("ofaEngines", parts.engines.ofa.into()),
    ]);
    capacity.extend(slices);
    capacity
}

/// Returns the name of a device. Those of NVIDIA's driver for MIG devices end with numbers of the profile and of the place, which NVML does
/// not report for a device; ours end with the numbers of the instances. No selector can use the names.
fn name(gpu: &NodeGpu, part: Option<&MigDevice>) -> String {
    let minor = gpu.gpu.minor;
    let Some(mig) = part else {
        return format!("gpu-{minor}");
    };
    let profile = gpu
        .profiles
        .get(&mig.uuid)
        .map_or("unknown", String::as_str)
        .replace('.', "")
        .to_ascii_lowercase();
    let profile: String = profile
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    let instances = format!("-{}-{}", mig.gpu_instance, mig.compute_instance);
    let mut name = format!("gpu-{minor}-mig-{profile}");
    name.truncate(MAX_NAME.saturating_sub(instances.len()));
    name + &instances
}

/// Returns a version of the driver or of CUDA in the form of semver.org, without leading zeros: 535.183.01 becomes 535.183.1.
fn semver(text: &str) -> Option<String> {
    let mut numbers = text
        .split('.')
        .take(3)
        .map(|part| part.parse::<u32>().ok())
        .collect::<Option<Vec<_>>>()?;
    numbers.resize(3, 0);
    match numbers.as_slice() {
        [major, minor, patch] => Some(format!("{major}.{minor}.{patch}")),
        _ => None,
    }
}

/// Returns the mode as NVIDIA's driver for DRA spells it.
const fn addressing(mode: AddressingMode) -> &'static str {
    match mode {
        AddressingMode::None => "None",
        AddressingMode::Hmm => "HMM",
        AddressingMode::Ats => "ATS",
    }
}

/// Returns the brand as NVIDIA's driver for DRA spells it.
fn brand(name: &str) -> &str {
    match name {
        "" => "Unknown",
        "GRID" => "Grid",
        "TITAN" => "Titan",
        "VApps" => "NvidiaVApps",
        "VPC" => "NvidiaVPC",
        "VCS" => "NvidiaVCS",
        "VWS" => "NvidiaVWS",
        "CloudGaming" => "NvidiaCloudGaming",
        other => other,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::monitor::message::Properties;
    use crate::node::gpus::tests::gpu;
    use nvidia_host::nvml::monitoring::{Engines, MemorySlices, MigAttributes};

    fn facts() -> Facts {
        let addressing_mode = Some(AddressingMode::Hmm);
        let properties = |memory_mib| Properties {
            memory_mib: Some(memory_mib),
            mig_capable: true,
            addressing_mode,
        };
        let engines = Engines {
            copy: 1,
            ..Engines::default()
        };
        let mig = MigAttributes {
            gpu_slices: 1,
            compute_slices: 1,
            memory_mib: 9728,
            multiprocessors: 14,
            engines,
        };
        Facts {
            driver_version: "535.183.01".into(),
            cuda_version: "12.2".into(),
            properties: [
                ("GPU-0".into(), properties(81559)),
                ("GPU-1".into(), properties(81920)),
            ]
            .into(),
            mig_attributes: [("MIG-1-0".into(), mig)].into(),
            memory_slices: [("MIG-1-0".into(), MemorySlices { start: 6, size: 2 })].into(),
        }
    }

    pub(crate) fn some(gpus: &[NodeGpu], facts: &Facts, before: &[Device]) -> Vec<Device> {
        let (numa_nodes, pcie_roots) = (
            [(gpus[0].gpu.bus_id, 1)].into(),
            [(gpus[0].gpu.bus_id, "pci0000:00".to_owned())].into(),
        );
        let places = Places {
            numa_nodes: &numa_nodes,
            pcie_roots: &pcie_roots,
        };
        devices(
            gpus,
            facts,
            places,
            (&Plugin::default(), &Limits::default()),
            before,
            |gpu| {
                (gpu.gpu.uuid == "GPU-1").then(|| Failure {
                    why: "XID 79".to_owned(),
                    is_of_driver: false,
                })
            },
        )
    }

    fn text(value: &str) -> Value {
        Value::Text(value.into())
    }

    fn version(value: &str) -> Value {
        Value::Version(value.into())
    }

    #[test]
    fn a_gpu_and_a_mig_device() {
        let mut gpus = [
            gpu(0, "NVIDIA H100", &[]),
            gpu(1, "NVIDIA H100", &["1g.10gb+me"]),
        ];
        for gpu in &mut gpus {
            gpu.gpu.compute_capability = "9.0".into();
        }
        let found = some(&gpus, &facts(), &[]);
        let names: Vec<_> = found.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["gpu-0", "gpu-1-mig-1g10gb-me-7-0"]);
        let expected = BTreeMap::from([
            ("type", text("gpu")),
            ("addressingMode", text("HMM")),
            ("uuid", text("GPU-0")),
            ("productName", text("NVIDIA H100")),
            ("brand", text("Unknown")),
            ("architecture", text("Hopper")),
            ("cudaComputeCapability", version("9.0.0")),
            ("driverVersion", version("535.183.1")),
            ("cudaDriverVersion", version("12.2.0")),
            ("resource.kubernetes.io/pciBusID", text("0000:01:00.0")),
            ("resource.kubernetes.io/pcieRoot", text("pci0000:00")),
            ("resource.kubernetes.io/numaNode", Value::Number(1)),
        ]);
        assert_eq!(found[0].attributes, expected);
        assert_eq!(found[0].capacity, [("memory", 81559 * MIB)].into());
        assert_eq!(
            (&found[0].unhealthy, &found[1].unhealthy),
            (&None, &Some("XID 79".to_owned()))
        );
        let mig = &found[1].attributes;
        assert_eq!(
            (&mig["type"], &mig["parentUUID"], &mig["profile"]),
            (&text("mig"), &text("GPU-1"), &text("1g.10gb+me"))
        );
        assert_eq!(
            (
                found[1].capacity["memory"],
                found[1].capacity["multiprocessors"]
            ),
            (9728 * MIB, 14)
        );
        assert_eq!(
            (&mig["addressingMode"], found[1].capacity.len()),
            (&text("HMM"), 9)
        );
        assert_eq!(
            (
                found[1].capacity["memorySlice6"],
                found[1].capacity["memorySlice7"]
            ),
            (1, 1)
        );
    }

    #[test]
    fn a_driver_that_stops_changes_no_attribute() {
        let gpus = [gpu(0, "NVIDIA H100", &[])];
        let before = some(&gpus, &facts(), &[]);
        let after = some(&gpus, &Facts::default(), &before);
        assert_eq!(before, after);
        assert_eq!(
            some(&gpus, &Facts::default(), &[])[0].capacity,
            BTreeMap::new()
        );
    }

    #[test]
    fn versions() {
        for (given, expected) in [
            ("535.183.01", Some("535.183.1")),
            ("9.0", Some("9.0.0")),
            ("12", Some("12.0.0")),
            ("1.2.3.4", Some("1.2.3")),
            ("", None),
            ("beta", None),
            ("1.-2", None),
        ] {
            assert_eq!(semver(given).as_deref(), expected, "{given}");
        }
    }
}
