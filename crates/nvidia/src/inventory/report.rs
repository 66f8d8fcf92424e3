//! The inventory in the form that `info --json` prints and `explain --inventory` reads. With it, a problem of one host can be reproduced on
//! another.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use base::report::{Failure, catalog};

use super::{BusId, ExcludedGpu, FailedGpu, Gpu, Inventory, MigDevice};

/// The document.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// The version of the document; earlier ones have none
    #[serde(default)]
    version: Option<u32>,
    #[serde(default)]
    driver_version: Option<String>,
    #[serde(default)]
    cuda_version: Option<String>,
    #[serde(default)]
    gpus: Option<Vec<ReportedGpu>>,
    /// GPUs that do not answer
    #[serde(default)]
    not_usable: Option<Vec<NotUsable>>,
    /// GPUs that the module parameter NVreg_ExcludedGpus names
    #[serde(default)]
    excluded: Option<Vec<Excluded>>,
}

/// A GPU that does not work. Every field may be unknown.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct NotUsable {
    index: Option<u32>,
    minor: Option<u32>,
    uuid: Option<String>,
    bus_id: Option<String>,
    model: Option<String>,
    reason: Option<String>,
    node_missing: Option<bool>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Excluded {
    bus_id: String,
    #[serde(default)]
    uuid: Option<String>,
}

