//! Carries files that are mounted in a directory over to the layer that covers the directory.
//!
//! With CDI, the runtime mounts the driver files before the hook creates the links to them. If the directory is on a
//! volume, the links need a layer, and that would hide the mounts.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result};
use rustix::fs::{FileType, OFlags, Stat};

use base::sys::in_root::Root;
use base::sys::mount::{Api, MountAttrs};

use crate::inject::files::directory::{Present, find_present};
use crate::inject::files::source::Source;
use crate::inject::files::tmpfs::is_read_only;
use crate::oci::spec_view::Mount;

/// Carries files over.
#[derive(Debug)]
pub(in crate::inject) struct Remounts {
    api: Api,
    /// Paths at which config.json has the runtime mount something read-only. crun does that only after the hooks: it remounts the bind
    /// mounts at the end (`finalize_mounts`).
    read_only: BTreeSet<PathBuf>,
}

/// A file that is mounted in a directory.
#[derive(Debug)]
pub(in crate::inject) struct Carried {
    /// Its path in the container
    path: PathBuf,
    source: Source,
}

impl Remounts {
    /// Creates the value from the mounts in config.json.
    pub(in crate::inject) fn new(mounts: &[Mount], api: Api) -> Self {
        Self {
            api,
            read_only: read_only_paths(mounts),
        }
    }

    /// Returns the paths at which config.json has the runtime mount something read-only.
    pub(in crate::inject) fn read_only_paths(&self) -> impl Iterator<Item = &Path> {
        self.read_only.iter().map(PathBuf::as_path)
    }

    /// Opens what is mounted at the paths `points` below the directory `dir` of a rootfs. `None` if a layer must not cover one of them.
    ///
    /// # Errors
    /// If a file cannot be mounted again.
    pub(in crate::inject) fn open(
        &self,
        rootfs: &Root,
        dir: &Path,
        points: BTreeSet<PathBuf>,
    ) -> Result<Option<Vec<Carried>>> {
        let mut found = Vec::new();
        for point in points {
            let path = dir.join(point);
            // Another mount can hide a mount point.
            let Ok(file) = rootfs.open_at(&path, OFlags::PATH | OFlags::NOFOLLOW) else {
                return Ok(None);
            };
            let stat = rustix::fs::fstat(&file)?;
            if !self.carries(&stat, is_read_only(&file), &path) {
                return Ok(None);
            }
            // The clone has the flags of the mount too, such as noexec.
            let source = Source::from_fd(file, None, MountAttrs::DRIVER_FILE, self.api)?;
            found.push(Carried { path, source });
        }
        Ok(Some(found))
    }

    /// Reports whether a layer may cover this file, which is mounted at a path relative to the root directory: the container cannot change
    /// it, because a layer makes it read-only.
    fn carries(&self, stat: &Stat, is_read_only: bool, path: &Path) -> bool {
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && (is_read_only || self.read_only.contains(&Path::new("/").join(path)))
    }
}

/// Returns the paths of the mounts that config.json has the runtime make read-only.
fn read_only_paths(mounts: &[Mount]) -> BTreeSet<PathBuf> {
    let mut paths = BTreeSet::new();
    for mount in mounts {
        if mount.is_bind() && gets_these_flags(mount) {
            paths.insert(mount.destination.clone());
        }
    }
    paths
}

/// Reports whether [`MountAttrs::DRIVER_FILE`] includes the restrictions of this mount.
fn gets_these_flags(mount: &Mount) -> bool {
    let has = |flag: &str| mount.options.iter().flatten().any(|option| option == flag);
    has("ro") && !has("noexec")
}

/// Mounts the files on the layer, and pushes the mounts to `done`.
///
/// # Errors
/// If the kernel refuses; `done` then has the mounts so far.
pub(in crate::inject) fn mount(
    rootfs: &Root,
    files: Vec<Carried>,
    done: &mut Vec<Rc<OwnedFd>>,
) -> Result<()> {
    for Carried { path, source } in files {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            continue;
        };
        let dir = rootfs.open_at(parent, OFlags::PATH | OFlags::DIRECTORY)?;
        // The layer shows the runtime's mount point, which is on the volume.
        if let Present::Other(point, _) = find_present(&dir, name)? {
            let mounted = source.attach(&dir, Path::new(name), point);
            done.push(
                mounted
                    .with_context(|| {
                        format!("mount {:?} on the layer", Path::new("/").join(&path))
                    })?
                    .into(),
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_that_the_runtime_makes_read_only() {
        let mount = |destination: &str, options: &[&str]| Mount {
            destination: destination.into(),
            kind: Some("bind".to_owned()),
            options: Some(options.iter().map(|&option| option.to_owned()).collect()),
            ..Mount::default()
        };
        let mounts = [
            mount("/driver", &["ro", "nosuid", "nodev", "rbind", "rprivate"]),
            mount("/writable", &["rbind"]),
            mount("/noexec", &["ro", "noexec"]),
            Mount {
                kind: Some("tmpfs".to_owned()),
                ..mount("/tmpfs", &["ro"])
            },
        ];
        assert_eq!(read_only_paths(&mounts), BTreeSet::from(["/driver".into()]));
    }
}
