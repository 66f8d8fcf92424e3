//! Applies steps inside the container's mount namespace.

mod cdi_hook;
pub(in crate::inject) mod layout;
mod ld_so_cache;
mod ld_so_conf;
mod own_node;
mod stale;

pub(in crate::inject) use cdi_hook::MAX_PARAMS;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};

use base::paths::ContainerPath;
use base::report::{Failure, Finding};
use base::sys::in_root::Created;
use base::sys::mount::{Api, MountAttrs};
use findings::catalog;
use nvidia_host::edits::Need;
use nvidia_host::edits::placement::Link;

use crate::inject::apply::layout::Layout;
use crate::inject::files::directory::{
    Present, find_present, is_unchanged, make_copy, make_file, replace_file, replace_link,
    replace_with_copy,
};
use crate::inject::files::source::Source;
use crate::inject::files::tmpfs::{Directory, is_own_tmpfs};
use crate::inject::remove::leftovers::is_library_of_a_driver;
use crate::inject::remove::undo::Change;
use crate::inject::{ApplyStep, Finished, Runner};
use own_node::OwnNodes;
use records::created::Entry;

/// A container whose mount namespace this process has entered. Each step is a method.
#[derive(Debug)]
pub(crate) struct Applier {
    layout: Layout,
    api: Api,
    /// Whether the engine made this root file system for the container
    is_own: bool,
    /// Names that earlier starts of the container created
    earlier: Vec<Entry>,
    /// The nodes that are created for the container
    own_nodes: OwnNodes,
    /// The files that steps have mounted, by device and inode number
    placed: BTreeSet<(u64, u64)>,
    /// Mounted files by their path
    mounted: Vec<(ContainerPath, Rc<OwnedFd>)>,
    /// Whether a step lists library directories for the image's ldconfig
    lists_directories: bool,
    /// Whether a link to a library of another driver version was replaced: an earlier start used that driver
    had_other_driver: bool,
    /// Files that an earlier start with another driver version left
    stale: Vec<Created>,
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

impl Runner for Applier {
    fn run(&mut self, apply: ApplyStep<'_, Self>, need: Need) -> Result<()> {
        self.layout.need = need;
        let (mark, mounted) = (self.layout.mark(), self.mounted.len());
        let result = apply(self);
        if result.is_err() {
            self.mounted.truncate(mounted);
            self.layout.undo_since(mark);
        }
        result
    }

    fn add_finding(&mut self, finding: Finding) {
        self.layout.done.findings.push(finding);
    }

    fn undo(self) {
        let Self {
            layout, mounted, ..
        } = self;
        drop(mounted);
        layout.undo();
    }

    fn finish(&mut self) -> Result<Finished> {
        self.layout.seal()?;
        // The setup is complete. A leftover that cannot be removed does no harm.
        self.remove_stale();
        let done = &mut self.layout.done;
        Ok(Finished {
            findings: std::mem::take(&mut done.findings),
            created: done.take_created(),
        })
    }
}

impl Applier {
    /// Creates a target without changes. `is_own`: the engine made this root file system for the container. `own_nodes`: the numbers of
    /// the nodes that are created for it.
    pub(in crate::inject) const fn new(
        layout: Layout,
        api: Api,
        is_own: bool,
        earlier: Vec<Entry>,
        own_nodes: BTreeSet<(u32, u32)>,
    ) -> Self {
        Self {
            layout,
            api,
            is_own,
            earlier,
            own_nodes: OwnNodes::new(own_nodes),
            placed: BTreeSet::new(),
            mounted: Vec::new(),
            lists_directories: false,
            had_other_driver: false,
            stale: Vec::new(),
        }
    }

    pub(in crate::inject) fn mount(
        &mut self,
        source: Source,
        target: &ContainerPath,
    ) -> Result<()> {
        let at = self.mount_point(&source, target, None)?;
        self.mount_on(source, target, at)
    }

