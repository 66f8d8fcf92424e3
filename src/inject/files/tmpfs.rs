//! A read-only tmpfs in a container, with small files and mounts in it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FileType, Mode, OFlags, StatVfsMountFlags};
use rustix::io::Errno;

use base::sys::mount::{self, Api, Label, MountAttrs, in_place};

use crate::inject::container::mounts::TMPFS_MAGIC;
use crate::inject::files::source::{Source, open_in, same_file};

/// Mount options: the tmpfs contains only small files and mount points.
const OPTIONS: [(&std::ffi::CStr, &std::ffi::CStr); 2] = [(c"mode", c"0555"), (c"size", c"1m")];

/// The content of such a tmpfs.
#[derive(Debug)]
pub(crate) struct Directory {
    files: Vec<(OsString, Vec<u8>)>,
    mounts: Vec<(PathBuf, FileType, Source)>,
    label: Option<Label>,
    /// The tmpfs with its files, for [`Api::Detached`]
    detached: Option<OwnedFd>,
}

impl Directory {
    /// Creates and fills the tmpfs if the kernel supports detached mounts. If a seccomp filter denies only the calls for file systems,
    /// [`Self::attach`] mounts it with mount(2).
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn prepare(
        files: Vec<(OsString, Vec<u8>)>,
        mounts: Vec<(PathBuf, FileType, Source)>,
        api: Api,
        label: Option<&Label>,
    ) -> Result<Self> {
        let mut directory = Self {
            files,
            mounts,
            label: label.cloned(),
            detached: None,
        };
        if api == Api::Detached {
            let Some(tmpfs) = mount::new_tmpfs(&OPTIONS, label).context("create a tmpfs")? else {
                return Ok(directory);
            };
            directory.fill(&tmpfs)?;
            directory.detached = Some(tmpfs);
        }
        Ok(directory)
    }

    /// Mounts the tmpfs on the directory `point`, which was opened as `name` in `dir`. Pushes the mounts to `done`, newest
    /// last.
    ///
    /// # Errors
    /// If the kernel refuses; `done` then has the mounts so far.
    pub(crate) fn attach(
        mut self,
        dir: &OwnedFd,
        name: &OsStr,
        point: OwnedFd,
        done: &mut Vec<Rc<OwnedFd>>,
    ) -> Result<()> {
        let in_place = self.detached.is_none();
        let tmpfs = match self.detached.take() {
            Some(tmpfs) => {
                mount::attach(&tmpfs, point).context("move_mount")?;
                let tmpfs = Rc::new(tmpfs);
                done.push(Rc::clone(&tmpfs));
                tmpfs
            }
            None => {
                in_place::mount_tmpfs(&point, "mode=0555,size=1m", self.label.as_ref())
                    .context("mount a tmpfs")?;
                let tmpfs = open_mounted(dir, name, &point);
                let tmpfs = Rc::new(
                    tmpfs.inspect_err(|_| drop(in_place::take_back(dir, Path::new(name))))?,
                );
                done.push(Rc::clone(&tmpfs));
                self.fill(&tmpfs)?;
                tmpfs
            }
        };
        for (path, _, source) in self.mounts {
            let mounted = source
                .attach_at(&tmpfs, &path)
                .with_context(|| format!("mount {path:?} in it"))?;
            done.push(mounted.into());
        }
        if in_place {
            in_place::restrict(&tmpfs, MountAttrs::PROC_FILE).context("restrict the mount")
        } else {
            mount::restrict(&tmpfs, MountAttrs::PROC_FILE).context("mount_setattr")
        }
    }

    fn fill(&self, tmpfs: &OwnedFd) -> Result<()> {
        for (name, content) in &self.files {
            write_file(tmpfs, name, content)?;
        }
        self.mounts
            .iter()
            .try_for_each(|(path, kind, _)| make_point(tmpfs, path, *kind))
    }
}

/// Opens the mount on `point`, which `name` leads to.
fn open_mounted(dir: &OwnedFd, name: &OsStr, point: &OwnedFd) -> Result<OwnedFd> {
    let tmpfs = open_in(dir, name)?;
    let is_point = same_file(&rustix::fs::fstat(&tmpfs)?, &rustix::fs::fstat(point)?);
    ensure!(!is_point, "its mount point was replaced in the meantime");
    Ok(tmpfs)
}

fn write_file(tmpfs: &OwnedFd, name: &OsStr, content: &[u8]) -> Result<()> {
    if content.is_empty() {
        let mode = Mode::from_raw_mode(0o444);
        return Ok(rustix::fs::mknodat(
            tmpfs,
            name,
            FileType::RegularFile,
            mode,
            0,
        )?);
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(tmpfs, name, flags, Mode::from_raw_mode(0o444))?;
    Ok(File::from(file).write_all(content)?)
}

/// Creates a mount point in the tmpfs.
fn make_point(tmpfs: &OwnedFd, path: &Path, kind: FileType) -> Result<()> {
    match kind {
        FileType::Directory => make_dirs(tmpfs, path)?,
        FileType::RegularFile => {
            if let Some(parent) = path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty())
            {
                make_dirs(tmpfs, parent)?;
            }
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
            rustix::fs::openat(tmpfs, path, flags, Mode::from_raw_mode(0o444))?;
        }
        _ => bail!("{path:?} is neither a file nor a directory"),
    }
    Ok(())
}

/// `mkdir -p`. It tries the whole path first, because most directories have the same parent.
fn make_dirs(tmpfs: &OwnedFd, path: &Path) -> rustix::io::Result<()> {
    match (make_dir(tmpfs, path), path.parent()) {
        (Err(Errno::NOENT), Some(parent)) => {
            make_dirs(tmpfs, parent).and_then(|()| make_dir(tmpfs, path))
        }
        (made, _) => made,
    }
}

fn make_dir(tmpfs: &OwnedFd, path: &Path) -> rustix::io::Result<()> {
    match rustix::fs::mkdirat(tmpfs, path, Mode::from_raw_mode(0o555)) {
        Err(Errno::EXIST) => Ok(()),
        made => made,
    }
}

/// Reports whether a directory is a read-only tmpfs, which an earlier run of the hook has mounted there: images cannot mount,
/// and runtimes mask paths only after the hooks.
pub(in crate::inject) fn is_own_tmpfs(point: impl AsFd) -> bool {
    is_read_only(&point) && rustix::fs::fstatfs(&point).is_ok_and(|fs| fs.f_type == TMPFS_MAGIC)
}

/// Reports whether the mount or the file system of a directory is read-only.
pub(in crate::inject) fn is_read_only(dir: impl AsFd) -> bool {
    rustix::fs::fstatvfs(&dir).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::RDONLY))
}
