//! Decides which edits a container gets, from the facts of the host and the request.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use base::report::{Finding, Kind, failure};
use findings::catalog;

use super::facts::{DeviceFacts, HostFacts, WslGpus};
use super::{DeviceNode, Edits, Wanted, build};
use crate::capability::Capability::{self, Compute, Display, Graphics, Video};
use crate::config::Limits;
use crate::driver::file_table::GBM_DIR;
use crate::driver::node_name::{CONTROL, NodeName};
use crate::driver::nodes::{CTL_MINOR, MODESET_MINOR, PREPARE, imex_channel};
use crate::driver::wsl::NODE;
use crate::feature::{Feature, FeatureRow};
use crate::inventory::caps::{MIG_MINORS, MigCap};
use crate::inventory::procfs::DRIVER_PROC;
use crate::inventory::select::Device;
use crate::inventory::{Gpu, MigDevice, limits};
use crate::mps::{self, CONTAINER_DIRECTORY};

/// The capabilities that require the nodes of a GPU in `/dev/dri`.
const DRM: [Capability; 2] = [Graphics, Display];

/// A node other than `/dev/nvidiactl` that does not belong to one GPU.
struct CommonNode {
    name: &'static str,
    /// The minor number. The kernel assigns the major number of nvidia-uvm at run time
    minor: u32,
    has_drivers_major: bool,
    /// The capabilities that require the node
    capabilities: [Capability; 2],
    /// The finding if it is missing
    missing: Option<&'static Kind>,
}

static COMMON_NODES: [CommonNode; 3] = [
    CommonNode {
        name: "nvidia-uvm",
        minor: 0,
        has_drivers_major: false,
        capabilities: [Compute, Video],
        missing: Some(&catalog::NO_UVM),
    },
    CommonNode {
        name: "nvidia-uvm-tools",
        minor: 1,
        has_drivers_major: false,
        capabilities: [Compute, Video],
        missing: None,
    },
    CommonNode {
        name: "nvidia-modeset",
        minor: MODESET_MINOR,
        has_drivers_major: true,
        capabilities: DRM,
        missing: Some(&catalog::NO_MODESET),
    },
];

/// Returns the names below /dev of the nodes that [`common_nodes`] needs.
pub(crate) fn common_node_names(wanted: &Wanted) -> impl Iterator<Item = &'static str> {
    std::iter::once(CONTROL).chain(requested_nodes(wanted).map(|node| node.name))
}

/// Returns the names below /dev of the nodes that are reported if they are missing.
pub(crate) fn reported_node_names(wanted: &Wanted) -> impl Iterator<Item = &'static str> {
    requested_nodes(wanted)
        .filter(|node| node.missing.is_some())
        .map(|node| node.name)
}

fn requested_nodes(wanted: &Wanted) -> impl Iterator<Item = &'static CommonNode> {
    COMMON_NODES
        .iter()
        .filter(|node| wanted.capabilities.any(&node.capabilities))
}

/// Whether the nodes in `/dev/dri` are requested.
#[must_use]
pub(crate) fn wants_drm(wanted: &Wanted) -> bool {
    wanted.capabilities.any(&DRM)
}

