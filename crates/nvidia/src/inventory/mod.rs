//! The inventory: the GPUs of the host at one moment, from NVML and from /proc/driver/nvidia.

pub mod cache;
pub mod cap_files;
pub mod caps;
pub mod fingerprint;
pub mod gather;
pub mod identity;
pub mod limits;
pub mod merge;
pub mod node_limits;
pub mod notice;
pub mod nvml;
pub mod processes;
pub mod procfs;
pub mod report;
pub mod scope;
pub mod select;
mod stored_error;

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use crate::bus_id::BusId;
use crate::device_id::DeviceId;
use crate::driver::DriverKind;

/// The driver and its GPUs at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// `535.183.01`
    pub driver_version: String,
    /// The newest CUDA version that the driver supports, such as `12.2`; empty if unknown.
    pub cuda_version: String,
    /// GPUs that work, in NVML's order.
    pub gpus: Vec<Gpu>,
    /// GPUs that do not work.
    pub failed: Vec<FailedGpu>,
    /// GPUs that the administrator excluded from the driver: for containers they do not exist.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded: Vec<ExcludedGpu>,
    /// The kind of the driver. It is determined each time, so it is not part of what is cached.
    #[serde(skip)]
    pub driver_kind: DriverKind,
}

/// A GPU that works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// NVML's index, which `nvidia-smi -L` also shows. See [`merge`] for the case that NVML omits GPUs.
    pub index: u32,
    /// The N of `/dev/nvidiaN`, which may differ from the index. On WSL 2, it is the index and has no meaning.
    pub minor: u32,
    /// `GPU-…`
    pub uuid: String,
    /// The PCI bus address.
    pub bus_id: BusId,
    /// `NVIDIA H100 80GB HBM3`; empty if unknown.
    pub model: String,
    /// `9.0`; empty if unknown.
    pub compute_capability: String,
    /// NVIDIA's brand name, such as `Tesla`; empty if unknown.
    pub brand: String,
    /// Whether MIG mode is enabled.
    pub mig_enabled: bool,
    /// Its MIG devices, in NVML's order.
    pub mig_devices: Vec<MigDevice>,
    /// Its MIG devices that NVML does not list because they lack device nodes. They are read from the driver's files each
    /// time, so they are not part of what is cached or printed.
    #[serde(skip)]
    pub unlisted_mig: Vec<UnlistedMig>,
}

/// The models that only drive the display of a workstation: the card in a DGX Station next to its
/// A100 or V100 GPUs. NVIDIA's programs skip the same names (`pkg/nvlib/device` in go-nvlib).
const DISPLAY_ONLY: [&str; 2] = ["DGX Display", "NVIDIA DGX Display"];

impl Gpu {
    /// Reports whether the GPU only drives a display, so that it is not among all GPUs of the host
    /// for containers. A request by its name is met.
    #[must_use]
    pub fn is_display_only(&self) -> bool {
        DISPLAY_ONLY.contains(&self.model.as_str())
    }
}

/// A MIG device that lacks device nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnlistedMig {
    /// The id of its GPU instance
    pub gpu_instance: u32,
    /// The id of its compute instance
    pub compute_instance: u32,
    /// The nodes that are missing, below /dev
    pub nodes: Vec<String>,
}

/// A MIG device: a part of a GPU that programs use like a separate GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    /// NVML's index within the GPU
    pub index: u32,
    /// `MIG-…`
    pub uuid: String,
    /// NVIDIA's name for its size, such as `1g.10gb`; `None` if unknown.
    #[serde(default)]
    pub profile: Option<String>,
    /// The id of its GPU instance
    pub gpu_instance: u32,
    /// The id of its compute instance
    pub compute_instance: u32,
}

/// A GPU that does not work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedGpu {
    /// The index that it would have if it worked.
    pub index: Option<u32>,
    /// The N of its `/dev/nvidiaN`, from the kernel module.
    pub minor: Option<u32>,
    /// From NVML or the kernel module, if one of them knows it.
    pub uuid: Option<String>,
    /// From NVML or the kernel module, if one of them knows it.
    pub bus_id: Option<BusId>,
    /// From the kernel module; patterns of `[devices]` are compared with it.
    pub model: Option<String>,
    /// The reason.
    #[serde(rename = "reason")]
    pub why: String,
    /// Whether the reason is a missing `/dev/nvidiaN`. A container that requests the GPU then does not start, even if it requests `all`.
    /// NVIDIA's stack starts it with one GPU less, without a message.
    pub node_missing: bool,
    /// Whether neither the group of its `/dev/nvidiaN` nor other users may open it. A start of the hook repairs such a node.
    #[serde(default)]
    pub node_shut: bool,
    /// Whether the device cgroup of the calling process denies the node, as in a job of Slurm or in a container of LXC. The GPU works.
    #[serde(default)]
    pub denied: bool,
}

/// A GPU that the module parameter `NVreg_ExcludedGpus` names. The kernel module lists it and refuses to open it; NVML
/// does not count it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExcludedGpu {
    /// The PCI bus address.
    pub bus_id: BusId,
    /// `GPU-…`; `None` if the kernel module has never opened the GPU.
    pub uuid: Option<String>,
}

