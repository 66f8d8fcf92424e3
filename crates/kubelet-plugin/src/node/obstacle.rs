//! Why containers cannot use a GPU, or a part of one.

use super::health::{GpuFailure, UNKNOWN};

/// Why a GPU is unhealthy that the kernel lists, before NVML has answered.
pub const NOT_ANSWERED: &str = "NVML has not answered yet";

/// Why containers cannot use a GPU, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The kernel lists the GPU, and NVML has not answered yet.
    NotAnswered,
    /// NVML has not reported the state of the GPU yet.
    Unknown,
    /// The GPU or the driver fails.
    Failure(GpuFailure),
    /// The CDI specs lack a device that engines look up in them.
    NoCdiDevice(String),
    /// Its MPS daemon does not serve containers.
    Mps(String),
}

impl Obstacle {
    /// Returns the reason in words.
    #[must_use]
    pub fn into_why(self) -> String {
        match self {
            Self::NotAnswered => NOT_ANSWERED.to_owned(),
            Self::Unknown => UNKNOWN.to_owned(),
            Self::Failure(GpuFailure { why, .. }) | Self::NoCdiDevice(why) | Self::Mps(why) => why,
        }
    }
}