    /// Creates a file that processes in the container may change. What the image has at this path stays, unless it is what a start of
    /// a container left: the copy of another driver, or the mount point of a container from which the image was made.
    pub(in crate::inject) fn copy(&mut self, content: &[u8], target: &ContainerPath) -> Result<()> {
        if self
            .layout
            .make(target, false, |dir, name| make_copy(dir, name, content))?
            .is_some()
        {
            return Ok(());
        }
        let dir = self.layout.parent(target)?;
        let name = target.file_name();
        if let Present::Other(_, stat) = find_present(&dir, name)?
            && is_unchanged(&stat)
        {
            let dir = self.layout.writable(dir, target)?;
            let name = Path::new(name);
            replace_with_copy(&dir, name, content)?;
            self.layout.done.note_created(target.relative(), &dir);
            self.layout.done.add(Change::Rewritten {
                dir,
                name: name.into(),
                old: Vec::new(),
            });
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
        match self.layout.make(target, false, make_file)? {
            Some((dir, ())) => Ok(MountPoint::New(dir)),
            None => self.existing_point(source, target, device),
        }
    }

    fn mount_on(&mut self, source: Source, target: &ContainerPath, at: MountPoint) -> Result<()> {
        let name = Path::new(target.file_name());
        let id = (source.stat().st_dev, source.stat().st_ino);
        let mounted = match at {
            MountPoint::Present => return Ok(()),
            MountPoint::New(dir) => {
                self.layout.mounts.refuse_shared_dir(&dir)?;
                source.attach_at(&dir, name)?
            }
            MountPoint::Existing(dir, point) => {
                self.layout.mounts.refuse_shared(&point)?;
                source.attach(&dir, name, point)?
            }
        };
        let mounted = Rc::new(mounted);
        self.layout.done.add(Change::Mounted(Rc::clone(&mounted)));
        self.mounted.push((target.clone(), mounted));
        self.placed.insert(id);
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
        let dir = self.layout.parent(target)?;
        let name = target.file_name();
        Ok(match find_present(&dir, name)? {
            Present::Other(_, stat) if is_device(&stat, device) => MountPoint::Present, // the engine created it
            Present::Other(_, stat) if source.is(&stat) => MountPoint::Present, // an earlier run of the hook mounted it
            Present::Other(point, stat) => {
                ensure!(
                    !is_directory(&stat),
                    "the image has a directory at this path"
                );
                // Two paths can lead to one directory, by links of the image or by a volume.
                ensure!(
                    !self.placed.contains(&(stat.st_dev, stat.st_ino)),
                    "another driver file is already there"
                );
                self.layout.done.note_left(target, &stat);
                // An empty file is the mount point of an earlier start.
                if device.is_none()
                    && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                    && stat.st_size > 0
                {
                    self.hides(target);
                }
                MountPoint::Existing(dir, point)
            }
            Present::Link(text) => {
                if device.is_none() {
                    self.hides(target);
                }
                let dir = self.layout.writable(dir, target)?;
                rustix::fs::unlinkat(&*dir, name, AtFlags::empty())?;
                self.layout.done.add(Change::Replaced {
                    dir,
                    name: name.into(),
                    text,
                });
                let made = self.layout.make(target, false, make_file)?;
                MountPoint::New(
                    made.context("another process created it in the meantime")?
                        .0,
                )
            }
            Present::Nothing => bail!("another process removed it in the meantime"),
        })
    }

    pub(in crate::inject) fn link(
        &mut self,
        Link {
            link, text, file, ..
        }: &Link,
    ) -> Result<()> {
        let text = Path::new(text);
        if self
            .layout
            .make(link, false, |dir, name| {
                rustix::fs::symlinkat(text, dir, name)
            })?
            .is_some()
        {
            return Ok(());
        }
        let dir = self.layout.parent(link)?;
        let name = link.file_name();
        match find_present(&dir, name)? {
            Present::Link(old) if old == text => {}
            Present::Link(old) => {
                let dir = self.layout.writable(dir, link)?;
                replace_link(&dir, Path::new(name), text)?;
                self.had_other_driver |= is_library_of_a_driver(&old);
                self.layout.done.add(Change::Replaced {
                    dir,
                    name: name.into(),
                    text: old,
                });
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
        let mounted = match self.mounted.iter().find(|(path, _)| path == file) {
            Some((_, mounted)) => Rc::clone(mounted),
            // The engine has mounted it, for example from a CDI spec.
            None => match self
                .layout
                .rootfs
                .open_existing(file.relative(), OFlags::PATH | OFlags::NOFOLLOW)?
            {
                Some(mounted) => mounted.into(),
                None => return Ok(()),
            },
        };
        let is_file =
            FileType::from_raw_mode(rustix::fs::fstat(&*mounted)?.st_mode) == FileType::RegularFile;
        let copy = Source::from_fd(
            mounted.try_clone()?,
            None,
            MountAttrs::DRIVER_FILE,
            self.api,
        )?;
        if copy.is(stat) || !is_file {
            return Ok(());
        }
        self.layout.mounts.refuse_shared(&point)?;
        self.layout.done.add(Change::Mounted(
            copy.attach(dir, Path::new(link.file_name()), point)?.into(),
        ));
        self.hides(link);
        Ok(())
    }

    /// Notes that the image has another file at this path.
    fn hides(&mut self, path: &ContainerPath) {
        let what = format!("the driver's file hides the image's own {path}");
        self.layout
            .done
            .findings
            .push(Finding::new(&catalog::HIDDEN, what, ""));
    }

    pub(in crate::inject) fn mask_proc(&mut self, directory: Directory) -> Result<()> {
        // /proc/driver/nvidia belongs to the kernel module and shows every GPU of the host to every container. If params says
        // "ModifyDeviceFiles: 1", the driver's libraries create missing device nodes, also of GPUs that the container
        // does not have (CVE-2021-1056).
        let Some(dir) = self
            .layout
            .rootfs
            .open_existing(Path::new("proc/driver"), OFlags::PATH | OFlags::DIRECTORY)?
        else {
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

    pub(in crate::inject) fn mount_files(
        &mut self,
        directory: Directory,
        target: &ContainerPath,
    ) -> Result<()> {
        let (dir, point) = self.directory_point(target)?;
        if is_own_tmpfs(&point) {
            return Ok(());
        }
        self.attach(directory, &dir, target.file_name(), point)
    }

    pub(in crate::inject) fn mount_directory(
        &mut self,
        source: Source,
        target: &ContainerPath,
    ) -> Result<()> {
        let (dir, point) = self.directory_point(target)?;
        if source.is(&rustix::fs::fstat(&point)?) {
            return Ok(());
        }
        self.layout.mounts.refuse_shared(&point)?;
        self.layout.forget_directories();
        self.layout.done.add(Change::Mounted(
            source
                .attach(&dir, Path::new(target.file_name()), point)?
                .into(),
        ));
        Ok(())
    }

    /// Returns a directory to mount on, created if it is missing, and its parent directory.
    fn directory_point(&mut self, target: &ContainerPath) -> Result<(Rc<OwnedFd>, OwnedFd)> {
        let make_dir = |dir: &OwnedFd, name: &OsStr| {
            rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755))
        };
        self.layout.make(target, true, make_dir)?;
        let dir = self.layout.parent(target)?;
        match find_present(&dir, target.file_name())? {
            Present::Other(point, stat) if is_directory(&stat) => Ok((dir, point)),
            _ => Err(anyhow::anyhow!(
                "the image has something other than a directory at this path"
            )),
        }
    }

    fn attach(
        &mut self,
        directory: Directory,
        dir: &OwnedFd,
        name: &OsStr,
        point: OwnedFd,
    ) -> Result<()> {
        self.layout.mounts.refuse_shared(&point)?;
        self.layout.forget_directories();
        let mut mounts = Vec::new();
        let attached = directory.attach(dir, name, point, &mut mounts);
        self.layout.done.add_mounts(mounts);
        attached
    }
}

fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

fn is_device(stat: &Stat, device: Option<(u32, u32)>) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && device
            == Some((
                rustix::fs::major(stat.st_rdev),
                rustix::fs::minor(stat.st_rdev),
            ))
}
