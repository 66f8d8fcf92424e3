//! What a spec was made from, so that one look at the host says whether it still fits: no NVML, nothing slow.
//!
//! The stamp is an argument of a hook entry in the spec. Annotations would be the place for it, but engines that read
//! them are new, and a file beside the spec could belong to another one.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::spec::Spec;
use crate::config::Config;
use crate::driver::DriverRoot;
use crate::inventory::caps::MIG_MINORS;
use crate::inventory::procfs::{self, DRIVER_PROC};
use crate::lower::rootfs::RootfsEdits;
use crate::paths::HostPath;

/// A host at one moment, as far as a spec depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Of the loaded driver
    pub driver: String,
    /// Device numbers are another boot's
    pub boot: String,
    /// GPUs, MIG devices, device numbers, libraries, settings; two that differ are two hosts
    pub rest: u64,
}

impl Stamp {
    /// As it is in a spec.
    #[must_use]
    pub fn to_text(&self) -> String {
        format!("driver={},boot={},host={:016x}", self.driver, self.boot, self.rest)
    }

    /// Reads it; `None` if it is none.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split(',');
        let mut field = |name: &str| fields.next()?.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
        let (driver, boot) = (field("driver")?, field("boot")?);
        let rest = u64::from_str_radix(&field("host")?, 16).ok()?;
        Some(Self { driver, boot, rest })
    }

    /// Of a spec that this program wrote.
    #[must_use]
    pub fn of(spec: &Spec) -> Option<Self> {
        let entries = spec.container_edits.hooks.iter().filter_map(|hook| RootfsEdits::of_entry(&hook.args));
        Self::parse(&entries.filter_map(|entry| entry.stamp).next()?)
    }

    /// Looks at the host; `None` if no driver is loaded, or it has no GPU. `options` are those of the command line.
    #[must_use]
    pub fn look(config: &Config, options: &impl std::fmt::Debug) -> Option<Self> {
        let driver = DriverRoot::open(&config.driver_root).ok()?;
        let proc = driver.owner_of(DRIVER_PROC).ok()?;
        let driver_version = procfs::read_version(&proc)?;
        let gpus = procfs::read_gpus(&proc);
        if gpus.is_empty() {
            return None;
        }
        let mut hasher = DefaultHasher::new();
        env!("CARGO_PKG_VERSION").hash(&mut hasher);
        format!("{config:?} {options:?}").hash(&mut hasher);
        for gpu in gpus {
            let information = Path::new(DRIVER_PROC).join("gpus").join(&gpu.dir).join("information");
            (gpu.dir, proc.read(&information).unwrap_or_default()).hash(&mut hasher);
        }
        let mut caps = Vec::new();
        walk(&proc, Path::new(DRIVER_PROC).join("capabilities"), 0, &mut caps);
        caps.hash(&mut hasher);
        // The numbers of /dev/nvidia-uvm and /dev/nvidia-caps are given out when their modules are loaded.
        let host = DriverRoot::open(&HostPath::new("/")).ok()?;
        let devices = host.read(Path::new("/proc/devices")).unwrap_or_default();
        let devices = String::from_utf8_lossy(&devices).into_owned();
        devices.lines().filter(|line| line.contains("nvidia")).for_each(|line| line.hash(&mut hasher));
        proc.read(Path::new(MIG_MINORS)).unwrap_or_default().hash(&mut hasher);
        let dev = match &config.dev_root {
            Some(root) => DriverRoot::open(root).ok()?,
            None => driver.owner_of("/dev/nvidiactl").ok()?,
        };
        for dir in ["/dev", "/dev/dri", "/dev/nvidia-caps"].map(Path::new) {
            let is_one = |name: &str| dir != Path::new("/dev") || name.starts_with("nvidia");
            for name in dev.names(dir).iter().filter(|name| name.to_str().is_some_and(is_one)) {
                let node = dev.locate(&dir.join(name)).ok();
                (name, node.map(|node| (node.device, node.gid))).hash(&mut hasher);
            }
        }
        // Whoever installs libraries runs ldconfig then.
        let cache = config.ldcache.as_ref().map_or_else(|| Path::new("/etc/ld.so.cache"), HostPath::as_path);
        let metadata = driver.open_file(cache).and_then(|file| Ok(file.metadata()?)).ok();
        metadata.map(|file| (file.mtime(), file.mtime_nsec(), file.size(), file.ino())).hash(&mut hasher);
        let boot = host.read(Path::new("/proc/sys/kernel/random/boot_id")).unwrap_or_default();
        let boot = String::from_utf8_lossy(&boot).trim().to_owned();
        Some(Self { driver: driver_version, boot, rest: hasher.finish() })
    }
}

/// The names of everything below: /proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access is five deep.
fn walk(root: &DriverRoot, dir: PathBuf, depth: usize, names: &mut Vec<PathBuf>) {
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
        let stamp = Stamp { driver: "535.183.01".into(), boot: "a-b".into(), rest: 7 };
        assert_eq!(stamp.to_text(), "driver=535.183.01,boot=a-b,host=0000000000000007");
        assert_eq!(Stamp::parse(&stamp.to_text()), Some(stamp));
        for wrong in ["", "driver=1", "driver=1,boot=2,host=x", "boot=1,driver=2,host=3"] {
            assert_eq!(Stamp::parse(wrong), None, "{wrong}");
        }
    }
}
