//! Finds programs of the host.

use std::path::{Path, PathBuf};

use crate::tree::Tree;

/// The directories in which engines and shells search for programs.
pub const DIRS: [&str; 7] = [
    "/usr/bin",
    "/usr/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/sbin",
    "/bin",
    "/usr/lib/cri-o-runc/sbin",
];

/// Returns the path of the first program with this name.
#[must_use]
pub fn find(host: &Tree, name: &str) -> Option<PathBuf> {
    for dir in DIRS {
        let path = Path::new(dir).join(name);
        if host.locate(&path).is_ok() {
            return Some(path);
        }
    }
    None
}
