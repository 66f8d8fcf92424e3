//! What the driver reports about itself and the GPUs, for labels and for claims. Pure.

use std::collections::BTreeMap;

use nvidia_host::nvml::monitoring::{MemorySlices, MigAttributes};

use crate::monitor::message::{Properties, Snapshot};
use crate::monitor::update::Update;

/// What NVML reports about the driver and the GPUs besides their names and health.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmlFacts {
    /// Empty without a driver
    pub driver_version: String,
    /// The newest CUDA version that the driver supports; empty if unknown
    pub cuda_version: String,
    /// The properties of GPUs by UUID
    pub properties: BTreeMap<String, Properties>,
    /// The parts of the GPU that MIG devices have, by UUID
    pub mig_attributes: BTreeMap<String, MigAttributes>,
    /// The memory slices of MIG devices, by UUID
    pub memory_slices: BTreeMap<String, MemorySlices>,
}

impl NvmlFacts {
    /// Takes a report of the monitor into account.
    pub fn apply(&mut self, update: &Update) {
        match update {
            Update::Snapshot(snapshot) => self.take(snapshot),
            Update::Absent(_) => *self = Self::default(),
            // The hardware is the same while the driver is replaced.
            Update::LetGo | Update::Sample(_) | Update::Event(_) | Update::Silent { .. } => {}
        }
    }

    fn take(&mut self, snapshot: &Snapshot) {
        self.driver_version
            .clone_from(&snapshot.inventory.driver_version);
        self.cuda_version
            .clone_from(&snapshot.inventory.cuda_version);
        let failed: Vec<_> = snapshot
            .inventory
            .failed
            .iter()
            .filter_map(|gpu| gpu.uuid.as_ref())
            .collect();
        // A GPU that is lost keeps its properties, like its ids.
        self.properties.retain(|uuid, _| failed.contains(&uuid));
        self.properties.extend(snapshot.properties.clone());
        self.mig_attributes.clone_from(&snapshot.mig_attributes);
        self.memory_slices.clone_from(&snapshot.memory_slices);
    }
}

/// Returns NVIDIA's name of the architecture of GPUs with this compute capability, such as `8.9`.
#[must_use]
pub fn architecture(compute_capability: &str) -> Option<&'static str> {
    let (major, minor) = compute_capability.split_once('.')?;
    Some(match (major.parse().ok()?, minor.parse().ok()?) {
        (2u32, _) => "Fermi",
        (3, _) => "Kepler",
        (5, _) => "Maxwell",
        (6, _) => "Pascal",
        (7, 0..5u32) => "Volta",
        (7, _) => "Turing",
        (8, 9) => "Ada Lovelace",
        (8, _) => "Ampere",
        (9, _) => "Hopper",
        (10..=12, _) => "Blackwell",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures() {
        for (capability, expected) in [
            ("3.5", Some("Kepler")),
            ("5.2", Some("Maxwell")),
            ("7.0", Some("Volta")),
            ("7.5", Some("Turing")),
            ("8.6", Some("Ampere")),
            ("8.9", Some("Ada Lovelace")),
            ("9.0", Some("Hopper")),
            ("12.0", Some("Blackwell")),
            ("99.0", None),
            ("", None),
        ] {
            assert_eq!(architecture(capability), expected, "{capability}");
        }
    }
}
