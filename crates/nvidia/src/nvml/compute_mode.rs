//! The compute mode of a GPU.

/// Which processes can use a GPU with CUDA, from `nvmlComputeMode_t`. The mode applies to new processes, and lasts until the driver
/// is unloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeMode {
    /// All processes
    Default,
    /// One thread of one process; CUDA 8 removed it
    ExclusiveThread,
    /// No process
    Prohibited,
    /// One process, such as the MPS server
    ExclusiveProcess,
}

impl ComputeMode {
    const ALL: [Self; 4] = [
        Self::Default,
        Self::ExclusiveThread,
        Self::Prohibited,
        Self::ExclusiveProcess,
    ];

    /// Returns the number in nvml.h.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::Default => 0,
            Self::ExclusiveThread => 1,
            Self::Prohibited => 2,
            Self::ExclusiveProcess => 3,
        }
    }

    /// Returns the mode with this number in nvml.h.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.number() == number)
    }

    /// Returns the name that `nvidia-smi -c` accepts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "DEFAULT",
            Self::ExclusiveThread => "EXCLUSIVE_THREAD",
            Self::Prohibited => "PROHIBITED",
            Self::ExclusiveProcess => "EXCLUSIVE_PROCESS",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        for mode in ComputeMode::ALL {
            assert_eq!(ComputeMode::from_number(mode.number()), Some(mode));
        }
        assert_eq!(ComputeMode::from_number(4), None);
    }
}
