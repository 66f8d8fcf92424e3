//! The XIDs that do not make a GPU unhealthy.

use super::parse::numbers;

/// All XIDs. NVIDIA's catalog has none with four digits.
const ALL: std::ops::Range<u32> = 0..1000;

/// The XIDs whose immediate action in NVIDIA's catalog is to ignore them, or to restart the application
/// (<https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>, RESTART_APP and IGNORE). All others need a reset, a reboot or a
/// person: 109, which NVIDIA's plugin ignores, needs a reset of the GPU.
///
/// Two XIDs have another action in the catalog. 45 follows from another XID, or from the end of a program. 154 reports that the recommended
/// recovery action changed, also to "none"; the monitor reads the action itself.
pub(super) const IGNORED: [u32; 69] = [
    8, 11, 13, 14, 25, 31, 32, 37, 38, 39, 40, 41, 43, 44, 45, 60, 63, 66, 67, 68, 69, 70, 71, 72,
    75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 92, 93, 94, 96, 97, 98, 99, 100, 101, 102, 103,
    104, 105, 106, 107, 108, 121, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 137, 139, 141,
    154, 157, 160, 161,
];

/// Parses a list of XIDs, or "all".
pub(super) fn ignored_xids(values: &[&str]) -> Result<Vec<u32>, String> {
    if values == ["all"] {
        return Ok(ALL.collect());
    }
    numbers(values).map_err(|list| format!("{list}, or \"all\""))
}
