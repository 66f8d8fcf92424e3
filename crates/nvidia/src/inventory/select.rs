//! Selects the devices for a request, within the administrator's limits.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use anyhow::Result;

use base::report::{Finding, failure};
use findings::catalog;

use super::caps::MigCap;
use super::limits::{permit, permit_failed};
use super::{ExcludedGpu, FailedGpu, Gpu, Inventory, MigDevice};
use crate::config::Limits;
use crate::device_id::{DeviceId, Nodes, VisibleDevices};
use crate::driver::node_name::NodeName;
use crate::driver::nodes::PREPARE;
use crate::quotes;

/// A device that a container can get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device<'a> {
    /// A whole GPU
    Gpu(&'a Gpu),
    /// A MIG device and its GPU
    Mig(&'a Gpu, &'a MigDevice),
}

/// Formats a device as `nvidia-smi -L` does.
impl fmt::Display for Device<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(gpu) => write!(f, "GPU {}: {} (UUID: {})", gpu.index, gpu.model, gpu.uuid),
            Self::Mig(gpu, mig) => write!(
                f,
                "MIG {}:{} of {} (UUID: {})",
                gpu.index, mig.index, gpu.model, mig.uuid
            ),
        }
    }
}

impl<'a> Device<'a> {
    /// Returns the UUID.
    #[must_use]
    pub fn uuid(self) -> &'a str {
        match self {
            Self::Gpu(gpu) => &gpu.uuid,
            Self::Mig(_, mig) => &mig.uuid,
        }
    }

    /// Returns the index as in a request: `0`, or `0:1` for a MIG device.
    #[must_use]
    pub fn index(self) -> String {
        match self {
            Self::Gpu(gpu) => gpu.index.to_string(),
            Self::Mig(gpu, mig) => format!("{}:{}", gpu.index, mig.index),
        }
    }

    /// Reports whether this is the device with this name.
    #[must_use]
    pub fn is_named(self, id: &DeviceId) -> bool {
        match self {
            Self::Gpu(gpu) => gpu.is_named(id),
            Self::Mig(gpu, mig) => mig.is_named(id, gpu),
        }
    }

    /// Returns the GPU, or the GPU of the MIG device.
    #[must_use]
    pub const fn gpu(self) -> &'a Gpu {
        match self {
            Self::Gpu(gpu) | Self::Mig(gpu, _) => gpu,
        }
    }
}

/// Returns the selected devices without duplicates in NVML's order, and findings about the others. `asked_by` names the source of the
/// request in messages.
///
/// # Errors
/// If a requested device does not exist, does not work or is denied, or if `all` matches no GPU.
pub fn select<'a>(
    devices: &VisibleDevices,
    asked_by: &str,
    inventory: &'a Inventory,
    limits: &Limits,
) -> Result<(Vec<Device<'a>>, Vec<Finding>)> {
    match devices {
        VisibleDevices::None => Ok((Vec::new(), Vec::new())),
        VisibleDevices::All => select_all(asked_by, inventory, limits),
        VisibleDevices::List(names) => select_named(names, asked_by, inventory, limits),
        VisibleDevices::Nodes(nodes) => select_named(
            &names_of(nodes, inventory, &BTreeMap::new()),
            asked_by,
            inventory,
            limits,
        ),
    }
}

fn select_named<'a>(
    names: &[String],
    asked_by: &str,
    inventory: &'a Inventory,
    limits: &Limits,
) -> Result<(Vec<Device<'a>>, Vec<Finding>)> {
    let mut chosen = Vec::new();
    for name in names {
        chosen.push(find(name, asked_by, inventory, limits)?);
    }
    let mut devices: Vec<_> = every_device(inventory).collect();
    devices.retain(|device| chosen.contains(device));
    Ok((devices, Vec::new()))
}

