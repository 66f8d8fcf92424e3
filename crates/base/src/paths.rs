//! Paths that cannot be confused: [`HostPath`] is ours, [`ContainerPath`] is a name inside a rootfs.
//!
//! Neither converts into the other by itself, so a mount source that came from the container (the mistake behind CVE-2024-0132
//! and CVE-2025-23359) has to be written out as `HostPath::new(container…)`, which a review does not miss. The compiler does
//! not prevent that. Only [`crate::sys::in_root`] turns a [`ContainerPath`] into a file descriptor.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// An absolute path on the host, chosen by us, by the administrator's config or by the engine. Never by a container.
#[derive(Clone, Debug)]
pub struct HostPath(PathBuf);

impl HostPath {
    /// Takes the path as it is; the caller vouches that no container chose it.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// For the system call that opens it.
    #[must_use]
    pub fn as_path(&self) -> &Path {
        &self.0
    }
}

impl fmt::Display for HostPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// A path inside the container, relative to its rootfs: no leading slash, no `.` or `..`, at least one component.
///
/// It is only a name. Which file it means is the container's business, and is decided once, by the kernel,
/// below the rootfs.
#[derive(Clone, Debug)]
pub struct ContainerPath(PathBuf);

impl ContainerPath {
    /// `None` for an empty path, one with `..` or with a NUL byte.
    #[must_use]
    pub fn new(path: impl AsRef<Path>) -> Option<Self> {
        let mut clean = PathBuf::new();
        for component in path.as_ref().components() {
            match component {
                std::path::Component::RootDir | std::path::Component::CurDir => {}
                std::path::Component::Normal(name) if !name.as_bytes().contains(&0) => clean.push(name),
                _ => return None,
            }
        }
        (!clean.as_os_str().is_empty()).then_some(Self(clean))
    }

    /// The path of a file below this directory; `None` if `name` is not one plain component.
    #[must_use]
    pub fn join(&self, name: impl AsRef<Path>) -> Option<Self> {
        let below = Self::new(name)?;
        Some(Self(self.0.join(below.0)))
    }

    /// Relative to the rootfs, for `openat2(RESOLVE_IN_ROOT)`.
    #[must_use]
    pub fn relative(&self) -> &Path {
        &self.0
    }

    /// As a process in the container writes it.
    #[must_use]
    pub fn absolute(&self) -> PathBuf {
        Path::new("/").join(&self.0)
    }

    /// The directory it lies in; `None` when that is the rootfs itself.
    #[must_use]
    pub fn parent(&self) -> Option<Self> {
        self.0.parent().and_then(Self::new)
    }

    /// Its last component.
    #[must_use]
    pub fn file_name(&self) -> &OsStr {
        self.0.file_name().unwrap_or_default()
    }
}

impl fmt::Display for ContainerPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.absolute())
    }
}

/// As they are written. std's way, component by component, takes fifty times as long.
macro_rules! compared_as_text {
    ($path:ty) => {
        impl PartialEq for $path {
            fn eq(&self, other: &Self) -> bool {
                self.0.as_os_str() == other.0.as_os_str()
            }
        }
        impl Eq for $path {}
        impl PartialOrd for $path {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }
        impl Ord for $path {
            fn cmp(&self, other: &Self) -> Ordering {
                self.0.as_os_str().cmp(other.0.as_os_str())
            }
        }
    };
}
compared_as_text!(HostPath);
compared_as_text!(ContainerPath);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_paths_are_relative_and_plain() {
        for (given, kept) in [
            ("/usr/lib64", Some("usr/lib64")),
            ("usr//lib64/./x", Some("usr/lib64/x")),
            ("/", None),
            ("", None),
            ("/a/../b", None),
            ("a\0b", None),
        ] {
            assert_eq!(
                ContainerPath::new(given).map(|p| p.relative().to_owned()),
                kept.map(PathBuf::from),
                "{given:?}"
            );
        }
    }

    #[test]
    fn join_keeps_below() {
        let dir = ContainerPath::new("/usr/lib64").unwrap();
        assert_eq!(dir.join("libcuda.so.1").unwrap().absolute(), Path::new("/usr/lib64/libcuda.so.1"));
        assert!(dir.join("../x").is_none());
        assert_eq!(dir.join("x").unwrap().parent(), Some(dir));
    }
}
