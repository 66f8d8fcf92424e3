//! The driver of a host, for a program that watches it for a long time.

use std::fs::File;
use std::path::Path;

use anyhow::Result;
use rustix::fs::{FileType, OFlags, Stat};

use base::tree::Tree;

use super::installed::{self, Installed};
use super::roots::Roots;
use crate::config::Config;
use crate::inventory::ask::Question;
use crate::inventory::identity::Who;
use crate::inventory::procfs::{self, DRIVER_PROC};
use crate::inventory::session::Session;
use crate::inventory::{Inventory, fingerprint};

/// What the kernel shows of the driver. Reading it calls no function of the driver that could hang.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelState {
    /// The version of the loaded module
    pub module: Option<String>,
    /// A number that changes when the module is loaded again; 0 if sysfs does not show the module
    pub load: u64,
    /// The bus addresses of the GPUs of the module
    pub gpus: Vec<String>,
    /// The driver's control node and those of GPUs, with their inodes: a confined process can open only the nodes that existed when it
    /// was confined, and not another node of the same name
    pub nodes: Vec<(String, u64)>,
    /// The compute instances, such as `gpu0/mig/gi1/ci0`
    pub mig: Vec<String>,
    /// The identity of the linker cache, which changes when libraries are installed
    pub libraries: Option<(u64, i64, i64)>,
}

impl KernelState {
    /// Reads the state of the driver that the configuration names. It is empty if the driver root cannot be opened.
    #[must_use]
    pub fn read(config: &Config) -> Self {
        let Ok(roots) = Roots::open(config) else { return Self::default() };
        Self { load: fingerprint::module_load(), ..Self::below(&roots) }
    }

    fn below(roots: &Roots) -> Self {
        let Roots { driver, dev, proc, .. } = roots;
        Self {
            module: procfs::read_version(proc),
            load: 0,
            gpus: names(proc, &Path::new(DRIVER_PROC).join("gpus")),
            nodes: nodes(dev),
            mig: mig(proc),
            libraries: linker_cache(driver),
        }
    }
}

fn names(tree: &Tree, dir: &Path) -> Vec<String> {
    tree.names(dir).into_iter().filter_map(|name| name.into_string().ok()).collect()
}

fn nodes(dev: &Tree) -> Vec<(String, u64)> {
    let names = names(dev, Path::new("/dev")).into_iter().filter(|name| is_node(name));
    names.map(|name| inode(dev, name)).collect()
}

fn is_node(name: &str) -> bool {
    let rest = name.strip_prefix("nvidia");
    rest.is_some_and(|rest| rest == "ctl" || !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Adds the inode of a node, or 0 if the node has disappeared.
fn inode(dev: &Tree, name: String) -> (String, u64) {
    let inode = stat(dev, &Path::new("dev").join(&name)).map_or(0, |stat| stat.st_ino);
    (name, inode)
}

/// Examines a file without following links.
///
/// A process in the driver root does not find its file descriptors in /proc, which the other lookups need on kernels without openat2(2).
fn stat(dev: &Tree, path: &Path) -> Option<Stat> {
    let file = dev.as_root().open_at(path, OFlags::PATH | OFlags::NOFOLLOW).ok()?;
    rustix::fs::fstat(file).ok()
}

fn mig(proc: &Tree) -> Vec<String> {
    let top = Path::new(DRIVER_PROC).join("capabilities");
    let mut found = Vec::new();
    for gpu in names(proc, &top).into_iter().filter(|name| name.starts_with("gpu")) {
        let mig = format!("{gpu}/mig");
        for instance in names(proc, &top.join(&mig)).into_iter().filter(|name| name.starts_with("gi")) {
            let instance = format!("{mig}/{instance}");
            let parts = names(proc, &top.join(&instance)).into_iter().filter(|name| name.starts_with("ci"));
            found.extend(parts.map(|part| format!("{instance}/{part}")));
        }
    }
    found
}

fn linker_cache(driver: &Tree) -> Option<(u64, i64, i64)> {
    let file = driver.open_file(Path::new("/etc/ld.so.cache")).ok()?;
    let stat = rustix::fs::fstat(&file).ok()?;
    Some((stat.st_ino, stat.st_mtime, i64::try_from(stat.st_mtime_nsec).ok()?))
}

/// The driver that the configuration names. It stays usable after this process has changed its root directory.
#[derive(Debug)]
pub struct Site {
    roots: Roots,
    question: Question,
}

impl Site {
    /// Finds the driver.
    ///
    /// # Errors
    /// If there is no driver.
    pub fn find(config: &Config) -> Result<Self> {
        let installed = Installed::find(config)?;
        let mut question = installed.question(config)?;
        if !may_change_user() {
            question.who = Who::Unchanged;
        }
        Ok(Self { roots: installed.roots, question })
    }

    /// Drops the privileges of this process and loads NVML, see [`Session::start`].
    ///
    /// # Errors
    /// Those of [`Session::start`].
    pub fn start_session(&self, pipe: &File) -> Result<Session> {
        let Roots { driver, dev, proc, sys } = self.roots.clone();
        Session::start(self.question.clone(), &[driver, dev, proc, sys], pipe)
    }

    /// Adds the GPUs to NVML's answer that only the kernel module lists, and MIG devices without nodes.
    pub fn complete(&self, inventory: &mut Inventory) {
        let roots = self.roots.afresh();
        installed::complete(&roots, inventory, &procfs::read_gpus(&roots.proc));
    }

    /// Whether the device node of the GPU with this minor number exists.
    #[must_use]
    pub fn has_node(&self, minor: u32) -> bool {
        let stat = stat(&self.roots.dev, Path::new(&format!("dev/nvidia{minor}")));
        stat.is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice)
    }

    /// Returns what the kernel shows now, without [`KernelState::load`].
    #[must_use]
    pub fn kernel_state(&self) -> KernelState {
        KernelState::below(&self.roots.afresh())
    }
}

/// Whether this process has the capabilities to change its user. A container or a unit may run it as root without them.
fn may_change_user() -> bool {
    use rustix::thread::CapabilitySet;
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
    rustix::thread::capabilities(None).is_ok_and(|caps| caps.effective.contains(needed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;

    #[test]
    fn the_state_changes_with_the_driver() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { driver_root: HostPath::new(dir.path()), ..Config::default() };
        let write = |path: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86  Release Build\n").unwrap();
        };
        let mut states = vec![KernelState::read(&config)];
        for path in [
            "dev/nvidiactl",
            "proc/driver/nvidia/version",
            "proc/driver/nvidia/gpus/0000:01:00.0/information",
            "dev/nvidia0",
            "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access",
            "etc/ld.so.cache",
        ] {
            write(path);
            let state = KernelState::read(&config);
            assert_ne!(Some(&state), states.last(), "{path}");
            states.push(state);
        }
        write("dev/nvidia-modeset");
        let last = KernelState::read(&config);
        assert_eq!(Some(&last), states.last());
        assert_eq!(last.module.as_deref(), Some("570.86"));
        assert_eq!(last.mig, ["gpu0/mig/gi1/ci0"]);
        let names: Vec<_> = last.nodes.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["nvidia0", "nvidiactl"]);
        std::fs::rename(dir.path().join("dev/nvidia-modeset"), dir.path().join("dev/nvidia0")).unwrap();
        assert_ne!(KernelState::read(&config), last, "another node of the same name");
    }
}
