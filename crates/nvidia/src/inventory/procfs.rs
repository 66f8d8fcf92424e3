//! Reads and parses the files of the kernel module below /proc/driver/nvidia.
//!
//! # The identity of a directory
//!
//! procfs gives an inode its times when it is first looked up, and drops it with the entry (`proc_misc_d_revalidate`). So the [`FileId`] of
//! an entry that was removed and created again has other times. The number of the inode alone does not identify the entry, because procfs
//! gives out the lowest free number. After the kernel has dropped its caches, the times of the same entry are others too. The size of a
//! directory in procfs is always 0.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use base::sys::file_id::FileId;
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

/// The directory of the GPUs below [`DRIVER_PROC`].
pub const GPUS: &str = "gpus";

/// Returns the GPUs of the kernel module, or none if it is not loaded.
#[must_use]
pub fn read_gpus(root: &Tree) -> Vec<KernelGpu> {
    let gpus = Path::new(DRIVER_PROC).join(GPUS);
    let mut found = Vec::new();
    for dir in root.names(&gpus) {
        found.extend(read_gpu(root, &gpus, dir));
    }
    found.sort_unstable();
    found
}

/// Returns the GPU with this directory below `gpus`, or `None` if the kernel module does not list it any more.
#[must_use]
pub fn read_one_gpu(root: &Tree, dir: &OsStr) -> Option<KernelGpu> {
    let path = Path::new(DRIVER_PROC).join(GPUS).join(dir);
    let information = root.read_kernel_text(&path.join("information")).ok()?;
    KernelGpu::parse(dir.to_owned(), &information)
}

fn read_gpu(root: &Tree, gpus: &Path, dir: OsString) -> Option<KernelGpu> {
    let information = root.read_kernel_text(&gpus.join(&dir).join("information"));
    KernelGpu::parse(dir, &information.unwrap_or_default())
}

/// What the kernel module says about a GPU that has been opened once, and the entry that says it. As long as there is the same entry, it
/// says the same: the module creates it when the driver is bound to the GPU (`nv_procfs_add_gpu`), keeps the minor number and the UUID
/// until the driver is unbound, and then removes it (`nv_procfs_remove_gpu`).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct KnownGpu {
    dir: String,
    entry: FileId,
    minor: u32,
    uuid: String,
    model: Option<String>,
}

impl KnownGpu {
    /// Returns `None` if more may become known about the GPU, or if its entry is so young that it could be confused with a later one.
    fn new(gpu: &KernelGpu, entry: FileId, now: SystemTime) -> Option<Self> {
        if gpu.excluded || !entry.is_settled(now) {
            return None;
        }
        Some(Self {
            dir: gpu.dir.to_str()?.to_owned(),
            entry,
            minor: gpu.minor?,
            uuid: gpu.uuid.clone()?,
            model: gpu.model.clone(),
        })
    }

    fn gpu(&self) -> Option<KernelGpu> {
        Some(KernelGpu {
            bus_id: BusId::parse(&self.dir)?,
            dir: self.dir.clone().into(),
            minor: Some(self.minor),
            uuid: Some(self.uuid.clone()),
            model: self.model.clone(),
            excluded: false,
        })
    }
}

/// Like [`read_gpus`], but does not read the files of GPUs that an earlier process knew. Returns also what a later process need not read.
#[must_use]
pub(crate) fn gpus_with(
    root: &Tree,
    known: &[KnownGpu],
    now: SystemTime,
) -> (Vec<KernelGpu>, Vec<KnownGpu>) {
    let gpus = Path::new(DRIVER_PROC).join(GPUS);
    let (mut found, mut settled) = (Vec::new(), Vec::new());
    for (dir, stat) in root.entries(&gpus, "") {
        let entry = stat.as_ref().map(FileId::from);
        let mut known = known.iter();
        let known = known.find(|gpu| *gpu.dir == *dir && Some(gpu.entry) == entry);
        if let Some(known) = known
            && let Some(gpu) = known.gpu()
        {
            found.push(gpu);
            settled.push(known.clone());
            continue;
        }
        let Some(gpu) = read_gpu(root, &gpus, dir) else {
            continue;
        };
        if let Some(entry) = entry {
            settled.extend(KnownGpu::new(&gpu, entry, now));
        }
        found.push(gpu);
    }
    found.sort_unstable();
    (found, settled)
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
    fn a_known_gpu_is_not_read_again_while_its_entry_is_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let gpus = dir.path().join("proc/driver/nvidia/gpus");
        let write = |bus: u32, uuid: &str, more: &str| {
            let gpu = gpus.join(format!("0000:{bus:02x}:00.0"));
            let information = format!("GPU UUID: \t {uuid}\nDevice Minor: \t {bus}\n{more}");
            std::fs::create_dir_all(&gpu).unwrap();
            std::fs::write(gpu.join("information"), information).unwrap();
        };
        write(1, "GPU-1", "Model: \t\t NVIDIA H100\n");
        write(2, "GPU-2", "");
        write(3, "GPU-????", "");
        write(4, "GPU-4", "GPU Excluded:\t Yes\n");
        let tree = Tree::open(&base::paths::HostPath::new(dir.path())).unwrap();
        let now = SystemTime::now();
        let later = now + std::time::Duration::from_secs(9);
        let (read, known) = gpus_with(&tree, &[], later);
        assert_eq!(read, read_gpus(&tree));
        let dirs: Vec<&str> = known.iter().map(|gpu| gpu.dir.as_str()).collect();
        assert_eq!(dirs, ["0000:01:00.0", "0000:02:00.0"]);
        let (_, young) = gpus_with(&tree, &[], now);
        assert_eq!(young, [], "entries that have just been created");

        // Before Linux 6.13, the clock of file systems stands still for up to 10 ms.
        std::thread::sleep(std::time::Duration::from_millis(20));
        // The module never writes to its file: the test shows which files are read.
        write(1, "GPU-x", "");
        write(3, "GPU-3", "");
        std::fs::remove_dir_all(gpus.join("0000:02:00.0")).unwrap();
        write(2, "GPU-other", "");
        let (again, known) = gpus_with(&tree, &known, later);
        let uuids: Vec<_> = again.iter().map(|gpu| gpu.uuid.as_deref()).collect();
        let expected = ["GPU-1", "GPU-other", "GPU-3", "GPU-4"].map(Some);
        assert_eq!(uuids, expected);
        assert_eq!(again[0], read[0]);
        assert_eq!(known.len(), 3);
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
