//! The directories of a container in which the hook may create names. A directory that is read-only or on a volume gets a layer.
//! Paths are resolved below a descriptor of the root file system only.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result};
use rustix::fs::OFlags;
use rustix::io::Errno;

use base::paths::ContainerPath;
use base::sys::ids::Ids;
use base::sys::in_root::{Created, OpenedDir, Root};
use base::sys::mount::{Api, Label, statmount};
use nvidia_host::edits::Need;

use crate::inject::apply::decide::{self, Uncreatable};
use crate::inject::container::Inside;
use crate::inject::container::host_dev::HostDev;
use crate::inject::container::mounts::{self, Mounts};
use crate::inject::files::directory::{Present, find_present};
use crate::inject::files::tmpfs::is_read_only;
use crate::inject::layer::overlay::{self, CoverReason};
use crate::inject::layer::remounted::Remounts;
use crate::inject::remove::undo::{Change, Done, Mark};
use crate::oci::spec_view::Mount;

/// The file system of a container whose mount namespace this process has entered.
#[derive(Debug)]
pub(in crate::inject) struct Layout {
    pub rootfs: Root,
    /// The ids of its user namespace, unless that is also the hook's
    ids: Option<Ids>,
    host_dev: HostDev,
    /// SELinux label of the file systems that the hook mounts
    pub label: Option<Label>,
    /// Which mounts are the container's own, and which are visible elsewhere
    pub mounts: Mounts,
    /// Mounts that a layer does not hide
    remounts: Remounts,
    /// Directories in which the hook may create names
    own_directories: Vec<Rc<OwnedFd>>,
    /// Overlays on read-only directories and on directories of volumes
    layers: Vec<Rc<OwnedFd>>,
    /// Open directories by their path, because most files go to a few of them. Cleared when something is mounted on a
    /// directory.
    opened: Vec<(PathBuf, Rc<OwnedFd>)>,
    /// Whether the container requires the names that are created
    pub need: Need,
    pub done: Done,
}

impl Layout {
    /// Returns the layout of an unchanged container. `inside` must have been opened in the current mount namespace. `of_runtime`:
    /// the mounts in config.json.
    pub(in crate::inject) fn new(
        inside: Inside,
        api: Api,
        host_dev: HostDev,
        label: Option<Label>,
        of_runtime: &[Mount],
    ) -> Self {
        Self {
            rootfs: inside.rootfs,
            ids: inside.ids,
            host_dev,
            label,
            mounts: Mounts::new(mounts::has_own_dev(of_runtime)),
            remounts: Remounts::new(of_runtime, api),
            own_directories: Vec::new(),
            layers: Vec::new(),
            opened: Vec::new(),
            need: Need::Required,
            done: Done::default(),
        }
    }

    /// Returns a point to which [`Self::undo_since`] returns.
    pub(in crate::inject) const fn mark(&self) -> (Mark, usize) {
        (self.done.mark(), self.layers.len())
    }

    /// Undoes all changes after the mark. A detached layer cannot be sealed, and names created in it would be lost, so it is forgotten.
    pub(in crate::inject) fn undo_since(&mut self, (mark, layers): (Mark, usize)) {
        self.layers.truncate(layers);
        self.forget_directories();
        self.mounts.forget_layers(layers);
        self.done.undo_since(mark, &self.rootfs);
    }

    /// Undoes all changes.
    pub(in crate::inject) fn undo(self) {
        let Self {
            rootfs,
            mounts,
            own_directories,
            layers,
            opened,
            done,
            ..
        } = self;
        drop((mounts, own_directories, layers, opened));
        done.undo(&rootfs);
    }

