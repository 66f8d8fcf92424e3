//! Applies steps inside the container's mount namespace. Paths are resolved below a descriptor of the root file system only.

mod cdi_hook;
mod created;
mod ld_so_cache;
mod ld_so_conf;
mod names;
mod own_node;
mod stale;

pub(super) use cdi_hook::MAX_PARAMS;
pub(super) use stale::is_library_of_a_driver;

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};

use base::paths::ContainerPath;
use base::report::{Failure, Finding, catalog};
use base::sys::ids::Ids;
use base::sys::in_root::{Created, Root};
use base::sys::mount::{self, Api, Label, MountAttrs};
use nvidia_host::edits::Need;
use nvidia_host::edits::placement::Link;

use super::container::Inside;
use super::directory::{
    Present, find_present, is_unchanged, make_copy, make_file, replace_file, replace_link, replace_with_copy,
};
use super::hosts_dev::HostsDev;
use super::mounts::Mounts;
use super::source::Source;
use super::tmpfs::{Directory, is_own_tmpfs};
use super::{Apply, Finished, Runner, read_only};
use crate::record::created::Entry;

/// A container whose mount namespace this process has entered, and the changes made to it.
#[derive(Debug)]
pub(crate) struct Target {
    rootfs: Root,
    /// The ids of its user namespace, unless that is also the hook's
    ids: Option<Ids>,
    api: Api,
    hosts_dev: HostsDev,
    /// SELinux label of the file systems that the hook mounts
    label: Option<Label>,
    /// Which mounts are the container's own, and which are visible elsewhere
    mount_facts: Mounts,
    /// Directories in which the hook may create names
    own_directories: Vec<Rc<OwnedFd>>,
    /// Changes to the container, newest last
    changes: Vec<Change>,
    /// Mounted files by their path
    mounts: Vec<(ContainerPath, Rc<OwnedFd>)>,
    /// Whether the container requires the step that is being carried out
    need: Need,
    /// Overlays on read-only directories and on directories of volumes
    layers: Vec<Rc<OwnedFd>>,
    /// Open directories by their path, because most files go to a few of them. Cleared when something is mounted on a
    /// directory.
    opened: Vec<(PathBuf, Rc<OwnedFd>)>,
    /// Whether a step lists library directories for the image's ldconfig
    lists_directories: bool,
    /// Whether a link to a library of another driver version was replaced: an earlier start used that driver
    had_other_driver: bool,
    /// Files that an earlier start with another driver version left
    stale: Vec<Created>,
    /// Whether the engine made this root file system for the container
    is_own: bool,
    /// Created names, for poststop
    created: Vec<Entry>,
    findings: Vec<Finding>,
}

/// Facts about a container that are determined before its mount namespace is entered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TargetFacts {
    /// Whether config.json has the runtime mount a tmpfs at /dev
    pub has_own_dev: bool,
    /// Whether the engine made its root file system for it
    pub is_own: bool,
}

/// A change to the container that can be undone.
#[derive(Debug)]
enum Change {
    Created(Created),
    Mounted(Rc<OwnedFd>),
    /// A symlink of the image that the hook replaced
    Replaced {
        dir: Rc<OwnedFd>,
        name: PathBuf,
        text: PathBuf,
    },
    /// A file of an earlier start that the hook replaced or removed
    Rewritten {
        dir: Rc<OwnedFd>,
        name: PathBuf,
        old: Vec<u8>,
    },
}

/// Where a source is mounted.
enum MountPoint {
    /// Nothing to mount on: the requested file is already there
    Present,
    /// An empty file that the hook created in this directory
    New(Rc<OwnedFd>),
    /// A file of the image, and the directory that contains it
    Existing(Rc<OwnedFd>, OwnedFd),
}

