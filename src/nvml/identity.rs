//! Who the process that asks NVML is.

use std::path::Path;

use anyhow::Result;

use crate::config::{self, Config};
use crate::driver::DriverRoot;
use crate::sys::ns;
use crate::sys::process::Identity;

/// The configured user; without one, root with the group that owns `/dev/nvidiactl`, so that nodes of
/// root:video 0660, as SUSE makes them, are open to a process without caps. `None` if the user cannot be changed: a plain
/// user, or a user namespace, where the host's groups do not exist.
///
/// # Errors
/// If the configured user or group does not exist.
pub fn of(config: &Config, dev: &DriverRoot) -> Result<Option<Identity>> {
    if !rustix::process::geteuid().is_root() || ns::in_user_namespace()? {
        return Ok(None);
    }
    if let Some(user) = &config.user {
        return config::resolve(user).map(Some);
    }
    let gid = dev.locate(Path::new("/dev/nvidiactl")).map_or(0, |node| node.gid);
    Ok(Some(Identity { uid: 0, gid }))
}
