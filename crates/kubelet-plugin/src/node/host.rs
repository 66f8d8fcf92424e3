//! Reads what the kernel knows about the GPUs of the node, without NVML.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use base::report::Finding;
use base::tree::Tree;
use findings::catalog;
use nvidia_host::config::Config;
use nvidia_host::driver::pci::{self, PCI_DEVICES};
use nvidia_host::feature::{FeatureRow, Features};
use nvidia_host::host::{self, Roots};
use nvidia_host::inventory::{BusId, cap_files, procfs};
use nvidia_host::mps::{self, Daemon};

use super::gpus::{self, NodeGpu, NumaNodes, PcieRoots, parse_numa_node, pcie_root};
use super::obstacle::NOT_ANSWERED;

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
    let mut found = NumaNodes::new();
    for NodeGpu { gpu, .. } in gpus {
        if let Some(node) = numa_node(&sys, gpu.bus_id) {
            found.insert(gpu.bus_id, node);
        }
    }
    Ok(found)
}

/// Returns the MPS daemons of those GPUs that config.toml shares.
#[must_use]
pub fn mps_daemons(config: &Config, gpus: &[NodeGpu]) -> Vec<Daemon> {
    if config.sharing.mps_gpus.is_empty() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for NodeGpu { gpu, failure, .. } in gpus {
        let mut gpu = gpu.clone();
        // The kernel does not know NVML's index, so that no index names the GPU.
        if failure.as_deref() == Some(NOT_ANSWERED) {
            gpu.index = u32::MAX;
        }
        found.push(gpu);
    }
    match Tree::open(&config.driver_root) {
        Ok(driver) => mps::daemons(&driver, &config.sharing, &found),
        Err(_) => Vec::new(),
    }
}

/// Returns which of these features containers can get, and findings about the others.
///
/// # Errors
/// If the driver root cannot be opened.
pub fn extra_devices(config: &Config, wanted: Features) -> Result<(Features, Vec<Finding>)> {
    let roots = Roots::open(config)?;
    let dev_root = roots.dev.path();
    let mut present = Features::EMPTY;
    for (feature, _) in host::features(&roots) {
        present.insert(feature);
    }
    let denied = config.devices.denied_features;
    let mut found = Features::EMPTY;
    let mut findings = Vec::new();
    for feature in wanted.iter() {
        let FeatureRow { name, title, .. } = feature.row();
        let request = format!("extra-devices contains {name:?} ({title})");
        if denied.has(feature) {
            findings.push(Finding::new(
                &catalog::PLUGIN_NO_EFFECT,
                format!(
                    "{request}, which deny in [devices] of config.toml withholds from containers"
                ),
                format!("remove {name:?} from one of the two lists"),
            ));
        } else if present.has(feature) {
            found.insert(feature);
        } else {
            findings.push(feature.missing(&request, &dev_root));
        }
    }
    Ok((found, findings))
}

/// Returns the roots of the PCI hierarchy of these GPUs, from sysfs.
///
/// # Errors
/// If the driver root cannot be opened.
pub fn pcie_roots(config: &Config, gpus: &[NodeGpu]) -> Result<PcieRoots> {
    let sys = Roots::open(config)?.sys;
    let mut found = PcieRoots::new();
    for NodeGpu { gpu, .. } in gpus {
        let path = Path::new(PCI_DEVICES).join(gpu.bus_id.in_sysfs());
        if let Ok(place) = sys.locate(&path)
            && let Some(root) = pcie_root(&place.path)
        {
            found.insert(gpu.bus_id, root);
        }
    }
    Ok(found)
}

/// Returns the model of the computer that its firmware reports.
#[must_use]
pub fn machine(config: &Config) -> Option<String> {
    let sys = Roots::open(config).ok()?.sys;
    let bytes = sys.read(Path::new(MACHINE)).ok()?;
    Some(String::from_utf8(bytes).ok()?.trim().to_owned())
}

/// Returns the PCI classes of NVIDIA's devices, by their addresses in sysfs. The map is empty if sysfs cannot be read.
#[must_use]
pub fn pci_classes(config: &Config) -> BTreeMap<String, String> {
    let mut classes = BTreeMap::new();
    if let Ok(roots) = Roots::open(config) {
        for device in pci::devices(&roots.sys).unwrap_or_default() {
            classes.insert(device.address, device.class);
        }
    }
    classes
}

/// Returns `NODE_NAME`, which the DaemonSet sets because a pod has a separate host name; outside a
/// pod, the host name.
#[must_use]
#[allow(
    clippy::disallowed_methods,
    reason = "the manifest sets it for this process"
)]
pub fn node_name() -> String {
    match std::env::var("NODE_NAME") {
        Ok(name) if !name.is_empty() => name,
        _ => {
            let name = std::fs::read_to_string(HOST_NAME).unwrap_or_default();
            name.trim().to_owned()
        }
    }
}

/// Reports whether the process runs in a pod, from a variable that the kubelet sets.
#[must_use]
#[allow(
    clippy::disallowed_methods,
    reason = "the kubelet sets it for this process"
)]
pub fn is_in_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

fn numa_node(sys: &Tree, bus_id: BusId) -> Option<u32> {
    let path = Path::new(PCI_DEVICES)
        .join(bus_id.in_sysfs())
        .join("numa_node");
    parse_numa_node(std::str::from_utf8(&sys.read(&path).ok()?).ok()?)
}
