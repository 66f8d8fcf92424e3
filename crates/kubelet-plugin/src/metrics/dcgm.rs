//! Decides which series the metrics have with the names and labels of NVIDIA's DCGM exporter, which most dashboards expect. Pure.
//!
//! The values have the units of DCGM. Those that NVML does not report are missing: DCGM's profiling metrics (`DCGM_FI_PROF_…`). A GPU has
//! one series, so that sums over GPUs are right, with the labels of the container that uses it. If several
//! containers share the GPU, the series has no such labels, or a setting creates a series for each container.

use std::collections::BTreeMap;

use nvidia_host::driver::node_name::NodeName;
use nvidia_host::nvml::monitoring::Memory;

use super::readings::{Reading, float};
use super::series::{
    Accelerator, Labels, Metric, MetricSources, Series, add, counter, gauge, holders,
};
use crate::kubelet::pods::PodContainer;
use crate::settings::values::MetricsNames;

const FB_FREE: Metric = gauge("DCGM_FI_DEV_FB_FREE", "Free memory in MiB");
const FB_USED: Metric = gauge("DCGM_FI_DEV_FB_USED", "Allocated memory in MiB");
const FB_RESERVED: Metric = gauge(
    "DCGM_FI_DEV_FB_RESERVED",
    "Memory in MiB that the driver reserves",
);
const FB_TOTAL: Metric = gauge("DCGM_FI_DEV_FB_TOTAL", "Memory in MiB");
const FB_USED_PERCENT: Metric = gauge(
    "DCGM_FI_DEV_FB_USED_PERCENT",
    "Allocated part of the memory that is not reserved, from 0 to 1",
);
const XID_ERRORS: Metric = gauge(
    "DCGM_FI_DEV_XID_ERRORS",
    "The last XID since the plugin started, 0 if there was none",
);

/// A metric of a whole GPU, and its value.
type Row = (Metric, fn(&Reading) -> Option<f64>);

/// Returns rows of the type, the name, the help text and the value of a metric.
macro_rules! rows {
    (|$reading:ident| $($kind:ident $name:literal $help:literal = $value:expr;)*) => {
        [$(($kind($name, $help), |$reading| $value)),*]
    };
}

const ROWS: [Row; 21] = rows! { |reading|
    gauge "DCGM_FI_DEV_SM_CLOCK" "Clock of the SMs in MHz" = reading.more()?.sm_clock.map(f64::from);
    gauge "DCGM_FI_DEV_MEM_CLOCK" "Clock of the memory in MHz" = reading.more()?.memory_clock.map(f64::from);
    gauge "DCGM_FI_DEV_MEMORY_TEMP" "Temperature of the memory in degrees Celsius" =
        reading.more()?.memory_temperature.map(float);
    gauge "DCGM_FI_DEV_GPU_TEMP" "Temperature of the GPU in degrees Celsius" = reading.temperature.map(f64::from);
    gauge "DCGM_FI_DEV_POWER_USAGE" "Power that the GPU's board uses, in W" = reading.watts();
    counter "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION" "Energy in mJ since the driver was loaded" = reading.more()?.energy.map(float);
    counter "DCGM_FI_DEV_PCIE_REPLAY_COUNTER" "Number of PCIe packets that were sent again" =
        reading.more()?.pcie_replays.map(float);
    gauge "DCGM_FI_DEV_GPU_UTIL" "Utilization of the GPU in percent" = reading.newest_utilization().map(f64::from);
    gauge "DCGM_FI_DEV_MEM_COPY_UTIL" "Percentage of time in which memory was read or written" =
        reading.more()?.memory_utilization.map(f64::from);
    gauge "DCGM_FI_DEV_ENC_UTIL" "Utilization of the encoder in percent" = reading.more()?.encoder.map(f64::from);
    gauge "DCGM_FI_DEV_DEC_UTIL" "Utilization of the decoder in percent" = reading.more()?.decoder.map(f64::from);
    counter "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS" "Rows that were remapped because of uncorrectable errors" =
        reading.more()?.remapped_uncorrectable.map(float);
    counter "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS" "Rows that were remapped because of correctable errors" =
        reading.more()?.remapped_correctable.map(float);
    gauge "DCGM_FI_DEV_ROW_REMAP_FAILURE" "1 if the remapping of a row has failed" = reading.more()?.remap_failure.map(float);
    gauge "DCGM_FI_DEV_ROW_REMAP_PENDING" "1 if a row will be remapped at the next reset of the GPU" =
        reading.more()?.remap_pending.map(float);
    gauge "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS" "Why the clocks are lower than they could be, as bits" =
        reading.more()?.clock_reasons.map(float);
    // The name since DCGM 3.3
    gauge "DCGM_FI_DEV_CLOCKS_EVENT_REASONS" "Why the clocks are lower than they could be, as bits" =
        reading.more()?.clock_reasons.map(float);
    // The exporter calls it a counter, but DCGM has a rate.
    gauge "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL" "MB that the GPU sent and received through all NVLinks in a second" =
        reading.nvlink_rate();
    gauge "DCGM_FI_DEV_POWER_MGMT_LIMIT" "Power that the GPU's board may use, in W" =
        Some(float(reading.more()?.power_limit?) / 1000.0);
    counter "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL" "Errors of the memory that were corrected since the driver was loaded" =
        reading.more()?.ecc_corrected.map(float);
    counter "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" "Errors of the memory that could not be corrected since the driver was loaded" =
        reading.more()?.ecc_uncorrected.map(float);
};

