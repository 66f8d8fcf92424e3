//! Decides which devices claims can have, with the names and attributes of NVIDIA's driver for DRA, because the selectors of users depend
//! on them. Pure.

use std::collections::{BTreeMap, BTreeSet};

use nvidia_host::config::Limits;
use nvidia_host::inventory::limits::permit;
use nvidia_host::inventory::{Gpu, MigDevice};
use nvidia_host::mps::{self, Daemon};
use nvidia_host::nvml::monitoring::AddressingMode;

use crate::node::devices::parts;
use crate::node::facts::{NvmlFacts, architecture};
use crate::node::gpus::{NodeGpu, NumaNodes, PcieRoots};
use crate::node::health::GpuFailure;
use crate::node::mps::max_clients;
use crate::settings::Plugin;

pub(super) const MIB: u64 = 1024 * 1024;
/// The name of the capacity of which a claim with MPS gets a part
pub(super) const MEMORY: &str = "memory";
/// The name of the capacity of which a claim with MPS gets one
pub(super) const CLIENTS: &str = "clients";
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
pub struct ClaimDevice {
    /// The name in the pool of the node
    pub name: String,
    /// The UUID of the GPU or MIG device
    pub uuid: String,
    /// The UUID of the GPU
    pub gpu: String,
    /// The attributes by name. Names without a domain belong to the driver's domain.
    pub attributes: BTreeMap<&'static str, Value>,
    /// The capacities by name, in bytes or as numbers
    pub capacity: BTreeMap<&'static str, u64>,
    /// What the MPS daemon of the GPU permits a client; `None` without a daemon
    pub mps: Option<MpsLimits>,
    /// Why the device cannot be used; `None` if it can
    pub unhealthy: Option<String>,
    /// NVML as a whole is silent. The device is tainted, but prepared claims keep it, because no error of
    /// this GPU is known.
    pub driver_silent: bool,
}

/// What an MPS daemon permits a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MpsLimits {
    /// The memory in bytes; `None` if it is not limited
    pub memory: Option<u64>,
    /// The part of the GPU's threads, from 1 to 100
    pub thread_percentage: u8,
}

impl MpsLimits {
    fn of(daemon: &Daemon) -> Self {
        let memory = daemon.state.memory_limit_mib;
        Self {
            memory: memory.map(|mib| mib.saturating_mul(MIB)),
            thread_percentage: daemon.state.active_thread_percentage.unwrap_or(100),
        }
    }
}

impl ClaimDevice {
    /// Returns the memory of each claim, in bytes, if several claims can have the device at the same time: its MPS daemon limits the memory,
    /// so that the scheduler can count it.
    #[must_use]
    pub fn share(&self) -> Option<u64> {
        let limit = self.mps?.memory?;
        let total = *self.capacity.get(MEMORY)?;
        if limit == 0 || limit > total {
            return None;
        }
        Some(limit)
    }
}

/// What the devices follow from.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// The GPUs of the node
    pub gpus: &'a [NodeGpu],
    /// What NVML reports about them
    pub facts: &'a NvmlFacts,
    /// The NUMA nodes
    pub numa_nodes: &'a NumaNodes,
    /// The roots of the PCI hierarchy, such as `pci0000:00`
    pub pcie_roots: &'a PcieRoots,
    /// The settings
    pub settings: &'a Plugin,
    /// The limits in force
    pub limits: &'a Limits,
    /// The MPS daemons of the GPUs
    pub mps: &'a [Daemon],
}

/// Returns the devices in the order of the PCI bus, in which the scheduler chooses them. `before` are the devices of the last call: a driver that
/// stops does not change what is known about the hardware. `failure` returns the error of a GPU.
#[must_use]
pub fn devices(
    sources: &Sources<'_>,
    before: &[ClaimDevice],
    failure: impl Fn(&NodeGpu) -> Option<GpuFailure>,
) -> Vec<ClaimDevice> {
    let mut found = Vec::new();
    let mut names = BTreeSet::new();
    for gpu in sources.gpus {
        let failure = failure(gpu);
        for part in parts(gpu, sources.settings) {
            // Two profiles can differ in a letter that names cannot have.
            if !permit(sources.limits, &gpu.gpu, part) || !names.insert(name(gpu, part)) {
                continue;
            }
            let mut device = device(gpu, part, sources);
            if let Some(failure) = &failure {
                device.unhealthy = Some(failure.why.clone());
                device.driver_silent = failure.driver_silent;
            }
            found.push(device);
        }
    }
    if sources.facts.driver_version.is_empty() {
        keep_hardware(&mut found, before);
    }
    found
}

