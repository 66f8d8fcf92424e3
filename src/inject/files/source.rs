//! A mount source: opened and checked on the host, attached in the container.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::{CWD, FileType, Mode, OFlags, Stat};

use base::paths::HostPath;
use base::sys::mount::{self, Api, MountAttrs, in_place};

/// A file or directory of the host's, ready to be mounted.
#[derive(Debug)]
pub(crate) struct Source {
    tree: Tree,
    attrs: MountAttrs,
}

#[derive(Debug)]
enum Tree {
    Detached(OwnedFd),
    /// For [`Api::InPlace`]: mount(2) rejects a source of another mount namespace. So the path is opened again in the
    /// container's namespace, which contains the host's tree until pivot_root(2), and must lead to the same inode. The kernel
    /// cannot reuse the inode number while the descriptor is open.
    Path(HostPath, OwnedFd),
    /// A mount in the container
    Mounted(OwnedFd),
}

impl Source {
    /// Opens `path`, and clones it into a detached mount if the kernel supports that.
    ///
    /// `path` was resolved before. If its last component has become a symlink since then, the link itself is mounted. The container's
    /// processes resolve it like a link of the image, below their root.
    ///
    /// # Errors
    /// If it is missing, or cannot be mounted.
    pub(crate) fn open(path: &HostPath, attrs: MountAttrs, api: Api) -> Result<Self> {
        let fd = match api {
            Api::Detached => mount::clone_tree_at(path.as_path(), attrs),
            Api::InPlace => open_real(path.as_path()).map_err(Into::into),
        };
        let fd = fd.with_context(|| format!("open {path}"))?;
        let tree = match api {
            Api::Detached => Tree::Detached(fd),
            Api::InPlace => Tree::Path(path.clone(), fd),
        };
        Ok(Self { tree, attrs })
    }

    /// Creates a source from an open file. `path` is the path that it was opened from, or `None` if the file is in the container, for
    /// a second path there.
    ///
    /// # Errors
    /// If it cannot be mounted.
    pub(crate) fn from_fd(
        opened: OwnedFd,
        path: Option<HostPath>,
        attrs: MountAttrs,
        api: Api,
    ) -> Result<Self> {
        let tree = match (api, path) {
            (Api::Detached, _) => {
                Tree::Detached(mount::clone_tree(&opened, attrs).context("open_tree")?)
            }
            (Api::InPlace, Some(path)) => Tree::Path(path, opened),
            (Api::InPlace, None) => Tree::Mounted(opened),
        };
        Ok(Self { tree, attrs })
    }

    /// Returns the file type, owner and device number of the opened file.
    ///
    /// # Errors
    /// If fstat(2) fails.
    pub(crate) fn stat(&self) -> rustix::io::Result<Stat> {
        let (Tree::Detached(fd) | Tree::Path(_, fd) | Tree::Mounted(fd)) = &self.tree;
        rustix::fs::fstat(fd)
    }

    /// Mounts the source at `path` in `dir`, where the hook just created the mount point; returns the mount. If another process
    /// replaces the mount point, the source is mounted on the replacement; a symlink is not followed.
    ///
    /// # Errors
    /// If the kernel refuses. With [`Api::InPlace`], also if the mount point is now a symlink.
    pub(crate) fn attach_at(self, dir: &OwnedFd, path: &Path) -> Result<OwnedFd> {
        if let Tree::Detached(mount) = self.tree {
            mount::attach_at(&mount, dir, path).context("move_mount")?;
            return Ok(mount);
        }
        let point = open_in(dir, path.as_os_str())?;
        let is_link =
            FileType::from_raw_mode(rustix::fs::fstat(&point)?.st_mode) == FileType::Symlink;
        ensure!(!is_link, "its mount point was replaced in the meantime");
        self.attach(dir, path, point)
    }

    /// Mounts the source on `point`, which was opened as `name` in `dir`, and returns the mount.
    ///
    /// # Errors
    /// If the kernel refuses, or the path now leads to another file.
    pub(crate) fn attach(self, dir: &OwnedFd, name: &Path, point: OwnedFd) -> Result<OwnedFd> {
        if let Tree::Detached(mount) = self.tree {
            mount::attach(&mount, point).context("move_mount")?;
            return Ok(mount);
        }
        let stat = self.stat()?;
        let source = match self.tree {
            Tree::Path(path, checked) => {
                let source =
                    open_real(path.as_path()).with_context(|| format!("open {path} again"))?;
                let same = same_file(&rustix::fs::fstat(&source)?, &rustix::fs::fstat(&checked)?);
                ensure!(same, "its source was replaced in the meantime");
                source
            }
            Tree::Detached(mount) | Tree::Mounted(mount) => mount,
        };
        // mount(2) ignores other flags together with MS_BIND: a bind mount has the flags of its source until it is remounted.
        in_place::bind(&source, point).context("mount")?;
        restrict(dir, name, &stat, self.attrs).inspect_err(|_| drop(in_place::take_back(dir, name)))
    }
}

/// Restricts the mount of this file that was just made at `name`, and returns it.
fn restrict(dir: &OwnedFd, name: &Path, source: &Stat, attrs: MountAttrs) -> Result<OwnedFd> {
    // The descriptor of the mount point shows the file below the mount: only the name leads to the mount. The kernel does not
    // let a mount point be renamed or removed in this namespace, and the inode shows that the mount is ours.
    let mounted = open_in(dir, name.as_os_str())?;
    ensure!(
        same_file(&rustix::fs::fstat(&mounted)?, source),
        "its mount point was replaced in the meantime"
    );
    in_place::restrict(&mounted, attrs).context("restrict the mount")?;
    Ok(mounted)
}

fn open_real(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(
        CWD,
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// Opens `name` in `dir` without following a symlink.
pub(in crate::inject) fn open_in(dir: impl AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(
        dir,
        name,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// Reports whether both describe the same file.
pub(in crate::inject) const fn same_file(a: &Stat, b: &Stat) -> bool {
    a.st_dev == b.st_dev && a.st_ino == b.st_ino
}
