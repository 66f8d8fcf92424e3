//! The container's side of each step. From here on there are only fds of the rootfs and names below it.

mod cdi_hook;
mod created;
mod ld_so_cache;
mod ld_so_conf;
mod names;
mod own_node;
mod stale;

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

use super::container::{Inside, is_missing};
use super::directory::{Present, find_present, make_file, replace_link, write_beside};
use super::hosts_dev::HostsDev;
use super::mounts::Mounts;
use super::prepare::Prepared;
use super::source::Source;
use super::tmpfs::{Directory, is_ours};
use super::{Finished, Take, read_only};
use crate::record::created::Entry;

/// A container whose mount namespace we are in, and what we did to it.
#[derive(Debug)]
pub(crate) struct Target {
    rootfs: Root,
    /// The ids of its user namespace, if it has one that we are not in
    ids: Option<Ids>,
    api: Api,
    hosts_dev: HostsDev,
    /// SELinux label of the file systems that the hook mounts
    label: Option<Label>,
    /// Where names may be created, and what others see
    known: Mounts,
    /// Directories in which they may be
    own: Vec<Rc<OwnedFd>>,
    done: Vec<Done>,
    mounts: Vec<(ContainerPath, Rc<OwnedFd>)>,
    /// Whether the container requires the step that is being carried out
    need: Need,
    /// Over read-only directories, and those of volumes
    layers: Vec<Rc<OwnedFd>>,
    /// Directories that were opened, by their paths: most files go to a few of them, and none is found a second way.
    /// Forgotten when something is mounted on a directory.
    opened: Vec<(PathBuf, Rc<OwnedFd>)>,
    /// Whether the directories of the libraries were listed for the image's ldconfig
    listed: bool,
    /// Whether a link to another driver's library was replaced: the container has run with that one
    had_another: bool,
    /// Files that a run of the container with the other driver left behind
    stale: Vec<Created>,
    /// Whether the root file system is this container's alone
    is_alone: bool,
    /// What was created, for poststop
    created: Vec<Entry>,
    findings: Vec<Finding>,
}

/// What is known of a container before its mount namespace is entered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TargetFacts {
    /// config.json has the runtime mount a tmpfs at /dev
    pub has_own_dev: bool,
    /// No other container has its root file system
    pub is_alone: bool,
}

/// What undoing has to take back, newest last.
#[derive(Debug)]
enum Done {
    Created(Created),
    Mounted(Rc<OwnedFd>),
    /// A symlink of the image's that ours replaced
    Replaced {
        dir: Rc<OwnedFd>,
        name: PathBuf,
        text: PathBuf,
    },
    /// A file that an earlier start left, which was replaced or removed
    Rewritten {
        dir: Rc<OwnedFd>,
        name: PathBuf,
        old: Vec<u8>,
    },
}

enum Existing {
    /// The file that the step asks for
    Asked,
    /// A new file of ours in this directory
    New(Rc<OwnedFd>),
    /// Something to mount on, in this directory
    Point(Rc<OwnedFd>, OwnedFd),
}

impl Take for Target {
    fn take(&mut self, step: Prepared<'_>, need: Need) -> Result<()> {
        self.need = need;
        let (done, layers, mounts) = (self.done.len(), self.layers.len(), self.mounts.len());
        let findings = self.findings.len();
        let result = match step {
            Prepared::Mount { source, target } => self.mount(source, target),
            Prepared::MountNode { source, target, device, own } => self.mount_node(source, target, device, own),
            Prepared::MountDirectory { source, target } => self.mount_directory(source, target),
            Prepared::MountFiles { directory, target } => self.mount_files(directory, target),
            Prepared::Link { link, text, file } => self.link(link, text, file),
            Prepared::MaskProc(directory) => self.mask_proc(directory),
            Prepared::MaskParams => self.mask_params(),
            Prepared::SetMode { target, mode } => self.set_mode(target, mode),
            Prepared::ListDirectories { first, others } => self.list_directories(first, others),
            Prepared::UpdateLinkerCache(entries) => self.update_linker_cache(entries),
        };
        if result.is_err() {
            // What is taken back is not there for the next step: a layer that is detached could not be sealed, and names in
            // it would be lost.
            self.layers.truncate(layers);
            self.mounts.truncate(mounts);
            self.findings.truncate(findings);
            self.forget_directories();
            self.known.forget_layers(layers);
            take_back(self.done.split_off(done));
        }
        result
    }

