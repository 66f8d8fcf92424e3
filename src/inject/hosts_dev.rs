//! The host's /dev, which a container can have as a volume: a name that is created there is the host's, and outlives the
//! container. An empty file in the place of a device node keeps the driver from working until somebody removes it.

use std::os::fd::AsFd;
use std::path::Path;

use anyhow::Result;
use rustix::fs::{CWD, Mode, OFlags};

use crate::error::failure;
use crate::finding::catalog;

/// Its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostsDev {
    /// `None` where it is none of its own: then nothing can be told apart by it
    device: Option<u64>,
}

impl HostsDev {
    /// Looks; on the host's side.
    #[must_use]
    pub fn look() -> Self {
        let device = |path: &str| rustix::fs::stat(path).ok().map(|stat| stat.st_dev);
        Self { device: device("/dev").filter(|dev| Some(*dev) != device("/")) }
    }

    /// Refuses to create something in this directory, if it is one of the host's /dev.
    ///
    /// # Errors
    /// If it is, or cannot be looked at.
    pub fn refuse(self, dir: impl AsFd) -> Result<()> {
        if self.device.is_none() || Some(rustix::fs::fstat(dir)?.st_dev) != self.device {
            return Ok(());
        }
        Err(failure(
            &catalog::HOSTS_DEV,
            "the container has the host's \"/dev\" as a volume, which lacks it, and what is created there would stay",
            "run \"oci-nvidia-hook prepare --root /\" on the host, which makes the nodes in its \"/dev\", or start the \
             container without that volume",
        ))
    }

    /// The same for a path of the host's: whether it is there, or may be created.
    ///
    /// # Errors
    /// If it is missing in a directory of the host's /dev.
    pub fn refuse_missing(self, path: &Path) -> Result<()> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let mut existing = path.ancestors().filter_map(|path| rustix::fs::openat(CWD, path, flags, Mode::empty()).ok());
        match existing.next() {
            Some(found) if path.symlink_metadata().is_err() => self.refuse(found),
            _ => Ok(()),
        }
    }
}