impl Runner for Target {
    fn run(&mut self, apply: Apply<'_, Self>, need: Need) -> Result<()> {
        self.need = need;
        let (changes, layers, mounts) = (self.changes.len(), self.layers.len(), self.mounts.len());
        let findings = self.findings.len();
        let result = apply(self);
        if result.is_err() {
            // Forget what the step added. A detached layer cannot be sealed, and names created in it would be lost.
            self.layers.truncate(layers);
            self.mounts.truncate(mounts);
            self.findings.truncate(findings);
            self.forget_directories();
            self.mount_facts.forget_layers(layers);
            undo_all(self.changes.split_off(changes));
        }
        result
    }

    fn add_finding(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    fn undo(self) {
        // A mount with open descriptors is busy: umount(2) would fail with EBUSY.
        drop(self.mounts);
        drop(self.layers);
        drop(self.opened);
        drop(self.mount_facts);
        drop(self.own_directories);
        undo_all(self.changes);
    }

    fn finish(&mut self) -> Result<Finished> {
        // A layer stays writable until here because the steps create names in it.
        self.layers.iter().try_for_each(|layer| read_only::seal(layer))?;
        // The setup is complete. A leftover that cannot be removed does no harm.
        self.remove_stale();
        let created = std::mem::take(&mut self.created);
        Ok(Finished { findings: std::mem::take(&mut self.findings), created })
    }
}

impl Target {
    /// Creates a target without changes. `inside` must have been opened in the current mount namespace.
    pub(crate) fn new(inside: Inside, api: Api, hosts_dev: HostsDev, label: Option<Label>, facts: TargetFacts) -> Self {
        Self {
            rootfs: inside.rootfs,
            ids: inside.ids,
            api,
            hosts_dev,
            label,
            mount_facts: Mounts::new(facts.has_own_dev),
            own_directories: Vec::new(),
            changes: Vec::new(),
            mounts: Vec::new(),
            need: Need::Required,
            layers: Vec::new(),
            opened: Vec::new(),
            lists_directories: false,
            had_other_driver: false,
            stale: Vec::new(),
            is_own: facts.is_own,
            created: Vec::new(),
            findings: Vec::new(),
        }
    }

    pub(super) fn mount(&mut self, source: Source, target: &ContainerPath) -> Result<()> {
        let at = self.mount_point(&source, target, None)?;
        self.mount_on(source, target, at)
    }

    /// Creates a file that processes in the container may change. What the image has at this path stays, unless it is what a start of
    /// a container left: the copy of another driver, or the mount point of a container from which the image was made.
    pub(super) fn copy(&mut self, content: &[u8], target: &ContainerPath) -> Result<()> {
        if self.make(target, false, |dir, name| make_copy(dir, name, content))?.is_some() {
            return Ok(());
        }
        let dir = self.parent(target)?;
        let name = target.file_name();
        if let Present::Other(_, stat) = find_present(&dir, name)?
            && is_unchanged(&stat)
        {
            let dir = self.writable(dir, target)?;
            let name = Path::new(name);
            replace_with_copy(&dir, name, content)?;
            self.note_created(target.relative(), &dir);
            self.changes.push(Change::Rewritten { dir, name: name.into(), old: Vec::new() });
        }
        Ok(())
    }

    /// Returns where to mount `source`: on a new empty file, or on an existing file.
    fn mount_point(
        &mut self,
        source: &Source,
        target: &ContainerPath,
        device: Option<(u32, u32)>,
    ) -> Result<MountPoint> {
        match self.make(target, false, make_file)? {
            Some((dir, ())) => Ok(MountPoint::New(dir)),
            None => self.existing_point(source, target, device),
        }
    }

    fn mount_on(&mut self, source: Source, target: &ContainerPath, at: MountPoint) -> Result<()> {
        let name = Path::new(target.file_name());
        let mounted = match at {
            MountPoint::Present => return Ok(()),
            MountPoint::New(dir) => {
                self.mount_facts.refuse_shared_dir(&dir)?;
                source.attach_at(&dir, name)?
            }
            MountPoint::Existing(dir, point) => {
                self.mount_facts.refuse_shared(&point)?;
                source.attach(&dir, name, point)?
            }
        };
        let mounted = Rc::new(mounted);
        self.changes.push(Change::Mounted(Rc::clone(&mounted)));
        self.mounts.push((target.clone(), mounted));
        Ok(())
    }