/// Takes over what was known about the hardware of the devices.
fn keep_hardware(devices: &mut [ClaimDevice], before: &[ClaimDevice]) {
    for device in devices {
        let is_it = |known: &&ClaimDevice| known.uuid == device.uuid && known.name == device.name;
        if let Some(known) = before.iter().find(is_it) {
            device.attributes.clone_from(&known.attributes);
            device.capacity.clone_from(&known.capacity);
        }
    }
}

fn device(gpu: &NodeGpu, part: Option<&MigDevice>, sources: &Sources<'_>) -> ClaimDevice {
    let facts = sources.facts;
    let mut device = ClaimDevice {
        name: name(gpu, part),
        uuid: part.map_or(&gpu.gpu.uuid, |mig| &mig.uuid).clone(),
        gpu: gpu.gpu.uuid.clone(),
        ..ClaimDevice::default()
    };
    device.describe(&gpu.gpu, sources);
    device.text("uuid", &device.uuid.clone());
    match part {
        None => {
            device.text("type", "gpu");
            let properties = facts.properties.get(&gpu.gpu.uuid);
            if let Some(mib) = properties.and_then(|properties| properties.memory_mib) {
                device.capacity.insert(MEMORY, mib.saturating_mul(MIB));
            }
            if let Some(daemon) = mps::of_gpu(sources.mps, &gpu.gpu.uuid) {
                device.share_with(MpsLimits::of(daemon), max_clients(&gpu.gpu));
            }
        }
        Some(mig) => {
            device.text("type", "mig");
            device.text("parentUUID", &gpu.gpu.uuid);
            if let Some(profile) = gpu.profiles.get(&mig.uuid) {
                device.text("profile", profile);
            }
            device.capacity = mig_capacity(mig, facts);
        }
    }
    device
}

impl ClaimDevice {
    /// Makes it a device that MPS shares. It has another type than a whole GPU, whose class does not match it.
    fn share_with(&mut self, limits: MpsLimits, clients: u32) {
        self.text("type", "mps");
        let percentage = Value::Number(limits.thread_percentage.into());
        self.attributes.insert("mpsThreadPercentage", percentage);
        if let Some(memory) = limits.memory {
            let mib = i64::try_from(memory / MIB).unwrap_or(i64::MAX);
            self.attributes
                .insert("mpsMemoryLimitMiB", Value::Number(mib));
        }
        self.capacity.insert(CLIENTS, clients.into());
        self.mps = Some(limits);
    }

    /// Adds an attribute, unless the text is empty or too long for one.
    fn text(&mut self, name: &'static str, value: &str) {
        if !value.is_empty() && value.len() <= MAX_TEXT {
            let value = Value::Text(value.to_owned());
            self.attributes.insert(name, value);
        }
    }

    /// Adds an attribute, unless the text is not a version.
    fn version(&mut self, name: &'static str, text: &str) {
        if let Some(version) = semver(text) {
            self.attributes.insert(name, Value::Version(version));
        }
    }

    /// Adds the attributes that the MIG devices of a GPU have too.
    fn describe(&mut self, gpu: &Gpu, sources: &Sources<'_>) {
        let facts = sources.facts;
        let properties = facts.properties.get(&gpu.uuid);
        if let Some(mode) = properties.and_then(|properties| properties.addressing_mode) {
            self.text("addressingMode", addressing(mode));
        }
        self.text("productName", &gpu.model);
        self.text("brand", brand(&gpu.brand));
        if let Some(name) = architecture(&gpu.compute_capability) {
            self.text("architecture", name);
        }
        self.version("cudaComputeCapability", &gpu.compute_capability);
        self.version("driverVersion", &facts.driver_version);
        self.version("cudaDriverVersion", &facts.cuda_version);
        self.text("resource.kubernetes.io/pciBusID", &gpu.bus_id.in_sysfs());
        if let Some(root) = sources.pcie_roots.get(&gpu.bus_id) {
            self.text("resource.kubernetes.io/pcieRoot", root);
        }
        if let Some(node) = sources.numa_nodes.get(&gpu.bus_id) {
            let node = Value::Number((*node).into());
            self.attributes
                .insert("resource.kubernetes.io/numaNode", node);
        }
    }
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

fn mig_capacity(mig: &MigDevice, facts: &NvmlFacts) -> BTreeMap<&'static str, u64> {
    let Some(parts) = facts.mig_attributes.get(&mig.uuid) else {
        return BTreeMap::new();
    };
    let slices = facts.memory_slices.get(&mig.uuid);
    let slices = slices.copied().unwrap_or_default();
    let first = usize::try_from(slices.start).unwrap_or(usize::MAX);
    let size = usize::try_from(slices.size).unwrap_or_default();
    let mut capacity = BTreeMap::from([
        ("memory", parts.memory_mib.saturating_mul(MIB)),
        ("multiprocessors", parts.multiprocessors.into()),
        ("copyEngines", parts.engines.copy.into()),
        ("decoders", parts.engines.decoder.into()),
        ("encoders", parts.engines.encoder.into()),
        ("jpegEngines", parts.engines.jpeg.into()),
        ("ofaEngines", parts.engines.ofa.into()),
    ]);
    for name in MEMORY_SLICES.iter().skip(first).take(size) {
        capacity.insert(name, 1);
    }
    capacity
}

