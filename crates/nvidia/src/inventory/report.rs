//! The inventory in the form that `info --json` prints and `plan --inventory` reads. With it, a problem of one host can be reproduced on
//! another.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use base::report::Failure;
use findings::catalog;

use crate::driver::{DriverKind, wsl};

use super::{BusId, ExcludedGpu, FailedGpu, Gpu, Inventory, MigDevice};

/// The document.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    version: u32,
    driver_version: Option<String>,
    cuda_version: Option<String>,
    gpus: Vec<ReportedGpu>,
    /// GPUs that do not answer
    not_usable: Vec<FailedGpu>,
    /// GPUs that the module parameter NVreg_ExcludedGpus names
    excluded: Vec<ExcludedGpu>,
}

/// A GPU that works.
#[derive(Debug, Serialize, Deserialize)]
struct ReportedGpu {
    index: u32,
    minor: u32,
    model: Option<String>,
    brand: Option<String>,
    uuid: String,
    bus_id: BusId,
    compute_capability: Option<String>,
    device_node: String,
    mig: ReportedMig,
}

#[derive(Debug, Serialize, Deserialize)]
struct ReportedMig {
    enabled: bool,
    devices: Vec<MigDevice>,
}

/// Converts an empty text, which stands for an unknown value in the inventory, to `None`.
fn known(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

impl From<&Inventory> for Report {
    fn from(inventory: &Inventory) -> Self {
        let gpus = inventory.gpus.iter().map(|gpu| ReportedGpu {
            index: gpu.index,
            minor: gpu.minor,
            model: known(&gpu.model),
            brand: known(&gpu.brand),
            uuid: gpu.uuid.clone(),
            bus_id: gpu.bus_id,
            compute_capability: known(&gpu.compute_capability),
            device_node: format!("/dev/{}", inventory.driver_kind.gpu_node(gpu.minor)),
            mig: ReportedMig {
                enabled: gpu.mig_enabled,
                devices: gpu.mig_devices.clone(),
            },
        });
        Self {
            version: base::json::VERSION,
            driver_version: known(&inventory.driver_version),
            cuda_version: known(&inventory.cuda_version),
            gpus: gpus.collect(),
            not_usable: inventory.failed.clone(),
            excluded: inventory.excluded.clone(),
        }
    }
}

impl From<Report> for Inventory {
    fn from(report: Report) -> Self {
        let driver_kind = match report.gpus.first() {
            Some(gpu) if gpu.device_node == wsl::NODE_PATH => DriverKind::Wsl,
            _ => DriverKind::Linux,
        };
        let gpus = report.gpus.into_iter().map(|gpu| Gpu {
            index: gpu.index,
            minor: gpu.minor,
            uuid: gpu.uuid,
            bus_id: gpu.bus_id,
            model: gpu.model.unwrap_or_default(),
            compute_capability: gpu.compute_capability.unwrap_or_default(),
            brand: gpu.brand.unwrap_or_default(),
            mig_enabled: gpu.mig.enabled,
            mig_devices: gpu.mig.devices,
            unlisted_mig: Vec::new(),
        });
        Self {
            gpus: gpus.collect(),
            driver_version: report.driver_version.unwrap_or_default(),
            cuda_version: report.cuda_version.unwrap_or_default(),
            failed: report.not_usable,
            excluded: report.excluded,
            driver_kind,
        }
    }
}

/// Reads a report from a file.
///
/// # Errors
/// If the file cannot be read, or is not a report.
pub fn read(path: &Path) -> Result<Inventory> {
    read_report(path).map(Inventory::from).with_context(|| {
        Failure::new(
            &catalog::INVENTORY_FILE,
            format!("cannot read the inventory {path:?}"),
            "create it with \"oci-nvidia-hook info --json\" on the host that has the GPUs",
        )
    })
}

#[expect(clippy::disallowed_methods, reason = "the user names the file")]
fn read_report(path: &Path) -> Result<Report> {
    let mut text = String::new();
    std::fs::File::open(path)?
        .take(16 << 20)
        .read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
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
            bus_id: Some(BusId {
                domain: 0,
                bus: 9,
                device: 0,
            }),
            model: Some("NVIDIA H100".into()),
            why: "it is lost".into(),
            node_missing: true,
            node_shut: true,
            denied: true,
        });
        inventory.excluded.push(ExcludedGpu {
            bus_id: BusId {
                domain: 0,
                bus: 10,
                device: 0,
            },
            uuid: None,
        });
        let text = serde_json::to_string(&Report::from(&inventory)).unwrap();
        assert_eq!(
            Inventory::from(serde_json::from_str::<Report>(&text).unwrap()),
            inventory
        );
    }

    #[test]
    fn an_incomplete_document_is_an_error() {
        for text in ["{}", r#"{"gpus":[{"uuid":"GPU-a"}]}"#, "[]"] {
            assert!(serde_json::from_str::<Report>(text).is_err(), "{text}");
        }
    }
}
