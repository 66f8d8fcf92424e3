//! Checks of the GPUs.

use std::time::Duration;

use findings::catalog;
use nvidia_host::config::Limits;
use nvidia_host::inventory::caps::MigCap;
use nvidia_host::inventory::select::{Device, every_device, mig_nodes_missing, permitted_devices};
use nvidia_host::inventory::{Gpu, Inventory};

use super::check::{Check, Status, count, or_ok};
use super::driver::{hooks_user, no_module, prepare};
use super::facts::{Facts, Nvml};

/// The time after which NVML counts as slow. With persistence mode, NVML takes less time for eight GPUs.
const SLOW: Duration = Duration::from_secs(3);

pub(super) fn on_the_bus(facts: &Facts) -> Check {
    if facts.driver.wsl.is_some() {
        return Check::skipped("the GPUs of WSL 2 are not on its PCI bus");
    }
    let Some(devices) = &facts.driver.pci else {
        return Check::skipped("the PCI bus cannot be inspected: /sys/bus/pci/devices is missing");
    };
    let gpus: Vec<_> = devices.iter().filter(|device| device.is_gpu()).collect();
    if let Some(finding) = facts
        .driver
        .diagnosis
        .as_ref()
        .filter(|finding| finding.kind.id() == catalog::PLATFORM.id())
    {
        return Check::found(finding.clone());
    }
    if gpus.is_empty() {
        // The integrated GPU of an SoC is not on a PCI bus.
        if facts.driver.module.is_some() {
            return Check::ok("no GPU is on the PCI bus, but the driver is loaded");
        }
        let fix = "check \"lspci -d 10de:\", the settings of the firmware, and whether the GPU is seated correctly";
        return Check::of(
            &catalog::NO_GPU,
            "this host has no NVIDIA GPU on its PCI bus",
            fix,
        );
    }
    let kept: Vec<_> = gpus
        .iter()
        .filter(|gpu| gpu.driver.as_deref() == Some("vfio-pci"))
        .collect();
    let more = if kept.is_empty() {
        String::new()
    } else {
        format!(", {} of them reserved for virtual machines", kept.len())
    };
    Check::ok(format!(
        "{} on the PCI bus{more}",
        count(gpus.len(), "NVIDIA GPU")
    ))
}

pub(super) fn nvml(facts: &Facts) -> Check {
    let Some(Nvml { answer, took, .. }) = &facts.driver.nvml else {
        return Check::skipped(&facts.driver.not_asked);
    };
    match answer {
        // The check "groups" reports that this user cannot open the nodes, with the group.
        Err(finding)
            if facts.user.is_some() && finding.kind.id() == catalog::NVML_PERMISSION.id() =>
        {
            Check::skipped("this user cannot open the GPUs")
        }
        Err(finding)
            if finding.kind.id() == catalog::NVML_PERMISSION.id()
                && hooks_user(facts).status == Status::Error =>
        {
            Check::skipped("the check hook-user reports why NVML cannot be asked")
        }
        Err(finding) => Check::found(finding.clone()),
        Ok(inventory) if *took > SLOW => Check::of(
            &catalog::SLOW_NVML,
            format!(
                "NVML took {:.1} s for {}",
                took.as_secs_f32(),
                count(inventory.gpus.len(), "GPU")
            ),
            "systemctl enable --now nvidia-persistenced",
        ),
        Ok(inventory) => {
            let cuda = if inventory.cuda_version.is_empty() {
                "unknown"
            } else {
                &inventory.cuda_version
            };
            let what = format!(
                "{} answered: driver {}, CUDA {cuda}",
                count(inventory.gpus.len(), "GPU"),
                inventory.driver_version
            );
            Check::ok(what)
        }
    }
}

pub(super) fn failed(facts: &Facts) -> Vec<Check> {
    let Some(inventory) = facts.driver.inventory() else {
        return vec![Check::skipped("NVML did not answer")];
    };
    // The check "nodes" reports missing nodes. A job or a container that has only some GPUs is usual.
    let failed: Vec<_> = inventory
        .failed
        .iter()
        .filter(|failed| !failed.node_missing && !failed.denied)
        .collect();
    if failed.is_empty() {
        return vec![Check::ok("all GPUs with a device node work")];
    }
    let xid = facts
        .driver
        .xid
        .as_ref()
        .map(|xid| format!(" (the kernel logged: {xid})"))
        .unwrap_or_default();
    let fix = "run \"nvidia-smi -q\" and \"journalctl -k | grep NVRM\"; a GPU that fell off the bus needs a reset or a reboot";
    failed
        .iter()
        .map(|failed| Check::of(&catalog::GPU_LEFT_OUT, format!("{failed}{xid}"), fix))
        .collect()
}

