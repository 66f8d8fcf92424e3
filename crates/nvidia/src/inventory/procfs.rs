//! Reads and parses the files of the kernel module below /proc/driver/nvidia.

use std::ffi::OsString;
use std::path::Path;

use base::tree::Tree;

use super::BusId;
use crate::driver::is_version;

/// The directory of the kernel module.
pub const DRIVER_PROC: &str = "/proc/driver/nvidia";

/// A GPU as the kernel module lists it, whether or not user space can open it. Ordered by bus id.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelGpu {
    /// The PCI bus address.
    pub bus_id: BusId,
    /// Its directory under /proc/driver/nvidia/gpus; the domain has four digits with some drivers, eight with others.
    pub dir: OsString,
    /// The N of `/dev/nvidiaN`
    pub minor: Option<u32>,
    /// `GPU-…`; `None` before the module has opened it for the first time
    pub uuid: Option<String>,
    /// `NVIDIA H100 80GB HBM3`, if the module knows it
    pub model: Option<String>,
    /// Whether the module parameter `NVreg_ExcludedGpus` names it: the module then refuses to open it.
    pub excluded: bool,
}

impl KernelGpu {
    /// Parses `gpus/<dir>/information`. Returns `None` if the name of the directory is not a bus address.
    #[must_use]
    pub fn parse(dir: OsString, information: &str) -> Option<Self> {
        Some(Self {
            bus_id: BusId::parse(dir.to_str()?)?,
            minor: parse_minor(information),
            uuid: parse_uuid(information),
            model: match field(information, "Model:") {
                Some("Unknown") | None => None,
                Some(model) => Some(model.to_owned()),
            },
            excluded: match field(information, "GPU Excluded:") {
                Some(value) => value.eq_ignore_ascii_case("yes"),
                None => false,
            },
            dir,
        })
    }
}

/// Returns the value of a line `name <tab> value`, or `None` if the line is missing or empty.
fn field<'a>(information: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = information.split('\n');
    match lines.find_map(|line| line.strip_prefix(name))?.trim() {
        "" => None,
        value => Some(value),
    }
}

/// Parses the device minor in `gpus/<bus id>/information`: `Device Minor: <tab> 3`.
#[must_use]
pub fn parse_minor(information: &str) -> Option<u32> {
    field(information, "Device Minor:")?.parse().ok()
}

/// Parses the UUID in `gpus/<bus id>/information`: `GPU UUID: <tab> GPU-…`. The module prints question marks for an unknown UUID.
#[must_use]
pub(crate) fn parse_uuid(information: &str) -> Option<String> {
    match field(information, "GPU UUID:")? {
        uuid if uuid.contains('?') => None,
        uuid => Some(uuid.to_owned()),
    }
}

/// Parses /proc/driver/nvidia/version: the first word of the line `NVRM version:` that is numbers and dots.
#[must_use]
pub fn parse_version(text: &str) -> Option<String> {
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.strip_prefix("NVRM version:"))?;
    let version = line.split_whitespace().find(|word| is_version(word))?;
    Some(version.to_owned())
}

/// Returns the version of the loaded kernel module, or `None` if it is not loaded.
#[must_use]
pub fn read_version(root: &Tree) -> Option<String> {
    version_of(&read_version_file(root)?)
}

/// Returns the file with the version of the loaded kernel module.
#[must_use]
pub(crate) fn read_version_file(root: &Tree) -> Option<Vec<u8>> {
    root.read_kernel_file(&Path::new(DRIVER_PROC).join(VERSION))
        .ok()
}

/// Returns the version of a kernel module from its file.
#[must_use]
pub(crate) fn version_of(file: &[u8]) -> Option<String> {
    parse_version(&String::from_utf8_lossy(file))
}

const VERSION: &str = "version";

/// Returns name and content of the existing files in `dir` that programs in containers read. `version` is the content of the file with
/// the version, if it has been read.
#[must_use]
pub fn read_files(root: &Tree, dir: &Path, version: Option<&[u8]>) -> Vec<(OsString, Vec<u8>)> {
    let mut files = Vec::new();
    for name in ["params", VERSION, "registry"] {
        if let Some(version) = version
            && name == VERSION
        {
            files.push((name.into(), version.to_vec()));
        } else if let Ok(content) = root.read_kernel_file(&dir.join(name)) {
            files.push((name.into(), content));
        }
    }
    files
}

/// Returns the GPUs of the kernel module, or none if it is not loaded.
#[must_use]
pub fn read_gpus(root: &Tree) -> Vec<KernelGpu> {
    let gpus = Path::new(DRIVER_PROC).join("gpus");
    let found = root.names(&gpus).into_iter().filter_map(|dir| {
        let information = root
            .read_kernel_text(&gpus.join(&dir).join("information"))
            .unwrap_or_default();
        KernelGpu::parse(dir, &information)
    });
    let mut found: Vec<KernelGpu> = found.collect();
    found.sort_unstable();
    found
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
        assert_eq!(
            parse_uuid("GPU UUID: \t GPU-????????-????-????-????-????????????\n"),
            None
        );
    }

    /// readdir(3) returns the names in any order.
    #[test]
    fn gpus_are_in_the_order_of_their_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let names = [9, 3, 12, 1, 7, 15, 4, 10, 2, 14].map(|bus| format!("0000:{bus:02x}:00.0"));
        for name in &names {
            std::fs::create_dir_all(dir.path().join("proc/driver/nvidia/gpus").join(name)).unwrap();
        }
        let found = read_gpus(&Tree::open(&base::paths::HostPath::new(dir.path())).unwrap());
        let mut expected = names.to_vec();
        expected.sort();
        assert_eq!(
            found
                .iter()
                .map(|gpu| gpu.dir.to_str().unwrap())
                .collect::<Vec<_>>(),
            expected
        );
    }

    #[test]
    fn an_excluded_gpu_is_known() {
        let of = |information: &str| KernelGpu::parse("0000:02:00.0".into(), information).unwrap();
        let excluded = of(
            "Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-x\nDevice Minor: \t 1\nGPU Excluded:\t Yes\n",
        );
        assert!(excluded.excluded);
        assert_eq!(
            (excluded.model.as_deref(), excluded.minor),
            (Some("NVIDIA H100"), Some(1))
        );
        for not in [
            "GPU Excluded:\t No\n",
            "GPU Excluded:\n",
            "Model: \t Unknown\n",
            "",
        ] {
            assert!(!of(not).excluded && of(not).model.is_none(), "{not:?}");
        }
        assert_eq!(KernelGpu::parse("gpus".into(), ""), None);
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
}
