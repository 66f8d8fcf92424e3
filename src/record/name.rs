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
    if may_have_conmon(record)
        && let Some(name) = conmon::name_of(&record.container.id, record.pid)
    {
        record.container.name = one_line(&name);
    }
}

/// Reports whether conmon may have started the container for Podman, so that the parents of its process are worth three system calls each.
/// Only Podman and CRI-O use conmon, and both keep their bundles in containers/storage.
fn may_have_conmon(record: &Record) -> bool {
    let container = &record.container;
    record.pid != 0
        && container.pod == Pod::default()
        && storage::dir_of(&container.bundle).is_some()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn which_containers_may_have_conmon() {
        let may = |pid: i32, namespace: &str, bundle: &str| {
            let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
            let pod = Pod {
                namespace: namespace.to_owned(),
                ..Pod::default()
            };
            record.name_container("0a".to_owned(), pod, Path::new(bundle));
            record.pid = pid;
            may_have_conmon(&record)
        };
        let podmans = "/var/lib/containers/storage/overlay-containers/0a/userdata";
        assert!(may(7, "", podmans) && may(7, "", "/home/u/x/vfs-containers/0a/userdata"));
        assert!(!may(0, "", podmans), "no process yet");
        assert!(!may(7, "lab", podmans), "the name is known");
        let containerds = "/run/containerd/io.containerd.runtime.v2.task/moby/0a";
        assert!(!may(7, "", containerds) && !may(7, "", ""));
    }
}
