//! Stores in a spec the state of the host from which it was created, so that a spec that is out of date is detected. NVML is only called
//! if there are MIG devices.
//!
//! The stamp is an argument of a hook entry in the spec. Older engines reject annotations, and a separate file could belong to another
//! spec.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use base::paths::HostPath;
use base::tree::Tree;
use cdi_spec::spec::Spec;

use crate::capability::{Capabilities, Capability, Omit};
use crate::cdi::entry::RootfsEdits;
use crate::config::Config;
use crate::driver::ipc;
use crate::inventory::caps::MIG_MINORS;
use crate::inventory::procfs::{self, DRIVER_PROC};
use crate::inventory::{Inventory, fingerprint};

/// The state of a host, as far as a spec depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The version of the loaded driver
    pub driver: String,
    /// The boot id: device numbers can change with each boot
    pub boot: String,
    /// A hash of the GPUs, the capability files, the device numbers, the libraries and the settings
    pub rest: u64,
    /// A hash of the MIG devices; `None` if there are none. The kernel does not show their UUIDs, so the value is a placeholder until
    /// [`Stamp::complete`] is called.
    pub mig: Option<u64>,
}

/// The placeholder: there are MIG devices, but NVML has not been called.
const UNASKED: u64 = 0;

impl Stamp {
    /// Returns the stamp as text, as in a spec.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mig = self.mig.map(|mig| format!(",mig={mig:016x}")).unwrap_or_default();
        format!("driver={},boot={},host={:016x}{mig}", self.driver, self.boot, self.rest)
    }

    /// Parses a stamp. Returns `None` if the text is not one.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split(',');
        let mut field = |name: &str| fields.next()?.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
        let (driver, boot) = (field("driver")?, field("boot")?);
        let rest = u64::from_str_radix(&field("host")?, 16).ok()?;
        let mig = field("mig").map(|mig| u64::from_str_radix(&mig, 16)).transpose().ok()?;
        Some(Self { driver, boot, rest, mig })
    }

    /// Adds the MIG devices from NVML's answer. Devices that were destroyed and created again can have the same numbers in procfs, but
    /// other UUIDs or other indices (see [`crate::inventory::cache`]).
    pub fn complete(&mut self, inventory: &Inventory) {
        if self.mig.is_none() {
            return;
        }
        let mut hasher = DefaultHasher::new();
        for gpu in inventory.gpus.iter().filter(|gpu| !gpu.mig_devices.is_empty()) {
            (gpu.index, &gpu.uuid).hash(&mut hasher);
            for mig in &gpu.mig_devices {
                (mig.index, &mig.uuid, mig.gpu_instance, mig.compute_instance).hash(&mut hasher);
            }
        }
        self.mig = Some(hasher.finish().max(UNASKED + 1));
    }

    /// Whether both stamps have MIG devices that NVML has listed, and these differ.
    #[must_use]
    pub fn has_other_mig_devices(&self, now: &Self) -> bool {
        let is_known = |stamp: &Self| stamp.mig != Some(UNASKED);
        self.mig.is_some() && is_known(self) && is_known(now) && self.mig != now.mig
    }

    /// Returns the stamp in a spec, or `None` if another program wrote the spec.
    #[must_use]
    pub fn from_spec(spec: &Spec) -> Option<Self> {
        let entries = spec.container_edits.hooks.iter().filter_map(|hook| RootfsEdits::from_entry(&hook.args));
        Self::parse(&entries.filter_map(|entry| entry.stamp).next()?)
    }

    /// Takes the stamp of this host. Returns `None` if no driver is loaded, or the driver has no GPU. `settings` are part of the stamp.
    #[must_use]
    pub fn of_host(config: &Config, settings: &impl std::fmt::Debug) -> Option<Self> {
        let driver = Tree::open(&config.driver_root).ok()?;
        let proc = driver.owner_of(DRIVER_PROC).ok()?;
        let driver_version = procfs::read_version(&proc)?;
        let gpus = procfs::read_gpus(&proc);
        if gpus.is_empty() {
            return None;
        }
        let mut hasher = DefaultHasher::new();
        env!("CARGO_PKG_VERSION").hash(&mut hasher);
        format!("{config:?} {settings:?}").hash(&mut hasher);
        for gpu in gpus {
            let information = Path::new(DRIVER_PROC).join("gpus").join(&gpu.dir).join("information");
            (gpu.dir, proc.read(&information).unwrap_or_default()).hash(&mut hasher);
        }
        let mut caps = Vec::new();
        walk(&proc, Path::new(DRIVER_PROC).join("capabilities"), 0, &mut caps);
        caps.hash(&mut hasher);
        // The kernel assigns the major numbers of /dev/nvidia-uvm and /dev/nvidia-caps when the modules are loaded.
        let host = Tree::open(&HostPath::new("/")).ok()?;
        let devices = host.read_text(Path::new("/proc/devices")).unwrap_or_default();
        devices.lines().filter(|line| line.contains("nvidia")).for_each(|line| line.hash(&mut hasher));
        proc.read(Path::new(MIG_MINORS)).unwrap_or_default().hash(&mut hasher);
        let dev = match &config.dev_root {
            Some(root) => Tree::open(root).ok()?,
            None => driver.owner_of("/dev/nvidiactl").ok()?,
        };
        for dir in ["/dev", "/dev/dri", "/dev/nvidia-caps"].map(Path::new) {
            let is_one = |name: &str| dir != Path::new("/dev") || name.starts_with("nvidia");
            for name in dev.names(dir).iter().filter(|name| name.to_str().is_some_and(is_one)) {
                let node = dev.locate(&dir.join(name)).ok();
                (name, node.map(|node| (node.device, node.gid))).hash(&mut hasher);
            }
        }
        // A new socket must be added to the spec, and engines fail to mount a socket that does not exist any more.
        let all = Capabilities::new(&Capability::ALL);
        let (sockets, _) = ipc::find(&driver, all, config.mps_directory.as_deref(), Omit::default());
        sockets.iter().for_each(|socket| (socket.source.as_path(), socket.is_fixed).hash(&mut hasher));
        // The installation of libraries runs ldconfig, which replaces the cache.
        let cache = config.ldcache.as_ref().map_or_else(|| Path::new("/etc/ld.so.cache"), HostPath::as_path);
        let metadata = driver.open_file(cache).and_then(|file| Ok(file.metadata()?)).ok();
        metadata.map(|file| (file.mtime(), file.mtime_nsec(), file.size(), file.ino())).hash(&mut hasher);
        let boot = host.read_text(Path::new("/proc/sys/kernel/random/boot_id")).unwrap_or_default().trim().to_owned();
        let mig = fingerprint::has_mig_devices(&proc).then_some(UNASKED);
        Some(Self { driver: driver_version, boot, rest: hasher.finish(), mig })
    }
}

