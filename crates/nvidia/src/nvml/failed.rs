//! A failed call of NVML.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A return code of NVML, `nvmlReturn_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code(pub u32);

impl Code {
    /// The GPU or the driver does not have the feature.
    pub const NOT_SUPPORTED: Self = Self(3);
    /// This user cannot open the device nodes.
    pub const NO_PERMISSION: Self = Self(4);
    /// There is no device with this index.
    pub const NOT_FOUND: Self = Self(6);
    /// The kernel module is not loaded, or `/dev/nvidiactl` is missing.
    pub const DRIVER_NOT_LOADED: Self = Self(9);
    /// Nothing happened within the time limit.
    pub const TIMEOUT: Self = Self(10);
    /// The library is older than the function.
    pub const FUNCTION_NOT_FOUND: Self = Self(13);
    /// The library has another version than the kernel module.
    pub const LIB_RM_VERSION_MISMATCH: Self = Self(18);
}

/// A call of NVML that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The function, such as `nvmlInit_v2`
    pub call: String,
    /// The return code
    pub code: Code,
    /// The library's description of the code
    pub text: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} reports {:?} ({})", self.call, self.text, self.code.0)
    }
}
