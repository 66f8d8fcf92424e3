//! Decides which series the metrics have. Pure.
//!
//! The series of containers have the names and labels of GKE's device plugin. Several containers may share a GPU; each of them has the
//! values of the whole GPU, because the driver does not report them by container. A GPU with MIG devices is reported as these, like
//! several smaller GPUs.

use std::collections::BTreeMap;
use std::ptr;
use std::time::UNIX_EPOCH;

use nvidia_host::mps::Status;
use nvidia_host::nvml::monitoring::Memory;

use super::readings::{Reading, Readings, float};
use crate::kubelet;
use crate::kubelet::pods::PodContainer;
use crate::node::Offer;
use crate::node::devices::uuid_of;
use crate::node::gpus::NodeGpu;
use crate::settings::values::MetricsNames;

const MIB: u64 = 1024 * 1024;

/// What the series follow from.
#[derive(Clone, Debug, Default)]
pub struct MetricSources {
    /// The GPUs and the resources
    pub offer: Offer,
    /// The values
    pub readings: Readings,
    /// The containers that have devices; none if the kubelet does not answer
    pub containers: Vec<PodContainer>,
    /// The registrations
    pub status: kubelet::Status,
    /// Whose names the metrics of GPUs have
    pub names: Vec<MetricsNames>,
    /// The name of the node
    pub node: String,
    /// The XIDs that do not affect the health
    pub ignored_xids: Vec<u32>,
}

/// A metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Metric {
    /// The name
    pub name: &'static str,
    /// The description
    pub help: &'static str,
    /// The type
    pub kind: MetricKind,
}

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MetricKind {
    /// A value that rises and falls
    Gauge,
    /// A value that only rises
    Counter,
}

pub(super) const fn gauge(name: &'static str, help: &'static str) -> Metric {
    Metric {
        name,
        help,
        kind: MetricKind::Gauge,
    }
}

pub(super) const fn counter(name: &'static str, help: &'static str) -> Metric {
    Metric {
        name,
        help,
        kind: MetricKind::Counter,
    }
}

const DUTY_CYCLE: Metric = gauge(
    "duty_cycle",
    "Mean utilization of the container's GPU in percent, in the last 10 seconds",
);
const MEMORY_TOTAL: Metric = gauge("memory_total", "Memory of the container's GPU in bytes");
const MEMORY_USED: Metric = gauge(
    "memory_used",
    "Allocated memory of the container's GPU in bytes",
);
const REQUEST: Metric = gauge("request", "Number of devices that the container has");
const DUTY_CYCLE_NODE: Metric = gauge(
    "duty_cycle_gpu_node",
    "Mean utilization of the GPU in percent, in the last 10 seconds",
);
const MEMORY_TOTAL_NODE: Metric = gauge("memory_total_gpu_node", "Memory of the GPU in bytes");
const MEMORY_USED_NODE: Metric = gauge(
    "memory_used_gpu_node",
    "Allocated memory of the GPU in bytes",
);
const HEALTH: Metric = gauge("onh_gpu_health", "1 if the GPU can be used, 0 if it cannot");
/// The reason changes while a GPU is unhealthy, so it is not a label of [`HEALTH`]: the time of an alert would begin again.
const UNHEALTHY: Metric = gauge("onh_gpu_unhealthy_info", "Why the GPU cannot be used");
const DRIVER: Metric = gauge("onh_driver_up", "1 if the driver answers, 0 if it does not");
const DRIVER_DOWN: Metric = gauge("onh_driver_down_info", "Why the driver does not answer");
const TEMPERATURE: Metric = gauge("onh_gpu_temperature_celsius", "Temperature of the GPU");
const POWER: Metric = gauge("onh_gpu_power_watts", "Power that the GPU's board uses");
const XID_ERRORS: Metric = counter(
    "onh_gpu_xid_errors_total",
    "Errors that the driver reported, by NVIDIA's number",
);
const MPS_READY: Metric = gauge(
    "onh_mps_ready",
    "1 if the MPS daemon of the GPU serves clients, 0 if it does not",
);
const MPS_CLIENTS: Metric = gauge("onh_mps_clients", "Number of clients of the MPS daemon");
const MPS_MEMORY_LIMIT: Metric = gauge(
    "onh_mps_memory_limit_bytes",
    "GPU memory that a client of the MPS daemon can allocate",
);
const MPS_THREADS: Metric = gauge(
    "onh_mps_active_thread_percentage",
    "Part of the GPU's threads that a client of the MPS daemon can use",
);
const REGISTRATION: Metric = gauge(
    "onh_registration_timestamp_seconds",
    "When the kubelet last accepted the resource, in seconds since 1970",
);