/// Collects the paths of all files and directories below `dir`. The deepest one is
/// /proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access.
fn walk(root: &Tree, dir: PathBuf, depth: usize, names: &mut Vec<PathBuf>) {
    const DEEPEST: usize = 6;
    for name in root.names(&dir) {
        let path = dir.join(name);
        if depth < DEEPEST {
            walk(root, path.clone(), depth + 1, names);
        }
        names.push(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_read_as_it_was_written() {
        let stamp = Stamp { driver: "535.183.01".into(), boot: "a-b".into(), rest: 7, mig: None };
        assert_eq!(stamp.to_text(), "driver=535.183.01,boot=a-b,host=0000000000000007");
        let mig = Stamp { mig: Some(9), ..stamp.clone() };
        assert_eq!(mig.to_text(), "driver=535.183.01,boot=a-b,host=0000000000000007,mig=0000000000000009");
        for stamp in [stamp, mig] {
            assert_eq!(Stamp::parse(&stamp.to_text()), Some(stamp));
        }
        for wrong in
            ["", "driver=1", "driver=1,boot=2,host=x", "boot=1,driver=2,host=3", "driver=1,boot=2,host=3,mig=x"]
        {
            assert_eq!(Stamp::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn mig_devices_made_anew_are_others() {
        let stamp = |mig| Stamp { driver: "1".into(), boot: "b".into(), rest: 7, mig };
        let inventory = crate::inventory::select::tests::inventory();
        let complete = |mig, change: fn(&mut crate::inventory::MigDevice)| {
            let (mut stamp, mut inventory) = (stamp(mig), inventory.clone());
            inventory.gpus.iter_mut().flat_map(|gpu| &mut gpu.mig_devices).for_each(change);
            stamp.complete(&inventory);
            stamp
        };
        let before = complete(Some(UNASKED), |_| ());
        assert_eq!(before, complete(Some(UNASKED), |_| ()));
        assert_eq!(complete(None, |_| ()), stamp(None), "no MIG devices in procfs");
        for (now, are_others) in [
            (before.clone(), false),
            (complete(Some(UNASKED), |mig| mig.uuid.push('x')), true),
            (complete(Some(UNASKED), |mig| mig.index += 1), true),
            (stamp(None), true),
            (stamp(Some(UNASKED)), false),
        ] {
            assert_eq!(before.has_other_mig_devices(&now), are_others, "{now:?}");
        }
        assert!(!stamp(None).has_other_mig_devices(&before), "that is a change that the kernel shows");
    }
}