    /// Makes the layers read-only. They are writable until here because the steps create names in them.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(in crate::inject) fn seal(&self) -> Result<()> {
        self.layers
            .iter()
            .try_for_each(|layer| overlay::seal(layer))
    }

    /// Opens the directory `path`, created if it is missing.
    pub(in crate::inject) fn directory(&mut self, path: &Path) -> Result<Rc<OwnedFd>> {
        if let Some((_, dir)) = self
            .opened
            .iter()
            .find(|(known, _)| known.as_os_str() == path.as_os_str())
        {
            return Ok(Rc::clone(dir));
        }
        let mut created = Vec::new();
        let mut opened = self.create_dir_all(path, &mut created);
        if opened
            .as_ref()
            .is_err_and(|error| error.kind() == std::io::ErrorKind::ReadOnlyFilesystem)
        {
            self.cover(self.rootfs.existing_part(path))?;
            opened = self.create_dir_all(path, &mut created);
        }
        self.done.add_directories(created);
        let dir = opened
            .with_context(|| format!("open its directory {:?}", Path::new("/").join(path)))?;
        self.opened.push((path.to_owned(), Rc::clone(&dir)));
        Ok(dir)
    }

    /// Opens a directory and creates missing parents. Fails with EROFS, like a read-only file system, where the hook must not
    /// create names.
    fn create_dir_all(
        &mut self,
        path: &Path,
        created: &mut Vec<Created>,
    ) -> std::io::Result<Rc<OwnedFd>> {
        let (known, rootfs, ids) = (&mut self.mounts, &self.rootfs, self.ids.as_ref());
        let OpenedDir { dir, created_below } = rootfs.create_dir_all(path, created, |dir| {
            match obstacle(known, rootfs, ids, dir, path) {
                Ok(None) => Ok(()),
                Ok(Some(_)) => Err(Errno::ROFS.into()),
                Err(error) => Err(std::io::Error::other(error)),
            }
        })?;
        if let Some(existing) = created_below {
            self.mounts.add_created(&dir, &existing);
            self.own_directories.push(Rc::clone(&dir));
        }
        Ok(dir)
    }

    /// Forgets open directories: after a mount on one of them, its path leads to the mount.
    pub(in crate::inject) fn forget_directories(&mut self) {
        self.opened.clear();
        self.own_directories.clear();
        self.mounts.forget_directories();
    }

    /// Opens the parent directory of `path`, created if it is missing.
    pub(in crate::inject) fn parent(&mut self, path: &ContainerPath) -> Result<Rc<OwnedFd>> {
        self.directory(parent_path(path))
    }

    /// Reports whether names may be created, replaced and removed in this directory, which `path` led to.
    pub(in crate::inject) fn may_create(&mut self, dir: &Rc<OwnedFd>, path: &Path) -> Result<bool> {
        if self
            .own_directories
            .iter()
            .any(|known| Rc::ptr_eq(known, dir))
        {
            return Ok(true);
        }
        let may = obstacle(&mut self.mounts, &self.rootfs, self.ids.as_ref(), dir, path)?.is_none();
        if may {
            self.own_directories.push(Rc::clone(dir));
        }
        Ok(may)
    }

    /// Returns `dir` if names can be replaced in it, and otherwise a layer on it.
    pub(in crate::inject) fn writable(
        &mut self,
        dir: Rc<OwnedFd>,
        path: &ContainerPath,
    ) -> Result<Rc<OwnedFd>> {
        if self.may_create(&dir, parent_path(path))? && !is_read_only(&*dir) {
            return Ok(dir);
        }
        self.covered_parent(path)
    }

    /// Mounts a layer on the parent directory of `path`, and opens it.
    pub(in crate::inject) fn covered_parent(
        &mut self,
        path: &ContainerPath,
    ) -> Result<Rc<OwnedFd>> {
        self.cover(parent_path(path))?;
        self.parent(path)
    }

    /// Creates a name with `make`, in a layer if the directory is read-only or on a volume. Returns the directory and the
    /// result of `make`; `None` if the name exists, which only the attempt to create it determines without a race.
    pub(in crate::inject) fn make<T>(
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
        // For an existing name, the kernel reports EEXIST also on a read-only file system (`filename_create` in fs/namei.c). So EROFS
        // means that the name is free.
        let mut made = make(&dir, name);
        if matches!(made, Err(Errno::ROFS)) {
            dir = self.covered_parent(path)?;
            made = make(&dir, name);
        }
        match made {
            Ok(made) => {
                self.done.add(Change::Created(Created {
                    dir: Rc::clone(&dir),
                    name: name.into(),
                    is_dir,
                }));
                Ok(Some((dir, made)))
            }
            Err(Errno::EXIST) => Ok(None),
            Err(errno) => Err(anyhow::Error::new(errno).context("create it")),
        }
    }

    /// Mounts a layer on the directory `path`.
    fn cover(&mut self, path: &Path) -> Result<()> {
        self.forget_directories();
        let below = Rc::new(
            self.rootfs
                .open_at(path, OFlags::PATH | OFlags::DIRECTORY)?,
        );
        let why = obstacle(
            &mut self.mounts,
            &self.rootfs,
            self.ids.as_ref(),
            &below,
            path,
        )?
        .unwrap_or(CoverReason::ReadOnly);
        let lost = decide::cover(Uncreatable {
            path,
            why,
            is_read_only: is_read_only(&*below) || self.becomes_read_only(&below)?,
            is_shared: self.mounts.is_shared(&below)?,
            in_hosts_dev: self.host_dev.has(&*below)?,
            need: self.need,
        })?;
        let mut mounts = Vec::new();
        let label = self.label.as_ref();
        let covered = overlay::cover(
            &self.rootfs,
            path,
            &below,
            why,
            &self.remounts,
            label,
            &mut mounts,
        );
        self.done.add_mounts(mounts);
        let layer = covered?;
        self.forget_directories();
        self.mounts.add_layer(&layer)?;
        self.layers.push(layer);
        self.done.findings.extend(lost);
        Ok(())
    }
}

impl Layout {
    /// Reports whether config.json has the runtime mount the volume of this directory read-only. crun remounts bind mounts only after
    /// the hooks (`finalize_mounts`).
    fn becomes_read_only(&self, dir: &OwnedFd) -> Result<bool> {
        let mount = statmount::id(dir)?;
        for path in self.remounts.read_only_paths() {
            let path = path.strip_prefix("/").unwrap_or(path);
            let Ok(point) = self.rootfs.open_at(path, OFlags::PATH) else {
                continue;
            };
            if statmount::id(&point)? == mount {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn parent_path(path: &ContainerPath) -> &Path {
    path.relative().parent().unwrap_or_else(|| Path::new("/"))
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
) -> Result<Option<CoverReason>> {
    if !known.is_own(rootfs, dir, path)? {
        return Ok(Some(CoverReason::Volume));
    }
    let Some(ids) = ids else { return Ok(None) };
    let stat = rustix::fs::fstat(&**dir)?;
    Ok(if ids.has(stat.st_uid, stat.st_gid) {
        None
    } else {
        Some(CoverReason::Owner)
    })
}
