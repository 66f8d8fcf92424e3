//! Examines the files of a container for `plan`, in a child process with a deadline.
//!
//! The container may run. It can mount a FUSE file system at any path, whose server decides how long a lookup takes, and a process that
//! waits for the server cannot always be killed. So another process waits, and is abandoned if it gets no answer.

use std::time::Duration;

use anyhow::Result;

use base::report::failure;
use base::sys::child;
use findings::catalog;
use nvidia_host::cdi::entry::RootfsEdits;

use crate::inject::container::OpenContainer;
use crate::oci::SpecView;
use crate::plan::{Gpus, Image};
use crate::stages::rootfs;

/// How long the examination may take. Usually it takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// Examines the container for the hook at prestart. `pid`: its process, or 0 if it has none. Returns `None` if the root file system is
/// empty or cannot be read.
///
/// # Errors
/// If there is no result in time.
pub(super) fn of_hook(gpus: &Gpus, spec: &SpecView, pid: i32) -> Result<Option<Image>> {
    within_deadline(|| {
        let open = open(spec, pid)?;
        let libraries = gpus
            .compat_libraries()
            .and_then(|(dir, driver, cuda)| open.compat_libraries(&dir, driver, cuda));
        Some(Image {
            facts: open.facts(),
            compat: libraries.unwrap_or_default(),
        })
    })
}

/// Examines the container for the hook entries in its config.json, like [`of_hook`].
///
/// # Errors
/// If there is no result in time.
pub(super) fn of_entries(edits: RootfsEdits, spec: &SpecView, pid: i32) -> Result<Option<Image>> {
    within_deadline(|| {
        let edits = rootfs::resolve(edits, spec);
        let open = open(spec, pid)?;
        Some(rootfs::image(&edits, &open))
    })
}

/// Opens the root file system: of the process, or on the host. `None` if it is empty or cannot be read.
fn open(spec: &SpecView, pid: i32) -> Option<OpenContainer> {
    if pid > 0
        && let Ok(waiting) = OpenContainer::open(pid, &spec.rootfs)
    {
        return Some(waiting);
    }
    let open = OpenContainer::here(&spec.rootfs).ok()?;
    OpenContainer::has_files(&spec.rootfs).then_some(open)
}

/// Returns the result of `examine`, which opens files of the container.
///
/// # Errors
/// If the result does not arrive in time, or the child process cannot be created.
fn within_deadline(examine: impl FnOnce() -> Option<Image>) -> Result<Option<Image>> {
    child::ask(PATIENCE, examine).map_err(|why| {
        failure(
            &catalog::TOO_LONG,
            format!("cannot examine the container's files: {why}"),
            "find the file system that does not answer (FUSE, NFS): run \"findmnt\" in the container",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvidia_host::edits::placement::{Compat32, Loader, RootfsFacts};
    use std::ffi::OsString;

    #[test]
    fn an_answer_arrives_as_it_is() {
        assert_eq!(within_deadline(|| None).unwrap(), None);
        for loader in [Loader::Glibc, Loader::Musl, Loader::None] {
            for compat32 in [Compat32::Lib, Compat32::Lib32, Compat32::Nowhere] {
                let facts = RootfsFacts {
                    debian: compat32 == Compat32::Lib,
                    compat32,
                    merged: true,
                    loader,
                };
                let image = Image {
                    facts,
                    compat: ["libcuda.so.1", "a \"b\"\n"].map(OsString::from).into(),
                };
                let answer = within_deadline(|| Some(image.clone())).unwrap();
                assert_eq!(answer, Some(image));
            }
        }
    }
}