/// All of them, in the order of the output.
pub const METRICS: [Metric; 19] = [
    DUTY_CYCLE,
    MEMORY_TOTAL,
    MEMORY_USED,
    REQUEST,
    DUTY_CYCLE_NODE,
    MEMORY_TOTAL_NODE,
    MEMORY_USED_NODE,
    DRIVER,
    DRIVER_DOWN,
    HEALTH,
    UNHEALTHY,
    TEMPERATURE,
    POWER,
    XID_ERRORS,
    MPS_READY,
    MPS_CLIENTS,
    MPS_MEMORY_LIMIT,
    MPS_THREADS,
    REGISTRATION,
];

/// The labels of a series
pub type Labels = Vec<(&'static str, String)>;

/// The series of each metric that has one.
pub type Series = BTreeMap<Metric, Vec<(Labels, f64)>>;

/// Returns the series with GKE's names, and our own.
#[must_use]
pub fn series(facts: &MetricSources) -> Series {
    let mut out = Series::new();
    if facts.names.contains(&MetricsNames::Gke) {
        of_containers(facts, &mut out);
        of_node(facts, &mut out);
    }
    of_health(&facts.readings, &mut out);
    for (uuid, reading) in &facts.readings.gpus {
        let labels = vec![("uuid", uuid.clone())];
        add(&mut out, TEMPERATURE, &labels, reading.temperature);
        add(&mut out, POWER, &labels, reading.watts());
    }
    for ((uuid, number), count) in &facts.readings.xids {
        let is_it = |ignored: &u32| u64::from(*ignored) == *number;
        let is_ignored = facts.ignored_xids.iter().any(is_it);
        let labels = vec![
            ("uuid", uuid.clone()),
            ("xid", number.to_string()),
            ("ignored", is_ignored.to_string()),
        ];
        add(&mut out, XID_ERRORS, &labels, Some(float(*count)));
    }
    of_mps(&facts.offer, &mut out);
    for (resource, registration) in &facts.status {
        let labels = vec![("resource_name", resource.clone())];
        if let Some(at) = registration.registered
            && let Ok(since) = at.duration_since(UNIX_EPOCH)
        {
            add(&mut out, REGISTRATION, &labels, Some(since.as_secs_f64()));
        }
    }
    out
}

/// The reasons are in separate series, which exist only while something does not work.
fn of_health(readings: &Readings, out: &mut Series) {
    if !readings.is_without_gpu {
        let why = readings.driver.why_not();
        add(out, DRIVER, &vec![], Some(u8::from(why.is_none())));
        if let Some(why) = why {
            let labels = vec![("reason", why.to_owned())];
            add(out, DRIVER_DOWN, &labels, Some(1));
        }
    }
    for (uuid, why) in &readings.health {
        let mut labels = vec![("uuid", uuid.clone())];
        add(out, HEALTH, &labels, Some(u8::from(why.is_none())));
        if let Some(why) = why {
            labels.push(("reason", why.clone()));
            add(out, UNHEALTHY, &labels, Some(1));
        }
    }
}

/// A daemon that is not ready has no clients that could be counted.
fn of_mps(offer: &Offer, out: &mut Series) {
    for daemon in offer.mps.iter() {
        let labels = vec![("uuid", daemon.state.gpu.clone())];
        let is_ready = daemon.status == Status::Ready;
        add(out, MPS_READY, &labels, Some(u8::from(is_ready)));
        if !is_ready {
            continue;
        }
        add(out, MPS_CLIENTS, &labels, Some(daemon.state.clients));
        let limit = daemon.state.memory_limit_mib;
        let bytes = limit.map(|mib| float(mib.saturating_mul(MIB)));
        add(out, MPS_MEMORY_LIMIT, &labels, bytes);
        let threads = daemon.state.active_thread_percentage;
        add(out, MPS_THREADS, &labels, threads);
    }
}

/// Adds a value to a series, if it is known.
pub(super) fn add<V: Into<f64>>(
    out: &mut Series,
    metric: Metric,
    labels: &Labels,
    value: Option<V>,
) {
    if let Some(value) = value {
        let series = out.entry(metric).or_default();
        series.push((labels.clone(), value.into()));
    }
}

fn of_containers(facts: &MetricSources, out: &mut Series) {
    for container in &facts.containers {
        let name = vec![
            ("namespace", container.namespace.clone()),
            ("pod", container.pod.clone()),
            ("container", container.name.clone()),
        ];
        let mut known: Vec<Accelerator<'_>> = Vec::new();
        for (resource, ids) in given(container) {
            let mut labels = name.clone();
            labels.push(("resource_name", resource.to_owned()));
            add(out, REQUEST, &labels, u32::try_from(ids.len()).ok());
            for id in ids {
                let Some(accelerator) = find(&facts.offer, id) else {
                    continue;
                };
                if known.iter().any(|other| other.uuid == accelerator.uuid) {
                    continue;
                }
                let values = accelerator.values(&facts.readings);
                let labels = [&*name, &accelerator.labels()].concat();
                known.push(accelerator);
                add(out, DUTY_CYCLE, &labels, values.utilization);
                if let Some(memory) = values.memory {
                    add(out, MEMORY_TOTAL, &labels, Some(float(memory.total)));
                    add(out, MEMORY_USED, &labels, Some(float(memory.used)));
                }
            }
        }
    }
}

/// Returns the ids of our devices that a container has: by the resource, or by the name of the
/// driver for claims.
fn given(container: &PodContainer) -> impl Iterator<Item = (&String, &Vec<String>)> {
    container.devices.iter().chain(&container.claims)
}

/// Returns the containers that have a GPU or a MIG device, by its UUID.
pub(super) fn holders(facts: &MetricSources) -> BTreeMap<&str, Vec<&PodContainer>> {
    let mut found: BTreeMap<&str, Vec<&PodContainer>> = BTreeMap::new();
    for container in &facts.containers {
        for id in given(container).flat_map(|(_, ids)| ids) {
            let Some(device) = find(&facts.offer, id) else {
                continue;
            };
            let holders = found.entry(device.uuid).or_default();
            // A container can have several replicas of a GPU.
            if holders.last().is_none_or(|last| !ptr::eq(*last, container)) {
                holders.push(container);
            }
        }
    }
    found
}

fn of_node(facts: &MetricSources, out: &mut Series) {
    for accelerator in facts.offer.gpus.iter().flat_map(accelerators) {
        let values = accelerator.values(&facts.readings);
        let labels = accelerator.labels();
        add(out, DUTY_CYCLE_NODE, &labels, values.utilization);
        if let Some(memory) = values.memory {
            add(out, MEMORY_TOTAL_NODE, &labels, Some(float(memory.total)));
            add(out, MEMORY_USED_NODE, &labels, Some(float(memory.used)));
        }
    }
}

/// A GPU, or a MIG device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accelerator<'a> {
    pub(super) gpu: &'a NodeGpu,
    pub(super) uuid: &'a str,
}

