//! Takes the fingerprint of a host: the state of the kernel on which NVML's answer depends. The cached inventory is valid while the
//! fingerprint stays the same. [`super::cache`] stores both.

use std::fmt::Write;
use std::io::Read;
use std::path::Path;

use rustix::fs::{FileType, Stat};

use base::paths::HostPath;
use base::sys::proc_file;
use base::tree::Tree;

use super::procfs::{DRIVER_PROC, KernelGpu};
use super::{BusId, Inventory};
use crate::driver::diagnosis::PCI_DEVICES;
use crate::driver::nodes::{CTL_MINOR, NVIDIA_MAJOR};

/// The files and directories that are examined.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// The real path of libnvidia-ml
    pub library: &'a HostPath,
    /// The root that has the device nodes
    pub dev: &'a Tree,
    /// The root that has /proc/driver/nvidia
    pub proc: &'a Tree,
    /// The root that has the PCI devices
    pub sys: &'a Tree,
}

/// The fingerprint of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint {
    /// The fingerprint as text, to be compared
    pub text: String,
    /// Whether each GPU has a known UUID, responds on the bus and has its node
    pub is_whole: bool,
}

/// Takes the fingerprint. Returns `None` if the inventory must not be cached, because a file cannot be examined or there are MIG devices.
#[must_use]
pub fn take(places: &Sources<'_>, version: &str, gpus: &[KernelGpu]) -> Option<Fingerprint> {
    let mut text = format!("module {version} {}\n", module_load());
    let boot = proc_file::read_text("/proc/sys/kernel/random/boot_id").ok()?;
    let library = rustix::fs::stat(places.library.as_path()).ok()?;
    write!(text, "boot {boot}library {}", identity(&library)).ok()?;
    if has_mig_devices(places.proc) {
        return None;
    }
    let dev = places.dev.open_dir(Path::new("/dev")).ok()?;
    let node = |name: &str, minor| dev.stat(name).filter(|stat| is_node(stat, minor)).map(|stat| access(&stat));
    writeln!(text, "nvidiactl {}", node("nvidiactl", CTL_MINOR)?).ok()?;
    let mut is_whole = true;
    for gpu in gpus {
        if gpu.excluded {
            // NVML does not count the GPU. It may lack a node, and it never gets a UUID.
            writeln!(text, "{} excluded", gpu.bus_id).ok()?;
            continue;
        }
        let responds = is_on_the_bus(places.sys, gpu.bus_id);
        let node = gpu.minor.and_then(|minor| node(&format!("nvidia{minor}"), minor));
        is_whole &= responds && node.is_some() && gpu.uuid.is_some();
        let (minor, uuid) = (gpu.minor.unwrap_or(u32::MAX), gpu.uuid.as_deref().unwrap_or("?"));
        writeln!(text, "{} {minor} {uuid} {} {responds}", gpu.bus_id, node.as_deref().unwrap_or("?")).ok()?;
    }
    Some(Fingerprint { text, is_whole })
}

/// Whether the kernel confirms an inventory: it has the same GPUs with the same bus ids, UUIDs and minors. All of them work, and none is
/// in MIG mode.
#[must_use]
pub fn is_confirmed(inventory: &Inventory, version: &str, kernel: &[KernelGpu]) -> bool {
    inventory.failed.is_empty() && is_confirmed_in_part(inventory, version, kernel)
}

/// Like [`is_confirmed`] for the GPUs that have answered. Each of the other GPUs must have an index.
#[must_use]
pub(crate) fn is_confirmed_in_part(inventory: &Inventory, version: &str, kernel: &[KernelGpu]) -> bool {
    let kernel: Vec<_> = kernel.iter().filter(|gpu| !gpu.excluded).collect();
    let failed = inventory.failed.iter().filter_map(|failed| failed.index);
    let mut indices: Vec<u32> = inventory.gpus.iter().map(|gpu| gpu.index).chain(failed).collect();
    indices.sort();
    inventory.driver_version == version
        && inventory.gpus.len() + inventory.failed.len() == kernel.len()
        && !kernel.is_empty()
        && inventory.gpus.iter().all(|gpu| is_listed_once(gpu, &kernel))
        && inventory.gpus.is_sorted_by_key(|gpu| gpu.index)
        && (0..).zip(&indices).all(|(index, known)| index == *known)
        && indices.len() == kernel.len()
}

fn is_listed_once(gpu: &super::Gpu, kernel: &[&KernelGpu]) -> bool {
    let same = kernel.iter().filter(|kernel| {
        kernel.bus_id == gpu.bus_id && kernel.uuid.as_deref() == Some(&gpu.uuid) && kernel.minor == Some(gpu.minor)
    });
    !gpu.mig_enabled && gpu.mig_devices.is_empty() && same.count() == 1
}

/// Returns the seconds since the host was booted, including suspend. Unlike the wall clock, this clock is never set.
#[must_use]
pub fn uptime() -> u64 {
    // rustix reads the vDSO, which does not work under valgrind. The tests that count instructions use valgrind.
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
    now.map_or(0, |now| u64::try_from(now.tv_sec()).unwrap_or_default())
}

/// Returns a number that changes when the module is loaded again: the inode number of its directory in sysfs, which is not reused before
/// the next boot (`kernfs_new_node`). procfs has no such number. Returns 0 if sysfs does not show the module.
pub(crate) fn module_load() -> u64 {
    rustix::fs::stat("/sys/module/nvidia").map_or(0, |stat| stat.st_ino)
}