    /// Returns the mount point at a name that is already used. A symlink is replaced with a file and never followed: its target
    /// is the image's choice, and may be any file of the host (CVE-2024-0133).
    fn existing_point(
        &mut self,
        source: &Source,
        target: &ContainerPath,
        device: Option<(u32, u32)>,
    ) -> Result<MountPoint> {
        let dir = self.parent(target)?;
        let name = target.file_name();
        Ok(match find_present(&dir, name)? {
            Present::Other(_, stat) if is_device(&stat, device) => MountPoint::Present, // the engine created it
            Present::Other(_, stat) if source.is(&stat) => MountPoint::Present, // an earlier run of the hook mounted it
            Present::Other(point, stat) => {
                ensure!(!is_directory(&stat), "the image has a directory at this path");
                self.note_left(target, &stat);
                MountPoint::Existing(dir, point)
            }
            Present::Link(text) => {
                let dir = self.writable(dir, target)?;
                rustix::fs::unlinkat(&*dir, name, AtFlags::empty())?;
                self.changes.push(Change::Replaced { dir, name: name.into(), text });
                let made = self.make(target, false, make_file)?;
                MountPoint::New(made.context("another process created it in the meantime")?.0)
            }
            Present::Nothing => bail!("another process removed it in the meantime"),
        })
    }

    pub(super) fn link(&mut self, Link { link, text, file, .. }: &Link) -> Result<()> {
        let text = Path::new(text);
        if self.make(link, false, |dir, name| rustix::fs::symlinkat(text, dir, name))?.is_some() {
            return Ok(());
        }
        let dir = self.parent(link)?;
        let name = link.file_name();
        match find_present(&dir, name)? {
            Present::Link(old) if old == text => {}
            Present::Link(old) => {
                let dir = self.writable(dir, link)?;
                replace_link(&dir, Path::new(name), text)?;
                self.had_other_driver |= stale::is_library_of_a_driver(&old);
                self.changes.push(Change::Replaced { dir, name: name.into(), text: old });
            }
            Present::Nothing => bail!("another process removed it in the meantime"),
            Present::Other(point, stat) => {
                ensure!(
                    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
                    "the image has something other than a regular file at this path"
                );
                self.mount_over(&dir, point, &stat, link, file)?;
            }
        }
        Ok(())
    }

    /// Mounts a driver file over a file of the image that has the name of a driver link.
    fn mount_over(
        &mut self,
        dir: &OwnedFd,
        point: OwnedFd,
        stat: &Stat,
        link: &ContainerPath,
        file: &ContainerPath,
    ) -> Result<()> {
        let mounted = match self.mounts.iter().find(|(path, _)| path == file) {
            Some((_, mounted)) => Rc::clone(mounted),
            // The engine has mounted it, for example from a CDI spec.
            None => match self.rootfs.open_existing(file.relative(), OFlags::PATH | OFlags::NOFOLLOW)? {
                Some(mounted) => mounted.into(),
                None => return Ok(()),
            },
        };
        let is_file = FileType::from_raw_mode(rustix::fs::fstat(&*mounted)?.st_mode) == FileType::RegularFile;
        let copy = Source::from_fd(mounted.try_clone()?, None, MountAttrs::DRIVER_FILE, self.api)?;
        if copy.is(stat) || !is_file {
            return Ok(());
        }
        self.mount_facts.refuse_shared(&point)?;
        self.changes.push(Change::Mounted(copy.attach(dir, Path::new(link.file_name()), point)?.into()));
        self.findings.push(Finding::new(
            &catalog::HIDDEN,
            format!("the driver's file hides the image's own {link}"),
            "",
        ));
        Ok(())
    }