pub(super) fn limits(facts: &Facts) -> Vec<Check> {
    let limits = facts.settings().devices;
    if limits.permit_all_gpus() {
        return vec![Check::ok("config.toml does not limit the GPUs")];
    }
    let Some(inventory) = facts.driver.inventory() else {
        return vec![Check::skipped("NVML did not answer")];
    };
    let findings = nvidia_host::inventory::limits::findings(&limits, inventory);
    or_ok(
        findings.into_iter().map(Check::found),
        Check::ok(limits_in_words(&limits, inventory)),
    )
}

/// Returns the devices that containers cannot get, so that the administrator can compare them with the intention.
fn limits_in_words(limits: &Limits, inventory: &Inventory) -> String {
    let permitted = permitted_devices(inventory, limits);
    let names: Vec<_> = every_device(inventory)
        .filter(|device| !permitted.contains(device))
        .map(Device::index)
        .collect();
    match names.as_slice() {
        [] => "[devices] in config.toml denies no GPU of this host".to_owned(),
        names => {
            format!(
                "[devices] in config.toml denies these GPUs and MIG devices: {}",
                names.join(", ")
            )
        }
    }
}

pub(super) fn persistence(facts: &Facts) -> Check {
    if facts.driver.module.is_none() {
        return no_module(facts);
    }
    if facts.driver.persistenced {
        return Check::ok("nvidia-persistenced runs");
    }
    Check::of(
        &catalog::NO_PERSISTENCE,
        "nvidia-persistenced does not run",
        "systemctl enable --now nvidia-persistenced",
    )
}

pub(super) fn fabric(facts: &Facts) -> Check {
    let switches = facts.driver.switches();
    if switches == 0 {
        return Check::skipped("this host has no NVSwitch on its PCI bus");
    }
    if facts.driver.fabric_manager {
        return Check::ok(format!(
            "the fabric manager runs, for {}",
            count(switches, "NVSwitch device")
        ));
    }
    Check::of(
        &catalog::NO_FABRIC_MANAGER,
        format!(
            "this host has {}, but the fabric manager does not run",
            count(switches, "NVSwitch device")
        ),
        "install the fabric manager in the version of the driver: systemctl enable --now nvidia-fabricmanager",
    )
}

pub(super) fn mig(facts: &Facts) -> Vec<Check> {
    let Some(inventory) = facts.driver.inventory() else {
        return vec![Check::skipped("NVML did not answer")];
    };
    let split: Vec<_> = inventory
        .gpus
        .iter()
        .filter(|gpu| gpu.mig_enabled)
        .collect();
    if split.is_empty() {
        return vec![Check::ok("no GPU is in MIG mode")];
    }
    let wrong: Vec<_> = split.iter().filter_map(|gpu| mig_of(facts, gpu)).collect();
    if wrong.is_empty() {
        let devices: usize = split.iter().map(|gpu| gpu.mig_devices.len()).sum();
        return vec![Check::ok(format!(
            "{} in MIG mode, {}",
            count(split.len(), "GPU"),
            count(devices, "MIG device")
        ))];
    }
    wrong
}

/// Returns an outcome if a GPU in MIG mode has no MIG devices. Partitioning it again would stop containers that use existing
/// instances, so the fix suggests that only if the driver lists none.
fn mig_of(facts: &Facts, gpu: &Gpu) -> Option<Check> {
    if !gpu.unlisted_mig.is_empty() {
        return Some(Check::of(
            &catalog::MIG_LEFT_OUT,
            mig_nodes_missing(gpu),
            prepare(facts),
        ));
    }
    if !gpu.mig_devices.is_empty() {
        return None;
    }
    let mut caps = facts
        .driver
        .mig_caps
        .iter()
        .map(|file| &file.cap)
        .filter(|cap| cap.gpu() == Some(gpu.minor));
    let has_compute_instance = caps
        .clone()
        .any(|cap| matches!(cap, MigCap::ComputeInstance(..)));
    let has_gpu_instance = caps.any(|cap| matches!(cap, MigCap::GpuInstance(..)));
    let index = gpu.index;
    let (what, fix) = if has_compute_instance {
        (
            format!("NVML lists no MIG device of GPU {index}, although the driver lists some and their nodes exist"),
            "compare \"ls -l /dev/nvidia-caps\" with user in config.toml, and the list with \"nvidia-smi -L\" as root"
                .to_owned(),
        )
    } else if has_gpu_instance {
        (
            format!(
                "GPU {index} has GPU instances without a compute instance, and therefore no MIG device"
            ),
            format!("nvidia-smi mig -i {index} -cci"),
        )
    } else {
        (
            format!("GPU {index} is in MIG mode but has no MIG device"),
            format!(
                "run \"nvidia-smi mig -i {index} -cgi 0 -C\", or leave MIG mode with \"nvidia-smi -i {index} -mig 0\""
            ),
        )
    };
    Some(Check::of(&catalog::MIG_EMPTY, what, fix))
}
