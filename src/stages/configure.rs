//! `nvidia-container-cli configure`, which LXC and enroot call: sets up a container without an OCI runtime and config.json. The
//! request is on the command line.

use std::path::Path;

use anyhow::Result;

use nvidia_host::config::Config;

use super::decide;
use super::prestart::{Namespaces, begin, set_up_container};
use records::Pod;

use crate::oci::SpecView;
use crate::plan::Container;
use crate::plan::request::GpuRequest;
use crate::record::call::Call;

/// Sets up the container whose root file system is `rootfs`, in the mount namespace of the process `pid` or, without one, of
/// this process.
///
/// # Errors
/// If the setup fails; it is then undone.
pub(crate) fn configure(
    rootfs: &Path,
    pid: Option<i32>,
    request: GpuRequest,
    config: Config,
    call: &mut Call,
) -> Result<()> {
    let start = begin();
    let (namespaces, pid) = match pid {
        Some(pid) => (Namespaces::OfRuntime, pid),
        // Only the caller can be in the container's cgroup.
        None => (
            Namespaces::MountOnly,
            rustix::process::getppid().map_or(0, |parent| parent.as_raw_nonzero().get()),
        ),
    };
    // The container's cgroup is identified by its id, which is unknown here. No cgroup has this name.
    let id = format!("process {pid}");
    call.name_container(&id, Pod::default(), Path::new(""));
    call.connect();
    let Some(gpus) = decide::gpus_for(request, config, &[], call)? else {
        return Ok(());
    };
    // There is no config.json: the process counts as root, and no device is allowed yet.
    let spec = SpecView {
        rootfs: rootfs.to_owned(),
        ..SpecView::default()
    };
    let container = Container {
        id: &id,
        cgroups_path: None,
        ..Container::from_spec(&spec)?
    };
    set_up_container(namespaces, pid, &container, &gpus, start, call)
}