fn identity(stat: &Stat) -> String {
    let Stat { st_dev, st_ino, st_size, st_mtime, st_mtime_nsec, st_ctime, st_ctime_nsec, .. } = stat;
    format!("{st_dev} {st_ino} {st_size} {st_mtime}.{st_mtime_nsec} {st_ctime}.{st_ctime_nsec}\n")
}

/// Whether a file is the driver's device node with this minor number. A symbolic link is rejected, because its target could change
/// without a trace in the fingerprint.
fn is_node(stat: &Stat, minor: u32) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && stat.st_rdev == rustix::fs::makedev(NVIDIA_MAJOR, minor)
}

/// Formats the permissions of a node: NVML counts only the GPUs whose nodes it can open.
fn access(stat: &Stat) -> String {
    format!("{:o} {}:{}", stat.st_mode, stat.st_uid, stat.st_gid)
}

/// Whether there are GPU instances: their directories are `capabilities/gpu0/mig/gi1`.
#[must_use]
pub(crate) fn has_mig_devices(proc: &Tree) -> bool {
    let capabilities = Path::new(DRIVER_PROC).join("capabilities");
    let starts = |name: &std::ffi::OsString, with: &str| name.to_str().is_some_and(|name| name.starts_with(with));
    let mut gpus = proc.names(&capabilities).into_iter().filter(|name| starts(name, "gpu"));
    gpus.any(|gpu| proc.names(&capabilities.join(gpu).join("mig")).iter().any(|name| starts(name, "gi")))
}

/// Whether a GPU responds on the PCI bus. If it has fallen off the bus, all bits of its registers are 1, but the module still lists it.
/// This does not wake a sleeping GPU: the module has already done so for the file `information`, which was read before.
fn is_on_the_bus(sys: &Tree, bus_id: BusId) -> bool {
    let mut vendor = [0xff; 2];
    let config = Path::new(PCI_DEVICES).join(bus_id.in_sysfs()).join("config");
    let read = sys.open_file(&config).ok().and_then(|mut file| file.read_exact(&mut vendor).ok());
    read.is_some() && vendor != [0xff; 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::select::tests::inventory;

    fn kernel() -> Vec<KernelGpu> {
        let gpu = |gpu: &super::super::Gpu| KernelGpu {
            dir: gpu.bus_id.in_sysfs().into(),
            bus_id: gpu.bus_id,
            minor: Some(gpu.minor),
            uuid: Some(gpu.uuid.clone()),
            ..KernelGpu::default()
        };
        inventory().gpus.iter().map(gpu).collect()
    }

    fn whole() -> Inventory {
        let mut whole = Inventory { driver_version: "535.1".into(), ..inventory() };
        for gpu in &mut whole.gpus {
            gpu.mig_enabled = false;
            gpu.mig_devices.clear();
        }
        whole
    }

    #[test]
    fn the_kernel_confirms_whole_gpus_only() {
        assert!(is_confirmed(&whole(), "535.1", &kernel()));
        type Change = fn(&mut Inventory, &mut Vec<KernelGpu>);
        let changes: [(&str, Change); 12] = [
            ("another GPU at the same place", |_, kernel| kernel[1].uuid = Some("GPU-new".into())),
            ("a GPU that does not say who it is", |_, kernel| kernel[1].uuid = None),
            ("another minor", |_, kernel| kernel[1].minor = Some(7)),
            ("another place", |_, kernel| kernel[1].bus_id.bus = 9),
            ("removed", |_, kernel| drop(kernel.pop())),
            ("added", |_, kernel| kernel.push(KernelGpu { uuid: Some("GPU-new".into()), ..kernel[0].clone() })),
            ("twice", |_, kernel| kernel[1] = kernel[0].clone()),
            ("none", |inventory, kernel| (inventory.gpus.clear(), kernel.clear()).1),
            ("MIG mode", |inventory, _| inventory.gpus[0].mig_enabled = true),
            ("MIG devices", |inventory, _| {
                inventory.gpus[0].mig_devices = super::super::select::tests::inventory().gpus[2].mig_devices.clone();
            }),
            ("an index is left out", |inventory, _| inventory.gpus[2].index = 3),
            ("one failed", |inventory, _| {
                let failed = super::super::FailedGpu { index: Some(3), ..Default::default() };
                inventory.failed.push(failed);
            }),
        ];
        for (what, change) in changes {
            let (mut inventory, mut kernel) = (whole(), kernel());
            change(&mut inventory, &mut kernel);
            assert!(!is_confirmed(&inventory, "535.1", &kernel), "{what}");
            assert!(!is_confirmed_in_part(&inventory, "535.1", &kernel), "{what}");
        }
        // One that hangs is known by its index, and the others are confirmed.
        let mut inventory = whole();
        inventory.gpus.remove(1);
        inventory.failed.push(super::super::FailedGpu { index: Some(1), ..super::super::FailedGpu::default() });
        assert!(is_confirmed_in_part(&inventory, "535.1", &kernel()) && !is_confirmed(&inventory, "535.1", &kernel()));
        inventory.failed[0].index = None;
        assert!(!is_confirmed_in_part(&inventory, "535.1", &kernel()));
        assert!(!is_confirmed(&whole(), "570", &kernel()), "another driver");
    }

    #[test]
    fn an_excluded_gpu_is_not_missed() {
        let excluded =
            KernelGpu { bus_id: BusId { domain: 0, bus: 9, device: 0 }, excluded: true, ..KernelGpu::default() };
        let more = [kernel(), vec![excluded]].concat();
        assert!(is_confirmed(&whole(), "535.1", &more));
        let mut kernel = kernel();
        kernel[1].excluded = true;
        assert!(!is_confirmed(&whole(), "535.1", &kernel), "NVML still lists it");
    }
}
