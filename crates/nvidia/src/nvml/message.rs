//! The lines of a monitor: the answer to [`super::protocol::Request::Monitor`].

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::monitoring::{AddressingMode, Memory, MemorySlices, MigAttributes};
use super::protocol::Unloadable;
use crate::inventory::Inventory;

/// A line of the monitor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// All GPUs have been polled. The lines of the next poll come within `next_ms` and the time limit of a call, or the driver does not
    /// answer, unless the [`super::progress`] shows that a call has begun since.
    Polled {
        /// How long the monitor may wait before the next poll, in milliseconds
        next_ms: u32,
    },
    /// What NVML and the kernel module report about all GPUs. The first one after a start, and one after each change.
    Snapshot(Box<Snapshot>),
    /// The state of one GPU
    Sample(Sample),
    /// An event that the driver reported
    Event(GpuEvent),
    /// The last line: why the monitor ends
    End(End),
    /// There is no monitor
    Refused(Unloadable),
}

/// The calls of NVML that the monitor makes now. It stores them in its [`super::progress`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlCall {
    /// NVML's index of the GPU, if the calls are about one GPU
    pub index: Option<u32>,
    /// The UUID of that GPU, if it is known already
    pub gpu: Option<String>,
    /// How long a call may wait for events, in milliseconds
    pub wait_ms: u32,
}

/// Why the monitor ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// The GPUs changed, or one of them may only work for another process: a new monitor starts at once.
    Changed,
    /// The driver is missing, or NVML fails, with this error.
    Unusable(String),
}

/// What NVML and the kernel module report about all GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The driver, its GPUs and MIG devices
    pub inventory: Inventory,
    /// The properties of GPUs by UUID
    pub properties: BTreeMap<String, Properties>,
    /// The profiles of MIG devices by UUID, such as `1g.10gb`
    pub mig_profiles: BTreeMap<String, String>,
    /// The parts of the GPU that MIG devices have, by UUID
    pub mig_attributes: BTreeMap<String, MigAttributes>,
    /// The memory slices of MIG devices by UUID, if the process may know them
    pub memory_slices: BTreeMap<String, MemorySlices>,
    /// How close GPUs are to each other. A pair that is missing is unknown to the driver.
    pub links: Vec<Link>,
    /// The UUIDs of GPUs for which the driver reports no events
    pub without_events: Vec<String>,
}

impl Snapshot {
    /// Returns the number of GPUs, those that do not answer included.
    #[must_use]
    pub fn count(&self) -> usize {
        self.inventory.gpus.len() + self.inventory.failed.len()
    }
}

/// What does not change while the GPU exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Properties {
    /// The memory in MiB; `None` if the driver does not report it
    pub memory_mib: Option<u64>,
    /// Whether the GPU can be in MIG mode
    pub mig_capable: bool,
    /// How it reaches memory of the host; `None` if the driver does not report it
    pub addressing_mode: Option<AddressingMode>,
}

/// How close two GPUs are to each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// The UUIDs of both GPUs, the one with the smaller index first
    pub gpus: (String, String),
    /// The closest common part of the PCIe topology
    pub level: Level,
    /// The number of NVLinks between them. If they are connected to switches, the smaller number of links of the two.
    pub nvlinks: u32,
}

/// `nvmlGpuTopologyLevel_t`, the closest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Level {
    /// Both are on one board.
    Board,
    /// One PCIe switch
    Switch,
    /// Several PCIe switches, without a host bridge
    Switches,
    /// One PCIe host bridge
    HostBridge,
    /// One NUMA node
    Node,
    /// The interconnect between NUMA nodes
    System,
}

/// The state of a GPU, polled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// The UUID
    pub gpu: String,
    /// Why a call about the GPU failed; `None` if the GPU answers
    pub error: Option<String>,
    /// Whether `/dev/nvidiaN` is missing
    pub node_missing: bool,
    /// What the driver recommends (field 230); `None` if the driver or the GPU does not support the field
    pub recovery: Option<Recovery>,
    /// Whether the GPU could not replace defective rows of its memory (field 145); `None` if not supported
    pub remap_failed: Option<bool>,
    /// The number of uncorrectable memory errors since the driver was loaded (field 4); `None` if not supported
    pub uncorrectable_ecc: Option<u64>,
    /// Its memory; `None` if not supported, or not permitted to the monitor's user
    pub memory: Option<Memory>,
    /// For metrics; `None` if they are not served
    pub measured: Option<Measured>,
}

