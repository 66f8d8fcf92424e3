//! What a container gets, decided as data and not yet done. It takes three steps, whoever has it decided:
//!
//! 1. [`asked()`]: config.json and config.toml say whether the container asks, and may have what it asks for;
//! 2. [`gpus()`]: the host says which devices those are, and which of the driver's files belong to them;
//! 3. [`Gpus::steps`] or [`Gpus::additions`]: the image says where they go.
//!
//! Stages act on the outcome and `explain` prints it: an [`Observer`] is all in which they differ.
//! `nvidia-container-cli configure` has its request from a command line, and begins with the second step.

mod container;
mod gpus;
mod verdict;

use std::path::Path;

use anyhow::Result;

use base::paths::HostPath;
use base::report::{Finding, catalog, failure};
use nvidia_host::config::Config;
use nvidia_host::device_id::VisibleDevices;
use nvidia_host::edits::{DeviceNode, Edits};
use nvidia_host::host::Host;
use nvidia_host::inventory::select::Device;

use crate::oci::{SpecView, spec_view};
use crate::request::GpuRequest;
use crate::select;
pub(crate) use container::Container;
pub(crate) use gpus::{Gpus, Image, Live, newer_libcuda};
pub(crate) use verdict::{Verdict, nothing, verdict};

/// Is told what comes of a container, and how far the decision is.
pub(crate) trait Observer {
    /// config.json alone asks for nothing. For most containers that is all, and it must cost nothing.
    fn not_asked(&mut self, spec: &SpecView);
    /// config.toml was read, because the container asks or may ask.
    fn config_read(&mut self, config: &Config);
    /// It is known whether the container asks for GPUs.
    fn decided(&mut self, asks: bool);
    fn finding(&mut self, finding: &Finding);
    /// The container asks for nothing, for this reason.
    fn nothing(&mut self, reason: String, spec: &SpecView);
    /// The container starts without GPUs although it asks, or has GPU nodes.
    fn left_alone(&mut self, finding: Finding);
    /// This is what it asks for.
    fn requested(&mut self, request: &GpuRequest);
    /// The host is needed now, and whatever has to be done on it first.
    ///
    /// # Errors
    /// If there is no driver, or it does not answer.
    fn host(&mut self, request: &GpuRequest, config: &Config) -> Result<Host>;
    fn devices(&mut self, devices: &[Device<'_>]);
}

/// What the container asks for, with the config.toml by which it may. `None` if it is left as it is; the observer knows why.
///
/// # Errors
/// If the request or config.toml is wrong.
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

/// What the request gets of this host, for a container whose config.json lists these device nodes. `None` if that is nothing,
/// and the container starts all the same; the observer knows why.
///
/// # Errors
/// If there is no driver, the container cannot have what it asks for, or something is missing that it cannot do without.
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
    let is_another = |node: &DeviceNode, device: &spec_view::Device| {
        let number = (Some(i64::from(node.major)), Some(i64::from(node.minor)));
        device.path == node.path.absolute() && (device.major, device.minor) != number
    };
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

/// The same request, with the UUIDs of the GPUs and MIG devices that it was given the nodes of.
fn with_names(request: &GpuRequest, host: &Host) -> GpuRequest {
    let VisibleDevices::Nodes(nodes) = &request.devices else { return request.clone() };
    GpuRequest { devices: VisibleDevices::List(host.names_of(nodes)), ..request.clone() }
}

/// The program that the hook entries of config.json and of CDI specs start: this one, unless another is named.
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
            format!("the program {path:?} is no absolute path"),
            "name it so with --hook-path",
        ));
    }
    Ok(HostPath::new(path))
}
