//! Creates names in a container, and decides where that is allowed.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};
use rustix::fs::OFlags;
use rustix::io::Errno;

use base::paths::ContainerPath;
use base::sys::ids::Ids;
use base::sys::in_root::{Created, Root};
use nvidia_host::edits::Need;

use super::{Change, Target, parent_path};
use crate::inject::directory::{Present, find_present};
use crate::inject::hosts_dev;
use crate::inject::mounts::Mounts;
use crate::inject::read_only::{self, Why};
use crate::inject::tmpfs::is_read_only;

impl Target {
    /// Opens the directory `path`, created if it is missing.
    pub(super) fn directory(&mut self, path: &Path) -> Result<Rc<OwnedFd>> {
        if let Some((_, dir)) = self.opened.iter().find(|(known, _)| known.as_os_str() == path.as_os_str()) {
            return Ok(Rc::clone(dir));
        }
        let mut created = Vec::new();
        let mut opened = self.create_dir_all(path, &mut created);
        if opened.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::ReadOnlyFilesystem) {
            self.cover(self.rootfs.existing_part(path))?;
            opened = self.create_dir_all(path, &mut created);
        }
        self.note_directories(path, &created);
        self.changes.extend(created.into_iter().map(Change::Created));
        let dir = opened.with_context(|| format!("open its directory {:?}", Path::new("/").join(path)))?;
        self.opened.push((path.to_owned(), Rc::clone(&dir)));
        Ok(dir)
    }

    /// Opens a directory and creates missing parents. Fails with EROFS, like a read-only file system, where the hook must not
    /// create names.
    pub(super) fn create_dir_all(&mut self, path: &Path, created: &mut Vec<Created>) -> std::io::Result<Rc<OwnedFd>> {
        let (known, rootfs, ids) = (&mut self.mount_facts, &self.rootfs, self.ids.as_ref());
        rootfs.create_dir_all(path, created, |dir| match obstacle(known, rootfs, ids, dir, path) {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(Errno::ROFS.into()),
            Err(error) => Err(std::io::Error::other(error)),
        })
    }

    /// Forgets open directories: after a mount on one of them, its path leads to the mount.
    pub(super) fn forget_directories(&mut self) {
        self.opened.clear();
        self.own_directories.clear();
        self.mount_facts.forget_directories();
    }

    /// Opens the parent directory of `path`, created if it is missing.
    pub(super) fn parent(&mut self, path: &ContainerPath) -> Result<Rc<OwnedFd>> {
        self.directory(parent_path(path))
    }

    /// Reports whether names may be created, replaced and removed in this directory, which `path` led to.
    pub(super) fn may_create(&mut self, dir: &Rc<OwnedFd>, path: &Path) -> Result<bool> {
        if self.own_directories.iter().any(|known| Rc::ptr_eq(known, dir)) {
            return Ok(true);
        }
        let may = obstacle(&mut self.mount_facts, &self.rootfs, self.ids.as_ref(), dir, path)?.is_none();
        if may {
            self.own_directories.push(Rc::clone(dir));
        }
        Ok(may)
    }

    /// Returns `dir` if names can be replaced in it, and otherwise a layer on it.
    pub(super) fn writable(&mut self, dir: Rc<OwnedFd>, path: &ContainerPath) -> Result<Rc<OwnedFd>> {
        if self.may_create(&dir, parent_path(path))? && !is_read_only(&*dir) {
            return Ok(dir);
        }
        self.covered_parent(path)
    }

    /// Mounts a layer on the parent directory of `path`, and opens it.
    pub(super) fn covered_parent(&mut self, path: &ContainerPath) -> Result<Rc<OwnedFd>> {
        self.cover(parent_path(path))?;
        self.parent(path)
    }

    /// Creates a name with `make`, in a layer if the directory is read-only or on a volume. Returns the directory and the
    /// result of `make`; `None` if the name exists, which only the attempt to create it determines without a race.
    pub(super) fn make<T>(
        &mut self,
        path: &ContainerPath,
        is_dir: bool,
        make: impl Fn(&OwnedFd, &OsStr) -> rustix::io::Result<T>,
    ) -> Result<Option<(Rc<OwnedFd>, T)>> {
        let mut dir = self.parent(path)?;
        let name = path.file_name();
        if !self.may_create(&dir, parent_path(path))? {
            if !matches!(find_present(&dir, name)?, Present::Nothing) {
                return Ok(None);
            }
            dir = self.covered_parent(path)?;
        }
        let mut made = make(&dir, name);
        if matches!(made, Err(Errno::ROFS)) {
            dir = self.covered_parent(path)?;
            made = make(&dir, name);
        }
        match made {
            Ok(made) => {
                self.note_created(path.relative(), &dir);
                self.changes.push(Change::Created(Created { dir: Rc::clone(&dir), name: name.into(), is_dir }));
                Ok(Some((dir, made)))
            }
            Err(Errno::EXIST) => Ok(None),
            Err(errno) => Err(anyhow::Error::new(errno).context("create it")),
        }
    }

    /// Mounts a layer on the directory `path`.
    pub(super) fn cover(&mut self, path: &Path) -> Result<()> {
        self.forget_directories();
        let below = Rc::new(self.rootfs.open_at(path, OFlags::PATH | OFlags::DIRECTORY)?);
        let why =
            obstacle(&mut self.mount_facts, &self.rootfs, self.ids.as_ref(), &below, path)?.unwrap_or(Why::ReadOnly);
        if why == Why::Volume && self.hosts_dev.has(&*below)? {
            return Err(hosts_dev::refusal());
        }
        self.mount_facts.refuse_shared(&below)?;
        let is_lost = why == Why::Volume && !is_read_only(&*below);
        // The container can no longer write to a covered directory, which an optional file does not justify.
        if is_lost && self.need == Need::Optional {
            return Err(read_only::not_covered(path));
        }
        let mut mounts = Vec::new();
        let covered = read_only::cover(&self.rootfs, path, &below, why, self.label.as_ref(), &mut mounts);
        let layer = mounts.last().filter(|_| covered.is_ok()).cloned();
        self.changes.extend(mounts.into_iter().map(Change::Mounted));
        covered?;
        self.forget_directories();
        if let Some(layer) = layer {
            self.mount_facts.add_layer(&layer)?;
            self.layers.push(layer);
        }
        if is_lost {
            self.findings.push(read_only::covered(path));
        }
        Ok(())
    }
}

/// Returns why no name may be created in this directory, which `path` led to; `None` if it may.
///
/// For a container with a user namespace, the hook still has the capabilities of the host's root, which override all file
/// permissions. The container's root user has capabilities only for files whose owner and group are mapped in the namespace;
/// see user_namespaces(7). In other directories, the hook would create a file that the container owns where the container
/// itself could not.
fn obstacle(
    known: &mut Mounts,
    rootfs: &Root,
    ids: Option<&Ids>,
    dir: &Rc<OwnedFd>,
    path: &Path,
) -> Result<Option<Why>> {
    if !known.is_own(rootfs, dir, path)? {
        return Ok(Some(Why::Volume));
    }
    let Some(ids) = ids else { return Ok(None) };
    let stat = rustix::fs::fstat(&**dir)?;
    Ok(if ids.has(stat.st_uid, stat.st_gid) { None } else { Some(Why::Owner) })
}