/// Returns the names of the devices with these nodes. `minors` contains the nodes of MIG capabilities: for a GPU in MIG mode, these are the
/// names of the MIG devices with both nodes, or the name of the GPU without such devices. A node without a GPU on this host keeps its
/// path, which matches no device.
#[must_use]
pub fn names_of(
    nodes: &Nodes,
    inventory: &Inventory,
    minors: &BTreeMap<MigCap, u32>,
) -> Vec<String> {
    let is_given = |cap: MigCap| match minors.get(&cap) {
        Some(minor) => nodes.caps.contains(minor),
        None => false,
    };
    let mut names = Vec::new();
    for minor in &nodes.gpus {
        let Some(gpu) = inventory.gpus.iter().find(|gpu| gpu.minor == *minor) else {
            names.push(name_of_failed(*minor, inventory));
            continue;
        };
        let before = names.len();
        for mig in &gpu.mig_devices {
            let (instance, compute) = (mig.gpu_instance, mig.compute_instance);
            if is_given(MigCap::GpuInstance(*minor, instance))
                && is_given(MigCap::ComputeInstance(*minor, instance, compute))
            {
                names.push(mig.uuid.clone());
            }
        }
        if names.len() == before {
            names.push(gpu.uuid.clone());
        }
    }
    names
}

fn name_of_failed(minor: u32, inventory: &Inventory) -> String {
    for gpu in &inventory.failed {
        if gpu.minor == Some(minor)
            && let Some(bus_id) = gpu.bus_id
        {
            return bus_id.to_string();
        }
    }
    format!("/dev/{}", NodeName::Gpu(minor))
}

/// Returns every device in NVML's order, each GPU before its MIG devices.
pub fn every_device(inventory: &Inventory) -> impl Iterator<Item = Device<'_>> {
    inventory.gpus.iter().flat_map(devices_of)
}

/// Returns a GPU and then its MIG devices.
pub fn devices_of(gpu: &Gpu) -> impl Iterator<Item = Device<'_>> {
    let parts = gpu.mig_devices.iter().map(move |mig| Device::Mig(gpu, mig));
    std::iter::once(Device::Gpu(gpu)).chain(parts)
}

/// Returns every device that `all` stands for: those that containers may have, without GPUs that
/// only drive a display.
pub fn permitted_devices<'a>(inventory: &'a Inventory, limits: &Limits) -> Vec<Device<'a>> {
    let is_for_all =
        |device: &Device<'_>| permitted(*device, limits) && !device.gpu().is_display_only();
    every_device(inventory).filter(is_for_all).collect()
}

/// Returns every GPU that containers may have and that does not work. `all` stands for the GPUs that this process may open, so nothing is
/// wrong with one that its device cgroup denies.
pub(crate) fn permitted_failed<'a>(
    inventory: &'a Inventory,
    limits: &Limits,
) -> impl Iterator<Item = &'a FailedGpu> {
    inventory
        .failed
        .iter()
        .filter(|gpu| !gpu.denied && permit_failed(limits, gpu))
}

/// Whether containers may have this device.
#[must_use]
pub fn permitted(device: Device<'_>, limits: &Limits) -> bool {
    match device {
        Device::Gpu(gpu) => permit(limits, gpu, None),
        Device::Mig(gpu, mig) => permit(limits, gpu, Some(mig)),
    }
}

fn select_all<'a>(
    asked_by: &str,
    inventory: &'a Inventory,
    limits: &Limits,
) -> Result<(Vec<Device<'a>>, Vec<Finding>)> {
    let failed: Vec<_> = permitted_failed(inventory, limits).collect();
    if let Some(missing) = failed.iter().find(|gpu| gpu.node_missing) {
        return Err(not_usable("all", asked_by, missing));
    }
    let chosen = permitted_devices(inventory, limits);
    if chosen.is_empty() {
        return Err(match (failed.first(), inventory.excluded.first()) {
            (Some(failed), _) => not_usable("all", asked_by, failed),
            (None, Some(gpu)) if inventory.gpus.is_empty() => excluded("all", asked_by, gpu),
            (None, None) if inventory.failed.iter().any(|gpu| gpu.denied) => failure(
                &catalog::NO_DEVICE,
                format!("{asked_by} requests all GPUs, and {NONE_PERMITTED}"),
                DENIED,
            ),
            (None, None) if inventory.gpus.is_empty() && inventory.failed.is_empty() => failure(
                &catalog::NO_DEVICE,
                format!("{asked_by} requests all GPUs, but the driver finds no GPU"),
                "run \"nvidia-smi -L\" and \"journalctl -k\" on the host",
            ),
            (None, _) => failure(
                &catalog::NO_DEVICE,
                format!(
                    "{asked_by} requests all GPUs, but [devices] in config.toml denies every GPU"
                ),
                "check allow and deny in the [devices] table of config.toml",
            ),
        });
    }
    let mut gpus = chosen.clone();
    gpus.retain(|device| matches!(device, Device::Gpu(_)));
    let others = match gpus.len() {
        1 => "only the other GPU".to_owned(),
        count => format!("the other {count} GPUs"),
    };
    let mut findings = Vec::new();
    for gpu in failed {
        findings.push(Finding::new(
            &catalog::GPU_LEFT_OUT,
            format!("{gpu}; the container gets {others}"),
            hint_for(gpu),
        ));
    }
    findings.extend(mig_left_out(inventory, limits));
    Ok((chosen, findings))
}

