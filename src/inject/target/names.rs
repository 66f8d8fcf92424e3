//! Where names are created, replaced and removed in a container: nothing else does that.

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

use super::{Done, Target, parent_path};
use crate::inject::directory::{Present, find_present};
use crate::inject::hosts_dev;
use crate::inject::mounts::Mounts;
use crate::inject::read_only::{self, Why};
use crate::inject::tmpfs::is_read_only;

impl Target {
    /// The open directory of this path, made if necessary.
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
        self.done.extend(created.into_iter().map(Done::Created));
        let dir = opened.with_context(|| format!("open its directory {:?}", Path::new("/").join(path)))?;
        self.opened.push((path.to_owned(), Rc::clone(&dir)));
        Ok(dir)
    }

    /// Like a read-only file system refuses it, what is not to be created is refused.
    pub(super) fn create_dir_all(&mut self, path: &Path, created: &mut Vec<Created>) -> std::io::Result<Rc<OwnedFd>> {
        let (known, rootfs, ids) = (&mut self.known, &self.rootfs, self.ids.as_ref());
        rootfs.create_dir_all(path, created, |dir| match why_not(known, rootfs, ids, dir, path) {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(Errno::ROFS.into()),
            Err(error) => Err(std::io::Error::other(error)),
        })
    }

    /// Something is mounted on one: its path leads elsewhere now.
    pub(super) fn forget_directories(&mut self) {
        self.opened.clear();
        self.own.clear();
        self.known.forget_directories();
    }

    /// The open directory in which `path` lies, made if necessary.
    pub(super) fn parent(&mut self, path: &ContainerPath) -> Result<Rc<OwnedFd>> {
        self.directory(parent_path(path))
    }

    /// Whether names may be created, replaced and removed in this directory, to which `path` led.
    pub(super) fn may_create(&mut self, dir: &Rc<OwnedFd>, path: &Path) -> Result<bool> {
        if self.own.iter().any(|known| Rc::ptr_eq(known, dir)) {
            return Ok(true);
        }
        let may = why_not(&mut self.known, &self.rootfs, self.ids.as_ref(), dir, path)?.is_none();
        if may {
            self.own.push(Rc::clone(dir));
        }
        Ok(may)
    }

    /// The same directory again, where a name can be replaced.
    pub(super) fn writable(&mut self, dir: Rc<OwnedFd>, path: &ContainerPath) -> Result<Rc<OwnedFd>> {
        if self.may_create(&dir, parent_path(path))? && !is_read_only(&*dir) {
            return Ok(dir);
        }
        self.covered_parent(path)
    }

    pub(super) fn covered_parent(&mut self, path: &ContainerPath) -> Result<Rc<OwnedFd>> {
        self.cover(parent_path(path))?;
        self.parent(path)
    }

    /// Makes something new, in a layer of ours if its directory is read-only or a volume's; returns the directory, too. `None` if the
    /// name is taken: whether it is, is asked by making it, which no look beforehand can be sure of.
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
                self.done.push(Done::Created(Created { dir: Rc::clone(&dir), name: name.into(), is_dir }));
                Ok(Some((dir, made)))
            }
            Err(Errno::EXIST) => Ok(None),
            Err(errno) => Err(anyhow::Error::new(errno).context("make it")),
        }
    }

    pub(super) fn cover(&mut self, path: &Path) -> Result<()> {
        self.forget_directories();
        let below = Rc::new(self.rootfs.open_at(path, OFlags::PATH | OFlags::DIRECTORY)?);
        let why = why_not(&mut self.known, &self.rootfs, self.ids.as_ref(), &below, path)?.unwrap_or(Why::ReadOnly);
        if why == Why::Volume && self.hosts_dev.has(&*below)? {
            return Err(hosts_dev::refusal());
        }
        self.known.refuse_shared(&below)?;
        let is_lost = why == Why::Volume && !is_read_only(&*below);
        // The container cannot write there any more: not for something that it can do without.
        if is_lost && self.need == Need::Optional {
            return Err(read_only::not_covered(path));
        }
        let mut mounts = Vec::new();
        let covered = read_only::cover(&self.rootfs, path, &below, why, self.label.as_ref(), &mut mounts);
        let layer = mounts.last().filter(|_| covered.is_ok()).cloned();
        self.done.extend(mounts.into_iter().map(Done::Mounted));
        covered?;
        self.forget_directories();
        if let Some(layer) = layer {
            self.known.add_layer(&layer)?;
            self.layers.push(layer);
        }
        if is_lost {
            self.findings.push(read_only::covered(path));
        }
        Ok(())
    }
}

/// Why no name may be created in this directory, to which `path` led.
///
/// In a container with a user namespace, our capabilities are still those of the host's root, and override the permissions of
/// any file. Those of the container's root user are good for files whose owner his namespace knows; see user_namespaces(7). In
/// other directories he may have no right to create a name, which would be his own, and which he could write to.
fn why_not(
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