/// Whether the table of MIG capabilities is needed, which has 4,000 lines.
#[must_use]
pub(crate) fn wants_mig_minors(wanted: &Wanted, devices: &[Device<'_>]) -> bool {
    wanted.mig_config
        || wanted.mig_monitor
        || devices
            .iter()
            .any(|device| matches!(device, Device::Mig(..)))
}

/// Returns the edits for a container, and findings about them.
///
/// # Errors
/// If something is missing that the container requires.
pub fn edits(
    facts: &HostFacts,
    wanted: &Wanted,
    devices: &[Device<'_>],
) -> Result<(Edits, Vec<Finding>)> {
    let (mut edits, mut findings) = common(facts, wanted)?;
    if let Some(daemon) = shared(&facts.devices.mps, devices)? {
        // The directory of another MPS daemon has the same path in containers.
        let path = Path::new(CONTAINER_DIRECTORY);
        edits.ipc.retain(|ipc| ipc.path.absolute() != path);
        edits.ipc.extend(daemon.ipc.clone());
    }
    findings.extend(not_isolated(&facts.devices, devices.len()));
    for device in devices {
        edits = edits.merge(of_device(&facts.devices, wanted, *device)?);
    }
    edits = edits.merge(mig_management(&facts.devices, wanted, devices)?);
    edits = edits.merge(build::device(
        imex_nodes(&facts.devices, wanted)?,
        Vec::new(),
    ));
    for feature in wanted.features.iter() {
        let nodes = facts.devices.of_feature(feature)?;
        if nodes.is_empty() {
            findings.push(without_nodes(feature, &facts.devices));
        }
        edits = edits.merge(build::device(nodes, Vec::new()));
    }
    Ok((without_proc(edits, &facts.devices), findings))
}

/// Returns the MPS daemon whose GPU a container with these devices gets, see [`mps::of_container`].
///
/// # Errors
/// If the daemon is not ready, or the container gets other GPUs too.
pub fn shared<'f>(
    daemons: &'f [mps::Daemon],
    devices: &[Device<'_>],
) -> Result<Option<&'f mps::Daemon>> {
    let uuids: Vec<&str> = devices
        .iter()
        .map(|device| device.gpu().uuid.as_str())
        .collect();
    mps::of_container(daemons, &uuids)
}

/// Returns the edits that do not depend on the devices.
///
/// # Errors
/// If `/dev/nvidiactl` is missing, or a node is wrong.
pub fn common(facts: &HostFacts, wanted: &Wanted) -> Result<(Edits, Vec<Finding>)> {
    let mut findings = facts.findings.clone();
    let nodes = common_nodes(&facts.devices, wanted, &mut findings)?;
    let mut edits = build::common(
        &facts.files,
        facts.ipc.clone(),
        nodes,
        facts.proc_files.clone(),
    );
    if !wants_drm(wanted) {
        // libgbm opens its backend for a node in /dev/dri.
        edits
            .links
            .retain(|link| Path::new(&link.name).parent() != Some(Path::new(GBM_DIR)));
    }
    Ok((without_proc(edits, &facts.devices), findings))
}

/// Returns the nodes that do not belong to one GPU.
///
/// # Errors
/// If `/dev/nvidiactl` is missing, or a node is wrong.
pub fn common_nodes(
    facts: &DeviceFacts,
    wanted: &Wanted,
    findings: &mut Vec<Finding>,
) -> Result<Vec<DeviceNode>> {
    if facts.wsl.is_some() {
        return Ok(Vec::new());
    }
    let mut found = vec![facts.required_of_driver(CONTROL, CTL_MINOR)?];
    for CommonNode {
        name,
        minor,
        has_drivers_major,
        missing,
        ..
    } in requested_nodes(wanted)
    {
        match (
            facts.optional_with(name, *minor, *has_drivers_major)?,
            missing,
        ) {
            (Some(node), _) => found.push(node),
            (None, Some(kind)) if wanted.gpus => {
                findings.push(Finding::new(
                    kind,
                    format!("the device node \"/dev/{name}\" is missing"),
                    PREPARE,
                ));
            }
            (None, _) => {}
        }
    }
    Ok(found)
}

/// Returns the edits for one device, in addition to the common ones.
///
/// # Errors
/// If a device node of the device is missing.
pub fn of_device(facts: &DeviceFacts, wanted: &Wanted, device: Device<'_>) -> Result<Edits> {
    let gpu = device.gpu();
    let mut edits = of_gpu(facts, gpu)?;
    if wants_drm(wanted) && facts.wsl.is_none() {
        edits = edits.merge(build::drm(drm_nodes(facts, gpu)?, &gpu.bus_id.in_sysfs()));
        edits = edits.merge(build::egl_device(gpu.minor));
    }
    // A container that manages MIG devices gets the capabilities of all instances in another step.
    let manages = wanted.mig_config || wanted.mig_monitor;
    if let (Device::Mig(gpu, mig), false) = (device, manages) {
        edits = edits.merge(of_mig_device(facts, gpu, mig)?);
    }
    Ok(without_proc(edits, facts))
}

fn of_gpu(facts: &DeviceFacts, gpu: &Gpu) -> Result<Edits> {
    if let Some(wsl) = &facts.wsl {
        return Ok(build::device(vec![dxg_node(facts, wsl)?], Vec::new()));
    }
    let node = facts
        .required_of_driver(&NodeName::Gpu(gpu.minor).to_string(), gpu.minor)
        .with_context(|| cannot_give(&gpu.uuid, gpu))?;
    let mount = facts
        .gpu_dir(gpu.bus_id)
        .and_then(|dir| facts.proc_mount(&dir));
    Ok(build::device(vec![node], mount.into_iter().collect()))
}

/// Returns the node of WSL 2. With it, a container can use all GPUs, so limits are not enforced but refused.
fn dxg_node(facts: &DeviceFacts, wsl: &WslGpus) -> Result<DeviceNode> {
    if let Some(Finding { kind, what, fix }) = refused_limits(wsl) {
        return Err(failure(kind, what, fix));
    }
    if let Some(node) = facts.optional(NODE)? {
        return Ok(node);
    }
    let what = format!(
        "the device node \"/dev/{NODE}\" is missing below {}",
        facts.dev_root
    );
    let fix = "run \"wsl --update\" and \"wsl --shutdown\" in Windows, and start WSL again";
    Err(failure(&catalog::NODE_MISSING, what, fix))
}

/// Returns why no container on WSL 2 may have GPUs: the limits deny some of them.
#[must_use]
pub fn refused_limits(wsl: &WslGpus) -> Option<Finding> {
    let denied = wsl.denied.first()?;
    let what = format!(
        "[devices] in config.toml denies GPU {denied} to containers, and on WSL 2 a container has all GPUs or none"
    );
    let fix = "remove allow and deny of GPUs from config.toml, or disable the GPU in Windows";
    Some(Finding::new(&catalog::NOT_LIMITED, what, fix))
}

/// Returns the finding about a container on WSL 2 that can use more GPUs than this number, which it requests.
#[must_use]
pub fn not_isolated(facts: &DeviceFacts, requested: usize) -> Option<Finding> {
    let count = facts.wsl.as_ref()?.count;
    if requested == 0 || requested >= count {
        return None;
    }
    let what = format!(
        "the container requests {requested} of {count} GPUs, and can use all of them: on WSL 2, \"/dev/{NODE}\" stands for all GPUs"
    );
    let fix = "limit the programs in the container with CUDA_VISIBLE_DEVICES";
    Some(Finding::new(&catalog::NOT_ISOLATED, what, fix))
}

/// Returns the `/dev/dri` nodes of a GPU, which Vulkan and EGL open.
fn drm_nodes(facts: &DeviceFacts, gpu: &Gpu) -> Result<Vec<DeviceNode>> {
    let mut nodes = Vec::new();
    for name in facts.drm.get(&gpu.bus_id).into_iter().flatten() {
        nodes.extend(facts.optional(&format!("dri/{name}"))?);
    }
    Ok(nodes)
}

/// Returns the capabilities of a MIG device: access to its GPU instance and to its compute instance.
#[must_use]
pub(crate) const fn caps_of(gpu: &Gpu, mig: &MigDevice) -> [MigCap; 2] {
    let instance = MigCap::GpuInstance(gpu.minor, mig.gpu_instance);
    [
        instance,
        MigCap::ComputeInstance(gpu.minor, mig.gpu_instance, mig.compute_instance),
    ]
}

/// Returns the edits of a MIG device, in addition to the edits of its GPU.
fn of_mig_device(facts: &DeviceFacts, gpu: &Gpu, mig: &MigDevice) -> Result<Edits> {
    let mut edits = Edits::default();
    for cap in caps_of(gpu, mig) {
        let node = cap_node(facts, cap).with_context(|| cannot_give(&mig.uuid, gpu))?;
        let mount = facts.proc_mount(&cap.proc_path());
        edits = edits.merge(build::device(
            node.into_iter().collect(),
            mount.into_iter().collect(),
        ));
    }
    Ok(edits)
}

/// Returns the node of a MIG capability, or `None` if the driver has only the files below /proc.
fn cap_node(facts: &DeviceFacts, cap: MigCap) -> Result<Option<DeviceNode>> {
    let Some(minors) = &facts.mig_minors else {
        return Ok(None);
    };
    let minor = *minors
        .get(&cap)
        .with_context(|| format!("{MIG_MINORS:?} does not have {cap:?}"))?;
    facts
        .required(&NodeName::Cap(minor).to_string(), minor, PREPARE)
        .map(Some)
}

/// Returns the capabilities with which a privileged container configures or monitors MIG devices.
pub fn management_caps(wanted: &Wanted) -> Vec<MigCap> {
    let mut caps = Vec::new();
    if wanted.mig_config {
        caps.push(MigCap::Config);
    }
    if wanted.mig_monitor {
        caps.push(MigCap::Monitor);
    }
    caps
}

/// Returns the edits for a container that configures or monitors MIG devices: the capability, and the capabilities of all instances of its GPUs.
///
/// # Errors
/// If the node of the capability is missing.
pub fn mig_management(
    facts: &DeviceFacts,
    wanted: &Wanted,
    devices: &[Device<'_>],
) -> Result<Edits> {
    let mut edits = Edits::default();
    for cap in management_caps(wanted) {
        let mut nodes: Vec<_> = cap_node(facts, cap)?.into_iter().collect();
        for name in instance_nodes(facts, devices) {
            // The table lists every instance that could be created; nodes exist for those that were.
            nodes.extend(facts.optional(&name)?);
        }
        let mut mounts = Vec::new();
        for path in management_paths(facts, cap, devices) {
            mounts.extend(facts.proc_mount(&path));
        }
        edits = edits.merge(build::device(nodes, mounts));
    }
    Ok(edits)
}

/// Returns the names below /dev of the nodes of all instances that these GPUs could have and that containers may manage.
pub(crate) fn instance_nodes(facts: &DeviceFacts, devices: &[Device<'_>]) -> Vec<String> {
    let mut names = Vec::new();
    for (cap, minor) in facts.mig_minors.iter().flatten() {
        let is_managed = |device: &Device| is_management_of(*cap, device.gpu(), &facts.limits);
        if devices.iter().any(is_managed) {
            names.push(NodeName::Cap(*minor).to_string());
        }
    }
    names
}

/// Whether a capability belongs to an instance of the GPU that containers may manage: `limits` permit one of its MIG devices, or it has
/// none yet.
#[must_use]
pub fn is_management_of(cap: MigCap, gpu: &Gpu, limits: &Limits) -> bool {
    if cap.gpu() != Some(gpu.minor) {
        return false;
    }
    let mut has_none = true;
    for mig in &gpu.mig_devices {
        if is_in(mig, cap) {
            if limits::permit(limits, gpu, Some(mig)) {
                return true;
            }
            has_none = false;
        }
    }
    has_none
}

fn is_in(mig: &MigDevice, cap: MigCap) -> bool {
    match cap {
        MigCap::GpuInstance(_, instance) => mig.gpu_instance == instance,
        MigCap::ComputeInstance(_, instance, compute) => {
            (mig.gpu_instance, mig.compute_instance) == (instance, compute)
        }
        MigCap::Config | MigCap::Monitor => false,
    }
}

/// Returns the paths that stay visible below /proc/driver/nvidia: the whole directory of capabilities, unless it contains files of MIG
/// devices that containers may not have. With a driver without nodes for capabilities, these files grant access.
#[must_use]
pub(crate) fn management_paths(
    facts: &DeviceFacts,
    cap: MigCap,
    devices: &[Device<'_>],
) -> BTreeSet<PathBuf> {
    if !facts.withholds_mig {
        return [Path::new(DRIVER_PROC).join("capabilities")].into();
    }
    let mut caps = vec![cap];
    for device in devices {
        let gpu = device.gpu();
        for mig in &gpu.mig_devices {
            if limits::permit(&facts.limits, gpu, Some(mig)) {
                caps.extend(caps_of(gpu, mig));
            }
        }
    }
    caps.into_iter().map(MigCap::proc_path).collect()
}

fn imex_nodes(facts: &DeviceFacts, wanted: &Wanted) -> Result<Vec<DeviceNode>> {
    let mut nodes = Vec::new();
    for channel in &wanted.imex_channels {
        let fix =
            format!("run \"oci-nvidia-hook prepare --imex-channel {channel}\" as root on the host");
        nodes.push(facts.required(&imex_channel(*channel), *channel, &fix)?);
    }
    Ok(nodes)
}

/// Returns the finding about a feature that this host lacks. As with NVIDIA's stack, the container starts without it.
fn without_nodes(feature: Feature, facts: &DeviceFacts) -> Finding {
    let FeatureRow {
        title, variable, ..
    } = feature.row();
    feature.missing(&format!("{variable} requests {title}"), &facts.dev_root)
}

/// Removes the mask if the host does not have /proc/driver/nvidia.
fn without_proc(mut edits: Edits, facts: &DeviceFacts) -> Edits {
    if !facts.has_proc {
        edits.proc_mask = None;
    }
    edits
}

fn cannot_give(uuid: &str, gpu: &Gpu) -> String {
    format!("cannot give {uuid} of GPU {} to the container", gpu.index)
}

#[cfg(test)]
mod tests;
