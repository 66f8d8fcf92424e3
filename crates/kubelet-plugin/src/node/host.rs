//! Reads what the kernel knows about the GPUs of the node, without NVML.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use base::report::Finding;
use base::tree::Tree;
use findings::catalog;
use nvidia_host::config::Config;
use nvidia_host::driver::pci::{self, PCI_DEVICES};
use nvidia_host::feature::{Feature, Features, Row};
use nvidia_host::host::{self, Roots};
use nvidia_host::inventory::{BusId, cap_files, procfs};

use super::gpus::{self, NodeGpu, NumaNodes, PcieRoots, parse_numa_node, pcie_root};

/// The file with the model of the computer.
const MACHINE: &str = "/sys/devices/virtual/dmi/id/product_name";

/// The file with the host name.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";

/// Returns the GPUs that the kernel module lists, before NVML has answered.
///
/// # Errors
/// If the driver root cannot be opened.
pub fn kernel_gpus(config: &Config, why: &str) -> Result<Vec<NodeGpu>> {
    let roots = Roots::open(config)?;
    let caps = cap_files::existing(&roots.proc);
    let has_mig = |minor: u32| caps.iter().any(|file| file.cap.gpu() == Some(minor));
    Ok(gpus::unanswered(
        &procfs::read_gpus(&roots.proc),
        has_mig,
        why,
    ))
}

/// Returns the NUMA nodes of these GPUs, from sysfs.
///
/// # Errors
/// If the driver root cannot be opened.
pub fn numa_nodes(config: &Config, gpus: &[NodeGpu]) -> Result<NumaNodes> {
    let sys = Roots::open(config)?.sys;
    let addresses = gpus.iter().map(|gpu| gpu.gpu.bus_id);
    Ok(addresses
        .filter_map(|address| Some((address, numa_node(&sys, address)?)))
        .collect())
}

/// Returns which of these features containers can get, and findings about the others.
///
/// # Errors
/// If the driver root cannot be opened.
pub fn extra_devices(config: &Config, wanted: Features) -> Result<(Features, Vec<Finding>)> {
    let roots = Roots::open(config)?;
    let dev_root = roots.dev.path();
    let present: Features = host::features(&roots)
        .into_iter()
        .map(|(feature, _)| feature)
        .collect();
    let denied = config.devices.denied_features;
    let lacks = |feature: &Feature| denied.has(*feature) || !present.has(*feature);
    let findings = wanted.iter().filter(lacks).map(|feature| {
        let Row { name, title, .. } = feature.row();
        let request = format!("extra-devices contains {name:?} ({title})");
        match denied.has(feature) {
            true => Finding::new(
                &catalog::PLUGIN_NO_EFFECT,
                format!(
                    "{request}, which deny in [devices] of config.toml withholds from containers"
                ),
                format!("remove {name:?} from one of the two lists"),
            ),
            false => feature.missing(&request, &dev_root),
        }
    });
    Ok((
        wanted.iter().filter(|feature| !lacks(feature)).collect(),
        findings.collect(),
    ))
}

/// Returns the roots of the PCI hierarchy of these GPUs, from sysfs.
///
/// # Errors
/// If the driver root cannot be opened.
pub fn pcie_roots(config: &Config, gpus: &[NodeGpu]) -> Result<PcieRoots> {
    let sys = Roots::open(config)?.sys;
    let root = |address: BusId| {
        let place = sys
            .locate(&Path::new(PCI_DEVICES).join(address.in_sysfs()))
            .ok()?;
        Some((address, pcie_root(&place.path)?))
    };
    Ok(gpus.iter().filter_map(|gpu| root(gpu.gpu.bus_id)).collect())
}

/// Returns the model of the computer that its firmware reports.
#[must_use]
pub fn machine(config: &Config) -> Option<String> {
    let bytes = Roots::open(config)
        .ok()?
        .sys
        .read(Path::new(MACHINE))
        .ok()?;
    Some(String::from_utf8(bytes).ok()?.trim().to_owned())
}

/// Returns the PCI classes of NVIDIA's devices, by their addresses in sysfs. The map is empty if sysfs cannot be read.
#[must_use]
pub fn pci_classes(config: &Config) -> BTreeMap<String, String> {
    let devices = Roots::open(config)
        .ok()
        .and_then(|roots| pci::devices(&roots.sys))
        .unwrap_or_default();
    devices
        .into_iter()
        .map(|device| (device.address, device.class))
        .collect()
}

/// Returns the name of the node: that in the variable of the DaemonSet, because the host name in a pod is that of the pod, or the
/// host name.
#[must_use]
#[allow(
    clippy::disallowed_methods,
    reason = "the manifest sets it for this process"
)]
pub fn node_name() -> String {
    let variable = std::env::var("NODE_NAME")
        .ok()
        .filter(|name| !name.is_empty());
    variable.unwrap_or_else(|| {
        std::fs::read_to_string(HOST_NAME)
            .unwrap_or_default()
            .trim()
            .to_owned()
    })
}

fn numa_node(sys: &Tree, bus_id: BusId) -> Option<u32> {
    let path = Path::new(PCI_DEVICES)
        .join(bus_id.in_sysfs())
        .join("numa_node");
    parse_numa_node(std::str::from_utf8(&sys.read(&path).ok()?).ok()?)
}
