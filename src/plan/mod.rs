//! Decides, as data, what a container gets. Nothing is changed here. The decision has three steps:
//!
//! 1. [`read_config`] and [`verdict()`]: config.json and config.toml decide whether the container requests GPUs, and whether it may;
//! 2. [`decide`]: the host, which the caller has inspected, decides which devices these are, and which driver files belong to them;
//! 3. [`Gpus::steps`] or [`Gpus::additions`]: the image decides where the files go.
//!
//! Stages apply the decision and `plan` prints it. `nvidia-container-cli configure` has its request from a command line, and begins
//! with the second step.

pub(crate) mod access;
pub(crate) mod additions;
mod container;
pub(crate) mod engine_devices;
mod gpus;
pub(crate) mod other_setup;
pub(crate) mod process;
pub(crate) mod request;
pub(crate) mod rootfs;
pub(crate) mod step;
pub(crate) mod steps;
pub(crate) mod text;
mod verdict;

#[cfg(test)]
mod tests;

use std::path::Path;

use anyhow::Result;

use base::paths::HostPath;
use base::report::{Finding, failure};
use findings::catalog;
use nvidia_host::cdi::compare::NumberedNode;
use nvidia_host::config::Config;
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::edits::{DeviceNode, Edits};
use nvidia_host::host::Host;
use nvidia_host::inventory::select::Device;
use nvidia_host::request::select;

use crate::oci::spec_view;
use crate::plan::request::GpuRequest;
pub(crate) use container::Container;
pub(crate) use gpus::{Gpus, Image, Live, newer_libcuda, root_beside_limits};
pub(crate) use verdict::{Verdict, allow_without_gpu, nothing, read_config, verdict};

/// What a host provides for a request.
#[derive(Debug)]
pub(crate) struct Provided {
    pub edits: Edits,
    pub devices: Vec<records::RecordedDevice>,
}

/// Returns a device as records have it.
fn recorded(device: &Device<'_>) -> records::RecordedDevice {
    let gpu = device.gpu();
    let mig_index = match device {
        Device::Gpu(_) => None,
        Device::Mig(_, mig) => Some(mig.index),
    };
    let uuid = device.uuid().to_owned();
    records::RecordedDevice {
        index: Some(gpu.index),
        mig_index,
        name: gpu.model.clone(),
        uuid,
        node: String::new(),
    }
}

/// Returns what this host provides for the request of a container whose config.json lists the device nodes `listed`. Adds findings,
/// also before an error.
///
/// # Errors
/// If the request cannot be met, or a required part is missing. [`allow_without_gpu`] decides whether the container starts nevertheless.
pub(crate) fn decide(
    request: &GpuRequest,
    config: &Config,
    host: &Host,
    listed: &[spec_view::LinuxDevice],
    findings: &mut Vec<Finding>,
) -> Result<Provided> {
    let request = with_names(request, host);
    let (devices, more) = select::decide(&request, &host.inventory, config)?;
    findings.extend(more);
    let (edits, more) = host.edits(&request.wanted()?, &devices)?;
    findings.extend(more);
    refuse_taken(&edits.nodes, listed)?;
    Ok(Provided {
        edits,
        devices: devices.iter().map(recorded).collect(),
    })
}

/// Refuses to replace a device that config.json lists. At prestart, the runtime has already created it; an edited
/// config.json would list two devices at one path.
///
/// # Errors
/// If config.json lists another device at the path of one of these nodes.
fn refuse_taken(nodes: &[DeviceNode], listed: &[spec_view::LinuxDevice]) -> Result<()> {
    let Some(taken) = nodes
        .iter()
        .find(|node| listed.iter().any(|device| is_another(node, device)))
    else {
        return Ok(());
    };
    let path = taken.path.absolute();
    Err(failure(
        &catalog::DEVICE_TAKEN,
        format!("config.json lists another device at {path:?}"),
        format!("start the container without the \"--device\" option for {path:?}"),
    ))
}

/// Whether the listed device has the path of the node, but another number or another type.
fn is_another(node: &DeviceNode, device: &spec_view::LinuxDevice) -> bool {
    let listed = NumberedNode::of(device.kind.as_deref(), device.major, device.minor);
    device.path == node.path.absolute() && listed != NumberedNode::Character(node.major, node.minor)
}

/// Returns the request with UUIDs in place of device nodes.
fn with_names(request: &GpuRequest, host: &Host) -> GpuRequest {
    let VisibleDevices::Nodes(nodes) = &request.devices else {
        return request.clone();
    };
    GpuRequest {
        devices: VisibleDevices::List(host.names_of(nodes)),
        ..request.clone()
    }
}

/// Returns the program that the hook entries in config.json and in CDI specs start: `named`, or this program.
///
/// # Errors
/// If its path is not absolute.
pub(crate) fn hook_program(named: Option<&Path>) -> Result<HostPath> {
    let path = match named {
        Some(path) => path.to_owned(),
        None => std::env::current_exe()?,
    };
    if !path.is_absolute() {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!("\"--hook-path\" {path:?} is not an absolute path"),
            "begin the path with /",
        ));
    }
    Ok(HostPath::new(path))
}
