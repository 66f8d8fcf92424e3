//! The driver of a host, for a program that watches it for a long time.

use std::path::Path;

use anyhow::Result;
use rustix::fs::{FileType, Stat};

use base::report::failure;
use base::sys::file_id::FileId;
use base::tree::Tree;
use findings::catalog;

use super::driver::Driver;
use super::roots::Roots;
use super::state::{self, HostState, MODULE};
use crate::config::Config;
use crate::driver::DriverKind;
use crate::driver::node_name::NodeName;
use crate::inventory::Inventory;
use crate::inventory::identity::RunAs;
use crate::inventory::procfs::DRIVER_PROC;
use crate::nvml::query::NvmlQuery;

/// The driver that the configuration names. It stays usable after this process has changed its root directory.
#[derive(Debug)]
pub struct WatchedDriver {
    roots: Roots,
    question: NvmlQuery,
}

impl WatchedDriver {
    /// Finds the driver.
    ///
    /// # Errors
    /// If the driver is missing, or is the one of WSL 2.
    pub fn find(config: &Config) -> Result<Self> {
        let driver = Driver::find(config)?;
        if driver.parts.roots.kind == DriverKind::Wsl {
            return Err(failure(
                &catalog::PLATFORM,
                "a program that watches the GPUs of a host does not support WSL 2: a container has all GPUs or none",
                "give containers the GPUs with the hook or with CDI: oci-nvidia-hook cdi generate",
            ));
        }
        let mut question = driver.question()?;
        if !may_change_user() {
            question.who = RunAs::Unchanged;
        }
        Ok(Self {
            roots: driver.parts.roots,
            question,
        })
    }

    /// Returns the question that has the place of the library.
    #[must_use]
    pub const fn question(&self) -> &NvmlQuery {
        &self.question
    }

    /// Returns the directories whose `/dev`, `/proc` and `/sys` the other functions read.
    #[must_use]
    pub fn trees(&self) -> [Tree; 4] {
        let Roots {
            driver,
            dev,
            proc,
            sys,
            ..
        } = self.roots.clone();
        [driver, dev, proc, sys]
    }

    /// Adds the GPUs to NVML's answer that only the kernel module lists, and MIG devices without nodes.
    pub fn complete(&self, inventory: &mut Inventory) {
        self.roots.afresh().complete_afresh(inventory);
    }

    /// Returns marks that differ when the host may not be in this state any more. They cost a system call each, and the state reads some files
    /// of each GPU and the directory of each MIG device.
    #[must_use]
    pub fn marks(&self, host: &HostState) -> HostMarks {
        let (dev, proc) = (&self.roots.dev, &self.roots.proc);
        let driver = proc.open_dir(Path::new(DRIVER_PROC)).ok();
        let of_driver = |name: &str| driver.as_ref()?.stat(name).map(Mark::of);
        let nodes = dev.open_dir(Path::new("/dev")).ok();
        let of_nodes = |name: &str| nodes.as_ref()?.stat(name).map(Mark::of);
        let kernel = vec![
            of_nodes("."),
            of_driver("version"),
            of_driver("gpus"),
            rustix::fs::stat(MODULE).ok().map(Mark::of),
        ];
        let mut mig = vec![of_driver("capabilities")];
        if mig != [None] {
            // The nodes of compute instances, whose directories are too many.
            mig.push(of_nodes("nvidia-caps"));
            for minor in host.gpus.iter().filter_map(|gpu| gpu.minor) {
                mig.push(of_driver(&format!("capabilities/gpu{minor}/mig")));
            }
        }
        HostMarks { kernel, mig }
    }

    /// Whether the device node of the GPU with this minor number exists.
    #[must_use]
    pub fn has_node(&self, minor: u32) -> bool {
        let stat = state::examine(&self.roots.dev.afresh(), &NodeName::Gpu(minor).to_string());
        stat.is_some_and(|stat| is_device(&stat))
    }

    /// Returns the state of the host, without the library.
    #[must_use]
    pub fn state(&self) -> HostState {
        HostState::without_library(&self.roots.afresh())
    }
}

/// What [`WatchedDriver::marks`] returns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMarks {
    /// The directory of the device nodes, the loaded module and its GPUs
    kernel: Vec<Option<Mark>>,
    /// The MIG capabilities, and those of each GPU
    mig: Vec<Option<Mark>>,
}

impl HostMarks {
    /// Whether the GPU instances may be others.
    #[must_use]
    pub fn has_other_mig(&self, before: &Self) -> bool {
        self.mig != before.mig
    }
}

/// The state of a file, or of a directory with the number of the directories in it. procfs does not change the times of a directory when
/// its content changes, but counts its directories (`proc_getattr`); an entry that is created again has other times, see
/// [`crate::inventory::procfs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    id: FileId,
    links: u64,
}

impl Mark {
    fn of(stat: Stat) -> Self {
        Self {
            id: FileId::from(&stat),
            links: wide(stat.st_nlink),
        }
    }
}

/// The number has 64 bits on x86, and 32 on ARM.
fn wide(number: impl Into<u64>) -> u64 {
    number.into()
}

fn is_device(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
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
    use crate::cdi::stamp::tests as stamp;
    use base::paths::HostPath;

    #[test]
    fn a_file_in_place_of_a_node_is_not_the_node() {
        let (dir, config) = stamp::host();
        let site = WatchedDriver::find(&Config {
            dev_root: Some(HostPath::new(dir.path())),
            ..config
        })
        .unwrap();
        assert!(!site.has_node(0));
        stamp::write(dir.path(), "dev/nvidia0", "");
        assert!(!site.has_node(0));
        let is_device = |path: &str| is_device(&rustix::fs::stat(path).unwrap());
        assert!(is_device("/dev/null") && !is_device("/etc/passwd"));
    }
}