    pub(super) fn mask_proc(&mut self, directory: Directory) -> Result<()> {
        // /proc/driver/nvidia belongs to the kernel module and shows every GPU of the host to every container. If params says
        // "ModifyDeviceFiles: 1", the driver's libraries create missing device nodes, also those of GPUs that the container
        // does not have (CVE-2021-1056).
        let Some(dir) = self.rootfs.open_existing(Path::new("proc/driver"), OFlags::PATH | OFlags::DIRECTORY)? else {
            return Ok(()); // the container has no /proc, or the driver is not loaded in this kernel
        };
        let name = OsStr::new("nvidia");
        match find_present(&dir, name)? {
            Present::Nothing => Ok(()),
            Present::Other(point, stat) if is_directory(&stat) => {
                if is_own_tmpfs(&point) {
                    Ok(())
                } else {
                    self.attach(directory, &dir, name, point)
                }
            }
            // In a proc file system it is a directory, so this /proc is not one.
            _ => Err(Failure::new(
                &catalog::NO_PROC,
                "\"/proc/driver/nvidia\" is not a directory in the container",
                "have the engine mount a proc file system at \"/proc\" in the container",
            )
            .into()),
        }
    }

    pub(super) fn mount_files(&mut self, directory: Directory, target: &ContainerPath) -> Result<()> {
        let (dir, point) = self.directory_point(target)?;
        if is_own_tmpfs(&point) {
            return Ok(());
        }
        self.attach(directory, &dir, target.file_name(), point)
    }

    pub(super) fn mount_directory(&mut self, source: Source, target: &ContainerPath) -> Result<()> {
        let (dir, point) = self.directory_point(target)?;
        if source.is(&rustix::fs::fstat(&point)?) {
            return Ok(());
        }
        self.mount_facts.refuse_shared(&point)?;
        self.forget_directories();
        self.changes.push(Change::Mounted(source.attach(&dir, Path::new(target.file_name()), point)?.into()));
        Ok(())
    }

    /// Returns a directory to mount on, created if it is missing, and its parent directory.
    fn directory_point(&mut self, target: &ContainerPath) -> Result<(Rc<OwnedFd>, OwnedFd)> {
        let make_dir = |dir: &OwnedFd, name: &OsStr| rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755));
        self.make(target, true, make_dir)?;
        let dir = self.parent(target)?;
        match find_present(&dir, target.file_name())? {
            Present::Other(point, stat) if is_directory(&stat) => Ok((dir, point)),
            _ => Err(anyhow::anyhow!("the image has something other than a directory at this path")),
        }
    }

    fn attach(&mut self, directory: Directory, dir: &OwnedFd, name: &OsStr, point: OwnedFd) -> Result<()> {
        self.mount_facts.refuse_shared(&point)?;
        self.forget_directories();
        let mut mounts = Vec::new();
        let attached = directory.attach(dir, name, point, &mut mounts);
        self.changes.extend(mounts.into_iter().map(Change::Mounted));
        attached
    }
}

fn parent_path(path: &ContainerPath) -> &Path {
    path.relative().parent().unwrap_or_else(|| Path::new("/"))
}

/// Undoes changes, the newest first. Errors are ignored: the container does not start anyway.
fn undo_all(changes: Vec<Change>) {
    for change in changes.into_iter().rev() {
        match change {
            Change::Created(created) => created.remove().ok(),
            Change::Mounted(mount) => mount::detach(mount.as_fd()).ok(),
            Change::Replaced { dir, name, text } => replace_link(&dir, &name, &text).ok(),
            Change::Rewritten { dir, name, old } => replace_file(&dir, &name, &old).ok(),
        };
    }
}

fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

fn is_device(stat: &Stat, device: Option<(u32, u32)>) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && device == Some((rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)))
}
