//! `poststop`: cleans up after a container that has ended.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Instant, SystemTime};

use anyhow::Result;

use base::sys::in_root::Root;

use super::read_stdin;
use crate::inject::remove::leftovers;
use crate::oci::{self, State};
use crate::record::call::Call;
use crate::record::name;
use records::created::{self, Entry};
use records::store::Store;

/// Removes the files that the setup created in the container, and notes its end in its record.
// Not inlined: a start at another stage would need a larger stack, and each page costs a fault.
#[inline(never)]
pub(crate) fn run() -> ExitCode {
    if let Ok(state) = read_stdin().and_then(|bytes| oci::state::parse(&bytes)) {
        clean_up(&state);
    }
    ExitCode::SUCCESS
}

/// Does the same for this container.
pub(super) fn clean_up(state: &State) {
    let Ok(Some(store)) = Store::existing() else {
        return;
    };
    let record = store.end(&state.id, SystemTime::now(), name::remember);
    // The engine may have unmounted the root file system already. Files that stay do no harm.
    if let Some(record) = record {
        remove_created(state, record.created).ok();
    }
}

fn remove_created(state: &State, created: Vec<Entry>) -> Result<()> {
    let spec = oci::spec_view::read(&state.bundle)?;
    Call::for_stage("poststop").set_deadline(Instant::now())?;
    let rootfs = Root::open(&spec.rootfs)?;
    if spec.rootfs != Path::new("/")
        && leftovers::is_own(&rootfs, &state.id, Some(&state.bundle), &spec.rootfs)
    {
        leftovers::remove(
            &rootfs,
            &created::merge(created, leftovers::mount_points(&rootfs, &spec)),
        );
    }
    Ok(())
}
