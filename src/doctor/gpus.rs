//! Checks of the GPUs themselves.

use std::time::Duration;

use base::report::catalog;
use nvidia_host::config::Limits;
use nvidia_host::inventory::caps::MigCap;
use nvidia_host::inventory::select::{Device, every_device, mig_nodes_missing, permitted_devices};
use nvidia_host::inventory::{Gpu, Inventory};

use super::driver::prepare;
use super::facts::PciDevice;
use super::{Facts, Outcome, or};

/// Longer than NVML takes for eight GPUs whose driver state is kept.
const SLOW: Duration = Duration::from_secs(3);

pub(super) fn on_the_bus(facts: &Facts) -> Vec<Outcome> {
    let Some(devices) = &facts.driver.pci else {
        return vec![Outcome::skipped("the PCI bus cannot be looked at: /sys/bus/pci/devices is not there")];
    };
    let gpus: Vec<_> = devices.iter().filter(|device| device.is_gpu()).collect();
    if gpus.is_empty() {
        // GPUs in a virtual machine's host bridge, or an integrated one of an SoC, are on no PCI bus.
        if facts.driver.module.is_some() {
            return vec![Outcome::ok("no GPU is on the PCI bus, and the driver is loaded")];
        }
        let fix = "look for it with \"lspci -d 10de:\", in the firmware's set-up, and on the board";
        return vec![Outcome::of(&catalog::NO_GPU, "there is no NVIDIA GPU on the PCI bus of this host", fix)];
    }
    let kept: Vec<_> = gpus.iter().filter(|gpu| gpu.driver.as_deref() == Some("vfio-pci")).collect();
    let more =
        if kept.is_empty() { String::new() } else { format!(", {} of them kept for virtual machines", kept.len()) };
    vec![Outcome::ok(format!("{} on the PCI bus{more}", count(gpus.len(), "NVIDIA GPU")))]
}

fn count(number: usize, of: &str) -> String {
    format!("{number} {of}{}", if number == 1 { "" } else { "s" })
}

pub(super) fn nvml(facts: &Facts) -> Vec<Outcome> {
    let Some((answer, took)) = &facts.driver.nvml else {
        return vec![Outcome::skipped(facts.driver.not_asked.clone())];
    };
    match answer {
        // That this user may not open the nodes is what the check of groups reports, with the group.
        Err(finding) if facts.user.is_some() && finding.kind.id == catalog::NVML_PERMISSION.id => {
            vec![Outcome::skipped("this user may not open the GPUs")]
        }
        Err(finding) => vec![Outcome::found(finding.clone())],
        Ok(inventory) if *took > SLOW => vec![Outcome::of(
            &catalog::SLOW_NVML,
            format!("NVML took {:.1} s for {}", took.as_secs_f32(), count(inventory.gpus.len(), "GPU")),
            "systemctl enable --now nvidia-persistenced",
        )],
        Ok(inventory) => {
            let cuda = if inventory.cuda_version.is_empty() { "unknown" } else { &inventory.cuda_version };
            let what = format!(
                "{} answered: driver {}, CUDA {cuda}",
                count(inventory.gpus.len(), "GPU"),
                inventory.driver_version
            );
            vec![Outcome::ok(what)]
        }
    }
}

pub(super) fn failed(facts: &Facts) -> Vec<Outcome> {
    let Some((Ok(inventory), _)) = &facts.driver.nvml else {
        return vec![Outcome::skipped("NVML did not answer")];
    };
    // A node that is missing has been told of.
    let failed: Vec<_> = inventory.failed.iter().filter(|failed| !failed.node_missing).collect();
    if failed.is_empty() {
        return vec![Outcome::ok("every GPU that has its device node answers")];
    }
    let xid = facts.driver.xid.as_ref().map(|xid| format!(" (the kernel says: {xid})")).unwrap_or_default();
    let fix = "nvidia-smi -q; journalctl -k | grep NVRM; a GPU that fell off the bus takes a reset or a reboot";
    failed.iter().map(|failed| Outcome::of(&catalog::GPU_LEFT_OUT, format!("{failed}{xid}"), fix)).collect()
}

pub(super) fn limits(facts: &Facts) -> Vec<Outcome> {
    let limits = facts.settings().devices;
    if limits == Limits::default() {
        return vec![Outcome::ok("config.toml keeps no GPU from containers")];
    }
    let Some((Ok(inventory), _)) = &facts.driver.nvml else {
        return vec![Outcome::skipped("NVML did not answer")];
    };
    let findings = nvidia_host::inventory::limits::findings(&limits, inventory);
    or(findings.into_iter().map(Outcome::found), Outcome::ok(limits_in_words(&limits, inventory)))
}

