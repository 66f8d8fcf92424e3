//! The name of a container in its engine, which config.json does not have.

use base::report::one_line;
use records::{ContainerNames, Pod, Record};

use super::storage;
use crate::oci::conmon;

/// Stores the container's name as the engine's own files have it, because a container that fails to start or has ended is often
/// removed immediately. The time for it grows with the number of containers.
pub(crate) fn remember(container: &mut ContainerNames) {
    if container.name.is_empty()
        && let Some(name) = storage::name_of(&container.id, &container.bundle)
    {
        container.name = one_line(&name);
    }
}

/// Reads the name that Podman gave to conmon with --name; CRI-O's names come from annotations.
pub(super) fn by_conmon(record: &mut Record) {
    if record.pid != 0
        && record.container.pod == Pod::default()
        && let Some(name) = conmon::name_of(&record.container.id, record.pid)
    {
        record.container.name = one_line(&name);
    }
}
