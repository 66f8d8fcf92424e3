//! `nvidia-container-cli configure`: turns the options into a request and sets up the container.

use std::path::Path;

use anyhow::Result;

use base::report::{catalog, failure};
use nvidia_host::config::Config;

use super::cli::Configure;
use crate::log::Log;
use crate::stages;

/// Sets up the container with this root file system, in the mount namespace of `--pid` or else of this process.
pub(super) fn configure(options: &Configure, config: Config, log: &mut Log) -> Result<()> {
    let rootfs = &options.rootfs;
    if !rootfs.is_absolute() || rootfs == Path::new("/") {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!("invalid root file system {rootfs:?}"),
            "give the absolute path of the container's root file system, which cannot be /",
        ));
    }
    let mut request = options.selection.request(options.capabilities(), &options.requirements, &config)?;
    request.omit.node_mounts = options.no_devbind;
    stages::configure::configure(rootfs, options.pid, request, config, log)
}
