//! What the kernel module says of its GPUs, under /proc/driver/nvidia: text parsers and their reader.

use std::ffi::OsString;
use std::path::Path;

use super::{BusId, FailedGpu, Inventory};
use crate::driver::root::DriverRoot;
use crate::few;

/// Where the kernel module reports.
pub const DRIVER_PROC: &str = "/proc/driver/nvidia";

/// A GPU as the kernel module lists it, whether or not user space can open it. Ordered by bus id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelGpu {
    /// Where it sits.
    pub bus_id: BusId,
    /// Its directory under /proc/driver/nvidia/gpus; the domain has four digits with some drivers, eight with others.
    pub dir: OsString,
    /// The N of `/dev/nvidiaN`
    pub minor: Option<u32>,
    /// `GPU-…`; `None` before the module has opened it for the first time
    pub uuid: Option<String>,
}

/// Parses one `gpus/<bus id>/information` file: `Device Minor: <tab> 3`.
#[must_use]
pub fn parse_minor(information: &str) -> Option<u32> {
    information.lines().find_map(|line| line.strip_prefix("Device Minor:")).and_then(|rest| rest.trim().parse().ok())
}

/// Parses the same for `GPU UUID: <tab> GPU-…`. Question marks are what the module says where it does not know it.
#[must_use]
pub fn parse_uuid(information: &str) -> Option<String> {
    let uuid = information.lines().find_map(|line| line.strip_prefix("GPU UUID:"))?.trim();
    (!uuid.is_empty() && !uuid.contains('?')).then(|| uuid.to_owned())
}

/// Parses /proc/driver/nvidia/version: the first word of the line `NVRM version:` that is numbers and dots.
#[must_use]
pub fn parse_version(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?;
    let is_version = |word: &&str| {
        word.split('.').count() >= 2
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit()))
    };
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// The version of the loaded kernel module; `None` if it is not loaded.
#[must_use]
pub fn read_version(root: &DriverRoot) -> Option<String> {
    let text = root.read(&Path::new(DRIVER_PROC).join("version")).ok()?;
    parse_version(&String::from_utf8_lossy(&text))
}

/// The files of `dir` that programs in containers read: name and content, of those that are there.
#[must_use]
pub fn read_files(root: &DriverRoot, dir: &Path) -> Vec<(OsString, Vec<u8>)> {
    let read = |name: &str| Some((name.into(), root.read(&dir.join(name)).ok()?));
    ["params", "version", "registry"].into_iter().filter_map(read).collect()
}

/// The GPUs that the kernel module drives; empty if it is not loaded.
#[must_use]
pub fn read_gpus(root: &DriverRoot) -> Vec<KernelGpu> {
    let gpus = Path::new(DRIVER_PROC).join("gpus");
    let found = root.names(&gpus).into_iter().filter_map(|dir| {
        let bus_id = BusId::parse(dir.to_str()?)?;
        let information = root.read(&gpus.join(&dir).join("information")).unwrap_or_default();
        let information = String::from_utf8_lossy(&information);
        Some(KernelGpu { minor: parse_minor(&information), uuid: parse_uuid(&information), dir, bus_id })
    });
    few::sorted(found.collect())
}

/// Adds the GPUs that the kernel has and NVML left out. NVML counts only those whose node it can open, so without
/// this a missing `/dev/nvidiaN` would pass unseen.
pub fn complete(inventory: &mut Inventory, kernel: &[KernelGpu], node_exists: impl Fn(u32) -> bool) {
    for gpu in kernel {
        let known = inventory.gpus.iter().any(|known| known.bus_id == gpu.bus_id)
            || inventory.failed.iter().any(|known| known.bus_id == Some(gpu.bus_id));
        if known {
            continue;
        }
        let missing = gpu.minor.filter(|minor| !node_exists(*minor));
        let why = missing.map_or_else(
            || "NVML does not list it".to_owned(),
            |minor| format!("its device node \"/dev/nvidia{minor}\" is missing"),
        );
        inventory.failed.push(FailedGpu {
            index: None,
            uuid: None,
            bus_id: Some(gpu.bus_id),
            why,
            node_missing: missing.is_some(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minor_is_read() {
        let text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-x\nDevice Minor: \t 3\n";
        assert_eq!(parse_minor(text), Some(3));
        assert_eq!(parse_minor("Device Minor: \t x\n"), None);
        assert_eq!(parse_minor(""), None);
        assert_eq!(parse_uuid(text).as_deref(), Some("GPU-x"));
        assert_eq!(parse_uuid("GPU UUID: \t GPU-????????-????-????-????-????????????\n"), None);
    }

    #[test]
    fn the_version_of_both_kinds_of_modules() {
        for (text, version) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version:  1.2.3",
                Some("535.183.01"),
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build  (root@x)\n",
                Some("570.86"),
            ),
            ("GCC version: 12.2.0\n", None),
        ] {
            assert_eq!(parse_version(text).as_deref(), version);
        }
    }

    #[test]
    fn gpus_that_nvml_left_out_are_found() {
        let bus_id = |bus| BusId { domain: 0, bus, device: 0 };
        let kernel =
            |bus, minor| KernelGpu { dir: OsString::new(), bus_id: bus_id(bus), minor: Some(minor), uuid: None };
        let mut inventory = Inventory::default();
        inventory.failed.push(FailedGpu {
            index: Some(0),
            uuid: None,
            bus_id: Some(bus_id(1)),
            why: "lost".into(),
            node_missing: false,
        });
        complete(&mut inventory, &[kernel(1, 0), kernel(2, 1), kernel(3, 2)], |minor| minor != 1);
        let failed: Vec<_> = inventory.failed.iter().map(ToString::to_string).collect();
        assert_eq!(
            failed,
            [
                "GPU 0: lost",
                "GPU at 00000000:02:00.0: its device node \"/dev/nvidia1\" is missing",
                "GPU at 00000000:03:00.0: NVML does not list it",
            ]
        );
        assert!(inventory.failed[1].node_missing && !inventory.failed[2].node_missing);
    }
}