/// Returns all metrics, in the order of the output.
pub fn metrics() -> impl Iterator<Item = Metric> {
    let rows = ROWS.into_iter().map(|(metric, _)| metric);
    rows.chain([
        XID_ERRORS,
        FB_FREE,
        FB_USED,
        FB_RESERVED,
        FB_TOTAL,
        FB_USED_PERCENT,
    ])
}

/// Adds the series to others.
pub fn extend(facts: &MetricSources, out: &mut Series) {
    let none = Reading::default();
    let version = match &facts.offer.known {
        Some(known) => known.driver_version.as_str(),
        None => "",
    };
    let holders = holders(facts);
    for gpu in &facts.offer.gpus {
        let reading = facts.readings.gpus.get(&gpu.gpu.uuid).unwrap_or(&none);
        let whole = Accelerator {
            gpu,
            uuid: &gpu.gpu.uuid,
        };
        let reserved = |uuid: &str| reading.more()?.reserved.get(uuid).copied();
        let last_xid = facts.readings.last_xids.get(&gpu.gpu.uuid);
        let last_xid = last_xid.copied().unwrap_or_default();
        for labels in all_labels(facts, &holders, whole, version) {
            for (metric, value) in ROWS {
                add(out, metric, &labels, value(reading));
            }
            add(out, XID_ERRORS, &labels, Some(float(last_xid)));
            // The memory belongs to the MIG devices, if there are any.
            if gpu.gpu.mig_devices.is_empty() {
                of_memory(reading.memory, reserved(&gpu.gpu.uuid), &labels, out);
            }
        }
        for mig in &gpu.gpu.mig_devices {
            let memory = reading.mig_memory.get(&mig.uuid).copied();
            let device = Accelerator {
                gpu,
                uuid: &mig.uuid,
            };
            for labels in all_labels(facts, &holders, device, version) {
                of_memory(memory, reserved(&mig.uuid), &labels, out);
            }
        }
    }
}

/// Adds the memory, as DCGM has it: with drivers from 510, the reserved memory is not a part of the used one.
fn of_memory(memory: Option<Memory>, reserved: Option<u64>, labels: &Labels, out: &mut Series) {
    let Some(Memory { total, used }) = memory else {
        return;
    };
    let free = total.saturating_sub(used);
    let used = used.saturating_sub(reserved.unwrap_or_default());
    let usable = total.saturating_sub(reserved.unwrap_or_default());
    for (metric, bytes) in [
        (FB_FREE, Some(free)),
        (FB_USED, Some(used)),
        (FB_RESERVED, reserved),
        (FB_TOTAL, Some(total)),
    ] {
        let mib = bytes.map(|bytes| float(bytes >> 20));
        add(out, metric, labels, mib);
    }
    if usable > 0 {
        let part = float(used) / float(usable);
        add(out, FB_USED_PERCENT, labels, Some(part));
    }
}

/// The containers that have a device, by its UUID.
type Holders<'a> = BTreeMap<&'a str, Vec<&'a PodContainer>>;

/// Returns the labels of each series of a GPU or MIG device.
fn all_labels(
    facts: &MetricSources,
    holders: &Holders<'_>,
    device: Accelerator<'_>,
    version: &str,
) -> Vec<Labels> {
    let labels = labels(facts, device, version);
    let containers = holders.get(device.uuid).map_or(&[][..], Vec::as_slice);
    let is_per_container = facts.names.contains(&MetricsNames::DcgmPerContainer);
    let mut groups = vec![containers];
    if is_per_container && !containers.is_empty() {
        groups = containers.chunks(1).collect();
    }
    let mut all = Vec::new();
    for group in groups {
        let mut labels = labels.clone();
        labels.extend(common(group));
        all.push(labels);
    }
    all
}

/// Returns the labels on which all containers agree: those of one pod have its name. The others are empty: Prometheus drops empty labels,
/// but with `honor_labels` it adds those of the plugin's own pod to a series that lacks them.
fn common(containers: &[&PodContainer]) -> Labels {
    let (mut container, mut namespace, mut pod) = (String::new(), String::new(), String::new());
    if let Some((first, others)) = containers.split_first() {
        let is_namespace = others
            .iter()
            .all(|other| other.namespace == first.namespace);
        if others.is_empty() {
            container.clone_from(&first.name);
        }
        if is_namespace {
            namespace.clone_from(&first.namespace);
        }
        if is_namespace && others.iter().all(|other| other.pod == first.pod) {
            pod.clone_from(&first.pod);
        }
    }
    vec![
        ("container", container),
        ("namespace", namespace),
        ("pod", pod),
    ]
}

fn labels(facts: &MetricSources, device: Accelerator<'_>, version: &str) -> Labels {
    let gpu = &device.gpu.gpu;
    let mut labels = vec![
        ("gpu", gpu.index.to_string()),
        ("UUID", gpu.uuid.clone()),
        ("pci_bus_id", gpu.bus_id.to_string().to_ascii_uppercase()),
        ("device", NodeName::Gpu(gpu.minor).to_string()),
        ("modelName", gpu.model.clone()),
    ];
    if let Some(mig) = gpu.mig_devices.iter().find(|mig| mig.uuid == device.uuid) {
        let profile = device.gpu.profiles.get(&mig.uuid);
        labels.extend([
            ("GPU_I_PROFILE", profile.cloned().unwrap_or_default()),
            ("GPU_I_ID", mig.gpu_instance.to_string()),
        ]);
    }
    labels.extend([
        ("Hostname", facts.node.clone()),
        ("DCGM_FI_DRIVER_VERSION", version.to_owned()),
    ]);
    labels
}
