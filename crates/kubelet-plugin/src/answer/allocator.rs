//! Answers the kubelet's questions from the state of the node. The device nodes are examined for each container, since they can
//! disappear at any time.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use nvidia_host::config::Config;
use nvidia_host::edits::decide;
use nvidia_host::edits::facts::DeviceFacts;
use nvidia_host::feature::Features;
use nvidia_host::host::Host;
use nvidia_host::inventory::select::Device as HostDevice;
use nvidia_host::mps;
use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::watch;

use base::report::Finding;
use findings::catalog;

use super::layout::{ICDS, Layout};
use super::{prefer, response};
use crate::cdi_specs::SharedSpecs;
use crate::model::{Allocator, InSpecs, Refusal, Resource, ResourceDevice};
use crate::node::Offer;
use crate::proto::ContainerAllocateResponse;
use crate::settings::values::DeviceListStrategy;
use crate::settings::{Settings, missing_host_path};
use crate::strategy::{self, Chooser};

/// Answers from the newest offer.
#[derive(Debug)]
pub struct NodeAllocator {
    /// The settings
    pub settings: Settings,
    /// The newest offer
    pub offer: watch::Receiver<Offer>,
    /// Chooses how containers get their devices
    pub chooser: Arc<Chooser>,
    /// `None` if the process keeps no CDI specs for the device plugin
    pub specs: Option<SharedSpecs>,
    /// The time of each answer to Allocate, also of refusals
    pub latency: Histogram,
}

impl NodeAllocator {
    fn answer(&self, resource: &str, ids: &[String]) -> Result<ContainerAllocateResponse, Refusal> {
        let strategies = self.chooser.current().strategies;
        let offer = self.offer.borrow();
        let restored = match &self.specs {
            Some(specs) if strategy::uses_cdi(&strategies) => Some(specs.restored()),
            _ => None,
        };
        let in_specs = restored.as_ref().unwrap_or(&offer.in_specs);
        let sources = Sources {
            settings: &self.settings,
            strategies: &strategies,
            offer: &offer,
            in_specs,
        };
        allocate(&sources, resource, ids)
    }
}

impl Allocator for NodeAllocator {
    fn allocate(
        &self,
        resource: &str,
        ids: &[String],
    ) -> Result<ContainerAllocateResponse, Refusal> {
        let start = Instant::now();
        let answer = self.answer(resource, ids);
        self.latency.observe(start.elapsed().as_secs_f64());
        answer
    }

    fn prefer(
        &self,
        resource: &str,
        available: &[String],
        required: &[String],
        size: usize,
    ) -> Vec<String> {
        let offer = self.offer.borrow();
        let devices = find(&offer, resource)
            .map(|found| found.devices.as_slice())
            .unwrap_or_default();
        let allocation = self.settings.plugin.allocation;
        let available = combinable(&offer, devices, available, size);
        prefer::choose(
            devices,
            &offer.closeness,
            allocation,
            &available,
            required,
            size,
        )
    }
}

/// Examines the host when a claim is prepared, whose devices are in a CDI spec. Nodes and files can disappear at any time, and an engine
/// that misses one starts no container.
#[derive(Debug)]
pub struct ClaimCheck {
    /// The settings
    pub settings: Settings,
    /// The newest offer
    pub offer: watch::Receiver<Offer>,
    /// The CDI specs for claims
    pub specs: SharedSpecs,
}

impl ClaimCheck {
    /// Checks that a container can have the devices with these UUIDs now. It uses CUDA with those in `for_cuda`.
    ///
    /// # Errors
    /// If a device node is missing or is another device, if the CDI spec lacks the device and cannot be written, or if the devices for CUDA are
    /// not one GPU that MPS shares, or others.
    pub fn check(&self, uuids: &[&str], for_cuda: &[&str]) -> Result<(), Refusal> {
        let in_specs = self.specs.restored();
        for uuid in uuids {
            if let Some(why) = in_specs.why_missing(uuid) {
                let what = format!("{uuid} does not work: {why}");
                let fix = "run \"oci-nvidia-kubelet-plugin check\" on the node; the kubelet tries it again";
                return Err(Refusal::of(&catalog::PLUGIN_DRIVER, &what, fix));
            }
        }
        let offer = self.offer.borrow();
        let devices = response::by_uuid(&offer.gpus, uuids)?;
        let host = host_of(&self.settings, &offer)?;
        let facts = host.device_facts(&response::wanted(Features::EMPTY), &devices);
        response::nodes(&facts, &devices, Features::EMPTY)
            .map_err(|error| Refusal::from(&error))?;
        mps::of_container(&facts.mps, for_cuda).map_err(|error| Refusal::from(&error))?;
        Ok(())
    }
}

