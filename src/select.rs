//! The devices of this host that a request gets.

use anyhow::Result;

use base::report::{Finding, catalog, failure};
use nvidia_host::capability::Capability;
use nvidia_host::config::{Config, Require};
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::driver::nodes::PREPARE;
use nvidia_host::inventory::select::{Device, mig_nodes_missing, select};
use nvidia_host::inventory::{Gpu, Inventory, limits};
use nvidia_host::require::{self, Properties};

use crate::request::{GpuRequest, MIG_CONFIG_DEVICES, MIG_MONITOR_DEVICES};

/// The devices that a request gets of an inventory, its requirements checked.
///
/// # Errors
/// If a device cannot be had, or a requirement is not met and config.toml enforces it.
pub fn decide<'a>(
    request: &GpuRequest,
    inventory: &'a Inventory,
    config: &Config,
) -> Result<(Vec<Device<'a>>, Vec<Finding>)> {
    let (devices, mut findings) = select(&request.devices, &request.asked_by, inventory, &config.devices)?;
    findings.extend(limits::findings(&config.devices, inventory));
    findings.extend(without_parts(request, &devices));
    let properties = properties(&devices, inventory);
    no_chosen_parts(request, &devices)?;
    for requirement in &request.requirements {
        match require::check(requirement, &properties) {
            Err(error) if config.requirements() == Require::Warn => {
                let Finding { what, fix, .. } = Finding::error(&error);
                findings.push(Finding::of(&catalog::REQUIREMENT_WARNING, what, fix));
            }
            checked => checked?,
        }
    }
    Ok((devices, findings))
}

/// Who manages MIG devices gets whole GPUs.
fn no_chosen_parts(request: &GpuRequest, devices: &[Device<'_>]) -> Result<()> {
    let management = [(MIG_CONFIG_DEVICES, &request.mig_config), (MIG_MONITOR_DEVICES, &request.mig_monitor)];
    let Some((variable, _)) = management.into_iter().find(|(_, value)| value.is_some()) else { return Ok(()) };
    if request.devices == VisibleDevices::All || !devices.iter().any(|device| matches!(device, Device::Mig(..))) {
        return Ok(());
    }
    Err(failure(
        &catalog::BAD_REQUEST,
        format!("{variable}=all cannot go with chosen MIG devices"),
        "choose whole GPUs, or all",
    ))
}

/// GPUs in MIG mode that are given by themselves: programs find no device that they can use. One that lays out or watches
/// MIG devices wants the GPU alone.
fn without_parts(request: &GpuRequest, devices: &[Device<'_>]) -> Vec<Finding> {
    if request.mig_config.is_some() || request.mig_monitor.is_some() || !request.capabilities.has(Capability::Compute) {
        return Vec::new();
    }
    let has_part =
        |gpu: &Gpu| devices.iter().any(|device| matches!(device, Device::Mig(of, _) if of.index == gpu.index));
    // For "all" the selection has reported these.
    let is_reported = |gpu: &Gpu| request.devices == VisibleDevices::All && !gpu.unlisted_mig.is_empty();
    let whole = devices.iter().filter_map(|device| match device {
        Device::Gpu(gpu) if gpu.mig_enabled && !has_part(gpu) && !is_reported(gpu) => Some(gpu),
        _ => None,
    });
    let finding = |gpu: &&Gpu| match gpu.mig_devices.first() {
        Some(mig) => Finding::of(
            &catalog::MIG_WHOLE,
            format!("GPU {} is in MIG mode and is given without its MIG devices", gpu.index),
            format!("ask for its MIG devices, as {}:{} or {}", gpu.index, mig.index, mig.uuid),
        ),
        None if !gpu.unlisted_mig.is_empty() => Finding::of(
            &catalog::MIG_WHOLE,
            format!("GPU {} is given without its MIG devices, because {}", gpu.index, mig_nodes_missing(gpu)),
            PREPARE,
        ),
        None => Finding::of(
            &catalog::MIG_WHOLE,
            format!("GPU {} is in MIG mode and has no MIG device", gpu.index),
            format!("nvidia-smi mig -i {0} -cgi 0 -C; or leave the mode: nvidia-smi -i {0} -mig 0", gpu.index),
        ),
    };
    whole.map(finding).collect()
}

/// What requirements are checked against: each GPU once; without one, the driver alone.
fn properties(devices: &[Device<'_>], inventory: &Inventory) -> Vec<(String, Properties)> {
    let told = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let driver = Properties {
        cuda: told(&inventory.cuda_version),
        driver: told(&inventory.driver_version),
        ..Properties::default()
    };
    let mut gpus: Vec<&Gpu> = devices.iter().map(|device| device.gpu()).collect();
    gpus.dedup_by_key(|gpu| gpu.index);
    if gpus.is_empty() {
        return vec![("the host".to_owned(), driver)];
    }
    let of = |gpu: &Gpu| Properties { arch: told(&gpu.compute_capability), brand: told(&gpu.brand), ..driver.clone() };
    gpus.into_iter().map(|gpu| (format!("GPU {}", gpu.index), of(gpu))).collect()
}
