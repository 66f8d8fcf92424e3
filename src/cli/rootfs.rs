//! The hook entry in specs that we write: at the createContainer stage, what an engine cannot do by itself. Its arguments
//! say what; nothing is looked for.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::driver::{DriverRoot, compat};
use crate::edits::build;
use crate::inject::container::Container;
use crate::inventory::procfs;
use crate::log::Log;
use crate::lower::live;
use crate::lower::rootfs::RootfsEdits;
use crate::oci::{self, hook_entries};
use crate::paths::HostPath;

/// Does it to the container whose state is on stdin. 0 if it may start, 1 if it must not.
#[must_use]
pub fn run(edits: RootfsEdits) -> ExitCode {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    match finish(edits) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            Log::default().error(&error);
            ExitCode::FAILURE
        }
    }
}

fn finish(edits: RootfsEdits) -> Result<()> {
    let bytes = oci::read_limited(std::io::stdin().lock(), oci::MAX_JSON)
        .context("cannot read the container state on stdin")?;
    let state = oci::state::parse(&bytes)?;
    let config = state.bundle.join("config.json");
    let bytes = File::open(&config)
        .map_err(anyhow::Error::new)
        .and_then(|file| oci::read_limited(file, oci::MAX_JSON))
        .with_context(|| format!("cannot read the container's spec {config:?}"))?;
    let spec = oci::spec_view::parse(&bytes, &state.bundle)
        .with_context(|| format!("cannot read the container's spec {config:?}"))?;
    let edits = with_entries(edits, &bytes)?;
    let files = edits.mask.as_ref().map(mask_files).unwrap_or_default();
    let mut log = Log::of(&state.id);
    let container = Container::here(&spec.rootfs)?;
    let mut steps = edits.steps(container.facts(), files);
    if let Some((driver, cuda)) = &edits.cuda_compat {
        let names = container.compat_libraries(driver, cuda);
        live::prefer(&mut steps, compat::DIR, |soname| names.contains(soname));
    }
    let findings = crate::inject::run(container, &steps)?;
    findings.iter().for_each(|finding| log.finding(finding));
    Ok(())
}

/// Each device of a spec brings an entry of its own, but there is one mask for all of them, and it cannot be changed
/// once it is there. So the first entry does what all of them say, and those after it find it done.
fn with_entries(edits: RootfsEdits, config: &[u8]) -> Result<RootfsEdits> {
    let entries = hook_entries::create_container(config).context("cannot read the container's hooks")?;
    // One that cannot be read fails by itself.
    let others = entries.iter().filter_map(|entry| RootfsEdits::of_entry(&entry.args));
    Ok(others.fold(edits, RootfsEdits::merge))
}

/// None where the driver is gone: then the container's /proc does not have it either.
fn mask_files(dir: &HostPath) -> Vec<(OsString, Vec<u8>)> {
    let root = DriverRoot::open(dir);
    let files = root.map(|root| procfs::read_files(&root, Path::new("/"))).unwrap_or_default();
    files.into_iter().map(build::mask_file).collect()
}