/// Returns findings about MIG devices that containers may have but NVML does not list, so that `all` does not include them.
pub(crate) fn mig_left_out(
    inventory: &Inventory,
    limits: &Limits,
) -> impl Iterator<Item = Finding> {
    with_unlisted_mig(inventory, limits).map(|gpu| {
        let what = format!(
            "\"all\" does not include every MIG device: {}",
            mig_nodes_missing(gpu)
        );
        Finding::new(&catalog::MIG_LEFT_OUT, what, PREPARE)
    })
}

fn with_unlisted_mig<'a>(
    inventory: &'a Inventory,
    limits: &Limits,
) -> impl Iterator<Item = &'a Gpu> {
    inventory
        .gpus
        .iter()
        .filter(|gpu| permit(limits, gpu, None) && !gpu.unlisted_mig.is_empty())
}

fn find<'a>(
    name: &str,
    asked_by: &str,
    inventory: &'a Inventory,
    limits: &Limits,
) -> Result<Device<'a>> {
    let id = DeviceId::parse(name);
    let Some(found) = every_device(inventory).find(|device| device.is_named(&id)) else {
        return Err(unknown(name, &id, asked_by, inventory, limits));
    };
    if !permitted(found, limits) {
        return Err(denied(name, asked_by, inventory, limits));
    }
    // NVML numbers only the MIG devices that it lists, so this index may belong to another one.
    if matches!(id, DeviceId::Mig { .. }) && !found.gpu().unlisted_mig.is_empty() {
        return Err(mig_unlisted(name, asked_by, found.gpu()));
    }
    Ok(found)
}

fn denied(name: &str, asked_by: &str, inventory: &Inventory, limits: &Limits) -> anyhow::Error {
    failure(
        &catalog::DENIED,
        format!("{asked_by} requests {name:?}, which [devices] in config.toml denies"),
        match known(asked_by, inventory, limits) {
            Some(known) => format!("{known}, or change [devices] in config.toml"),
            None => "change [devices] in config.toml, which allows no GPU of this host".to_owned(),
        },
    )
}

fn unknown(
    name: &str,
    id: &DeviceId,
    asked_by: &str,
    inventory: &Inventory,
    limits: &Limits,
) -> anyhow::Error {
    match inventory.failed.iter().find(|gpu| gpu.is_named(id)) {
        Some(failed) if permit_failed(limits, failed) => return not_usable(name, asked_by, failed),
        Some(_) => return denied(name, asked_by, inventory, limits),
        None => {}
    }
    if let Some(gpu) = inventory.excluded.iter().find(|gpu| gpu.is_named(id)) {
        return excluded(name, asked_by, gpu);
    }
    if matches!(id, DeviceId::Unknown(word) if word.contains('/') && word.contains('=')) {
        return failure(
            &catalog::UNKNOWN_DEVICE,
            format!("{asked_by} requests {name:?}, which is the name of a CDI device"),
            "request GPUs, such as NVIDIA_VISIBLE_DEVICES=all, and have the engine add the CDI device",
        );
    }
    let kind = match id {
        DeviceId::Mig { .. } => "MIG device",
        DeviceId::Uuid(uuid) if uuid.starts_with("MIG-") => "MIG device",
        _ => "GPU",
    };
    let mut unlisted = with_unlisted_mig(inventory, limits);
    let may_be = match id {
        DeviceId::Mig { gpu: index, .. } => unlisted.find(|gpu| gpu.index == *index),
        _ if kind == "MIG device" => unlisted.next(),
        _ => None,
    };
    if let Some(gpu) = may_be {
        return mig_unlisted(name, asked_by, gpu);
    }
    let mut what = format!("{asked_by} requests {name:?}: this host has no such {kind}");
    // The name may belong to a failed GPU whose index or UUID is unknown.
    for failed in permitted_failed(inventory, limits) {
        if failed.may_be_named(id) {
            write!(what, "; {failed}").ok();
        }
    }
    let fix = match quotes::fix(name) {
        Some(fix) => fix.to_owned(),
        None => whole_uuid(id, inventory, limits)
            .or_else(|| known(asked_by, inventory, limits))
            .unwrap_or_else(|| "see the GPUs of the host with \"oci-nvidia-hook info\"".to_owned()),
    };
    failure(&catalog::UNKNOWN_DEVICE, what, fix)
}

