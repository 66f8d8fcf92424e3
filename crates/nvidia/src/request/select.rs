//! Selects the devices of the host for a request.

use anyhow::Result;

use crate::capability::Capability;
use crate::config::{Config, Require};
use crate::device_id::VisibleDevices;
use crate::driver::nodes::PREPARE;
use crate::feature::{FeatureRow, Features};
use crate::inventory::select::{Device, mig_nodes_missing, select};
use crate::inventory::{Gpu, Inventory, limits};
use crate::require::{self, Properties};
use base::report::{Finding, failure};
use findings::catalog;

use super::{GpuRequest, Variable};

/// Returns the devices for a request, after checking its requirements.
///
/// # Errors
/// If a device is unavailable, or a requirement is not met and config.toml enforces it.
pub fn decide<'a>(
    request: &GpuRequest,
    inventory: &'a Inventory,
    config: &Config,
) -> Result<(Vec<Device<'a>>, Vec<Finding>)> {
    let (devices, mut findings) = select(
        &request.devices,
        &request.asked_by,
        inventory,
        &config.devices,
    )?;
    if request.devices != VisibleDevices::None {
        findings.extend(limits::findings(&config.devices, inventory));
    }
    findings.extend(mig_findings(request, &devices));
    let properties = properties(&devices, inventory);
    refuse_selected_mig_devices(request, &devices)?;
    refuse_denied(request.features, config)?;
    findings.extend(request.remarks.iter().cloned());
    for requirement in &request.requirements {
        match require::check(requirement, &properties) {
            Err(error) if config.requirements() == Require::Warn => {
                let Finding { what, fix, .. } = Finding::error(&error);
                findings.push(Finding::new(&catalog::REQUIREMENT_WARNING, what, fix));
            }
            checked => checked?,
        }
    }
    Ok((devices, findings))
}

/// Refuses MIG management for selected MIG devices: it needs whole GPUs.
fn refuse_selected_mig_devices(request: &GpuRequest, devices: &[Device<'_>]) -> Result<()> {
    let variable = match (&request.mig_config, &request.mig_monitor) {
        (Some(_), _) => Variable::MigConfigDevices,
        (None, Some(_)) => Variable::MigMonitorDevices,
        (None, None) => return Ok(()),
    };
    let is_mig = |device: &Device<'_>| matches!(device, Device::Mig(..));
    if request.devices == VisibleDevices::All || !devices.iter().any(is_mig) {
        return Ok(());
    }
    let variable = variable.name();
    Err(failure(
        &catalog::BAD_REQUEST,
        format!("{variable}=all cannot be combined with selected MIG devices"),
        "request whole GPUs, or all",
    ))
}

/// Refuses features that `[devices]` in config.toml denies.
///
/// # Errors
/// If one of them is denied.
pub fn refuse_denied(features: Features, config: &Config) -> Result<()> {
    let denied = config.devices.denied_features;
    let Some(feature) = features.iter().find(|feature| denied.has(*feature)) else {
        return Ok(());
    };
    let FeatureRow {
        title,
        variable,
        name,
        ..
    } = feature.row();
    Err(failure(
        &catalog::DENIED,
        format!("[devices] in config.toml denies the devices of {title}"),
        format!(
            "start the container without {variable} and nvidia.com/{name}=all, or remove {name:?} from deny in config.toml"
        ),
    ))
}

/// Returns findings about whole GPUs in MIG mode, on which compute programs find no usable device. Not for programs that
/// configure or monitor MIG devices.
fn mig_findings(request: &GpuRequest, devices: &[Device<'_>]) -> Vec<Finding> {
    if request.mig_config.is_some()
        || request.mig_monitor.is_some()
        || !request.capabilities.has(Capability::Compute)
    {
        return Vec::new();
    }
    let (mut whole, mut with_mig_devices) = (Vec::new(), Vec::new());
    for device in devices {
        match device {
            Device::Gpu(gpu) => whole.push(*gpu),
            Device::Mig(gpu, _) => with_mig_devices.push(gpu.index),
        }
    }
    let mut findings = Vec::new();
    for gpu in whole {
        // The selection has reported unlisted MIG devices if the container requests all GPUs.
        let is_reported = request.devices == VisibleDevices::All && !gpu.unlisted_mig.is_empty();
        if gpu.mig_enabled && !with_mig_devices.contains(&gpu.index) && !is_reported {
            findings.push(mig_finding(gpu));
        }
    }
    findings
}

fn mig_finding(gpu: &Gpu) -> Finding {
    let index = gpu.index;
    let (what, fix) = match gpu.mig_devices.first() {
        Some(mig) => (
            format!("GPU {index} is in MIG mode and is given without its MIG devices"),
            format!(
                "request its MIG devices, for example {index}:{} or {}",
                mig.index, mig.uuid
            ),
        ),
        None if !gpu.unlisted_mig.is_empty() => (
            format!(
                "GPU {index} is given without its MIG devices, because {}",
                mig_nodes_missing(gpu)
            ),
            PREPARE.to_owned(),
        ),
        None => (
            format!("GPU {index} is in MIG mode and has no MIG device"),
            format!(
                "run \"nvidia-smi mig -i {index} -cgi 0 -C\", or leave MIG mode with \"nvidia-smi -i {index} -mig 0\""
            ),
        ),
    };
    Finding::new(&catalog::MIG_WHOLE, what, fix)
}

/// Returns the properties to check requirements against: the properties of each GPU, or only of the driver without a GPU.
fn properties(devices: &[Device<'_>], inventory: &Inventory) -> Vec<(String, Properties)> {
    let driver = Properties {
        cuda: known(&inventory.cuda_version),
        driver: known(&inventory.driver_version),
        ..Properties::default()
    };
    let mut gpus: Vec<&Gpu> = devices.iter().map(|device| device.gpu()).collect();
    gpus.dedup_by_key(|gpu| gpu.index);
    if gpus.is_empty() {
        return vec![("the host".to_owned(), driver)];
    }
    let mut of_gpus = Vec::new();
    for gpu in gpus {
        let properties = Properties {
            arch: known(&gpu.compute_capability),
            brand: known(&gpu.brand),
            ..driver.clone()
        };
        of_gpus.push((format!("GPU {}", gpu.index), properties));
    }
    of_gpus
}

fn known(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests;
