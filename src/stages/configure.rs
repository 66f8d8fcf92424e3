//! `nvidia-container-cli configure`: for a container without an OCI runtime and without a config.json, whose request is on the
//! command line. LXC and enroot call it.

use std::path::Path;

use anyhow::Result;

use nvidia_host::config::Config;

use super::prestart::{Place, begin, give};
use crate::log::Log;
use crate::oci::Pod;
use crate::plan::{self, Container};
use crate::request::GpuRequest;

/// Gives the request to the container whose root file system is `rootfs`: as the process `pid` sees it or, without one, as this
/// process does.
///
/// # Errors
/// If it cannot be given; then nothing of it is there.
pub(crate) fn configure(
    rootfs: &Path,
    pid: Option<i32>,
    request: GpuRequest,
    config: Config,
    log: &mut Log,
) -> Result<()> {
    let start = begin();
    let (place, pid) = match pid {
        Some(pid) => (Place::Outside, pid),
        // The caller is in the container's cgroup, if a process is.
        None => (Place::Here, rustix::process::getppid().map_or(0, |parent| parent.as_raw_nonzero().get())),
    };
    // Cgroups are told apart by the container's id, and none is known here: no cgroup has this name.
    let id = format!("process {pid}");
    log.name_container(&id, Pod::default(), Path::new(""));
    log.connect();
    let Some(gpus) = plan::gpus(request, config, &[], log)? else { return Ok(()) };
    give(place, pid, &Container::at(rootfs, &id)?, &gpus, start, log)
}
