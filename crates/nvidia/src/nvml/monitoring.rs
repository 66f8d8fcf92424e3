//! What NVML reports about a GPU to a program that watches it.

use serde::{Deserialize, Serialize};

/// The parts of a GPU that a MIG device has, from `nvmlDeviceAttributes_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigAttributes {
    /// The slices of its GPU instance
    pub gpu_slices: u32,
    /// The slices of its compute instance
    pub compute_slices: u32,
    /// Its memory in MiB
    pub memory_mib: u64,
    /// Its multiprocessors
    pub multiprocessors: u32,
    /// The engines that it shares with other compute instances of its GPU instance
    pub engines: Engines,
}

/// The memory slices of a GPU instance, from `nvmlGpuInstancePlacement_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySlices {
    /// The number of the first one
    pub start: u32,
    /// How many there are
    pub size: u32,
}

/// How a GPU reaches memory that programs allocate on the host, from `nvmlDeviceAddressingModeType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AddressingMode {
    /// Not at all
    None,
    /// Heterogeneous Memory Management: the driver mirrors the page tables of the CPU.
    Hmm,
    /// Address Translation Services: the GPU uses the page tables of the CPU.
    Ats,
}

/// Numbers of engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engines {
    /// Copies memory
    pub copy: u32,
    /// Decodes video
    pub decoder: u32,
    /// Encodes video
    pub encoder: u32,
    /// Decodes JPEG
    pub jpeg: u32,
    /// Computes optical flow
    pub ofa: u32,
}

/// The memory of a device in bytes, from `nvmlMemory_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// All of it
    pub total: u64,
    /// Allocated, or reserved by the driver
    pub used: u64,
}