/// Which devices are kept from containers, so that a reader can compare that with what the lists were meant to do.
fn limits_in_words(limits: &Limits, inventory: &Inventory) -> String {
    let permitted = permitted_devices(inventory, limits);
    let names: Vec<_> =
        every_device(inventory).filter(|device| !permitted.contains(device)).map(Device::index).collect();
    match names.as_slice() {
        [] => "[devices] in config.toml keeps no GPU of this host from containers".to_owned(),
        names => {
            format!("[devices] in config.toml keeps these GPUs and MIG devices from containers: {}", names.join(", "))
        }
    }
}

pub(super) fn persistence(facts: &Facts) -> Vec<Outcome> {
    if facts.driver.module.is_none() {
        return vec![Outcome::skipped("the kernel module is not loaded")];
    }
    if facts.driver.persistenced {
        return vec![Outcome::ok("nvidia-persistenced runs")];
    }
    vec![Outcome::of(
        &catalog::NO_PERSISTENCE,
        "nvidia-persistenced does not run",
        "systemctl enable --now nvidia-persistenced",
    )]
}

pub(super) fn fabric(facts: &Facts) -> Vec<Outcome> {
    let switches = facts.driver.pci.iter().flatten().filter(|device| PciDevice::is_switch(device)).count();
    if switches == 0 {
        return vec![Outcome::skipped("there is no NVSwitch on the PCI bus")];
    }
    if facts.driver.fabric_manager {
        return vec![Outcome::ok(format!("the fabric manager runs, for {switches} NVSwitches"))];
    }
    vec![Outcome::of(
        &catalog::NO_FABRIC_MANAGER,
        format!(
            "the board has {switches} NVSwitches, and the fabric manager does not run (it has to be of the driver's version)"
        ),
        "systemctl enable --now nvidia-fabricmanager",
    )]
}

pub(super) fn mig(facts: &Facts) -> Vec<Outcome> {
    let Some((Ok(inventory), _)) = &facts.driver.nvml else {
        return vec![Outcome::skipped("NVML did not answer")];
    };
    let split: Vec<_> = inventory.gpus.iter().filter(|gpu| gpu.mig_enabled).collect();
    if split.is_empty() {
        return vec![Outcome::ok("no GPU is in MIG mode")];
    }
    let wrong: Vec<_> = split.iter().filter_map(|gpu| mig_of(facts, gpu)).collect();
    if wrong.is_empty() {
        let devices: usize = split.iter().map(|gpu| gpu.mig_devices.len()).sum();
        return vec![Outcome::ok(format!(
            "{} in MIG mode, {}",
            count(split.len(), "GPU"),
            count(devices, "MIG device")
        ))];
    }
    wrong
}

/// What keeps a GPU in MIG mode from having MIG devices. Partitioning it again would end the work of containers that use
/// the existing instances, so that is advised only if the driver lists none.
fn mig_of(facts: &Facts, gpu: &Gpu) -> Option<Outcome> {
    if !gpu.unlisted_mig.is_empty() {
        return Some(Outcome::of(&catalog::NODE_MISSING, mig_nodes_missing(gpu), prepare(facts)));
    }
    if !gpu.mig_devices.is_empty() {
        return None;
    }
    let mut caps = facts.driver.mig_caps.iter().map(|file| &file.cap).filter(|cap| cap.gpu() == Some(gpu.minor));
    let has_compute_instance = caps.clone().any(|cap| matches!(cap, MigCap::ComputeInstance(..)));
    let has_gpu_instance = caps.any(|cap| matches!(cap, MigCap::GpuInstance(..)));
    let index = gpu.index;
    let (what, fix) = if has_compute_instance {
        (
            format!("NVML lists no MIG device of GPU {index}, although the driver has some and their nodes exist"),
            "compare \"ls -l /dev/nvidia-caps\" with user in config.toml; \"nvidia-smi -L\" as root lists them"
                .to_owned(),
        )
    } else if has_gpu_instance {
        (
            format!("GPU {index} has GPU instances without a compute instance, so it has no MIG device"),
            format!("nvidia-smi mig -i {index} -cci"),
        )
    } else {
        (
            format!("GPU {index} is in MIG mode and has no MIG device"),
            format!("nvidia-smi mig -i {index} -cgi 0 -C; or disable MIG mode: nvidia-smi -i {index} -mig 0"),
        )
    };
    Some(Outcome::of(&catalog::MIG_EMPTY, what, fix))
}
