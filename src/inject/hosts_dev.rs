//! The host's /dev, which a container can have as a volume: a name that is created there is the host's, and outlives the
//! container. An empty file in the place of a device node keeps the driver from working until somebody removes it.

use std::os::fd::AsFd;
use std::path::Path;

use anyhow::Result;

use base::report::{catalog, failure};

/// The file system of the host's `/dev`, to recognize it in a container that has it as a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostsDev {
    /// `None` if `/dev` is part of the root file system: its device number then does not identify it
    device: Option<u64>,
}

impl HostsDev {
    /// Reads it; to be called in the host's mount namespace.
    pub(crate) fn find() -> Self {
        let device = |path: &str| rustix::fs::stat(path).ok().map(|stat| stat.st_dev);
        Self { device: device("/dev").filter(|dev| Some(*dev) != device("/")) }
    }

    /// Whether this is a directory of it.
    ///
    /// # Errors
    /// If it cannot be looked at.
    pub(crate) fn has(self, dir: impl AsFd) -> Result<bool> {
        Ok(self.device.is_some() && Some(rustix::fs::fstat(dir)?.st_dev) == self.device)
    }

    /// Refuses a path of the host's at which something would have to be made.
    ///
    /// # Errors
    /// If it is missing in a directory of the host's /dev.
    pub(crate) fn refuse_missing(self, path: &Path) -> Result<()> {
        let is_missing = rustix::fs::lstat(path).is_err();
        let existing = path.ancestors().find_map(|path| rustix::fs::stat(path).ok());
        match existing {
            Some(dir) if is_missing && Some(dir.st_dev) == self.device => Err(refusal()),
            _ => Ok(()),
        }
    }
}

/// The error of a container that has the host's `/dev` as a volume without the nodes.
pub(crate) fn refusal() -> anyhow::Error {
    failure(
        &catalog::HOSTS_DEV,
        "the container has the host's \"/dev\" as a volume, which lacks it, and what is created there would stay",
        "run \"oci-nvidia-hook prepare --root /\" on the host, which makes the nodes in its \"/dev\", or start the container \
         without that volume",
    )
}
