//! `poststop`: notes the end of a container.

use std::process::ExitCode;
use std::time::SystemTime;

use super::read_stdin;
use crate::oci::{self, State};
use crate::record::name;
use records::store::Store;

/// Notes the end of the container in its record. The files that the setup created stay: a container can have changed them, and another
/// one can use them.
// Not inlined: a start at another stage would need a larger stack, and each page costs a fault.
#[inline(never)]
pub(crate) fn run() -> ExitCode {
    if let Ok(state) = read_stdin().and_then(|bytes| oci::state::parse(&bytes)) {
        note_end(&state);
    }
    ExitCode::SUCCESS
}

/// Does the same for this container.
pub(super) fn note_end(state: &State) {
    if let Ok(Some(store)) = Store::existing() {
        store.end(&state.id, SystemTime::now(), name::remember);
    }
}
