//! Decides, as data, what a container gets. Nothing is changed here. The decision has three steps:
//!
//! 1. [`asked()`]: config.json and config.toml decide whether the container requests GPUs, and whether it may;
//! 2. [`gpus()`]: the host decides which devices these are, and which driver files belong to them;
//! 3. [`Gpus::steps`] or [`Gpus::additions`]: the image decides where the files go.
//!
//! Stages apply the decision and `explain` prints it. They differ only in their [`Observer`]. `nvidia-container-cli configure` has
//! its request from a command line, and begins with the second step.

pub(crate) mod access;
pub(crate) mod additions;
pub(crate) mod asked;
mod container;
pub(crate) mod given;
mod gpus;
pub(crate) mod others;
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
use base::report::{Finding, catalog, failure};
use nvidia_host::config::Config;
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::edits::{DeviceNode, Edits};
use nvidia_host::host::Host;
use nvidia_host::inventory::select::Device;
use nvidia_host::request::select;

use crate::oci::{SpecView, spec_view};
use crate::plan::request::GpuRequest;
pub(crate) use container::Container;
pub(crate) use gpus::{Gpus, Image, Live, newer_libcuda};
pub(crate) use verdict::{Verdict, nothing, verdict};

/// Receives the progress and the results of the decision about a container.
pub(crate) trait Observer {
    /// config.json contains no request. This is the case for most containers, so this function must be cheap.
    fn not_asked(&mut self, spec: &SpecView);
    /// config.toml was read, because config.json contains a request or may contain one.
    fn config_read(&mut self, config: &Config);
    /// `asks` is whether the container requests GPUs.
    fn decided(&mut self, asks: bool);
    fn finding(&mut self, finding: &Finding);
    /// The container requests nothing, for this reason.
    fn nothing(&mut self, reason: String, spec: &SpecView);
    /// The container starts without GPUs, although it requests them or has device nodes of GPUs.
    fn left_alone(&mut self, finding: Finding);
    /// The container requests this.
    fn requested(&mut self, request: &GpuRequest);
    /// Prepares the host if needed, and inspects it.
    ///
    /// # Errors
    /// If the driver is missing or does not answer.
    fn host(&mut self, request: &GpuRequest, config: &Config) -> Result<Host>;
    fn devices(&mut self, devices: &[Device<'_>]);
}

/// Returns the request of the container and the configuration; `None` if the container is left unchanged, for a reason that the
/// observer received.
///
/// # Errors
/// If the request or config.toml is invalid.
pub(crate) fn asked(
    spec: &SpecView,
    config: Option<&Path>,
    observer: &mut impl Observer,
) -> Result<Option<(GpuRequest, Config)>> {
    let Some((config, findings)) = verdict::read_config(spec, config)? else {
        observer.not_asked(spec);
        return Ok(None);
    };
    observer.config_read(&config);
    let verdict = verdict(spec, &config);
    observer.decided(!matches!(verdict, Ok(Verdict::Nothing(_))));
    findings.iter().for_each(|finding| observer.finding(finding));
    match verdict? {
        Verdict::Nothing(reason) => observer.nothing(reason, spec),
        Verdict::LeftAlone(finding) => observer.left_alone(finding),
        Verdict::Gpus(request) => {
            observer.requested(&request);
            return Ok(Some((*request, config)));
        }
    }
    Ok(None)
}

/// Returns what this host provides for the request of a container whose config.json lists the device nodes `listed`; `None` if the
/// container starts without it, for a reason that the observer received.
///
/// # Errors
/// If the driver is missing, the request cannot be met, or a required part is missing.
pub(crate) fn gpus(
    request: GpuRequest,
    config: Config,
    listed: &[spec_view::Device],
    observer: &mut impl Observer,
) -> Result<Option<Gpus>> {
    match find(&request, &config, listed, observer) {
        Ok((host, edits)) => Ok(Some(Gpus { request, config, host, edits })),
        Err(error) => {
            observer.left_alone(verdict::excuse(&request, &config, error)?);
            Ok(None)
        }
    }
}

fn find(
    request: &GpuRequest,
    config: &Config,
    listed: &[spec_view::Device],
    observer: &mut impl Observer,
) -> Result<(Host, Edits)> {
    let host = observer.host(request, config)?;
    let request = with_names(request, &host);
    let (devices, findings) = select::decide(&request, &host.inventory, config)?;
    findings.iter().for_each(|finding| observer.finding(finding));
    let (edits, findings) = host.edits(&request.wanted()?, &devices)?;
    findings.iter().for_each(|finding| observer.finding(finding));
    refuse_taken(&edits.nodes, listed)?;
    observer.devices(&devices);
    Ok((host, edits))
}

/// Refuses to replace a device that config.json lists. At prestart and later the runtime has already created it; at precreate
/// config.json would list two devices at one path.
///
/// # Errors
/// If config.json lists another device at the path of one of these nodes.
fn refuse_taken(nodes: &[DeviceNode], listed: &[spec_view::Device]) -> Result<()> {
    let Some(taken) = nodes.iter().find(|node| listed.iter().any(|device| is_another(node, device))) else {
        return Ok(());
    };
    let path = taken.path.absolute();
    Err(failure(
        &catalog::DEVICE_TAKEN,
        format!("config.json lists another device at {path:?}"),
        format!("start the container without the \"--device\" option for {path:?}"),
    ))
}

/// Whether the listed device has the path of the node, but another number.
fn is_another(node: &DeviceNode, device: &spec_view::Device) -> bool {
    let number = (Some(i64::from(node.major)), Some(i64::from(node.minor)));
    device.path == node.path.absolute() && (device.major, device.minor) != number
}

/// Returns the request with UUIDs in place of device nodes.
fn with_names(request: &GpuRequest, host: &Host) -> GpuRequest {
    let VisibleDevices::Nodes(nodes) = &request.devices else { return request.clone() };
    GpuRequest { devices: VisibleDevices::List(host.names_of(nodes)), ..request.clone() }
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
