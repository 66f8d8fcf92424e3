//! Recognizes the host's /dev, which a container can have as a volume. A file that the hook creates there would stay on the
//! host. An empty file with the name of a device node prevents the driver from working until it is removed.

use std::os::fd::AsFd;
use std::path::Path;

use anyhow::Result;

use base::report::failure;
use findings::catalog;

/// The file system of the host's `/dev`, to recognize it in a container that has it as a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostDev {
    /// `None` if `/dev` is part of the root file system: its device number then does not identify it
    device: Option<u64>,
}

impl HostDev {
    /// Reads the device number of /dev. Must be called in the host's mount namespace.
    pub(crate) fn find() -> Self {
        let device = |path: &str| rustix::fs::stat(path).ok().map(|stat| stat.st_dev);
        Self {
            device: device("/dev").filter(|dev| Some(*dev) != device("/")),
        }
    }

    /// Reports whether a directory is in the host's /dev.
    ///
    /// # Errors
    /// If fstat(2) fails.
    pub(crate) fn has(self, dir: impl AsFd) -> Result<bool> {
        Ok(self.device.is_some() && Some(rustix::fs::fstat(dir)?.st_dev) == self.device)
    }

    /// Refuses a path in the host's /dev at which a file would have to be created.
    ///
    /// # Errors
    /// If the path is missing in the host's /dev.
    pub(crate) fn refuse_missing(self, path: &Path) -> Result<()> {
        let is_missing = rustix::fs::lstat(path).is_err();
        let existing = path
            .ancestors()
            .find_map(|path| rustix::fs::stat(path).ok());
        match existing {
            Some(dir) if is_missing && Some(dir.st_dev) == self.device => Err(refusal()),
            _ => Ok(()),
        }
    }
}

/// The error for a container that has the host's `/dev` as a volume if `/dev` lacks the nodes.
pub(crate) fn refusal() -> anyhow::Error {
    failure(
        &catalog::HOSTS_DEV,
        "the container has the host's \"/dev\" as a volume, which lacks the node, and a node created there would stay on the host",
        "run \"oci-nvidia-hook prepare --root /\" on the host, which creates the nodes in its \"/dev\", or start the container \
         without that volume",
    )
}