    fn note(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    fn undo(self) {
        // Open mounts keep their mount points busy.
        drop(self.mounts);
        drop(self.layers);
        drop(self.opened);
        drop(self.known);
        drop(self.own);
        take_back(self.done);
    }

    fn finish(&mut self) -> Result<Finished> {
        // A layer stays writable until here because the steps create names in it.
        self.layers.iter().try_for_each(|layer| read_only::seal(layer))?;
        // Nothing can fail from here on, and what cannot be removed does no harm.
        for left in self.stale.drain(..) {
            left.remove().ok();
        }
        let created = std::mem::take(&mut self.created);
        Ok(Finished { findings: std::mem::take(&mut self.findings), created })
    }
}

impl Target {
    /// The rootfs must have been opened in the mount namespace that we are in now.
    pub(crate) fn new(inside: Inside, api: Api, hosts_dev: HostsDev, label: Option<Label>, facts: TargetFacts) -> Self {
        Self {
            rootfs: inside.rootfs,
            ids: inside.ids,
            api,
            hosts_dev,
            label,
            known: Mounts::new(facts.has_own_dev),
            own: Vec::new(),
            done: Vec::new(),
            mounts: Vec::new(),
            need: Need::Required,
            layers: Vec::new(),
            opened: Vec::new(),
            listed: false,
            had_another: false,
            stale: Vec::new(),
            is_alone: facts.is_alone,
            created: Vec::new(),
            findings: Vec::new(),
        }
    }

    fn mount(&mut self, source: Source, target: &ContainerPath) -> Result<()> {
        let place = self.place(&source, target, None)?;
        self.put(source, target, place)
    }

    /// Where to mount it: on a new file, or on what is there.
    fn place(&mut self, source: &Source, target: &ContainerPath, device: Option<(u32, u32)>) -> Result<Existing> {
        match self.make(target, false, make_file)? {
            Some((dir, ())) => Ok(Existing::New(dir)),
            None => self.existing_point(source, target, device),
        }
    }

    fn put(&mut self, source: Source, target: &ContainerPath, place: Existing) -> Result<()> {
        let name = Path::new(target.file_name());
        let mounted = match place {
            Existing::Asked => return Ok(()),
            Existing::New(dir) => {
                self.known.refuse_shared_dir(&dir)?;
                source.attach_at(&dir, name)?
            }
            Existing::Point(dir, point) => {
                self.known.refuse_shared(&point)?;
                source.attach(&dir, name, point)?
            }
        };
        let mounted = Rc::new(mounted);
        self.done.push(Done::Mounted(Rc::clone(&mounted)));
        self.mounts.push((target.clone(), mounted));
        Ok(())
    }

    /// Looks where the name is taken. A link makes way for a new file: followed, it would have us mount wherever the image
    /// likes (CVE-2024-0133).
    fn existing_point(
        &mut self,
        source: &Source,
        target: &ContainerPath,
        device: Option<(u32, u32)>,
    ) -> Result<Existing> {
        let dir = self.parent(target)?;
        let name = target.file_name();
        Ok(match find_present(&dir, name)? {
            Present::Other(_, stat) if is_device(&stat, device) => Existing::Asked, // the engine made it already
            Present::Other(_, stat) if source.is(&stat) => Existing::Asked,         // a second run
            Present::Other(point, stat) => {
                ensure!(!is_directory(&stat), "the image has a directory in its place");
                self.note_left(target, &stat);
                Existing::Point(dir, point)
            }
            Present::Link(text) => {
                let dir = self.writable(dir, target)?;
                rustix::fs::unlinkat(&*dir, name, AtFlags::empty())?;
                self.done.push(Done::Replaced { dir, name: name.into(), text });
                let made = self.make(target, false, make_file)?;
                Existing::New(made.context("somebody made it meanwhile")?.0)
            }
            Present::Nothing => bail!("somebody removed it meanwhile"),
        })
    }

