//! Applies steps inside the container's mount namespace.

mod cdi_hook;
mod decide;
pub(in crate::inject) mod layout;
mod ld_so_cache;
mod ld_so_conf;
mod own_node;
mod stale;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, bail};
use rustix::fs::{AtFlags, Mode, OFlags, Stat};

use base::paths::ContainerPath;
use base::report::Finding;
use base::sys::in_root::Created;
use base::sys::mount::{Api, MountAttrs};
use nvidia_host::edits::Need;
use nvidia_host::edits::placement::Link;

use crate::inject::apply::decide::{
    CopyAt, LinkAt, MountAt, Mounting, copy_at, directory_at, hidden, hides_file, link_at, mask_at,
    mount_at,
};
use crate::inject::apply::layout::Layout;
use crate::inject::files::directory::{
    Present, find_present, make_copy, make_file, replace_file, replace_link, replace_with_copy,
};
use crate::inject::files::source::{Source, same_file};
use crate::inject::files::tmpfs::{Directory, is_own_tmpfs};
use crate::inject::prepare::Prepared;
use crate::inject::remove::undo::Change;
use own_node::OwnNodes;
use stale::is_library_of_a_driver;
pub(in crate::inject) use stale::is_own;

/// A container whose mount namespace this process has entered. Each step is a method.
#[derive(Debug)]
pub(crate) struct Applier {
    layout: Layout,
    api: Api,
    /// Whether the engine made this root file system for the container
    is_own: bool,
    /// The nodes that are created for the container
    own_nodes: OwnNodes,
    /// Mounted files by their path
    mounted: Vec<(ContainerPath, Rc<OwnedFd>)>,
    /// Device and inode numbers of the first of these files
    placed: Vec<(u64, u64)>,
    /// Whether a step lists library directories for the image's ldconfig
    lists_directories: bool,
    /// The directories in which a link to a library of another driver version was replaced: an earlier start used that driver
    of_other_driver: Vec<ContainerPath>,
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

impl Applier {
    /// Creates a target without changes. `is_own`: the engine made this root file system for the container. `own_nodes`: the numbers of
    /// the nodes that are created for it.
    pub(in crate::inject) const fn new(
        layout: Layout,
        api: Api,
        is_own: bool,
        own_nodes: BTreeSet<(u32, u32)>,
    ) -> Self {
        Self {
            layout,
            api,
            is_own,
            own_nodes: OwnNodes::new(own_nodes),
            mounted: Vec::new(),
            placed: Vec::new(),
            lists_directories: false,
            of_other_driver: Vec::new(),
            stale: Vec::new(),
        }
    }

    /// Runs one step. If it fails, undoes the changes of this step.
    pub(in crate::inject) fn run(&mut self, step: Prepared<'_>, need: Need) -> Result<()> {
        self.layout.need = need;
        let (mark, mounted) = (self.layout.mark(), self.mounted.len());
        let result = self.apply(step);
        if result.is_err() {
            self.mounted.truncate(mounted);
            self.placed.truncate(mounted);
            self.layout.undo_since(mark);
        }
        result
    }

    fn apply(&mut self, step: Prepared<'_>) -> Result<()> {
        match step {
            Prepared::Mount(source, target) => self.mount(source, target),
            Prepared::MountDirectory(source, target) => self.mount_directory(source, target),
            Prepared::MountNode(source, node, own) => self.mount_node(source, node, own),
            Prepared::MountFiles(directory, target) => self.mount_files(directory, target),
            Prepared::Copy(content, target) => self.copy(&content, target),
            Prepared::Link(link) => self.link(link),
            Prepared::MaskProc(directory) => self.mask_proc(directory),
            Prepared::MaskParams(params) => self.mask_params(params.as_deref()),
            Prepared::SetMode(target, mode) => self.set_mode(target, mode),
            Prepared::ListDirectories { first, others } => self.list_directories(first, others),
            Prepared::UpdateLinkerCache(entries) => self.update_linker_cache(entries),
        }
    }

    /// Adds a finding about the container.
    pub(in crate::inject) fn add_finding(&mut self, finding: Finding) {
        self.layout.done.findings.push(finding);
    }

    /// Undoes all steps as far as possible: the container does not start anyway.
    pub(in crate::inject) fn undo(self) {
        let Self {
            layout, mounted, ..
        } = self;
        drop(mounted);
        layout.undo();
    }

    /// Completes the setup after the last step. Returns the findings.
    pub(in crate::inject) fn finish(&mut self) -> Result<Vec<Finding>> {
        self.layout.seal()?;
        // The setup is complete. A leftover that cannot be removed does no harm.
        self.remove_stale();
        Ok(std::mem::take(&mut self.layout.done.findings))
    }

    fn mount(&mut self, source: Source, target: &ContainerPath) -> Result<()> {
        let at = self.mount_point(&source, target, None)?;
        self.mount_on(source, target, at)
    }

