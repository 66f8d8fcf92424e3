//! `nvidia-container-cli configure`: the request that its options make.

use std::path::Path;

use anyhow::Result;

use base::report::{catalog, failure};
use nvidia_host::capability::{Capabilities, Capability};
use nvidia_host::config::Config;

use super::cli::Options;
use crate::log::Log;
use crate::stages;

/// Gives it to the container whose root file system is `rootfs`: of the process that was named, or where we are.
pub(super) fn configure(rootfs: &Path, options: &Options, config: Config, log: &mut Log) -> Result<()> {
    if !rootfs.is_absolute() || rootfs == Path::new("/") {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!("{rootfs:?} is no root file system of a container"),
            "name its directory, from / on and not / itself",
        ));
    }
    let request = options.selection.request(capabilities(options), &config)?;
    stages::configure::configure(rootfs, options.pid, request, config, log)
}

fn capabilities(options: &Options) -> Capabilities {
    let mut chosen = options.selection.capabilities.clone();
    if options.selection.compat32 {
        chosen.push(Capability::Compat32);
    }
    Capabilities::of(&chosen)
}