struct Values {
    utilization: Option<f64>,
    memory: Option<Memory>,
}

impl Accelerator<'_> {
    pub(super) fn is_whole(&self) -> bool {
        self.gpu.gpu.uuid == self.uuid
    }

    fn labels(&self) -> Labels {
        let model = &self.gpu.gpu.model;
        let model = match self.gpu.profiles.get(self.uuid) {
            // The name that NVML has for the MIG device
            Some(profile) => format!("{model} MIG {profile}"),
            None => model.clone(),
        };
        vec![
            ("make", "nvidia".to_owned()),
            ("accelerator_id", self.uuid.to_owned()),
            ("model", model),
        ]
    }

    fn values(&self, readings: &Readings) -> Values {
        let reading = readings.gpus.get(&self.gpu.gpu.uuid);
        if self.is_whole() {
            let utilization = reading.and_then(Reading::utilization);
            return Values {
                utilization,
                memory: reading.and_then(|reading| reading.memory),
            };
        }
        // NVML does not report the utilization of MIG devices.
        let memory = reading.and_then(|reading| reading.mig_memory.get(self.uuid).copied());
        Values {
            utilization: None,
            memory,
        }
    }
}

fn accelerators(gpu: &NodeGpu) -> Vec<Accelerator<'_>> {
    let migs = gpu.gpu.mig_devices.iter();
    let mut found: Vec<_> = migs
        .map(|mig| Accelerator {
            gpu,
            uuid: &mig.uuid,
        })
        .collect();
    if found.is_empty() {
        found.push(Accelerator {
            gpu,
            uuid: &gpu.gpu.uuid,
        });
    }
    found
}

/// Returns the device with this id of a resource: the one with the UUID in the id, or the GPU of an
/// id without a UUID.
fn find<'a>(offer: &'a Offer, id: &str) -> Option<Accelerator<'a>> {
    if let Some(found) = with_uuid(offer, uuid_of(id)) {
        return Some(found);
    }
    let device = offer.devices().find(|device| device.id == id)?;
    with_uuid(offer, &device.gpu)
}

fn with_uuid<'a>(offer: &'a Offer, uuid: &str) -> Option<Accelerator<'a>> {
    for gpu in &offer.gpus {
        if gpu.gpu.uuid == uuid {
            let uuid = &gpu.gpu.uuid;
            return Some(Accelerator { gpu, uuid });
        }
        let mut migs = gpu.gpu.mig_devices.iter();
        if let Some(mig) = migs.find(|mig| mig.uuid == uuid) {
            let uuid = &mig.uuid;
            return Some(Accelerator { gpu, uuid });
        }
    }
    None
}

#[cfg(test)]
mod tests;