/// Returns the hint with the UUID that begins with the given one, if there is one such device. The UUIDs of other containers' GPUs are
/// not printed, so a few digits that anybody can guess are not sufficient.
fn whole_uuid(id: &DeviceId, inventory: &Inventory, limits: &Limits) -> Option<String> {
    const LEAST: usize = "GPU-01234567".len();
    let DeviceId::Uuid(start) = id else {
        return None;
    };
    let mut found = None;
    for device in every_device(inventory) {
        let uuid = device.uuid();
        let is_start = uuid
            .get(..start.len())
            .is_some_and(|of_device| of_device.eq_ignore_ascii_case(start));
        if start.len() < LEAST || !is_start || !permitted(device, limits) {
            continue;
        }
        if found.replace(uuid).is_some() {
            return None;
        }
    }
    Some(format!("request the whole UUID: {}", found?))
}

fn mig_unlisted(name: &str, asked_by: &str, gpu: &Gpu) -> anyhow::Error {
    let what = format!(
        "{asked_by} requests {name:?}, and {}",
        mig_nodes_missing(gpu)
    );
    failure(&catalog::NODE_MISSING, what, PREPARE)
}

/// `device nodes of MIG devices of GPU 0 are missing: "/dev/nvidia-caps/nvidia-cap13" (GPU instance 1, compute instance 0)`
#[must_use]
pub fn mig_nodes_missing(gpu: &Gpu) -> String {
    let devices: Vec<_> = gpu.unlisted_mig.iter().map(ToString::to_string).collect();
    format!(
        "device nodes of MIG devices of GPU {} are missing: {}",
        gpu.index,
        devices.join(", ")
    )
}

fn not_usable(name: &str, asked_by: &str, failed: &FailedGpu) -> anyhow::Error {
    let kind = if failed.node_missing {
        &catalog::NODE_MISSING
    } else {
        &catalog::NOT_USABLE
    };
    failure(
        kind,
        format!("{asked_by} requests {}: {failed}", requested(name)),
        hint_for(failed),
    )
}

/// The hint about a device cgroup, which the manager of jobs or containers sets.
const DENIED: &str = "request the GPU from the job manager or the container manager (Slurm: --gres, LXC: lxc.cgroup2.devices.allow)";
const NONE_PERMITTED: &str = "the device cgroup of this process denies each of them";

const fn hint_for(failed: &FailedGpu) -> &'static str {
    if failed.node_missing || failed.node_shut {
        PREPARE
    } else if failed.denied {
        DENIED
    } else {
        "see \"nvidia-smi -q\" and \"journalctl -k\" on the host"
    }
}

/// Returns a requested name as messages print it.
fn requested(name: &str) -> String {
    if name == "all" {
        "all GPUs".to_owned()
    } else {
        format!("{name:?}")
    }
}

fn excluded(name: &str, asked_by: &str, gpu: &ExcludedGpu) -> anyhow::Error {
    failure(
        &catalog::NOT_USABLE,
        format!("{asked_by} requests {}: {gpu}", requested(name)),
        "request another GPU, or change NVreg_ExcludedGpus (\"grep -r ExcludedGpus /etc/modprobe.d\") and load the \
         module again",
    )
}

