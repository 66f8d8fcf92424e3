//! `nvidia-container-cli configure`: the hook's way, for who is no OCI runtime and has no config.json. LXC and enroot call it.

use std::path::{Path, PathBuf};

use anyhow::Result;

use base::report::{catalog, failure};
use nvidia_host::capability::Capabilities;
use nvidia_host::config::Config;

use super::cli::Options;
use crate::log::Log;
use crate::oci::{Pod, SpecView, State};
use crate::stages::prestart::{self, Place};

/// Gives it to the container whose root file system is `rootfs`: of the process that was named, or where we are.
pub(super) fn configure(rootfs: &Path, options: &Options, config: &Config, log: &mut Log) -> Result<()> {
    if !rootfs.is_absolute() || rootfs == Path::new("/") {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!("{rootfs:?} is no root file system of a container"),
            "name its directory, from / on and not / itself",
        ));
    }
    let request = options.selection.request(capabilities(options), config)?;
    let (place, pid) = match options.pid {
        Some(pid) => (Place::Outside, pid),
        // Whoever calls us is in the container's cgroup, if anybody is.
        None => (Place::Here, rustix::process::getppid().map_or(0, |parent| parent.as_raw_nonzero().get())),
    };
    // Cgroups are told apart by the container's id, and nobody has one here: no cgroup has this name.
    let state = State { id: format!("process {pid}"), pid, bundle: PathBuf::new() };
    log.name_container(&state.id, Pod::default(), &state.bundle);
    log.connect();
    let spec = SpecView { rootfs: rootfs.to_owned(), ..SpecView::default() };
    prestart::set_up_gpus(place, &state, &spec, &request, config, log)
}

fn capabilities(options: &Options) -> Capabilities {
    let mut chosen = options.selection.capabilities.clone();
    if options.selection.compat32 {
        chosen.push(nvidia_host::capability::Capability::Compat32);
    }
    Capabilities::of(&chosen)
}