    /// Creates a file that processes in the container may change. What the image has at this path stays, unless it is what a start of
    /// a container left: the copy of another driver, or the mount point of a container from which the image was made.
    fn copy(&mut self, content: &[u8], target: &ContainerPath) -> Result<()> {
        if self
            .layout
            .make(target, false, |dir, name| make_copy(dir, name, content))?
            .is_some()
        {
            return Ok(());
        }
        let dir = self.layout.parent(target)?;
        let name = target.file_name();
        if copy_at(find_present(&dir, name)?.seen()) == CopyAt::InsteadOfCopy {
            let dir = self.layout.writable(dir, target)?;
            let name = Path::new(name);
            replace_with_copy(&dir, name, content)?;
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
        Ok(())
    }

    /// Reads the numbers of the mounted files. Most containers do not need them, because their image has no file to mount on.
    fn find_placed(&mut self) -> Result<()> {
        for (_, mounted) in self.mounted.iter().skip(self.placed.len()) {
            let stat = rustix::fs::fstat(&**mounted)?;
            self.placed.push((stat.st_dev, stat.st_ino));
        }
        Ok(())
    }

    /// Returns the mount point at a name that is already used.
    fn existing_point(
        &mut self,
        source: &Source,
        target: &ContainerPath,
        device: Option<(u32, u32)>,
    ) -> Result<MountPoint> {
        let dir = self.layout.parent(target)?;
        let name = target.file_name();
        let present = find_present(&dir, name)?;
        self.find_placed()?;
        let stat = source.stat()?;
        let file = Mounting {
            source: (stat.st_dev, stat.st_ino),
            device,
            placed: &self.placed,
        };
        let at = mount_at(present.seen(), file)?;
        if let MountAt::Over { hides: true } | MountAt::InsteadOfLink { hides: true } = at {
            self.layout.done.findings.push(hidden(target));
        }
        match (at, present) {
            (MountAt::Present, _) => Ok(MountPoint::Present),
            (_, Present::Other(point, _)) => Ok(MountPoint::Existing(dir, point)),
            (_, Present::Link(text)) => {
                let dir = self.layout.writable(dir, target)?;
                rustix::fs::unlinkat(&*dir, name, AtFlags::empty())?;
                self.layout.done.add(Change::Replaced {
                    dir,
                    name: name.into(),
                    text,
                });
                let made = self.layout.make(target, false, make_file)?;
                let (dir, ()) = made.context("another process created it in the meantime")?;
                Ok(MountPoint::New(dir))
            }
            (_, Present::Nothing) => bail!("another process removed it in the meantime"),
        }
    }

    fn link(
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
        let present = find_present(&dir, name)?;
        match (link_at(present.seen(), text)?, present) {
            (LinkAt::Present, _) => {}
            (_, Present::Link(old)) => {
                let dir = self.layout.writable(dir, link)?;
                replace_link(&dir, Path::new(name), text)?;
                if is_library_of_a_driver(&old) {
                    self.of_other_driver.extend(link.parent());
                }
                self.layout.done.add(Change::Replaced {
                    dir,
                    name: name.into(),
                    text: old,
                });
            }
            (_, Present::Nothing) => bail!("another process removed it in the meantime"),
            (_, Present::Other(point, stat)) => {
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
        if !hides_file(&rustix::fs::fstat(&*mounted)?, stat) {
            return Ok(());
        }
        let copy = Source::from_fd(
            mounted.try_clone()?,
            None,
            MountAttrs::DRIVER_FILE,
            self.api,
        )?;
        self.layout.mounts.refuse_shared(&point)?;
        self.layout.done.add(Change::Mounted(
            copy.attach(dir, Path::new(link.file_name()), point)?.into(),
        ));
        self.layout.done.findings.push(hidden(link));
        Ok(())
    }

    fn mask_proc(&mut self, directory: Directory) -> Result<()> {
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
        let present = find_present(&dir, name)?;
        match (mask_at(present.seen())?, present) {
            (true, Present::Other(point, _)) if !is_own_tmpfs(&point) => {
                self.attach(directory, &dir, name, point)
            }
            _ => Ok(()),
        }
    }

    fn mount_files(&mut self, directory: Directory, target: &ContainerPath) -> Result<()> {
        let (dir, point) = self.directory_point(target)?;
        if is_own_tmpfs(&point) {
            return Ok(());
        }
        self.attach(directory, &dir, target.file_name(), point)
    }

    fn mount_directory(&mut self, source: Source, target: &ContainerPath) -> Result<()> {
        let (dir, point) = self.directory_point(target)?;
        if same_file(&source.stat()?, &rustix::fs::fstat(&point)?) {
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
        let present = find_present(&dir, target.file_name())?;
        directory_at(present.seen())?;
        match present {
            Present::Other(point, _) => Ok((dir, point)),
            _ => bail!("another process removed it in the meantime"),
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