/// Values that only metrics need. `None` is a value that the GPU or the driver does not support.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// The percentage of time in which a kernel ran
    pub utilization: Option<u32>,
    /// Degrees Celsius
    pub temperature: Option<u32>,
    /// Milliwatts
    pub power: Option<u32>,
    /// The memory of MIG devices by UUID
    pub mig_memory: BTreeMap<String, Memory>,
    /// What only metrics with DCGM's names contain; `None` if they are not served
    pub more: Option<Box<More>>,
}

/// Values that only metrics with DCGM's names need. `None` is a value that the GPU or the driver does not support.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct More {
    /// The percentage of time in which memory was read or written
    pub memory_utilization: Option<u32>,
    /// Percent
    pub encoder: Option<u32>,
    /// Percent
    pub decoder: Option<u32>,
    /// Degrees Celsius
    pub memory_temperature: Option<u64>,
    /// Megahertz
    pub sm_clock: Option<u32>,
    /// Megahertz
    pub memory_clock: Option<u32>,
    /// Millijoules since the driver was loaded
    pub energy: Option<u64>,
    /// The number of PCIe packets that were sent again
    pub pcie_replays: Option<u64>,
    /// The number of rows that were remapped because of correctable errors
    pub remapped_correctable: Option<u64>,
    /// The number of rows that were remapped because of uncorrectable errors
    pub remapped_uncorrectable: Option<u64>,
    /// Whether the remapping of a row has failed: 1 if it has
    pub remap_failure: Option<u64>,
    /// The power in milliwatts that the board may use
    pub power_limit: Option<u64>,
    /// The number of corrected errors of the memory since the driver was loaded
    pub ecc_corrected: Option<u64>,
    /// The number of errors of the memory since the driver was loaded that could not be corrected
    pub ecc_uncorrected: Option<u64>,
    /// The bytes of the memory that the driver reserves, by the UUID of the GPU or MIG device
    pub reserved: BTreeMap<String, u64>,
    /// Why the clocks are lower than they could be: bits of `nvmlClocksEventReason…`
    pub clock_reasons: Option<u64>,
    /// The KiB that the GPU has sent and received through its NVLinks
    pub nvlink_data: Option<u64>,
    /// Whether a row will be remapped at the next reset: 1 if it will
    pub remap_pending: Option<u64>,
}

/// `nvmlDeviceGpuRecoveryAction_t`: what has to be done before the GPU works again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Recovery {
    /// Nothing
    None,
    /// A reset of the GPU
    Reset,
    /// A reboot of the host
    Reboot,
    /// The programs that use peer-to-peer access must end
    DrainP2p,
    /// All programs on the GPU must end, then it must be reset
    DrainAndReset,
    /// A number that this version does not know
    Unknown(u32),
}

impl Recovery {
    /// Returns the action with this number.
    #[must_use]
    pub const fn of(number: u32) -> Self {
        match number {
            0 => Self::None,
            1 => Self::Reset,
            2 => Self::Reboot,
            3 => Self::DrainP2p,
            4 => Self::DrainAndReset,
            number => Self::Unknown(number),
        }
    }
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("the driver recommends nothing"),
            Self::Reset => f.write_str("the driver recommends a reset of the GPU"),
            Self::Reboot => f.write_str("the driver recommends a reboot of the host"),
            Self::DrainP2p => {
                f.write_str("the driver recommends that programs with peer-to-peer access end")
            }
            Self::DrainAndReset => f.write_str(
                "the driver recommends a reset of the GPU after all programs on it have ended",
            ),
            Self::Unknown(number) => write!(f, "the driver recommends recovery action {number}"),
        }
    }
}

/// An event that the driver reported about a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEvent {
    /// The UUID of the GPU, also if the cause is one of its MIG devices
    pub gpu: String,
    /// What happened
    pub kind: EventKind,
}

/// What an event reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventKind {
    /// An error with NVIDIA's number for it
    Xid(u64),
    /// The GPU cannot be used
    Unavailable,
    /// The recommended action changed. A sample follows.
    RecoveryAction,
    /// An uncorrectable memory error
    UncorrectableEcc,
}