/// Returns the hint that names the devices that can be requested, if there are any. The events of a pod show it, so it contains no UUIDs
/// or bus ids of GPUs that belong to other containers.
fn known(asked_by: &str, inventory: &Inventory, limits: &Limits) -> Option<String> {
    const MOST: usize = 16;
    let devices = every_device(inventory)
        .filter(|device| permitted(*device, limits))
        .map(Device::index);
    let mut known: Vec<_> = devices.collect();
    if known.len() > MOST {
        known.truncate(MOST);
        known.push("…".to_owned());
    }
    let known = known.join(", ");
    // Only variables have "none".
    let words = if asked_by == "--device" {
        "all"
    } else {
        "all, none"
    };
    (!known.is_empty()).then(|| {
        format!(
            "request one of {known}, {words}; \"oci-nvidia-hook info\" on the host prints the GPUs"
        )
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::device_id;
    use crate::inventory::{BusId, UnlistedMig};
    use base::report::render;

    /// Three GPUs; the last is split in two.
    pub(crate) fn inventory() -> Inventory {
        let gpu = |index: u32| Gpu {
            index,
            minor: index,
            uuid: format!("GPU-0000000{index}"),
            bus_id: BusId {
                domain: 0,
                bus: index + 1,
                device: 0,
            },
            model: "NVIDIA H100 80GB HBM3".to_owned(),
            compute_capability: "9.0".to_owned(),
            brand: "Tesla".to_owned(),
            mig_enabled: false,
            mig_devices: Vec::new(),
            unlisted_mig: Vec::new(),
        };
        let mut inventory = Inventory {
            gpus: (0..3).map(gpu).collect(),
            ..Inventory::default()
        };
        inventory.gpus[2].mig_enabled = true;
        inventory.gpus[2].mig_devices = [(0, 5), (1, 7)]
            .map(|(index, gpu_instance)| MigDevice {
                index,
                uuid: format!("MIG-2{index}"),
                profile: Some("1g.10gb".to_owned()),
                gpu_instance,
                compute_instance: 0,
            })
            .to_vec();
        inventory
    }

    fn failed(index: Option<u32>, node_missing: bool) -> FailedGpu {
        let why = "it is lost".to_owned();
        let bus_id = Some(BusId {
            domain: 0,
            bus: 9,
            device: 0,
        });
        FailedGpu {
            index,
            uuid: Some("GPU-00000009".into()),
            bus_id,
            why,
            node_missing,
            ..FailedGpu::default()
        }
    }

    #[test]
    fn the_gpus_that_are_left_are_counted() {
        let mut inventory = inventory();
        inventory.failed = vec![failed(Some(9), false)];
        let says = |inventory: &Inventory, words: &str| {
            let (_, findings) =
                select(&VisibleDevices::All, "x", inventory, &Limits::default()).unwrap();
            assert!(findings[0].what.ends_with(words), "{}", findings[0].what);
        };
        says(&inventory, "; the container gets the other 3 GPUs");
        inventory.gpus.truncate(1);
        says(&inventory, "; the container gets only the other GPU");
    }

    fn chosen_within(asked: &str, inventory: &Inventory, limits: &Limits) -> Result<Vec<String>> {
        let asked = device_id::parse(asked).unwrap();
        let (chosen, _) = select(&asked, "NVIDIA_VISIBLE_DEVICES", inventory, limits)?;
        Ok(chosen
            .iter()
            .map(|device| device.uuid().to_owned())
            .collect())
    }

    fn chosen(asked: &str, inventory: &Inventory) -> Result<Vec<String>> {
        chosen_within(asked, inventory, &Limits::default())
    }

    const ALL: [&str; 5] = [
        "GPU-00000000",
        "GPU-00000001",
        "GPU-00000002",
        "MIG-20",
        "MIG-21",
    ];

    #[test]
    fn each_form_finds_its_device_once() {
        for (asked, expected) in [
            ("all", &ALL[..]),
            ("none", &[]),
            ("1", &ALL[1..2]),
            ("1,0,1", &ALL[..2]),
            ("gpu-00000001", &ALL[1..2]),
            ("0000:02:00.0,1", &ALL[1..2]),
            ("MIG-21", &ALL[4..]),
            ("mig-20", &ALL[3..4]),
            ("2:1,2:0", &ALL[3..]),
            ("MIG-GPU-00000002/7/0", &ALL[4..]),
            ("2:0,2", &ALL[2..4]),
        ] {
            assert_eq!(chosen(asked, &inventory()).unwrap(), expected, "{asked}");
        }
    }

    #[test]
    fn an_unknown_device_is_named_with_the_known_ones() {
        for asked in [
            "7",
            "GPU-x",
            "0000:55:00.0",
            "bogus",
            "0:1",
            "MIG-x",
            "MIG-GPU-00000002/7/1",
        ] {
            let text = render(&chosen(asked, &inventory()).unwrap_err());
            assert!(
                text.contains("NVIDIA_VISIBLE_DEVICES requests")
                    && text.contains("this host has no such"),
                "{text}"
            );
            assert!(text.ends_with("hint: request one of 0, 1, 2, 2:0, 2:1, all, none; \"oci-nvidia-hook info\" on the host prints the GPUs"), "{text}");
        }
        for (asked, hint) in [
            ("nvidia.com/gds=all", "have the engine add the CDI device"),
            ("a/b=$(reboot)", "have the engine add the CDI device"),
            ("\"all\"", "hint: remove the quotes"),
            ("'0,1'", "hint: remove the quotes"),
        ] {
            let text = render(&chosen(asked, &inventory()).unwrap_err());
            let (_, shown) = text.split_once("hint: ").unwrap();
            assert!(text.contains(hint) && !shown.contains("reboot"), "{text}");
        }
    }

    #[test]
    fn the_start_of_a_uuid_has_a_hint() {
        let mut inventory = inventory();
        let whole = "GPU-51eed001-0000-0000-0000-000000000001";
        inventory.gpus[0].uuid = whole.into();
        let hint = format!("hint: request the whole UUID: {whole}");
        for (asked, limits, is_shown) in [
            ("GPU-51eed001", Limits::default(), true),
            ("gpu-51EED001-00", Limits::default(), true),
            ("GPU-51eed00", Limits::default(), false),
            ("GPU-51eed002", Limits::default(), false),
            (
                "GPU-51eed001",
                Limits {
                    deny: vec!["0".into()],
                    ..Limits::default()
                },
                false,
            ),
        ] {
            let text = render(&chosen_within(asked, &inventory, &limits).unwrap_err());
            assert_eq!(text.ends_with(&hint), is_shown, "{asked}: {text}");
        }
        inventory.gpus[1].uuid = whole.replace("000001", "000002");
        let text = render(&chosen("GPU-51eed001", &inventory).unwrap_err());
        assert!(!text.contains("whole UUID"), "{text}");
    }

    #[test]
    fn a_failed_gpu_matters_to_who_asks_for_it() {
        let mut inventory = inventory();
        inventory.failed.push(failed(Some(3), false));
        assert_eq!(chosen("0", &inventory).unwrap(), ["GPU-00000000"]);
        let (devices, findings) =
            select(&VisibleDevices::All, "x", &inventory, &Limits::default()).unwrap();
        assert_eq!((devices.len(), findings.len()), (5, 1));
        assert!(
            findings[0].what.contains("GPU 3: it is lost"),
            "{}",
            findings[0].what
        );
        for asked in [
            "3",
            "0000:09:00.0",
            "GPU-00000009",
            "3:0",
            "MIG-GPU-00000009/7/0",
        ] {
            let text = render(&chosen(asked, &inventory).unwrap_err());
            assert!(text.contains("GPU 3: it is lost (ONH-033)"), "{text}");
        }
    }

    #[test]
    fn a_missing_node_stops_a_container_that_asks_for_all() {
        let mut inventory = inventory();
        inventory.failed.push(failed(None, true));
        assert!(
            render(&chosen("all", &inventory).unwrap_err()).contains("GPU-00000009: it is lost")
        );
        assert_eq!(chosen("0,1", &inventory).unwrap().len(), 2);
        for (asked, is_named) in [
            ("3", true),
            ("GPU-x", false),
            ("0000:55:00.0", false),
            ("MIG-x", true),
        ] {
            let text = render(&chosen(asked, &inventory).unwrap_err());
            assert_eq!(
                text.contains("; GPU-00000009: it is lost"),
                is_named,
                "{asked}: {text}"
            );
        }
    }

    #[test]
    fn a_mig_device_without_nodes_is_reported() {
        let mut inventory = inventory();
        inventory.gpus[2].mig_devices.remove(0);
        inventory.gpus[2].mig_devices[0].index = 0;
        inventory.gpus[2].unlisted_mig = vec![UnlistedMig {
            gpu_instance: 5,
            compute_instance: 0,
            nodes: vec![
                "nvidia-caps/nvidia-cap12".into(),
                "nvidia-caps/nvidia-cap13".into(),
            ],
        }];
        let missing = "device nodes of MIG devices of GPU 2 are missing: \"/dev/nvidia-caps/nvidia-cap12\", \
                       \"/dev/nvidia-caps/nvidia-cap13\" (GPU instance 5, compute instance 0)";
        let (devices, findings) =
            select(&VisibleDevices::All, "x", &inventory, &Limits::default()).unwrap();
        assert_eq!((devices.len(), findings.len()), (4, 1));
        assert_eq!(
            (findings[0].kind.id(), findings[0].fix.as_str()),
            ("ONH-232", PREPARE)
        );
        assert!(findings[0].what.ends_with(missing), "{}", findings[0].what);
        // Another MIG device has index 0 now.
        for asked in ["MIG-20", "2:0", "2:1", "MIG-GPU-00000002/5/0"] {
            let text = render(&chosen(asked, &inventory).unwrap_err());
            assert!(
                text.contains(&format!("{missing} (ONH-021)\nhint: {PREPARE}")),
                "{asked}: {text}"
            );
        }
        assert_eq!(chosen("MIG-21", &inventory).unwrap(), ["MIG-21"]);
        let limits = Limits {
            deny: vec!["2".into()],
            ..Limits::default()
        };
        assert!(
            select(&VisibleDevices::All, "x", &inventory, &limits)
                .unwrap()
                .1
                .is_empty()
        );
    }

    /// A job of Slurm has some of the GPUs, and is not warned about the others.
    #[test]
    fn a_gpu_that_the_device_cgroup_denies() {
        let mut inventory = inventory();
        let why = "the device cgroup of this process denies \"/dev/nvidia3\"".to_owned();
        let denied = FailedGpu {
            denied: true,
            why,
            ..failed(Some(3), false)
        };
        inventory.failed.push(denied);
        let limits = Limits::default();
        let (devices, findings) = select(&VisibleDevices::All, "x", &inventory, &limits).unwrap();
        assert_eq!((devices.len(), findings.len()), (5, 0));
        let text = render(&chosen_within("3", &inventory, &limits).unwrap_err());
        assert!(
            text.contains("the device cgroup of this process denies") && text.contains("Slurm"),
            "{text}"
        );
        inventory.gpus.clear();
        let text = render(&chosen_within("all", &inventory, &limits).unwrap_err());
        assert!(
            text.contains("denies each of them") && text.contains("Slurm"),
            "{text}"
        );
    }

    #[test]
    fn limits_hold_for_gpus_that_do_not_work() {
        for node_missing in [true, false] {
            let mut inventory = inventory();
            inventory.failed.push(failed(Some(3), node_missing));
            for deny in ["3", "GPU-00000009", "0000:09:00.0"] {
                let limits = Limits {
                    deny: vec![deny.into()],
                    ..Limits::default()
                };
                let (devices, findings) =
                    select(&VisibleDevices::All, "x", &inventory, &limits).unwrap();
                assert_eq!((devices.len(), findings.len()), (5, 0), "{deny}");
                let text = render(&chosen_within("3", &inventory, &limits).unwrap_err());
                assert!(
                    text.contains("which [devices] in config.toml denies (ONH-032)")
                        && !text.contains("lost"),
                    "{text}"
                );
            }
            inventory.gpus.clear();
            let limits = Limits {
                deny: vec!["3".into()],
                ..Limits::default()
            };
            let text = render(&chosen_within("all", &inventory, &limits).unwrap_err());
            assert!(text.contains("[devices]"), "{text}");
        }
    }

    #[test]
    fn an_excluded_gpu_is_named_and_in_no_ones_way() {
        let mut inventory = inventory();
        let bus_id = BusId {
            domain: 0,
            bus: 9,
            device: 0,
        };
        inventory.excluded.push(ExcludedGpu {
            bus_id,
            uuid: Some("GPU-00000009".into()),
        });
        let (devices, findings) =
            select(&VisibleDevices::All, "x", &inventory, &Limits::default()).unwrap();
        assert_eq!((devices.len(), findings.len()), (5, 0));
        for asked in ["GPU-00000009", "0000:09:00.0"] {
            let text = render(&chosen(asked, &inventory).unwrap_err());
            assert!(text.contains("NVreg_ExcludedGpus (ONH-033)"), "{text}");
        }
        assert!(render(&chosen("3", &inventory).unwrap_err()).contains("(ONH-030)"));
        inventory.gpus.clear();
        assert!(render(&chosen("all", &inventory).unwrap_err()).contains("NVreg_ExcludedGpus"));
    }

    #[test]
    fn a_node_is_its_gpu() {
        let nodes = |gpus: &[u32], caps: &[u32]| Nodes {
            gpus: gpus.iter().copied().collect(),
            caps: caps.iter().copied().collect(),
        };
        let minors = [
            (MigCap::GpuInstance(2, 5), 12),
            (MigCap::ComputeInstance(2, 5, 0), 13),
            (MigCap::GpuInstance(2, 7), 21),
            (MigCap::ComputeInstance(2, 7, 0), 22),
        ]
        .into();
        let mut inventory = inventory();
        inventory.failed.push(FailedGpu {
            minor: Some(9),
            ..failed(Some(3), false)
        });
        for (nodes, names) in [
            (nodes(&[1], &[]), &["GPU-00000001"][..]),
            (nodes(&[0, 2], &[21, 22]), &["GPU-00000000", "MIG-21"]),
            (nodes(&[2], &[12, 22]), &["GPU-00000002"]),
            (nodes(&[2], &[12, 13, 21, 22]), &["MIG-20", "MIG-21"]),
            (nodes(&[9, 7], &[]), &["/dev/nvidia7", "00000000:09:00.0"]),
        ] {
            assert_eq!(names_of(&nodes, &inventory, &minors), names);
        }
        let ask = |minor| {
            select(
                &VisibleDevices::Nodes(nodes(&[minor], &[])),
                "x",
                &inventory,
                &Limits::default(),
            )
        };
        assert_eq!(ask(1).unwrap().0.len(), 1);
        assert!(
            render(&ask(7).unwrap_err()).contains("\"/dev/nvidia7\": this host has no such GPU")
        );
        assert!(render(&ask(9).unwrap_err()).contains("it is lost (ONH-033)"));
    }

    #[test]
    fn all_of_nothing_is_an_error() {
        assert!(
            render(&chosen("all", &Inventory::default()).unwrap_err()).contains("finds no GPU")
        );
    }

    #[test]
    fn limits_hold_for_names_and_for_all() {
        let limits = Limits {
            allow: vec!["0".into(), "2".into()],
            deny: vec!["MIG-20".into()],
            ..Limits::default()
        };
        assert_eq!(
            chosen_within("all", &inventory(), &limits).unwrap(),
            ["GPU-00000000", "GPU-00000002", "MIG-21"]
        );
        for asked in ["1", "MIG-20", "2:0"] {
            let text = render(&chosen_within(asked, &inventory(), &limits).unwrap_err());
            assert!(
                text.contains("which [devices] in config.toml denies"),
                "{text}"
            );
            let (_, hint) = text.split_once("hint: ").unwrap();
            assert!(
                hint.starts_with("request one of 0, 2, 2:1, all, none") && !hint.contains("GPU-"),
                "{text}"
            );
        }
        let none = Limits {
            allow: vec!["9".into()],
            ..Limits::default()
        };
        assert!(
            render(&chosen_within("all", &inventory(), &none).unwrap_err()).contains("[devices]")
        );
        let text = render(&chosen_within("1", &inventory(), &none).unwrap_err());
        assert!(
            text.ends_with(
                "hint: change [devices] in config.toml, which allows no GPU of this host"
            ),
            "{text}"
        );
    }
}
