//! Confines this process and loads NVML.

use std::ffi::OsStr;
use std::io;
use std::path::Path;

use base::paths::HostPath;
use base::sys::confine::{CapabilitySet, Identity, Kept, confine};
use base::tree::Tree;
use nvidia_host::inventory::identity;
use nvidia_host::nvml::protocol::{LibraryPlace, Unloadable};

use crate::ffi::NvmlLibrary;
use crate::files;
use crate::lines::Lines;

/// Libraries that NVML requires in addition to libc. In a driver root other than `/` they may be missing, or belong to another glibc than
/// this process, so the host's are loaded before the root directory is changed.
const PRELOAD: [&str; 5] = [
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "libgcc_s.so.1",
];

/// The library, and those that it requires.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) library: NvmlLibrary,
    _preloaded: Vec<NvmlLibrary>,
}

/// Drops the privileges of this process except these capabilities, and loads the library. The kernel kills this process when its parent
/// ends. `watched` are directories whose `/dev`, `/proc` and `/sys` the process reads later.
///
/// # Errors
/// If a privilege cannot be dropped, or the library cannot be loaded.
pub(crate) fn load(
    capabilities: CapabilitySet,
    place: &LibraryPlace,
    watched: &[Tree],
    lines: &Lines,
) -> Result<Loaded, Unloadable> {
    let mut preloaded = Vec::new();
    if place.root != Path::new("/") {
        for name in PRELOAD {
            preloaded.extend(NvmlLibrary::load(OsStr::new(name)));
        }
    }
    confine_to(capabilities, place, watched, lines)
        .map_err(|error| Unloadable::Confine(base::report::line(&error.into())))?;
    if let Some(name) = place.kind.library_of_nvml() {
        preloaded.extend(NvmlLibrary::load(OsStr::new(name)));
    }
    match NvmlLibrary::load(place.library.as_os_str()) {
        Ok(library) => Ok(Loaded {
            library,
            _preloaded: preloaded,
        }),
        // The text of dlerror(3) is in the source of the error.
        Err(error) => Err(Unloadable::Load(base::report::line(&error.into()))),
    }
}

fn confine_to(
    capabilities: CapabilitySet,
    place: &LibraryPlace,
    watched: &[Tree],
    lines: &Lines,
) -> io::Result<()> {
    // The directory is closed again: an open directory outside of the new root would be a way out of it.
    let files = {
        let tree = Tree::open(&HostPath::new(&place.root))?;
        files::of_nvml(
            &tree,
            &place.library,
            watched,
            may_own_files(place.identity),
        )
    };
    let kept = Kept {
        root: &place.root,
        identity: place.identity,
        capabilities,
        files,
    };
    confine(kept, lines.pipe())
}

/// Whether files can belong to this user, so that this process can read only the files that it needs, and that existed when it started.
/// They include the nodes of MIG devices.
pub(crate) fn may_own_files(identity: Option<Identity>) -> bool {
    identity::may_own_files(identity)
}