/// Returns the name of a device. NVIDIA's driver ends the names of MIG devices with numbers of the
/// profile and of the place, which NVML does not report for a device; ours end with the numbers of
/// the instances. No selector can use the names.
fn name(gpu: &NodeGpu, part: Option<&MigDevice>) -> String {
    let minor = gpu.gpu.minor;
    let Some(mig) = part else {
        return format!("gpu-{minor}");
    };
    let profile = gpu.profiles.get(&mig.uuid);
    let profile = profile.map_or("unknown", String::as_str).replace('.', "");
    let mut name = format!("gpu-{minor}-mig-");
    for c in profile.chars() {
        name.push(if c.is_ascii_alphanumeric() { c } else { '-' });
    }
    name.make_ascii_lowercase();
    let instances = format!("-{}-{}", mig.gpu_instance, mig.compute_instance);
    name.truncate(MAX_NAME.saturating_sub(instances.len()));
    name + &instances
}

/// Returns a version of the driver or of CUDA in the form of semver.org, without leading zeros: 535.183.01 becomes 535.183.1.
fn semver(text: &str) -> Option<String> {
    let mut numbers = [0_u32; 3];
    for (number, part) in numbers.iter_mut().zip(text.split('.')) {
        *number = part.parse().ok()?;
    }
    let [major, minor, patch] = numbers;
    Some(format!("{major}.{minor}.{patch}"))
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

    fn facts() -> NvmlFacts {
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
        NvmlFacts {
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

    pub(crate) fn some(
        gpus: &[NodeGpu],
        facts: &NvmlFacts,
        before: &[ClaimDevice],
    ) -> Vec<ClaimDevice> {
        let (numa_nodes, pcie_roots) = (
            [(gpus[0].gpu.bus_id, 1)].into(),
            [(gpus[0].gpu.bus_id, "pci0000:00".to_owned())].into(),
        );
        let sources = Sources {
            gpus,
            facts,
            numa_nodes: &numa_nodes,
            pcie_roots: &pcie_roots,
            settings: &Plugin::default(),
            limits: &Limits::default(),
            mps: &[],
        };
        devices(&sources, before, |gpu| {
            (gpu.gpu.uuid == "GPU-1").then(|| GpuFailure {
                why: "XID 79".to_owned(),
                driver_silent: false,
            })
        })
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
    fn two_mig_devices_with_one_name() {
        let mut gpus = [gpu(0, "NVIDIA H100", &["1g.10gb+me", "1g.10gb-me"])];
        for mig in &mut gpus[0].gpu.mig_devices {
            mig.gpu_instance = 7;
        }
        let found = some(&gpus, &facts(), &[]);
        let uuids: Vec<_> = found.iter().map(|device| device.uuid.as_str()).collect();
        // The API server rejects a slice with two devices of one name.
        assert_eq!(uuids, ["MIG-0-0"]);
    }

    #[test]
    fn a_driver_that_stops_changes_no_attribute() {
        let gpus = [gpu(0, "NVIDIA H100", &[])];
        let before = some(&gpus, &facts(), &[]);
        let after = some(&gpus, &NvmlFacts::default(), &before);
        assert_eq!(before, after);
        assert_eq!(
            some(&gpus, &NvmlFacts::default(), &[])[0].capacity,
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