/// Whether `id` names the GPU with this index, UUID or bus id.
fn names(id: &DeviceId, index: Option<u32>, uuid: Option<&str>, bus_id: Option<BusId>) -> bool {
    match id {
        DeviceId::Index(asked) => index == Some(*asked),
        DeviceId::Uuid(asked) => uuid.is_some_and(|uuid| uuid.eq_ignore_ascii_case(asked)),
        DeviceId::PciBusId(asked) => bus_id == Some(*asked),
        DeviceId::Mig { .. } | DeviceId::Unknown(_) => false,
    }
}

impl Inventory {
    /// Returns the UUIDs of all MIG devices.
    #[must_use]
    pub fn mig_uuids(&self) -> BTreeSet<String> {
        let devices = self.gpus.iter().flat_map(|gpu| &gpu.mig_devices);
        devices.map(|device| device.uuid.clone()).collect()
    }

    /// Adds a GPU after those with smaller indices.
    fn add_gpu(&mut self, gpu: Gpu) {
        let place = self.gpus.partition_point(|known| known.index <= gpu.index);
        self.gpus.insert(place, gpu);
    }

    /// Adds a GPU that failed after those with smaller indices. Those without an index come first.
    fn add_failed(&mut self, failed: FailedGpu) {
        let place = self
            .failed
            .partition_point(|known| known.index <= failed.index);
        self.failed.insert(place, failed);
    }
}

impl Gpu {
    /// Whether `id` names it.
    #[must_use]
    pub fn is_named(&self, id: &DeviceId) -> bool {
        names(id, Some(self.index), Some(&self.uuid), Some(self.bus_id))
    }
}

impl FailedGpu {
    /// Whether `id` names it, or a MIG device of it.
    #[must_use]
    pub fn is_named(&self, id: &DeviceId) -> bool {
        match id {
            DeviceId::Mig { gpu, .. } => self.index == Some(*gpu),
            DeviceId::Uuid(uuid) if uuid.starts_with("MIG-GPU-") => {
                let gpu = uuid
                    .strip_prefix("MIG-")
                    .and_then(|rest| rest.split('/').next());
                gpu.zip(self.uuid.as_deref())
                    .is_some_and(|(asked, uuid)| asked.eq_ignore_ascii_case(uuid))
            }
            id => names(id, self.index, self.uuid.as_deref(), self.bus_id),
        }
    }

    /// Whether `id` could name it, because the property that `id` refers to is unknown for this GPU.
    #[must_use]
    pub(crate) fn may_be_named(&self, id: &DeviceId) -> bool {
        match id {
            DeviceId::Index(_) | DeviceId::Mig { .. } => self.index.is_none(),
            // The UUID of a MIG device does not show which GPU it is a part of.
            DeviceId::Uuid(uuid) => self.uuid.is_none() || uuid.starts_with("MIG-"),
            DeviceId::PciBusId(_) => self.bus_id.is_none(),
            DeviceId::Unknown(_) => false,
        }
    }
}

impl ExcludedGpu {
    /// Whether `id` names it. It has no index.
    #[must_use]
    pub fn is_named(&self, id: &DeviceId) -> bool {
        names(id, None, self.uuid.as_deref(), Some(self.bus_id))
    }
}

impl MigDevice {
    /// Returns the name in drivers before 470.
    fn old_name(&self, gpu: &Gpu) -> String {
        format!(
            "MIG-{}/{}/{}",
            gpu.uuid, self.gpu_instance, self.compute_instance
        )
    }

    /// Whether `id` names it, a part of `gpu`: by UUID, by `gpu:index`, or in the form of drivers before 470,
    /// `MIG-GPU-<uuid>/<gi>/<ci>`.
    #[must_use]
    pub fn is_named(&self, id: &DeviceId, gpu: &Gpu) -> bool {
        match id {
            DeviceId::Uuid(uuid) => {
                uuid.eq_ignore_ascii_case(&self.uuid)
                    || (uuid.contains('/') && uuid.eq_ignore_ascii_case(&self.old_name(gpu)))
            }
            DeviceId::Mig { gpu: index, mig } => (*index, *mig) == (gpu.index, self.index),
            _ => false,
        }
    }
}

impl fmt::Display for UnlistedMig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            gpu_instance,
            compute_instance,
            nodes,
        } = self;
        let nodes: Vec<_> = nodes
            .iter()
            .map(|name| format!("\"/dev/{name}\""))
            .collect();
        write!(
            f,
            "{} (GPU instance {gpu_instance}, compute instance {compute_instance})",
            nodes.join(", ")
        )
    }
}

impl fmt::Display for FailedGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.index, &self.uuid, self.bus_id) {
            (Some(index), _, _) => write!(f, "GPU {index}")?,
            (None, Some(uuid), _) => f.write_str(uuid)?,
            (None, None, Some(bus_id)) => write!(f, "GPU at {bus_id}")?,
            (None, None, None) => f.write_str("a GPU")?,
        }
        write!(f, ": {}", self.why)
    }
}

impl fmt::Display for ExcludedGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU at {}", self.bus_id)?;
        if let Some(uuid) = &self.uuid {
            write!(f, " ({uuid})")?;
        }
        f.write_str(": excluded by the module parameter NVreg_ExcludedGpus")
    }
}