    fn link(&mut self, link: &ContainerPath, text: &Path, file: &ContainerPath) -> Result<()> {
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
                self.had_another |= stale::is_library_of_a_driver(&old);
                self.done.push(Done::Replaced { dir, name: name.into(), text: old });
            }
            Present::Nothing => bail!("somebody removed it meanwhile"),
            Present::Other(point, stat) => {
                ensure!(
                    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
                    "the image has something else than a file in its place"
                );
                self.mount_over(&dir, point, &stat, link, file)?;
            }
        }
        Ok(())
    }

    /// The image ships a file of its own under a name of the driver's: it stays in the image, and ours hides it.
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
            // Mounted by the engine, where it does that.
            None => match self.rootfs.open_at(file.relative(), OFlags::PATH | OFlags::NOFOLLOW) {
                Ok(mounted) => mounted.into(),
                Err(error) if is_missing(&error) => return Ok(()),
                Err(error) => return Err(error.into()),
            },
        };
        let is_file = FileType::from_raw_mode(rustix::fs::fstat(&*mounted)?.st_mode) == FileType::RegularFile;
        let copy = Source::copy_of(&mounted, MountAttrs::DRIVER_FILE, self.api)?;
        if copy.is(stat) || !is_file {
            return Ok(());
        }
        self.known.refuse_shared(&point)?;
        self.done.push(Done::Mounted(copy.attach(dir, Path::new(link.file_name()), point)?.into()));
        self.findings.push(Finding::of(
            &catalog::HIDDEN,
            format!("the image's own {link} is hidden by the driver's"),
            "",
        ));
        Ok(())
    }

    fn mask_proc(&mut self, directory: Directory) -> Result<()> {
        // /proc/driver/nvidia belongs to the kernel module and shows every GPU of the host to every container. If params says
        // "ModifyDeviceFiles: 1", the driver's libraries create missing device nodes, also those of GPUs that the container does
        // not have (CVE-2021-1056).
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let dir = match self.rootfs.open_at(Path::new("proc/driver"), flags) {
            Ok(dir) => dir,
            // A container without /proc, or a driver that is not in this kernel (its root has a /proc of its own).
            Err(error) if is_missing(&error) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let name = OsStr::new("nvidia");
        match find_present(&dir, name)? {
            Present::Nothing => Ok(()),
            Present::Other(point, stat) if is_directory(&stat) => {
                if is_ours(&point) {
                    Ok(())
                } else {
                    self.attach(directory, &dir, name, point)
                }
            }
            // The kernel's own is a directory: this is not the kernel's.
            _ => Err(Failure::new(
                &catalog::NO_PROC,
                "\"/proc/driver/nvidia\" is no directory there",
                "have the engine mount a proc file system at \"/proc\" in the container",
            )
            .into()),
        }
    }

    fn mount_files(&mut self, directory: Directory, target: &ContainerPath) -> Result<()> {
        let (dir, point) = self.directory_point(target)?;
        if is_ours(&point) {
            return Ok(());
        }
        self.attach(directory, &dir, target.file_name(), point)
    }

    fn mount_directory(&mut self, source: Source, target: &ContainerPath) -> Result<()> {
        let (dir, point) = self.directory_point(target)?;
        if source.is(&rustix::fs::fstat(&point)?) {
            return Ok(());
        }
        self.known.refuse_shared(&point)?;
        self.forget_directories();
        self.done.push(Done::Mounted(source.attach(&dir, Path::new(target.file_name()), point)?.into()));
        Ok(())
    }

    /// A directory to mount on, made if necessary, and the one it lies in.
    fn directory_point(&mut self, target: &ContainerPath) -> Result<(Rc<OwnedFd>, OwnedFd)> {
        let make_dir = |dir: &OwnedFd, name: &OsStr| rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755));
        self.make(target, true, make_dir)?;
        let dir = self.parent(target)?;
        match find_present(&dir, target.file_name())? {
            Present::Other(point, stat) if is_directory(&stat) => Ok((dir, point)),
            _ => Err(anyhow::anyhow!("the image has something else than a directory in its place")),
        }
    }

    fn attach(&mut self, directory: Directory, dir: &OwnedFd, name: &OsStr, point: OwnedFd) -> Result<()> {
        self.known.refuse_shared(&point)?;
        self.forget_directories();
        let mut mounts = Vec::new();
        let attached = directory.attach(dir, name, point, &mut mounts);
        self.done.extend(mounts.into_iter().map(Done::Mounted));
        attached
    }
}

fn parent_path(path: &ContainerPath) -> &Path {
    path.relative().parent().unwrap_or_else(|| Path::new("/"))
}

/// Undoes the steps, the newest first.
fn take_back(done: Vec<Done>) {
    for done in done.into_iter().rev() {
        match done {
            Done::Created(created) => created.remove().ok(),
            Done::Mounted(mount) => mount::detach(mount.as_fd()).ok(),
            Done::Replaced { dir, name, text } => replace_link(&dir, &name, &text).ok(),
            Done::Rewritten { dir, name, old } => write_beside(&dir, &name, &[old.into()]).ok(),
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