/// What an answer follows from.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// The settings
    pub settings: &'a Settings,
    /// How containers get their devices
    pub strategies: &'a [DeviceListStrategy],
    /// What the node offers
    pub offer: &'a Offer,
    /// What the CDI specs have now
    pub in_specs: &'a InSpecs,
}

/// Returns what a container with these devices gets.
///
/// # Errors
/// As [`Allocator::allocate`].
pub fn allocate(
    sources: &Sources<'_>,
    resource: &str,
    ids: &[String],
) -> Result<ContainerAllocateResponse, Refusal> {
    let Sources {
        settings,
        strategies,
        offer,
        in_specs,
    } = *sources;
    let plugin = &settings.plugin;
    if let Some(id) = ids.iter().find(|id| offer.denied.contains(*id)) {
        let fix = "delete the pod; the kubelet chooses another device for the next one";
        return Err(Refusal::of(
            &catalog::DENIED,
            &format!("config.toml does not allow containers to use {id}"),
            fix,
        ));
    }
    let Some(found) = find(offer, resource) else {
        let what = format!("the resource {resource} does not exist");
        let kind = &catalog::PLUGIN_UNKNOWN_DEVICE;
        return Err(Refusal::of(kind, &what, "delete the pod"));
    };
    let permitted = response::permitted(found, ids, plugin.several_replicas)?;
    let devices = response::of_host(&offer.gpus, &permitted)?;
    let uses_cdi = strategy::uses_cdi(strategies);
    if uses_cdi {
        check_names(in_specs, &devices)?;
    }
    let host = host_of(settings, offer)?;
    if strategies.contains(&DeviceListStrategy::HostPath)
        && let Some(Finding { kind, what, fix }) = missing_host_path(plugin)
    {
        return Err(Refusal::of(kind, &what, &fix));
    }
    let mut features = offer.features;
    if uses_cdi {
        // An engine starts no container with the name of a device that is in no spec.
        for feature in offer.features.iter() {
            features.set(feature, in_specs.features.has(feature));
        }
    }
    let facts = host.device_facts(&response::wanted(features), &devices);
    let layout = Layout {
        strategies,
        settings: plugin,
        has_icds: plugin.host_path.join(ICDS).is_dir(),
        features,
        mps_pipe: mps_pipe(&facts, &devices)?,
    };
    response::response(&facts, &devices, &layout)
}

/// Returns the directory of the MPS daemon that serves the GPU of a container. The daemon may have ended since the kubelet has chosen the
/// device, and then the container would have no limits.
fn mps_pipe<'f>(
    facts: &'f DeviceFacts,
    devices: &[HostDevice<'_>],
) -> Result<Option<&'f Path>, Refusal> {
    let daemon = decide::shared(&facts.mps, devices).map_err(|error| Refusal::from(&error))?;
    let ipc = daemon.and_then(|daemon| daemon.ipc.as_ref());
    Ok(ipc.map(|ipc| ipc.source.as_path()))
}

/// Returns the available devices that a container can have together: without the GPUs that have an MPS daemon, if there are enough others.
fn combinable(
    offer: &Offer,
    devices: &[ResourceDevice],
    available: &[String],
    size: usize,
) -> Vec<String> {
    let mut others = Vec::new();
    for id in available {
        let device = devices.iter().find(|device| device.id == *id);
        if device.is_none_or(|device| mps::of_gpu(&offer.mps, &device.gpu).is_none()) {
            others.push(id.clone());
        }
    }
    if size > 1 && others.len() >= size {
        return others;
    }
    available.to_vec()
}

/// Returns the host, with the limits of the offer: config.toml can have changed since the start.
fn host_of(settings: &Settings, offer: &Offer) -> Result<Host, Refusal> {
    let config = Config {
        devices: offer.limits.clone(),
        ..settings.common.clone()
    };
    Host::for_devices(&config, offer.inventory()).map_err(|error| Refusal::from(&error))
}

/// Checks that the CDI spec has each device, although the offer may be from before a change of the
/// strategy.
fn check_names(in_specs: &InSpecs, devices: &[HostDevice<'_>]) -> Result<(), Refusal> {
    for device in devices {
        if let Some(why) = in_specs.why_missing(device.uuid()) {
            let what = format!("{} does not work: {why}", device.uuid());
            let fix = "delete the pod, and run \"oci-nvidia-kubelet-plugin check\" on the node";
            return Err(Refusal::of(&catalog::PLUGIN_UNHEALTHY_DEVICE, &what, fix));
        }
    }
    Ok(())
}

fn find<'a>(offer: &'a Offer, name: &str) -> Option<&'a Resource> {
    offer
        .resources
        .iter()
        .find(|resource| resource.name == name)
}
