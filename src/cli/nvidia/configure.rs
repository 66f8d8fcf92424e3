//! `nvidia-container-cli configure`: the request that its options make.

use std::path::Path;

use anyhow::Result;

use base::report::{catalog, failure};
use nvidia_host::config::Config;

use super::cli::Configure;
use crate::log::Log;
use crate::stages;

/// Gives it to the container whose root file system is `rootfs`: of the process that was named, or where we are.
pub(super) fn configure(options: &Configure, config: Config, log: &mut Log) -> Result<()> {
    let rootfs = &options.rootfs;
    if !rootfs.is_absolute() || rootfs == Path::new("/") {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!("{rootfs:?} is no root file system of a container"),
            "name its directory, from / on and not / itself",
        ));
    }
    let mut request = options.selection.request(options.capabilities(), &options.requirements, &config)?;
    request.omit.node_mounts = options.no_devbind;
    stages::configure::configure(rootfs, options.pid, request, config, log)
}