/// A GPU that works. Only the UUID is always known.
#[derive(Debug, Serialize, Deserialize)]
struct ReportedGpu {
    #[serde(default)]
    index: Option<u32>,
    #[serde(default)]
    minor: Option<u32>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    brand: Option<String>,
    uuid: String,
    #[serde(default)]
    bus_id: Option<String>,
    #[serde(default)]
    compute_capability: Option<String>,
    #[serde(default)]
    device_node: Option<String>,
    #[serde(default)]
    mig: Option<ReportedMig>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct ReportedMig {
    #[serde(default)]
    enabled: Option<bool>,
    #[serde(default)]
    devices: Option<Vec<ReportedMigDevice>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ReportedMigDevice {
    #[serde(default)]
    index: Option<u32>,
    uuid: String,
    #[serde(default)]
    gpu_instance: Option<u32>,
    #[serde(default)]
    compute_instance: Option<u32>,
}

/// Converts an empty text, which stands for an unknown value in the inventory, to `None`.
fn known(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

impl From<&Inventory> for Report {
    fn from(inventory: &Inventory) -> Self {
        let gpus = inventory.gpus.iter().map(|gpu| ReportedGpu {
            index: Some(gpu.index),
            minor: Some(gpu.minor),
            model: known(&gpu.model),
            brand: known(&gpu.brand),
            uuid: gpu.uuid.clone(),
            bus_id: Some(gpu.bus_id.to_string()),
            compute_capability: known(&gpu.compute_capability),
            device_node: Some(format!("/dev/nvidia{}", gpu.minor)),
            mig: Some(ReportedMig {
                enabled: Some(gpu.mig_enabled),
                devices: Some(gpu.mig_devices.iter().map(ReportedMigDevice::from).collect()),
            }),
        });
        Self {
            version: Some(base::json::VERSION),
            driver_version: known(&inventory.driver_version),
            cuda_version: known(&inventory.cuda_version),
            gpus: Some(gpus.collect()),
            not_usable: Some(inventory.failed.iter().map(NotUsable::from).collect()),
            excluded: Some(inventory.excluded.iter().map(Excluded::from).collect()),
        }
    }
}

impl From<&FailedGpu> for NotUsable {
    fn from(gpu: &FailedGpu) -> Self {
        Self {
            index: gpu.index,
            minor: gpu.minor,
            uuid: gpu.uuid.clone(),
            bus_id: gpu.bus_id.map(|bus_id| bus_id.to_string()),
            model: gpu.model.clone(),
            reason: known(&gpu.why),
            node_missing: Some(gpu.node_missing),
        }
    }
}

impl From<NotUsable> for FailedGpu {
    fn from(gpu: NotUsable) -> Self {
        Self {
            index: gpu.index,
            minor: gpu.minor,
            uuid: gpu.uuid,
            bus_id: gpu.bus_id.as_deref().and_then(BusId::parse),
            model: gpu.model,
            why: gpu.reason.unwrap_or_default(),
            node_missing: gpu.node_missing.unwrap_or_default(),
        }
    }
}

impl From<&ExcludedGpu> for Excluded {
    fn from(gpu: &ExcludedGpu) -> Self {
        Self { bus_id: gpu.bus_id.to_string(), uuid: gpu.uuid.clone() }
    }
}

impl From<&MigDevice> for ReportedMigDevice {
    fn from(mig: &MigDevice) -> Self {
        Self {
            index: Some(mig.index),
            uuid: mig.uuid.clone(),
            gpu_instance: Some(mig.gpu_instance),
            compute_instance: Some(mig.compute_instance),
        }
    }
}

impl From<Report> for Inventory {
    fn from(report: Report) -> Self {
        let gpus = (0..).zip(report.gpus.unwrap_or_default()).map(|(place, gpu)| {
            let index = gpu.index.unwrap_or(place);
            let mig = gpu.mig.unwrap_or_default();
            let mig_devices: Vec<_> = (0..).zip(mig.devices.unwrap_or_default()).map(mig_device).collect();
            Gpu {
                index,
                minor: gpu.minor.unwrap_or(index),
                uuid: gpu.uuid,
                bus_id: gpu.bus_id.as_deref().and_then(BusId::parse).unwrap_or_default(),
                model: gpu.model.unwrap_or_default(),
                compute_capability: gpu.compute_capability.unwrap_or_default(),
                brand: gpu.brand.unwrap_or_default(),
                mig_enabled: mig.enabled.unwrap_or(!mig_devices.is_empty()),
                mig_devices,
                unlisted_mig: Vec::new(),
            }
        });
        let excluded = report.excluded.unwrap_or_default().into_iter();
        let excluded =
            excluded.map(|gpu| ExcludedGpu { bus_id: BusId::parse(&gpu.bus_id).unwrap_or_default(), uuid: gpu.uuid });
        Self {
            gpus: gpus.collect(),
            driver_version: report.driver_version.unwrap_or_default(),
            cuda_version: report.cuda_version.unwrap_or_default(),
            failed: report.not_usable.unwrap_or_default().into_iter().map(FailedGpu::from).collect(),
            excluded: excluded.collect(),
        }
    }
}

/// Converts a MIG device. Reports of earlier versions have no index; it is the position in the list.
fn mig_device((place, mig): (u32, ReportedMigDevice)) -> MigDevice {
    MigDevice {
        index: mig.index.unwrap_or(place),
        uuid: mig.uuid,
        gpu_instance: mig.gpu_instance.unwrap_or_default(),
        compute_instance: mig.compute_instance.unwrap_or_default(),
    }
}

/// Reads a report from a file.
///
/// # Errors
/// If the file cannot be read, or is not a report.
pub fn read(path: &Path) -> Result<Inventory> {
    let read = || -> Result<Inventory> {
        let mut text = String::new();
        std::fs::File::open(path)?.take(16 << 20).read_to_string(&mut text)?;
        Ok(serde_json::from_str::<Report>(&text)?.into())
    };
    read().with_context(|| {
        Failure::new(
            &catalog::INVENTORY_FILE,
            format!("cannot read the inventory {path:?}"),
            "create it with \"oci-nvidia-hook info --json\" on the host that has the GPUs",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_read_back() {
        let mut inventory = super::super::select::tests::inventory();
        // MIG device 0 was destroyed: the other one keeps its index.
        inventory.gpus[2].mig_devices.remove(0);
        inventory.failed.push(FailedGpu {
            index: Some(3),
            minor: Some(3),
            uuid: Some("GPU-x".into()),
            bus_id: Some(BusId { domain: 0, bus: 9, device: 0 }),
            model: Some("NVIDIA H100".into()),
            why: "it is lost".into(),
            node_missing: true,
        });
        inventory.excluded.push(ExcludedGpu { bus_id: BusId { domain: 0, bus: 10, device: 0 }, uuid: None });
        let text = serde_json::to_string(&Report::from(&inventory)).unwrap();
        assert_eq!(Inventory::from(serde_json::from_str::<Report>(&text).unwrap()), inventory);
    }

    #[test]
    fn a_uuid_is_enough() {
        let text = r#"{"gpus":[{"uuid":"GPU-a"},{"uuid":"GPU-b","mig":{"devices":[{"uuid":"MIG-c"}]},"model":null}]}"#;
        let inventory = Inventory::from(serde_json::from_str::<Report>(text).unwrap());
        assert_eq!((inventory.gpus[1].index, inventory.gpus[1].minor), (1, 1));
        assert!(inventory.gpus[1].mig_enabled && !inventory.gpus[0].mig_enabled);
        assert!(serde_json::from_str::<Report>(r#"{"gpus":[{}]}"#).is_err());
        assert!(Inventory::from(serde_json::from_str::<Report>("{}").unwrap()).gpus.is_empty());
    }
}
