//! Separate types for paths on the host ([`HostPath`]) and for names inside a container's rootfs ([`ContainerPath`]).
//!
//! Neither converts into the other implicitly. To mount a source that the container chose (the mistake behind CVE-2024-0132 and
//! CVE-2025-23359), code has to spell out `HostPath::new(container…)`, which stands out in a review; the compiler does not
//! prevent it. Only [`crate::sys::in_root`] turns a [`ContainerPath`] into a file descriptor.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// An absolute path on the host. The hook, the administrator or the engine chose it, never a container.
#[derive(Clone, Debug, Default)]
pub struct HostPath(PathBuf);

impl HostPath {
    /// Wraps the path unchanged. The caller guarantees that no container chose it.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Returns the path for a system call.
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
/// It is only a name: symbolic links in the rootfs decide which file it refers to. The kernel resolves it once, below the
/// rootfs.
#[derive(Clone, Debug)]
pub struct ContainerPath(PathBuf);

impl ContainerPath {
    /// Returns `None` if the path is empty or contains `..` or a NUL byte.
    #[must_use]
    pub fn new(path: impl AsRef<Path>) -> Option<Self> {
        let mut clean = PathBuf::new();
        for component in path.as_ref().components() {
            match component {
                std::path::Component::RootDir | std::path::Component::CurDir => {}
                std::path::Component::Normal(name) if !name.as_bytes().contains(&0) => {
                    clean.push(name)
                }
                _ => return None,
            }
        }
        (!clean.as_os_str().is_empty()).then_some(Self(clean))
    }

    /// Returns the path `name` below this directory. `name` may have several components (`gbm/x.so`). Returns `None` if `name`
    /// is empty or contains `..` or a NUL byte.
    #[must_use]
    pub fn join(&self, name: impl AsRef<Path>) -> Option<Self> {
        let below = Self::new(name)?;
        Some(Self(self.0.join(below.0)))
    }

    /// Returns the path relative to the rootfs, for `openat2(RESOLVE_IN_ROOT)`.
    #[must_use]
    pub fn relative(&self) -> &Path {
        &self.0
    }

    /// Returns the path with a leading slash, as a process in the container uses it.
    #[must_use]
    pub fn absolute(&self) -> PathBuf {
        Path::new("/").join(&self.0)
    }

    /// Returns the parent directory, or `None` if that is the rootfs itself.
    #[must_use]
    pub fn parent(&self) -> Option<Self> {
        self.0.parent().and_then(Self::new)
    }

    /// Returns the last component.
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

/// Compares paths as byte strings. std compares them component by component, which takes fifty times as long.
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
        assert_eq!(
            dir.join("libcuda.so.1").unwrap().absolute(),
            Path::new("/usr/lib64/libcuda.so.1")
        );
        assert!(dir.join("../x").is_none());
        assert_eq!(dir.join("x").unwrap().parent(), Some(dir));
    }
}
